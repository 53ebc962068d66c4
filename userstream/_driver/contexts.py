"""Contexts: the primary one of each device, and the calling thread's current one."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cuda.bindings import driver

from userstream._driver.library import check_device, ensure
from userstream._driver.status import SUCCESS, ask, call, failed

if TYPE_CHECKING:
    from collections.abc import Iterator

_INVALID_CONTEXT = driver.CUresult.CUDA_ERROR_INVALID_CONTEXT

_lock = threading.Lock()
_primary: dict[int, driver.CUcontext] = {}
_devices: dict[int, int] = {}  # by the address of the primary context


def primary_context(device: int) -> driver.CUcontext:
    """Return the primary context of a device, retained once and kept for the process."""
    try:
        return _primary[device]
    except KeyError:
        check_device(device)
    # Making a context takes long: not under the lock. A retain too many is given back.
    handle = call(driver.cuDeviceGet, device)
    context = call(driver.cuDevicePrimaryCtxRetain, handle)
    with _lock:
        kept = _primary.setdefault(device, context)
        _devices[int(kept)] = device
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
    return _devices.get(context)


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


def default_context() -> driver.CUcontext:
    """Return the context that a default stream stands for: the current one, or device 0's."""
    ensure()
    return current_context() or primary_context(0)


@contextmanager
def entered(context: driver.CUcontext) -> Iterator[driver.CUcontext]:
    """Make `context` current for the block; afterwards the caller's is current again."""
    current = call(driver.cuCtxGetCurrent)
    if int(current) == int(context):
        yield context
        return
    call(driver.cuCtxPushCurrent, context)
    try:
        yield context
    finally:
        call(driver.cuCtxPopCurrent)


def synchronize_context(context: driver.CUcontext) -> None:
    """Block until everything in `context` is done (for drivers without `record_context`)."""
    with entered(context):
        call(driver.cuCtxSynchronize)


def priority_range(context: driver.CUcontext) -> tuple[int, int]:
    """Return the lowest and the highest priority of the streams of a context."""
    with entered(context):
        least, greatest = call(driver.cuCtxGetStreamPriorityRange)
    return int(least), int(greatest)
