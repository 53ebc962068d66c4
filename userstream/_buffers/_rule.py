"""What a rule is: how the buffers of one kind answer where they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from userstream import _driver
from userstream.errors import HostBufferError, UnsupportedBufferError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from userstream._buffers._info import BufferInfo, Layout
    from userstream._driver import Memory, Place
    from userstream.typing import StreamLike


# What a rule answers instead of the handle of a producer's stream.
NOTHING_PENDING = 0
UNKNOWN = -1


class Framework(NamedTuple):
    """The current streams of a framework, one per thread and device."""

    name: str
    # Whether it is imported and can use a GPU.
    is_usable: Callable[[], bool]
    # The handle of the current stream of a device, and what keeps that stream alive.
    current_stream: Callable[[int], tuple[int, object]]
    # Makes a stream the current one of a device; returns what undoes it, in the same thread. Both
    # are called with the device current.
    activate: Callable[[StreamLike, int], Callable[[], object]]
    # Tells the framework's allocator that its current stream uses a buffer of its own.
    record_use: Callable[[Any], None] | None = None


class Rule(NamedTuple):
    """How the buffers of one kind are read. A file per framework makes one."""

    # The ordinal of the device. Raises HostBufferError, or DeviceMismatchError for parts.
    device_id: Callable[[Any], int]
    describe: Callable[[Any], BufferInfo]
    # The handle of the stream that a buffer names, which it keeps alive; NOTHING_PENDING or
    # UNKNOWN. By default the current stream of the framework stands in.
    producer: Callable[[Any], int] | None = None
    framework: Framework | None = None
    # What it is made of, each on one device; and where these are in the whole, if it is an array.
    parts: Callable[[Any], Sequence[Any]] | None = None
    places: Callable[[Any], Sequence[tuple[Any, Any]]] | None = None
    # Makes a contiguous copy on the framework's current stream; whether its memory says too little.
    pack: Callable[[Any], Any] | None = None
    must_pack: Callable[[Any], bool] | None = None
    # Whether it says that it must not be written; by default nothing does.
    read_only: Callable[[Any], bool] | None = None
    # Of one on the host: what NumPy can read, and the type of its elements if that is another one.
    host: Callable[[Any], tuple[Any, str | None]] | None = None
    # Instead of naming the producer: orders the stream of that handle after it, and returns what
    # keeps the memory.
    export: Callable[[Any, int], object] | None = None
    # For a copy, instead of `describe`: at least as much as it needs, of what has a device.
    layout: Callable[[Any], Layout | BufferInfo] | None = None


def is_named(kind: type, packages: tuple[str, ...], names: tuple[str, ...]) -> bool:
    """Tell whether a type, or a base of it, has one of the names and comes from the packages."""
    return any(
        base.__name__ in names and base.__module__.startswith(packages) for base in kind.__mro__
    )


def type_name(obj: object) -> str:
    """Return the full name of an object's type, for messages."""
    kind = type(obj)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return module + kind.__qualname__


def host_error(obj: object, where: str = "host memory") -> HostBufferError:
    """Return the error for a buffer that has no device."""
    return HostBufferError(
        f"this {type_name(obj)} is in {where}, which belongs to no device; pass a GPU buffer "
        "(get_stream and the waits take the device itself as well)"
    )


def device_at(address: int, obj: object) -> int:
    """Ask the driver on which device an address of `obj` is.

    Raises
    ------
    HostBufferError
        It is pinned host memory.
    UnsupportedBufferError
        It is 0, no memory that the driver knows, or of a context that is not a primary one.
    """
    place = _place(address, obj)
    if place.kind == "pinned":
        raise host_error(obj, "pinned host memory")
    return _usable(place, address, obj)


def locate(address: int, obj: object) -> tuple[int, Memory]:
    """Return the device and the kind of memory at an address of `obj`, pinned memory included."""
    place = _place(address, obj)
    kind = place.kind
    return place.device if kind == "pinned" else _usable(place, address, obj), kind


def _place(address: int, obj: object) -> Place:
    if address == 0:
        raise UnsupportedBufferError(
            f"this {type_name(obj)} has address 0 (it is empty, or was freed), which does not tell "
            "its device (get_stream and the waits take the device itself as well)"
        )
    _driver.ensure()
    place = _driver.place_of(address)
    if place is None:
        raise UnsupportedBufferError(
            f"address {address:#x} of this {type_name(obj)} is no memory that the CUDA driver knows"
        )
    return place


def _usable(place: Place, address: int, obj: object) -> int:
    if not place.is_in_primary_context():
        raise UnsupportedBufferError(
            f"address {address:#x} of this {type_name(obj)} was allocated in a CUDA context that "
            "is not the primary one of its device, where the user streams are"
        )
    return place.device
