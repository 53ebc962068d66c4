"""Page-locked host memory from a pool of the driver, which delays no launches.

``cuMemHostAlloc`` and ``cuMemFreeHost`` hold up all threads that give work to a GPU: on an H200 for
0.6 s while 1 GiB is allocated, and in a free until the GPU has run out of work. A pool does not.
"""

from __future__ import annotations

import time
from typing import Any

from cuda.bindings import driver

from userstream._driver.contexts import primary_context, within
from userstream._driver.copies import allocate_pinned, free_pinned
from userstream._driver.library import device_attribute, device_count
from userstream._driver.status import NOT_READY, SUCCESS, ask, call, failed, make
from userstream._driver.streams import relaxed
from userstream.errors import DriverError, NotSupportedError

_SUPPORTED = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HOST_NUMA_MEMORY_POOLS_SUPPORTED
_NODE = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID
_NON_BLOCKING = int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
_PATIENCE = 2e-3  # seconds for an allocation; more than it takes if the stream of the pool is free

_pools: dict[int, _HostPool] = {}  # by device


class HostMemory:
    """A block of page-locked host memory for all devices, from a pool where pools are supported."""

    __slots__ = ("_device", "_pool", "address", "size")

    def __init__(self, size: int, device: int) -> None:
        self.size = size
        self.address: int | None = None  # until the block is allocated
        self._device = device
        self._pool: _HostPool | None = None

    def allocate(self) -> None:
        """Allocate the block on the host's NUMA node nearest to the device."""
        try:
            self._pool = _pool_of(self._device)
            self.address = self._pool.allocate(self.size)
        except (DriverError, NotSupportedError):
            pass  # an old driver, a container that may not use memory of a node, or a full node
        if self.address is None:
            self._pool = None
            self.address = allocate_pinned(primary_context(self._device), self.size)

    def free(self) -> None:
        """Free the block; only without a pool does that wait for the GPU."""
        assert self.address is not None
        if self._pool is None:
            free_pinned(primary_context(self._device), self.address)
        else:
            self._pool.free(self.address)


class _HostPool:
    """A pool of page-locked memory that is nearest to a device."""

    __slots__ = ("_context", "_pools", "_streams")

    def __init__(self, device: int) -> None:
        self._context = primary_context(device)
        self._pools: list[tuple[Any, ...]] = []  # one, once it is open
        self._streams: list[tuple[Any, ...]] = []  # of its own: others may be held

    def open(self, device: int) -> None:
        devices = range(device_count())
        if not all(map(_may_have_host_pools, devices)):
            raise NotSupportedError("a device has no pools of host memory", device=device)
        properties = driver.CUmemPoolProps()
        properties.allocType = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_HOST_NUMA
        properties.location.id = max(0, device_attribute(device, _NODE))  # -1 without NUMA
        access = list(map(_access, devices))
        pool = relaxed(make, self._pools, driver.cuMemPoolCreate, properties)
        relaxed(call, driver.cuMemPoolSetAccess, pool, access, len(access))
        within(self._context, relaxed, make, self._streams, driver.cuStreamCreate, _NON_BLOCKING)

    def allocate(self, size: int) -> int | None:
        """Allocate memory; return its address, or `None` if the stream of the pool is held up."""
        address: int | None = within(self._context, relaxed, self._allocate, size)
        return address

    def _allocate(self, size: int) -> int | None:
        (_, pool), (_, stream) = self._pools[0], self._streams[0]
        address, has_arrived = call(driver.cuMemAllocFromPoolAsync, size, pool, stream), False
        try:
            has_arrived = _arrives(stream)
        finally:
            if not has_arrived:
                driver.cuMemFreeAsync(address, stream)
        return int(address) if has_arrived else None

    def free(self, address: int) -> None:
        """Free memory of the pool, without waiting for the GPU."""
        within(self._context, relaxed, self._free, address)

    def _free(self, address: int) -> None:
        (_, stream) = self._streams[0]
        call(driver.cuMemFreeAsync, address, stream)
        call(driver.cuStreamSynchronize, stream)  # here the pool gives memory back

    def close(self) -> None:
        while self._pools:
            relaxed(driver.cuMemPoolDestroy, self._pools.pop()[1])
        while self._streams:
            # Popped first: an interrupted close leaks a stream and never destroys one twice.
            relaxed(driver.cuStreamDestroy, self._streams.pop()[1])


def _arrives(stream: driver.CUstream) -> bool:
    """Return whether a stream completes its queued work within a short time.

    It may have to wait for work of others: ``cuCtxWaitEvent`` holds all streams of a context, and
    whoever is queuing work may not be kept waiting for the GPU.
    """
    until = time.monotonic() + _PATIENCE
    while True:
        (status,) = ask(driver.cuStreamQuery, stream)
        if status == SUCCESS:
            return True
        if status != NOT_READY:
            raise failed("cuStreamQuery", status)
        if time.monotonic() > until:
            return False


def _pool_of(device: int) -> _HostPool:
    pool = _pools.get(device)
    if pool is not None:
        return pool
    made = _HostPool(device)
    try:
        made.open(device)
        return _pools.setdefault(device, made)
    finally:
        if _pools.get(device) is not made:  # another thread came first, an error, or a signal
            made.close()


def _may_have_host_pools(device: int) -> bool:
    """Return whether a device supports copies with host memory pools."""
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
