"""What the driver knows of an address, whoever allocated it."""

from __future__ import annotations

from typing import Literal

from cuda.bindings import driver

from userstream._driver.contexts import device_of_primary, primary_context
from userstream._driver.status import SUCCESS, ask, call, failed

Memory = Literal["device", "managed", "pinned"]

_MEMORY_TYPE = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
_CONTEXT = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_CONTEXT
_ORDINAL = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
_MANAGED = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_MANAGED
_HOST = int(driver.CUmemorytype.CU_MEMORYTYPE_HOST)
_INVALID_VALUE = driver.CUresult.CUDA_ERROR_INVALID_VALUE


def is_host_pointer(address: int) -> bool | None:
    """Tell whether the memory at an address is pinned host memory; `None` if it is not CUDA's."""
    status, kind = ask(driver.cuPointerGetAttribute, _MEMORY_TYPE, address)
    if status == SUCCESS:
        return int(kind) == _HOST
    if status == _INVALID_VALUE:
        return None
    raise failed("cuPointerGetAttribute", status)


def is_managed_pointer(address: int) -> bool:
    """Tell whether the memory at an address is managed."""
    return bool(call(driver.cuPointerGetAttribute, _MANAGED, address))


def device_of_pointer(address: int) -> int:
    """Return the device of the memory at an address."""
    return int(call(driver.cuPointerGetAttribute, _ORDINAL, address))


def primary_device_of_pointer(address: int) -> int | None:
    """Return the device of an address, or `None` if it belongs to a context not its primary one."""
    context = int(call(driver.cuPointerGetAttribute, _CONTEXT, address))
    device = device_of_primary(context)
    if device is not None:
        return device
    device = device_of_pointer(address)
    # The memory of a pool belongs to no context, but to the device.
    return device if context in (0, int(primary_context(device))) else None
