"""Contexts: the primary one of each device, and the calling thread's current one."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from cuda.bindings import driver

from userstream._driver import core
from userstream._driver.library import check_device, ensure
from userstream._driver.status import SUCCESS, ask, call, failed

if TYPE_CHECKING:
    from collections.abc import Iterator

_INVALID_CONTEXT = driver.CUresult.CUDA_ERROR_INVALID_CONTEXT

_primary: dict[int, driver.CUcontext] = {}
devices_of_primaries: dict[int, int] = {}  # by the address of the primary context


def primary_context(device: int) -> driver.CUcontext:
    """Return the primary context of a device, retained once and kept for the process."""
    try:
        return _primary[device]
    except KeyError:
        check_device(device)
    # Making a context takes long, so under no lock. A retain too many is given back.
    handle = call(driver.cuDeviceGet, device)
    context = call(driver.cuDevicePrimaryCtxRetain, handle)
    devices_of_primaries[int(context)] = device
    kept = _primary.setdefault(device, context)
    if kept is not context:
        call(driver.cuDevicePrimaryCtxRelease, handle)
    return kept


def primary_context_if_active(device: int) -> driver.CUcontext | None:
    """Return the primary context of a device without bringing one into being."""
    known = _primary.get(device)
    if known is not None:
        return known
    _flags, active = call(driver.cuDevicePrimaryCtxGetState, call(driver.cuDeviceGet, device))
    return primary_context(device) if active else None


def device_of_primary(context: int) -> int | None:
    """Return the device whose primary context, known by `primary_context`, this is."""
    return devices_of_primaries.get(context)


def current_context() -> driver.CUcontext | None:
    """Return the calling thread's current context, if it has one."""
    context = call(driver.cuCtxGetCurrent)
    return context if int(context) else None


def current_device() -> int:
    """Return the calling thread's current device: 0 without a context, as ``cudaGetDevice``."""
    status, device = ask(driver.cuCtxGetDevice)
    if status == SUCCESS:
        return int(device)
    if status == _INVALID_CONTEXT:
        return 0
    raise failed("cuCtxGetDevice", status)


def is_current(context: driver.CUcontext | int) -> bool:
    """Tell whether a context is known to be the current one; `False` also if that fails."""
    try:
        return bool(driver.cuCtxGetCurrent()[1] == context)
    except (RuntimeError, ValueError):
        return False


def default_context() -> driver.CUcontext:
    """Return the context that a default stream stands for: the current one, or device 0's."""
    ensure()
    return current_context() or primary_context(0)


def some_context() -> driver.CUcontext:
    """Return any context, for a question that all of them answer alike; one that is there."""
    known = list(_primary.values())  # at once: other threads add to it
    return known[0] if known else default_context()


# Call `within(context, function, *args)`: the function runs with the context current, and no signal
# handler runs between a change of the context and the call. See `native/calls.c`.
within = core.within


@contextmanager
def entered(context: driver.CUcontext) -> Iterator[None]:
    """Make a context current for a block."""
    changed: list[int] = []  # the context to restore, from the change on
    error = None
    try:
        core.enter(context, changed)
        yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        core.leave(changed, error)


def synchronize_context(context: driver.CUcontext) -> None:
    """Block until everything in `context` is done (for drivers without `record_context`)."""
    within(context, call, driver.cuCtxSynchronize)


def priority_range(context: driver.CUcontext) -> tuple[int, int]:
    """Return the lowest and the highest priority of the streams of a context."""
    least, greatest = within(context, call, driver.cuCtxGetStreamPriorityRange)
    return int(least), int(greatest)
