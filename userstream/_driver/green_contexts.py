"""Green contexts: contexts whose work runs on a part of the multiprocessors (SMs) of a device.

They belong to the primary context of their device: memory, modules and events are shared, and an
event that is recorded in the primary context, or that it waits for, is one of all its green
contexts as well. So the streams of ours count as streams of the primary context, except in the
call that creates them.
"""

from __future__ import annotations

from cuda.bindings import driver

from userstream._driver.contexts import primary_context
from userstream._driver.library import version
from userstream._driver.status import SUCCESS, ask, call, failed
from userstream.errors import NotSupportedError

_SM = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
_DEFAULT_STREAM = int(driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM)  # required

# What the driver answers where there are not so many.
_TOO_MANY = (
    driver.CUresult.CUDA_ERROR_INVALID_VALUE,
    driver.CUresult.CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION,
)

# The primary contexts of ours, by address: for a stream, the driver returns the green one.
primaries: dict[int, int] = {}


def check_supported() -> None:
    """Raise `NotSupportedError` with a driver before CUDA 12.5, which cannot order them."""
    if version() < 12050:
        raise NotSupportedError(
            "sms= needs a CUDA 12.5 driver or newer, the first that can order green contexts; "
            "install a newer NVIDIA driver, or leave sms= out for the whole device",
            function="cuGreenCtxCreate",
        )


def whole(device: int) -> driver.CUdevResource:
    """Return all multiprocessors of a device."""
    return call(driver.cuDeviceGetDevResource, call(driver.cuDeviceGet, device), _SM)


def split(
    resource: driver.CUdevResource, least: int
) -> tuple[driver.CUdevResource, driver.CUdevResource] | None:
    """Return at least so many of some multiprocessors, and the rest; `None` if there are fewer."""
    # Not by cuDevSmResourceSplit of CUDA 13.1, which rounds nothing up.
    status, *values = ask(driver.cuDevSmResourceSplitByCount, 1, resource, 0, least)
    if status in _TOO_MANY:
        return None
    if status != SUCCESS:
        raise failed("cuDevSmResourceSplitByCount", status)
    parts, made, rest = values
    return (parts[0], rest) if int(made) else None


def count(resource: driver.CUdevResource) -> int:
    """Return the number of multiprocessors."""
    return int(resource.sm.smCount)


def create(
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
        destroy(green)
        raise
    primaries[int(context)] = int(primary)
    return green, context


def destroy(green: driver.CUgreenCtx) -> None:
    """Destroy a green context that nothing uses."""
    call(driver.cuGreenCtxDestroy, green)
