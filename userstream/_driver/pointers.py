"""What the driver knows of an address, whoever allocated it.

``cuPointerGetAttribute`` is called by its address here: cuda-bindings 12.9.6 to 12.9.8 and 13.2.0
to 13.4.1 answer 0 for the device ordinal of any memory.
"""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, Literal

from cuda.bindings import driver

from userstream._driver.contexts import device_of_primary, primary_context
from userstream._driver.status import call, failed

if TYPE_CHECKING:
    from collections.abc import Callable

Memory = Literal["device", "managed", "pinned"]

_FUNCTION = "cuPointerGetAttribute"
_INTRODUCED = 4000  # the CUDA version, which selects the signature
_INVALID_VALUE = int(driver.CUresult.CUDA_ERROR_INVALID_VALUE)
_HOST = int(driver.CUmemorytype.CU_MEMORYTYPE_HOST)

_MEMORY_TYPE = int(driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE)
_CONTEXT = int(driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_CONTEXT)
_ORDINAL = int(driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)
_MANAGED = int(driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_MANAGED)
_DEVICE_POINTER = int(driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_POINTER)
_RANGE_START = int(driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR)
_RANGE_SIZE = int(driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_RANGE_SIZE)


@functools.cache
def _function() -> Callable[..., int]:
    address, _found = call(driver.cuGetProcAddress, _FUNCTION.encode(), _INTRODUCED, 0)
    prototype = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64)
    return prototype(int(address))


def _attribute(which: int, address: int) -> int | None:
    value = ctypes.c_uint64()  # no attribute is larger
    status = _function()(ctypes.byref(value), which, address)
    if status == 0:
        return value.value
    if status == _INVALID_VALUE:
        return None
    raise failed(_FUNCTION, status)


def is_host_pointer(address: int) -> bool | None:
    """Tell whether the memory at an address is pinned host memory; `None` if it is not CUDA's."""
    kind = _attribute(_MEMORY_TYPE, address)
    return None if kind is None else kind == _HOST


def is_managed_pointer(address: int) -> bool:
    """Tell whether the memory at an address is managed."""
    return bool(_attribute(_MANAGED, address))


def device_of_pointer(address: int) -> int | None:
    """Return the device of the memory at an address."""
    return _attribute(_ORDINAL, address)


def primary_device_of_pointer(address: int) -> int | None:
    """Return the device of an address, or `None` if it belongs to a context not its primary one."""
    context = _attribute(_CONTEXT, address)
    device = None if context is None else device_of_primary(context)
    if device is not None:
        return device
    device = device_of_pointer(address)
    if device is None:  # freed meanwhile
        return None
    # The memory of a pool belongs to no context, but to the device.
    return device if context in (0, int(primary_context(device))) else None


def allocation_of_pointer(address: int) -> tuple[int, int] | None:
    """Return the address and the size of the allocation that an address is in."""
    start, size = _attribute(_RANGE_START, address), _attribute(_RANGE_SIZE, address)
    return None if start is None or size is None else (start, size)


def can_access(address: int) -> bool:
    """Tell whether the device of the current context can access the memory at an address."""
    return _attribute(_DEVICE_POINTER, address) is not None
