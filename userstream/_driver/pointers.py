"""Driver attributes of an address, independent of the library that allocated the memory.

The functions are called by their addresses: cuda-bindings 12.9.6 to 12.9.8 and 13.2.0 to
13.4.1 answer 0 for the device ordinal of any memory.
"""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, Literal, NamedTuple

from cuda.bindings import driver

from userstream import _process
from userstream._driver import core
from userstream._driver.contexts import devices_of_primaries, primary_context, some_context, within
from userstream._driver.library import driver_function, ensure
from userstream._driver.status import SUCCESS, ask, failed
from userstream._driver.streams import relaxed

if TYPE_CHECKING:
    from collections.abc import Callable

Memory = Literal["device", "managed", "pinned"]

_INVALID_VALUE = int(driver.CUresult.CUDA_ERROR_INVALID_VALUE)
_NO_RANGE = (driver.CUresult.CUDA_ERROR_INVALID_VALUE, driver.CUresult.CUDA_ERROR_NOT_FOUND)
_HOST = int(driver.CUmemorytype.CU_MEMORYTYPE_HOST)
_POOL = int(driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE)
_DEVICE_POINTER = int(driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_POINTER)
_LEGACY_IPC = int(driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE)


class Place(NamedTuple):
    """The memory at an address."""

    is_host: bool  # page-locked; managed memory may be on the host as well
    is_managed: bool
    device: int
    context: int  # 0 if it belongs to none, like that of a pool
    start: int  # of the allocation
    size: int

    @property
    def kind(self) -> Memory:
        """The kind of memory, as users see it."""
        return "managed" if self.is_managed else "pinned" if self.is_host else "device"

    def is_in_primary_context(self) -> bool:
        """Return whether the memory belongs to its device or the device's primary context."""
        if not self.context or self.context in devices_of_primaries:
            return True
        return self.context == int(primary_context(self.device))

    def covers(self, start: int, nbytes: int) -> bool:
        """Return whether bytes lie in the allocation, or in one range of mapped allocations."""
        end, stop = start + nbytes, self.start + self.size
        if self.start <= start and end <= stop:
            return True
        if start >= 1 << 64 or start < 0 or end > 1 << 64 or not self._may_be_mapped():
            return False
        # Of memory mapped piece by piece, such as PyTorch's expandable segments, the driver reports
        # only the piece.
        while start < end:
            piece = place_of(start)
            if piece is None or piece.device != self.device or not piece._may_be_mapped():
                return False
            start = piece.start + piece.size
        return True

    def _may_be_mapped(self) -> bool:
        """Return whether the memory may come from ``cuMemMap``, which maps several allocations."""
        if self.is_host or self.is_managed or is_of_pool(self.start):
            return False
        return not _attribute(_LEGACY_IPC, self.start)


def place_of(address: int) -> Place | None:
    """Return the allocation at an address; `None` if CUDA does not know the address."""
    if _process.halted:
        _process.check_fork()
    status, kind, managed, device, context, start, size = _question()(address)
    if status:
        raise failed("cuPointerGetAttributes", status)
    if not kind:
        return None
    if kind == _HOST and not start <= address < start + size:
        # The memory is of a pool, and `start` counts from where that begins.
        start, size = _range_of(address) or (start, size)
    return Place(kind == _HOST, bool(managed), device, context, start, size)


def usual_device(address: int) -> int | None:
    """Return the device of memory that may be used on its user stream, in one driver call.

    `None` if that call does not settle the question: `place_of` then gives the reason.
    """
    if _process.halted:
        _process.check_fork()
    status, kind, _managed, device, context, _start, _size = _question()(address)
    if status or not kind or kind == _HOST or (context and context not in devices_of_primaries):
        return None
    return device


def _range_of(address: int) -> tuple[int, int] | None:
    """Return the start and the size of an allocation; `None` if the driver does not know them."""
    asked = driver.cuMemGetAddressRange
    status, start, size = within(some_context(), relaxed, ask, asked, address)
    if status in _NO_RANGE:
        return None
    if status != SUCCESS:
        raise failed("cuMemGetAddressRange", status)
    return int(start), int(size)


def can_access(address: int) -> bool:
    """Return whether the device of the current context can access an address."""
    return _attribute(_DEVICE_POINTER, address) is not None


def is_of_pool(address: int) -> bool:
    """Return whether the memory at an address belongs to a pool."""
    return bool(_attribute(_POOL, address))


def _attribute(which: int, address: int) -> int | None:
    value = ctypes.c_uint64()
    status = _single()(ctypes.byref(value), which, address)
    if status not in (0, _INVALID_VALUE):
        raise failed("cuPointerGetAttribute", status)
    return None if status else value.value


@functools.cache
def _question() -> Callable[[int], tuple[int, ...]]:
    """Load the driver; return the function of the core that describes an address."""
    ensure()
    return core.pointer


@functools.cache
def _single() -> Callable[..., int]:
    return driver_function(
        "cuPointerGetAttribute", 4000, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64
    )
