"""Page-locked host memory from a pool of the driver, which delays no launches.

``cuMemHostAlloc`` and ``cuMemFreeHost`` hold up all threads that give work to a GPU: on an H200 for
0.6 s while 1 GiB is allocated, and in a free until the GPU has run out of work. A pool does not.
"""

from __future__ import annotations

import time
from typing import Any

from cuda.bindings import driver

from userstream._driver.contexts import primary_context, within
from userstream._driver.library import device_attribute, device_count
from userstream._driver.memory import allocate_pinned, free_pinned
from userstream._driver.status import NOT_READY, SUCCESS, ask, call, failed, make
from userstream._driver.streams import relaxed
from userstream.errors import DriverError, NotSupportedError

_SUPPORTED = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HOST_NUMA_MEMORY_POOLS_SUPPORTED
_NODE = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID
_NON_BLOCKING = int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
_PATIENCE = 2e-3  # seconds for an allocation; more than it takes if the stream of the pool is free

_pools: dict[int, _HostPool] = {}  # by device


class HostMemory:
    """A block of page-locked host memory, for all devices.

    It knows what the driver gave it, and how to free that, from when the driver did: whatever
    signal comes in `allocate`, nothing is lost.
    """

    __slots__ = ("_answers", "_device", "_pool")

    def __init__(self, device: int) -> None:
        self._device = device
        self._answers: list[tuple[Any, ...]] = []
        self._pool: _HostPool | None = None

    @property
    def address(self) -> int | None:
        """Where it is; `None` until it is allocated."""
        for status, address in self._answers:
            if status == SUCCESS:
                return int(address)
        return None

    def allocate(self, size: int) -> None:
        """Allocate it, on the host's node that is nearest to the device."""
        try:
            self._pool = pool = _pool_of(self._device)
            if pool.allocate(size, self._answers):
                return
        except (DriverError, NotSupportedError):
            pass  # an old driver, a container that may not ask for memory of a node, or a full node
        self._pool = None
        allocate_pinned(primary_context(self._device), size, self._answers)

    def free(self) -> None:
        """Free it; that of a pool whatever the GPU still does."""
        (_status, address) = self._answers.pop()
        if self._pool is None:
            free_pinned(primary_context(self._device), int(address))
        else:
            self._pool.free(address)


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

    def allocate(self, size: int, made: list[tuple[Any, ...]]) -> bool:
        """Allocate, unless the stream of the pool is held up; tell whether it was done."""
        within(self._context, relaxed, self._allocate, size, made)
        return bool(made)

    def _allocate(self, size: int, made: list[tuple[Any, ...]]) -> None:
        (_, pool), (_, stream) = self._pools[0], self._streams[0]
        pending: list[tuple[Any, ...]] = []  # the memory is there when the stream got there
        try:
            make(pending, driver.cuMemAllocFromPoolAsync, size, pool, stream)
            if _arrives(stream):
                made.extend(pending)
        finally:
            for status, address in [] if made else pending:  # late, an error, or a signal
                if status == SUCCESS:
                    driver.cuMemFreeAsync(address, stream)

    def free(self, address: object) -> None:
        within(self._context, relaxed, self._free, address)

    def _free(self, address: object) -> None:
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
    """Tell whether a stream has done what is queued on it, within a short time.

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
