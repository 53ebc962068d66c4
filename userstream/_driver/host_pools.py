"""Page-locked host memory from a pool of the driver, which holds up nobody's launches.

``cuMemHostAlloc`` and ``cuMemFreeHost`` hold up all threads that give work to a GPU: on an H200 for
0.6 s while 1 GiB is allocated, and in a free until the GPU has run out of work. A pool does not.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from cuda.bindings import driver

from userstream._driver.contexts import primary_context, within
from userstream._driver.library import device_attribute, device_count
from userstream._driver.memory import allocate_pinned, free_pinned
from userstream._driver.status import call
from userstream._driver.streams import relaxed
from userstream.errors import DriverError, NotSupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

_SUPPORTED = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HOST_NUMA_MEMORY_POOLS_SUPPORTED
_NODE = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID
_NON_BLOCKING = int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)

_pools: dict[int, _HostPool] = {}  # by device


def allocate_host(device: int, size: int) -> tuple[int, Callable[[], None]]:
    """Allocate page-locked host memory for all devices, on the host's node that is nearest to one.

    Return its address, and a function that frees it: that of a pool whatever the GPU still does.
    """
    try:
        pool = _pool_of(device)
        address = pool.allocate(size)
    except (DriverError, NotSupportedError):
        pass  # an old driver, a container that may not ask for memory of a node, or a full node
    else:
        return address, partial(pool.free, address)
    context = primary_context(device)
    address = allocate_pinned(context, size)
    return address, partial(free_pinned, context, address)


class _HostPool(NamedTuple):
    context: driver.CUcontext
    stream: driver.CUstream  # of its own: others may be held
    pool: driver.CUmemoryPool

    def allocate(self, size: int) -> int:
        return int(within(self.context, relaxed, self._allocate, size))

    def _allocate(self, size: int) -> driver.CUdeviceptr:
        address: driver.CUdeviceptr = call(
            driver.cuMemAllocFromPoolAsync, size, self.pool, self.stream
        )
        try:
            call(driver.cuStreamSynchronize, self.stream)
        except BaseException:
            driver.cuMemFreeAsync(address, self.stream)
            raise
        return address

    def free(self, address: int) -> None:
        within(self.context, relaxed, self._free, address)

    def _free(self, address: int) -> None:
        call(driver.cuMemFreeAsync, address, self.stream)
        call(driver.cuStreamSynchronize, self.stream)  # here the pool gives memory back

    def close(self) -> None:
        relaxed(call, driver.cuMemPoolDestroy, self.pool)
        relaxed(call, driver.cuStreamDestroy, self.stream)


def _pool_of(device: int) -> _HostPool:
    try:
        return _pools[device]
    except KeyError:
        made = _open(device)
    kept = _pools.setdefault(device, made)
    if kept is not made:  # another thread came first
        made.close()
    return kept


def _open(device: int) -> _HostPool:
    devices = range(device_count())
    if not all(map(_may_have_host_pools, devices)):
        raise NotSupportedError("a device has no pools of host memory", device=device)
    properties = driver.CUmemPoolProps()
    properties.allocType = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_HOST_NUMA
    properties.location.id = max(0, device_attribute(device, _NODE))  # -1 without NUMA
    access = list(map(_access, devices))
    context = primary_context(device)
    pool = relaxed(call, driver.cuMemPoolCreate, properties)
    try:
        relaxed(call, driver.cuMemPoolSetAccess, pool, access, len(access))
        stream = within(context, relaxed, call, driver.cuStreamCreate, _NON_BLOCKING)
    except BaseException:
        driver.cuMemPoolDestroy(pool)
        raise
    return _HostPool(context, stream, pool)


def _may_have_host_pools(device: int) -> bool:
    """Tell whether a device has them. If not, a pool can be made, but no copy works there."""
    try:
        return bool(device_attribute(device, _SUPPORTED))
    except DriverError:  # the pools are older than the question
        return True


def _access(device: int) -> driver.CUmemAccessDesc:
    access = driver.CUmemAccessDesc()
    access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = device
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return access
