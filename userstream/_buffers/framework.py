"""The frameworks: what is known of each before it is loaded, and access to its current streams.

A framework is one module of this package and one row of `KNOWN`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from userstream.typing import StreamLike


class Known(NamedTuple):
    """A row for a framework, whose module is loaded with the first object of the framework."""

    file: str | None  # module of this package; None if a protocol says all about the buffers
    packages: tuple[str, ...]  # that define the types of the framework
    distributions: str  # regular expression for the packages that an installer knows
    device: tuple[str, str] | None = None  # module and name of the type of its device objects
    # Types whose `__dlpack__(stream=)` orders the stream after the producer. Each was verified on
    # an H200, with delayed work pending.
    honours_dlpack: tuple[str, ...] = ()
    # Types whose `__cuda_array_interface__` may name a stream other than the producer's. Types that
    # name a default stream need no entry: a default stream of an unknown type is never trusted.
    misleads: tuple[str, ...] = ()


KNOWN = (
    Known("torch", ("torch",), "torch", ("torch", "device")),
    Known("cupy", ("cupy", "cupyx"), r"cupy(-cuda\d+x)?", ("cupy.cuda", "Device")),
    Known("jax", ("jax", "jaxlib"), r"jax(-cuda\d+-plugin)?", ("jax", "Device")),
    Known("numba", ("numba", "numba_cuda"), "numba(-cuda)?"),
    Known("dali", ("nvidia",), r"nvidia-dali(-nightly|-weekly)?-cuda\d+"),
    Known("warp", ("warp",), "warp-lang", ("warp", "Device")),
    Known("tvm_ffi", ("tvm_ffi",), "apache-tvm-ffi", ("tvm_ffi", "Device")),
    Known("cvcuda", ("cvcuda", "nvcv"), r"cvcuda(-cu\d+)?"),
    Known(None, ("rmm",), r"rmm(-cu\d+)?"),
    Known(None, ("pylibraft",), r"pylibraft(-cu\d+)?"),
    Known(None, ("holoscan",), r"holoscan(-cu\d+)?"),
    Known(None, ("nvidia",), r"nvidia-(nvimgcodec|nvcomp)(-cu\d+)?"),
    # 1.5: waits on the host
    Known(None, ("drjit",), "drjit", honours_dlpack=("ArrayBase",)),
    # 2.2: waits for an event. Planes of a frame name stream 0, which the interface forbids, where
    # the decoder was given no stream.
    Known(
        None,
        ("PyNvVideoCodec", "_PyNvVideoCodec"),
        "pynvvideocodec",
        honours_dlpack=("DecodedFrame",),
        misleads=("CAIMemoryView",),
    ),
)

NO_STREAM = 0  # returned for a device without a current stream


class Framework:
    """The current streams of a framework, one per thread and device."""

    __slots__ = (
        "activate",
        "captures",
        "current_stream",
        "is_usable",
        "name",
        "needs_blocking",
        "record_use",
    )

    def __init__(
        self,
        name: str,
        is_usable: Callable[[], bool],
        current_stream: Callable[[int], tuple[int, object]],
        activate: Callable[[StreamLike, int], Callable[[], object]],
        *,
        record_use: Callable[[Any], None] | None = None,
        captures: bool = False,
        needs_blocking: bool = False,
    ) -> None:
        self.name = name
        # Returns whether the framework is imported and can use a GPU.
        self.is_usable = is_usable
        # Returns the handle of a device's current stream, and an object that keeps it alive.
        self.current_stream = current_stream
        # Makes a stream current on a device; returns a function that undoes this in the same
        # thread. Both are called with the device current.
        self.activate = activate
        # Informs the framework's allocator that the current stream uses one of its buffers.
        self.record_use = record_use
        # True if the framework captures graphs on its current stream, and the query is free of
        # side effects.
        self.captures = captures
        # True if the framework relies on the legacy default stream to wait for its streams, which
        # works for blocking streams only.
        self.needs_blocking = needs_blocking


def is_named(kind: type, packages: tuple[str, ...], names: tuple[str, ...]) -> bool:
    """Return whether a type or one of its bases has one of the names and is from the packages."""
    return any(
        base.__name__ in names and base.__module__.startswith(packages) for base in kind.__mro__
    )


def type_name(obj: object) -> str:
    """Return the full name of an object's type, for messages."""
    kind = type(obj)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return module + kind.__qualname__
