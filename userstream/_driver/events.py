"""Events that are recorded behind, or hold up, the work of a whole context."""

from __future__ import annotations

from cuda.bindings import driver

from userstream._driver.contexts import within
from userstream._driver.library import version
from userstream._driver.status import call

_NO_TIMING = driver.CUevent_flags.CU_EVENT_DISABLE_TIMING


def create_event(context: driver.CUcontext) -> driver.CUevent:
    """Create an event without timing in `context`."""
    return within(context, call, driver.cuEventCreate, _NO_TIMING)


def record_context(context: driver.CUcontext, event: int | driver.CUevent) -> None:
    """Record an event behind all the work of a context; invalidates any capture there."""
    call(driver.cuCtxRecordEvent, context, driver.CUevent(int(event)))


def let_context_wait(context: driver.CUcontext, event: int | driver.CUevent) -> None:
    """Make all later work of a context wait for an event; invalidates any capture there."""
    call(driver.cuCtxWaitEvent, context, driver.CUevent(int(event)))


def has_context_events() -> bool:
    """Tell whether the driver can order a whole context: since CUDA 12.5."""
    return version() >= 12050
