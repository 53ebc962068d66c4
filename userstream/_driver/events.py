"""Events of a whole context; those of streams are `_events`' and cuda.core's."""

from __future__ import annotations

from cuda.bindings import driver

from userstream._driver.contexts import within
from userstream._driver.library import version
from userstream._driver.status import NOT_READY, SUCCESS, ask, call, failed

_NO_TIMING = driver.CUevent_flags.CU_EVENT_DISABLE_TIMING


def create_event(context: driver.CUcontext) -> driver.CUevent:
    """Create an event without timing in `context`."""
    return within(context, call, driver.cuEventCreate, _NO_TIMING)


def destroy_event(event: driver.CUevent) -> None:
    """Destroy an event, also one that is pending."""
    call(driver.cuEventDestroy, event)


def record_context(context: driver.CUcontext, event: driver.CUevent) -> None:
    """Record an event behind all the work of a context; invalidates any capture there."""
    call(driver.cuCtxRecordEvent, context, event)


def let_context_wait(context: driver.CUcontext, event: driver.CUevent) -> None:
    """Make all later work of a context wait for an event; invalidates any capture there."""
    call(driver.cuCtxWaitEvent, context, event)


def has_context_events() -> bool:
    """Tell whether the driver can order a whole context: since CUDA 12.5."""
    return version() >= 12050


def event_is_done(event: driver.CUevent, device: object) -> bool:
    """Ask whether an event has completed. Call it under `relaxed`."""
    (status,) = ask(driver.cuEventQuery, event)
    if status == SUCCESS:
        return True
    if status == NOT_READY:
        return False
    raise failed("cuEventQuery", status, device)
