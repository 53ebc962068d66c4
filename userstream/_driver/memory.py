"""Page-locked host memory, and who may access managed memory."""

from __future__ import annotations

from typing import Any

from cuda.bindings import driver

from userstream._driver.contexts import within
from userstream._driver.status import call, make
from userstream._driver.streams import relaxed


def allocate_pinned(
    context: driver.CUcontext, size: int, made: list[tuple[Any, ...]] | None = None
) -> int:
    """Allocate page-locked host memory for all devices; return its address.

    Whatever signal comes, the driver's answer is in `made`: see `make`.
    """
    made, flags = [] if made is None else made, driver.CU_MEMHOSTALLOC_PORTABLE
    return int(within(context, relaxed, make, made, driver.cuMemHostAlloc, size, flags))


def free_pinned(context: driver.CUcontext, address: int) -> None:
    """Free what `allocate_pinned` gave. Waits for the device."""
    within(context, relaxed, call, driver.cuMemFreeHost, address)


def device_address(address: int) -> int:
    """Return where the current context's device sees page-locked host memory."""
    return int(relaxed(call, driver.cuMemHostGetDevicePointer, address, 0))


ATTACHMENTS = {
    "global": int(driver.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL),
    "host": int(driver.CUmemAttach_flags.CU_MEM_ATTACH_HOST),
    "single": int(driver.CUmemAttach_flags.CU_MEM_ATTACH_SINGLE),
}


def attach_memory(address: int, to: str, handle: driver.CUstream, stream: object) -> None:
    """Queue a change of who may access a whole allocation of managed memory."""
    call(driver.cuStreamAttachMemAsync, handle, address, 0, ATTACHMENTS[to], stream=stream)
