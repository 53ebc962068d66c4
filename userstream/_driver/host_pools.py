"""Page-locked host memory from a pool of the driver, which delays no launches.

``cuMemHostAlloc`` and ``cuMemFreeHost`` hold up all threads that give work to a GPU: on an H200 for
0.6 s while 1 GiB is allocated, and in a free until the GPU has run out of work. A pool does not.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import time
from collections import deque
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
    """A block of page-locked host memory, for all devices.

    It knows what the driver gave it, and how to free that, from when the driver did: whatever
    signal comes in `allocate`, nothing is lost.
    """

    __slots__ = ("_answers", "_device", "_late", "_pool", "size")

    def __init__(self, size: int, device: int) -> None:
        self.size = size
        self._device = device
        self._answers: list[tuple[Any, ...]] = []
        self._late: list[tuple[Any, ...]] = []  # instead of there, until the stream got there
        self._pool: _HostPool | None = None

    @property
    def address(self) -> int | None:
        """The address of the block; `None` until it is allocated."""
        for status, address in self._answers:
            if status == SUCCESS:
                return int(address)
        return None

    def allocate(self) -> None:
        """Allocate it, on the host's node that is nearest to the device."""
        try:
            self._pool = pool = _pool_of(self._device)
            try:
                if pool.allocate(self.size, self._late):
                    self._answers.extend(map(list.pop, (self._late,)))  # no signal in between
                    return
            finally:
                self.discard()
        except (DriverError, NotSupportedError):
            pass  # an old driver, a container that may not ask for memory of a node, or a full node
        self._pool = None
        allocate_pinned(primary_context(self._device), self.size, self._answers)

    def discard(self) -> None:
        """Free what came too late; or before an error, or a signal."""
        if self._late and self._pool is not None:
            self._pool.discard(self._late)

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
        """Allocate; tell whether the memory is there, as the stream of the pool is not held up."""
        return bool(within(self._context, relaxed, self._allocate, size, made))

    def _allocate(self, size: int, made: list[tuple[Any, ...]]) -> bool:
        (_, pool), (_, stream) = self._pools[0], self._streams[0]
        make(made, driver.cuMemAllocFromPoolAsync, size, pool, stream)
        return _arrives(stream)

    def discard(self, made: list[tuple[Any, ...]]) -> None:
        """Free what is not there yet, once it is. What fails is no loss: there is none."""
        within(self._context, relaxed, self._discard, made)

    def _discard(self, made: list[tuple[Any, ...]]) -> None:
        (_, stream) = self._streams[0]
        # In one call of C: whatever signal comes, it is still in the list or it is freed.
        addresses = map(operator.itemgetter(1), map(list.pop, [made] * len(made)))
        with contextlib.suppress(IndexError):  # another thread was faster
            deque(map(driver.cuMemFreeAsync, addresses, itertools.repeat(stream)), maxlen=0)

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
