"""Table of the supported frameworks, and the interface to the current streams of a framework.

A framework is one module of this package and one row of `KNOWN`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from userstream.typing import StreamLike

_Value = TypeVar("_Value")


# Plain classes keep "import userstream" fast: to create a named tuple takes ten times as long.
class Known:
    """Row of a framework in `KNOWN`; its module is loaded with the framework's first object."""

    def __init__(
        self,
        file: str | None,  # module of this package; None if a protocol describes the buffers fully
        packages: tuple[str, ...],  # that define the types of the framework
        distributions: str,  # regular expression for the packages that an installer knows
        device: tuple[str, str] | None = None,  # module and name of the type of its device objects
        *,
        # Types whose `__dlpack__(stream=)` orders the stream after the producer. Each was verified
        # on an H200, with delayed work pending.
        honors_dlpack: tuple[str, ...] = (),
        # Types whose `__cuda_array_interface__` may name a stream other than the producer's. Types
        # that name a default stream need no entry: a default stream of an unknown type is never
        # trusted.
        misleads: tuple[str, ...] = (),
        # True if the framework captures graphs on its current stream; a query of that stream has
        # no side effects.
        captures: bool = False,
    ) -> None:
        self.file, self.packages, self.distributions = file, packages, distributions
        self.device, self.honors_dlpack, self.misleads = device, honors_dlpack, misleads
        self.captures = captures


KNOWN = (
    Known("torch", ("torch",), "torch", ("torch", "device"), captures=True),
    Known("cupy", ("cupy", "cupyx"), r"cupy(-cuda\d+x)?", ("cupy.cuda", "Device"), captures=True),
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
    Known(None, ("drjit",), "drjit", honors_dlpack=("ArrayBase",)),
    # 2.2: waits for an event. Planes of a frame name stream 0, which the interface forbids, where
    # the decoder was given no stream.
    Known(
        None,
        ("PyNvVideoCodec", "_PyNvVideoCodec"),
        "pynvvideocodec",
        honors_dlpack=("DecodedFrame",),
        misleads=("CAIMemoryView",),
    ),
)

NO_STREAM = 0  # returned for a device without a current stream


class Framework:
    """The current streams of a framework, one per thread and device."""

    def __init__(
        self,
        name: str,
        # Returns whether the framework is imported and can use a GPU.
        is_usable: Callable[[], bool],
        # Returns the handle of a device's current stream, and an object that keeps it alive.
        current_stream: Callable[[int], tuple[int, object]],
        # Makes a stream current on a device; returns a function that undoes this in the same
        # thread. Both are called with the device current.
        activate: Callable[[StreamLike, int], Callable[[], object]],
        *,
        # Informs the framework's allocator that the current stream uses one of its buffers.
        record_use: Callable[[Any], None] | None = None,
        # True if the framework relies on the legacy default stream to wait for its streams, which
        # works for blocking streams only.
        needs_blocking: bool = False,
    ) -> None:
        self.name, self.is_usable, self.current_stream = name, is_usable, current_stream
        self.activate, self.record_use = activate, record_use
        self.needs_blocking = needs_blocking


def is_named(kind: type, packages: tuple[str, ...], names: tuple[str, ...]) -> bool:
    """Return whether a type, or a base of it, has one of the names and is from the packages."""
    return any(
        base.__name__ in names and base.__module__.startswith(packages) for base in kind.__mro__
    )


def named(values: Mapping[str, _Value], kind: type, packages: tuple[str, ...]) -> _Value | None:
    """Return the value for the name of a type, or of a base, that is defined in the packages."""
    for base in kind.__mro__:
        if base.__name__ in values and base.__module__.startswith(packages):
            return values[base.__name__]
    return None


def type_name(obj: object) -> str:
    """Return the full name of an object's type, for messages."""
    kind = type(obj)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return module + kind.__qualname__
