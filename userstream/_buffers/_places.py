"""Query and check the memory at an address, by the driver."""

from __future__ import annotations

from typing import TYPE_CHECKING

from userstream import _driver
from userstream._buffers._names import type_name
from userstream.errors import HostBufferError, UnsupportedBufferError

if TYPE_CHECKING:
    from userstream._driver.pointers import Place


def host_error(obj: object, where: str = "host memory") -> HostBufferError:
    """Return the error for a buffer that has no device."""
    return HostBufferError(
        f"this {type_name(obj)} is in {where}, which belongs to no device; pass a GPU buffer "
        "(get_stream and the waits also take the device itself)"
    )


def place_of(address: int, obj: object) -> Place:
    """Query the driver for the memory at an address of `obj`, pinned memory included.

    Raises
    ------
    UnsupportedBufferError
        The address is 0, unknown to the driver, or in a context that is not a primary one.
    """
    return checked_place(_driver.pointers.place_of(address) if address else None, address, obj)


def checked_place(place: Place | None, address: int, obj: object) -> Place:
    """Return a place that the driver reported; raise for the same errors as `place_of`."""
    if address == 0:
        raise UnsupportedBufferError(
            f"this {type_name(obj)} has address 0 (it is empty, or was freed), which does not "
            "determine its device (get_stream and the waits also take the device itself)"
        )
    if place is None:
        raise UnsupportedBufferError(
            f"address {address:#x} of this {type_name(obj)} is not in memory that the CUDA driver "
            "knows"
        )
    if place.kind != "pinned" and not place.is_in_primary_context():
        raise UnsupportedBufferError(
            f"address {address:#x} of this {type_name(obj)} was allocated in a CUDA context that "
            "is not the primary one of its device, where the user streams are"
        )
    return place


def device_at(place: Place, obj: object) -> int:
    """Return the device of the memory of `obj`; raise `HostBufferError` for pinned host memory."""
    if place.kind == "pinned":
        raise host_error(obj, "pinned host memory")
    return place.device
