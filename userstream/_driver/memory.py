"""Page-locked host memory."""

from __future__ import annotations

from cuda.bindings import driver

from userstream._driver.contexts import within
from userstream._driver.status import call
from userstream._driver.streams import relaxed


def allocate_pinned(context: driver.CUcontext, size: int) -> int:
    """Allocate page-locked host memory for all devices; return its address."""
    flags = driver.CU_MEMHOSTALLOC_PORTABLE
    return int(within(context, relaxed, call, driver.cuMemHostAlloc, size, flags))


def free_pinned(context: driver.CUcontext, address: int) -> None:
    """Free what `allocate_pinned` gave. Waits for the device."""
    within(context, relaxed, call, driver.cuMemFreeHost, address)
