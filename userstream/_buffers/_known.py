"""What is known of types that implement the protocols, by inspection."""

from __future__ import annotations

import functools

from userstream._buffers._names import is_named

# Their `__dlpack__(stream=)` orders the stream after the producer; each was verified, with work
# pending behind a delay, on an H200:
_HONOUR_DLPACK = (
    (("drjit",), ("ArrayBase",)),  # Dr.Jit 1.5: it waits on the host
    (("PyNvVideoCodec", "_PyNvVideoCodec"), ("DecodedFrame",)),  # 2.2: for an event of the frame
)

# Their `__cuda_array_interface__` names a stream that need not be the producer's. Those that name
# a default stream need no entry: no unknown type is believed in that.
_MISLEAD = (
    # 2.2, planes of a frame: 0, which the interface forbids, where the decoder was given no stream
    (("PyNvVideoCodec", "_PyNvVideoCodec"), ("CAIMemoryView",)),
)


@functools.lru_cache(maxsize=256)
def honours_dlpack(kind: type) -> bool:
    """Tell whether objects of a type are known to order a consumer's stream by ``__dlpack__``."""
    return any(is_named(kind, *names) for names in _HONOUR_DLPACK)


@functools.lru_cache(maxsize=256)
def misleads(kind: type) -> bool:
    """Tell whether the stream of a type's interface is not to be believed."""
    return any(is_named(kind, *names) for names in _MISLEAD)
