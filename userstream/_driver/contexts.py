"""Contexts: primary contexts, green contexts, and the calling thread's current context."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from cuda.bindings import driver

from userstream._driver import core
from userstream._driver.library import check_device, ensure, version
from userstream._driver.status import SUCCESS, ask, call, failed
from userstream.errors import NotSupportedError

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
    # Creating a context takes long, so no lock is held. A superfluous retain is released.
    handle = call(driver.cuDeviceGet, device)
    context = call(driver.cuDevicePrimaryCtxRetain, handle)
    devices_of_primaries[int(context)] = device
    kept = _primary.setdefault(device, context)
    if kept is not context:
        call(driver.cuDevicePrimaryCtxRelease, handle)
    return kept


def primary_context_if_active(device: int) -> driver.CUcontext | None:
    """Return the primary context of a device if it exists; create none."""
    known = _primary.get(device)
    if known is not None:
        return known
    _flags, active = call(driver.cuDevicePrimaryCtxGetState, call(driver.cuDeviceGet, device))
    return primary_context(device) if active else None


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
    """Return whether a context is current; `False` also if the driver does not answer."""
    try:
        return bool(driver.cuCtxGetCurrent()[1] == context)
    except (RuntimeError, ValueError):
        return False


def default_context() -> driver.CUcontext:
    """Return the context that a default stream stands for: the current one, or device 0's."""
    ensure()
    return current_context() or primary_context(0)


def some_context() -> driver.CUcontext:
    """Return any existing context, for queries that all contexts answer alike."""
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


# Green contexts: contexts whose work runs on some of the multiprocessors (SMs) of a device. A green
# context shares memory, modules and events with the primary context of its device. An event that is
# recorded in the primary context, or that the primary context waits for, covers all green contexts.
# So streams of green contexts count as streams of the primary context, except at their creation.

_SM = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
_DEFAULT_STREAM = int(driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM)  # required

# The driver's results for more multiprocessors than the device has.
_TOO_MANY = (
    driver.CUresult.CUDA_ERROR_INVALID_VALUE,
    driver.CUresult.CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION,
)

# The primary contexts of ours, by address: for a stream, the driver returns the green one.
primaries_of_green: dict[int, int] = {}


def check_green_contexts() -> None:
    """Raise `NotSupportedError` for a driver that cannot order green contexts (before 12.5)."""
    if version() < 12050:
        raise NotSupportedError(
            "sms= needs a CUDA 12.5 driver or newer, the first that can order green contexts; "
            "install a newer NVIDIA driver, or leave sms= out for the whole device",
            function="cuGreenCtxCreate",
        )


def all_multiprocessors(device: int) -> driver.CUdevResource:
    """Return all multiprocessors of a device."""
    return call(driver.cuDeviceGetDevResource, call(driver.cuDeviceGet, device), _SM)


def split_multiprocessors(
    resource: driver.CUdevResource, least: int
) -> tuple[driver.CUdevResource, driver.CUdevResource] | None:
    """Split off `least` multiprocessors or more; return both parts, or `None` if too few."""
    # Not cuDevSmResourceSplit of CUDA 13.1: that function does not round up.
    status, *values = ask(driver.cuDevSmResourceSplitByCount, 1, resource, 0, least)
    if status in _TOO_MANY:
        return None
    if status != SUCCESS:
        raise failed("cuDevSmResourceSplitByCount", status)
    parts, made, rest = values
    return (parts[0], rest) if int(made) else None


def multiprocessor_count(resource: driver.CUdevResource) -> int:
    """Return the number of multiprocessors."""
    return int(resource.sm.smCount)


def create_green_context(
    resource: driver.CUdevResource, device: int
) -> tuple[driver.CUgreenCtx, driver.CUcontext]:
    """Create a green context; return it, and the context that it is for other functions."""
    primary = primary_context(device)
    description = call(driver.cuDevResourceGenerateDesc, [resource], 1)
    ordinal = call(driver.cuDeviceGet, device)
    green = call(driver.cuGreenCtxCreate, description, ordinal, _DEFAULT_STREAM)
    try:
        context = call(driver.cuCtxFromGreenCtx, green)
    except Exception:
        destroy_green_context(green)
        raise
    primaries_of_green[int(context)] = int(primary)
    return green, context


def destroy_green_context(green: driver.CUgreenCtx) -> None:
    """Destroy a green context that nothing uses."""
    call(driver.cuGreenCtxDestroy, green)
