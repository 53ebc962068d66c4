"""Types whose implementation of a protocol is known to be reliable or wrong."""

from __future__ import annotations

import functools

from userstream._buffers._names import is_named

# Types whose `__dlpack__(stream=)` orders the stream after the producer. Each was verified on an
# H200, with delayed work pending:
_HONOUR_DLPACK = (
    (("drjit",), ("ArrayBase",)),  # Dr.Jit 1.5: waits on the host
    (("PyNvVideoCodec", "_PyNvVideoCodec"), ("DecodedFrame",)),  # 2.2: waits for an event
)

# Types whose `__cuda_array_interface__` may name a stream other than the producer's. Types that
# name a default stream need no entry: a default stream of an unknown type is never trusted.
_MISLEAD = (
    # 2.2, planes of a frame: 0, which the interface forbids, where the decoder was given no stream
    (("PyNvVideoCodec", "_PyNvVideoCodec"), ("CAIMemoryView",)),
)


@functools.lru_cache(maxsize=256)
def honours_dlpack(kind: type) -> bool:
    """Return whether ``__dlpack__`` of a type is known to order the consumer's stream."""
    return any(is_named(kind, *names) for names in _HONOUR_DLPACK)


@functools.lru_cache(maxsize=256)
def misleads(kind: type) -> bool:
    """Return whether the interface of a type is known to name a wrong stream."""
    return any(is_named(kind, *names) for names in _MISLEAD)
