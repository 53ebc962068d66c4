"""What a rule is: how the buffers of one kind answer where they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from userstream import _driver
from userstream.errors import HostBufferError, UnsupportedBufferError

if TYPE_CHECKING:
    from collections.abc import Callable

    from userstream._buffers._info import BufferInfo, Memory


class Rule(NamedTuple):
    """How the buffers of one kind are read. A file per framework makes one."""

    # The ordinal of the device. Raises HostBufferError, or DeviceMismatchError for parts.
    device_id: Callable[[Any], int]
    describe: Callable[[Any], BufferInfo]


def is_named(kind: type, packages: tuple[str, ...], names: tuple[str, ...]) -> bool:
    """Tell whether a type, or a base of it, has one of the names and comes from the packages."""
    return any(
        base.__name__ in names and base.__module__.startswith(packages) for base in kind.__mro__
    )


def type_name(obj: object) -> str:
    """Return the full name of an object's type, for messages."""
    kind = type(obj)
    return f"{kind.__module__}.{kind.__qualname__}"


def host_error(obj: object, where: str = "host memory") -> HostBufferError:
    """Return the error for a buffer that has no device."""
    return HostBufferError(
        f"this {type_name(obj)} is in {where}, which belongs to no device; pass a GPU buffer, or "
        "the device itself"
    )


class Place(NamedTuple):
    """Where the driver says that an address is."""

    device: int
    memory: Memory


def locate(address: int, obj: object) -> Place:
    """Ask the driver where an address of `obj` is; pinned memory included.

    Raises
    ------
    UnsupportedBufferError
        It is 0, no memory that the driver knows, or of a context that is not a primary one.
    """
    if address == 0:
        raise UnsupportedBufferError(
            f"this {type_name(obj)} has address 0 (it is empty, or was freed), which does not tell "
            "its device; pass the device itself"
        )
    _driver.ensure()
    found = _driver.pointer_attributes(address)
    if not found.known:
        raise UnsupportedBufferError(
            f"address {address:#x} of this {type_name(obj)} is no memory that the CUDA driver knows"
        )
    if found.managed:
        return Place(found.device, "managed")
    if found.on_host:
        return Place(found.device, "pinned")
    if found.context and found.context != int(_driver.primary_context(found.device)):
        raise UnsupportedBufferError(
            f"address {address:#x} of this {type_name(obj)} was allocated in a CUDA context that "
            f"is not the primary context of device {found.device}, where the user streams are",
            device=found.device,
        )
    return Place(found.device, "device")


def device_at(address: int, obj: object) -> int:
    """Ask the driver on which device an address of `obj` is."""
    place = locate(address, obj)
    if place.memory == "pinned":
        raise host_error(obj, "pinned host memory")
    return place.device
