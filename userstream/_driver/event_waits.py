"""Waits of a stream for an event of any library."""

from __future__ import annotations

from cuda.bindings import driver

from userstream._driver.status import call

EXTERNAL = int(driver.CUevent_wait_flags.CU_EVENT_WAIT_EXTERNAL)


def wait_for_event(handle: driver.CUstream, event: int, flags: int, stream: object) -> None:
    """Make later work on a stream wait for an event; no host wait."""
    call(driver.cuStreamWaitEvent, handle, driver.CUevent(event), flags, stream=stream)
