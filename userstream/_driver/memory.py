"""Page-locked host memory."""

from __future__ import annotations

from cuda.bindings import driver

from userstream._driver.contexts import entered
from userstream._driver.status import call
from userstream._driver.streams import relaxed_capture


def allocate_pinned(context: driver.CUcontext, size: int) -> int:
    """Allocate page-locked host memory for all devices; return its address."""
    with entered(context), relaxed_capture():
        return int(call(driver.cuMemHostAlloc, size, driver.CU_MEMHOSTALLOC_PORTABLE))


def free_pinned(context: driver.CUcontext, address: int) -> None:
    """Free what `allocate_pinned` gave. Waits for the device."""
    with entered(context), relaxed_capture():
        call(driver.cuMemFreeHost, address)
