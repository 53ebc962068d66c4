"""Memory of every kind: allocating, freeing, pools."""

from __future__ import annotations

import ctypes
import mmap
from functools import partial

import pytest
from cuda.bindings import driver

from conformance.support import (
    INVALID_CONTEXT,
    INVALID_VALUE,
    NON_BLOCKING,
    SUCCESS,
    Background,
    Result,
    Word,
    becomes,
    current,
    elsewhere,
    finishes,
    no_context,
    ok,
    told_ordinals,
)
from helpers import needs_host_pools
from userstream.testing import latch

OUT_OF_MEMORY = Result.CUDA_ERROR_OUT_OF_MEMORY
ALREADY_REGISTERED = Result.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
NOT_REGISTERED = Result.CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED
NOT_FOUND = Result.CUDA_ERROR_NOT_FOUND
GLOBAL_ATTACH = driver.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL
HOST_ATTACH = driver.CUmemAttach_flags.CU_MEM_ATTACH_HOST
SINGLE_ATTACH = driver.CUmemAttach_flags.CU_MEM_ATTACH_SINGLE


@pytest.fixture
def pages():
    """Two pages of ordinary host memory."""
    area = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    view = (ctypes.c_char * (2 * mmap.PAGESIZE)).from_buffer(area)
    yield ctypes.addressof(view)
    del view
    area.close()


@pytest.fixture
def managed():
    address = int(ok(driver.cuMemAllocManaged(4096, GLOBAL_ATTACH)))
    yield address
    ok(driver.cuMemFree(address))


# ---- device memory ----------------------------------------------------------


def test_zero_bytes_are_refused():
    assert driver.cuMemAlloc(0)[0] == INVALID_VALUE


def test_too_much_memory():
    assert driver.cuMemAlloc(1 << 46)[0] == OUT_OF_MEMORY


def test_allocation_works_after_too_much(memory):
    driver.cuMemAlloc(1 << 46)
    address = ok(driver.cuMemAlloc(64))
    ok(driver.cuMemFree(address))


@pytest.mark.parametrize(
    "allocate",
    [
        pytest.param(lambda: driver.cuMemAlloc(64), id="device"),
        pytest.param(lambda: driver.cuMemAllocHost(64), id="pinned"),
        pytest.param(lambda: driver.cuMemHostAlloc(64, 0), id="pinned with flags"),
        pytest.param(lambda: driver.cuMemAllocManaged(64, GLOBAL_ATTACH), id="managed"),
    ],
)
def test_allocation_needs_a_context(allocate):
    with no_context():
        assert allocate()[0] == INVALID_CONTEXT


def test_addresses_are_aligned():
    addresses = [int(ok(driver.cuMemAlloc(3))) for _ in range(4)]
    assert all(address % 256 == 0 for address in addresses)
    for address in addresses:
        ok(driver.cuMemFree(address))


def test_freeing_null_does_nothing():
    assert driver.cuMemFree(0) == (SUCCESS,)


def test_freeing_works_without_a_context():
    address = ok(driver.cuMemAlloc(64))
    assert elsewhere(lambda: driver.cuMemFree(address)) == (SUCCESS,)


def test_freeing_the_middle_is_refused(memory):
    assert driver.cuMemFree(memory + 16) == (INVALID_VALUE,)


def test_freeing_twice_is_refused():
    address = ok(driver.cuMemAlloc(64))
    ok(driver.cuMemFree(address))
    assert driver.cuMemFree(address) == (INVALID_VALUE,)


def test_freeing_host_memory_as_device_memory_is_refused(pages):
    assert driver.cuMemFree(pages) == (INVALID_VALUE,)


def test_freeing_waits_for_the_streams(stream):
    address = ok(driver.cuMemAlloc(64))
    with latch(stream) as held:
        freeing = Background(lambda: driver.cuMemFree(address))
        assert freeing.is_blocked
        held.release()
        assert freeing.answer == (SUCCESS,)


def test_memory_is_accounted():
    before, total = ok(driver.cuMemGetInfo())
    address = ok(driver.cuMemAlloc(64 << 20))
    after, same_total = ok(driver.cuMemGetInfo())
    ok(driver.cuMemFree(address))
    assert before - after >= 64 << 20
    assert total == same_total


def test_the_range_of_an_address(memory):
    base, size = ok(driver.cuMemGetAddressRange(memory + 100))
    assert (int(base), size) == (memory, 256)


def test_the_range_of_no_memory(pages):
    assert driver.cuMemGetAddressRange(pages)[0] != SUCCESS


# ---- pinned memory ----------------------------------------------------------


def test_pinned_memory_is_host_memory(pinned):
    Word(pinned + 128).value = 5
    assert Word(pinned + 128).value == 5


def test_the_device_sees_pinned_memory_under_the_same_address(pinned):
    assert int(ok(driver.cuMemHostGetDevicePointer(pinned, 0))) == pinned


def test_the_device_pointer_of_the_middle(pinned):
    assert int(ok(driver.cuMemHostGetDevicePointer(pinned + 64, 0))) == pinned + 64


def test_the_device_pointer_has_no_flags(pinned):
    assert driver.cuMemHostGetDevicePointer(pinned, 1)[0] == INVALID_VALUE


def test_host_memory_has_no_device_pointer(pages):
    assert driver.cuMemHostGetDevicePointer(pages, 0)[0] == INVALID_VALUE


def test_flags_of_pinned_memory_are_refused_when_unknown():
    assert driver.cuMemHostAlloc(64, 0x80)[0] == INVALID_VALUE


def test_pinned_memory_of_zero_bytes_is_at_null():
    assert driver.cuMemHostAlloc(0, 0) == (SUCCESS, 0)


def test_freeing_pinned_memory_twice_is_refused():
    address = ok(driver.cuMemHostAlloc(64, 0))
    ok(driver.cuMemFreeHost(address))
    assert driver.cuMemFreeHost(address) == (INVALID_VALUE,)


def test_freeing_ordinary_memory_as_pinned_is_refused(pages):
    assert driver.cuMemFreeHost(pages) == (INVALID_VALUE,)


def test_freeing_pinned_memory_waits_for_the_streams(stream):
    address = ok(driver.cuMemHostAlloc(64, 0))
    with latch(stream) as held:
        freeing = Background(lambda: driver.cuMemFreeHost(address))
        assert freeing.is_blocked
        held.release()
        assert freeing.answer == (SUCCESS,)


@pytest.mark.multi_device
def test_portable_pinned_memory_works_with_every_device(pinned, make_stream, other_context):
    there = make_stream(context=other_context)
    Word(pinned).write(there, 9)
    assert finishes(there)
    assert Word(pinned).value == 9


# ---- registered memory ------------------------------------------------------


def test_host_memory_can_be_registered(pages):
    assert driver.cuMemHostRegister(pages, mmap.PAGESIZE, 0) == (SUCCESS,)
    assert driver.cuMemHostUnregister(pages) == (SUCCESS,)


def test_streams_write_registered_memory(pages, stream):
    ok(driver.cuMemHostRegister(pages, mmap.PAGESIZE, 0))
    address = int(ok(driver.cuMemHostGetDevicePointer(pages, 0)))
    ok(driver.cuStreamWriteValue32(stream, address, 4, 0))
    assert finishes(stream)
    assert Word(pages).value == 4
    ok(driver.cuMemHostUnregister(pages))


def test_memory_is_registered_once(pages):
    ok(driver.cuMemHostRegister(pages, mmap.PAGESIZE, 0))
    assert driver.cuMemHostRegister(pages, mmap.PAGESIZE, 0) == (ALREADY_REGISTERED,)
    ok(driver.cuMemHostUnregister(pages))


def test_only_registered_memory_is_unregistered(pages):
    assert driver.cuMemHostUnregister(pages) == (NOT_REGISTERED,)


@pytest.mark.parametrize("size", [0, (1 << 64) - 1, (1 << 64) - 4096], ids=hex)
def test_sizes_that_cannot_be_registered(pages, size):
    assert driver.cuMemHostRegister(pages, size, 0) == (INVALID_VALUE,)


def test_only_memory_that_is_there_can_be_registered():
    assert driver.cuMemHostRegister(0x10000, 4096, 0)[0] != SUCCESS


# ---- managed memory ---------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (GLOBAL_ATTACH, SUCCESS),
        (HOST_ATTACH, SUCCESS),
        (SINGLE_ATTACH, INVALID_VALUE),
        (0, INVALID_VALUE),
        (8, INVALID_VALUE),
    ],
)
def test_flags_of_managed_memory(flags, expected):
    result, address = driver.cuMemAllocManaged(64, int(flags))
    if result == SUCCESS:
        ok(driver.cuMemFree(address))
    assert result == expected


def test_managed_memory_of_zero_bytes_is_refused():
    assert driver.cuMemAllocManaged(0, GLOBAL_ATTACH)[0] == INVALID_VALUE


def test_the_host_reads_managed_memory(managed, stream):
    ok(driver.cuMemsetD8Async(managed, 3, 64, stream))
    assert finishes(stream)
    assert Word(managed).value == 0x03030303


@pytest.mark.parametrize("flags", [GLOBAL_ATTACH, HOST_ATTACH, SINGLE_ATTACH])
def test_managed_memory_can_be_attached(managed, stream, flags):
    assert driver.cuStreamAttachMemAsync(stream, managed, 0, int(flags)) == (SUCCESS,)
    assert finishes(stream)


def test_attaching_device_memory_is_refused(memory, stream):
    answer = driver.cuStreamAttachMemAsync(stream, memory, 0, int(SINGLE_ATTACH))
    assert answer == (INVALID_VALUE,)


def test_attaching_in_an_unknown_way_is_refused(managed, stream):
    assert driver.cuStreamAttachMemAsync(stream, managed, 0, 8) == (INVALID_VALUE,)


# ---- pools and the order of a stream ----------------------------------------


def pool_attribute(pool, name):
    attribute = getattr(driver.CUmemPool_attribute, f"CU_MEMPOOL_ATTR_{name}")
    return int(ok(driver.cuMemPoolGetAttribute(pool, attribute)))


def new_pool(place=0, kind=driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE):
    properties = driver.CUmemPoolProps()
    properties.allocType = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = kind
    properties.location.id = place
    return ok(driver.cuMemPoolCreate(properties))


def test_allocation_in_the_order_of_a_stream(stream):
    address = ok(driver.cuMemAllocAsync(64, stream))
    ok(driver.cuMemsetD8Async(address, 1, 64, stream))
    assert driver.cuMemFreeAsync(address, stream) == (SUCCESS,)
    assert finishes(stream)


def test_allocation_of_zero_bytes_in_the_order_of_a_stream(stream):
    assert int(ok(driver.cuMemAllocAsync(0, stream))) == 0


def test_allocation_on_a_held_stream_does_not_block(stream):
    with latch(stream):
        allocating = Background(lambda: driver.cuMemAllocAsync(64, stream))
        address = ok(allocating.answer)
        freeing = Background(lambda: driver.cuMemFreeAsync(address, stream))
        assert freeing.answer == (SUCCESS,)
    assert finishes(stream)


def test_allocation_on_a_stream_needs_no_context(stream):
    address = ok(elsewhere(lambda: driver.cuMemAllocAsync(64, stream)))
    assert elsewhere(lambda: driver.cuMemFreeAsync(address, stream)) == (SUCCESS,)


def test_freeing_null_in_the_order_of_a_stream(stream):
    assert driver.cuMemFreeAsync(0, stream) == (SUCCESS,)


def test_memory_of_a_pool_can_be_freed_on_another_stream(make_stream, event):
    first, second = make_stream(), make_stream()
    address = ok(driver.cuMemAllocAsync(64, first))
    ok(driver.cuEventRecord(event, first))
    ok(driver.cuStreamWaitEvent(second, event, 0))
    assert driver.cuMemFreeAsync(address, second) == (SUCCESS,)
    assert finishes(second)


@pytest.mark.simulated
def test_memory_whose_free_is_queued_cannot_be_freed_again(stream):
    """Its address may be another's by then."""
    address = ok(driver.cuMemAllocAsync(64, stream))
    with latch(stream):
        ok(driver.cuMemFreeAsync(address, stream))
        assert driver.cuMemFreeAsync(address, stream) == (INVALID_VALUE,)
        assert driver.cuMemFree(address) == (INVALID_VALUE,)
    assert finishes(stream)


def test_memory_of_a_pool_can_be_freed_at_once(stream):
    address = ok(driver.cuMemAllocAsync(64, stream))
    assert finishes(stream)
    assert driver.cuMemFree(address) == (SUCCESS,)


def test_the_pool_of_a_device_is_its_default_pool():
    assert int(ok(driver.cuDeviceGetMemPool(0))) == int(ok(driver.cuDeviceGetDefaultMemPool(0)))


def test_the_pool_of_a_device_can_be_changed(stream):
    pool, default = new_pool(), ok(driver.cuDeviceGetDefaultMemPool(0))
    ok(driver.cuDeviceSetMemPool(0, pool))
    assert int(ok(driver.cuDeviceGetMemPool(0))) == int(pool)
    assert int(ok(driver.cuDeviceGetDefaultMemPool(0))) == int(default)
    ok(driver.cuDeviceSetMemPool(0, default))
    ok(driver.cuMemPoolDestroy(pool))


def test_a_destroyed_pool_is_no_longer_that_of_the_device():
    pool = new_pool()
    ok(driver.cuDeviceSetMemPool(0, pool))
    ok(driver.cuMemPoolDestroy(pool))
    assert int(ok(driver.cuDeviceGetMemPool(0))) == int(ok(driver.cuDeviceGetDefaultMemPool(0)))


def test_the_default_pool_cannot_be_destroyed():
    default = ok(driver.cuDeviceGetDefaultMemPool(0))
    assert driver.cuMemPoolDestroy(default) == (INVALID_VALUE,)


def test_a_pool_accounts_what_is_used(stream):
    pool = new_pool()
    address = ok(driver.cuMemAllocFromPoolAsync(1 << 20, pool, stream))
    assert finishes(stream)
    assert pool_attribute(pool, "USED_MEM_CURRENT") == 1 << 20
    ok(driver.cuMemFreeAsync(address, stream))
    assert finishes(stream)
    assert becomes(0, lambda: pool_attribute(pool, "USED_MEM_CURRENT"))
    assert pool_attribute(pool, "USED_MEM_HIGH") == 1 << 20
    ok(driver.cuMemPoolDestroy(pool))


@pytest.mark.parametrize(
    "name",
    [
        "REUSE_FOLLOW_EVENT_DEPENDENCIES",
        "REUSE_ALLOW_OPPORTUNISTIC",
        "REUSE_ALLOW_INTERNAL_DEPENDENCIES",
    ],
)
def test_reuse_is_on(name):
    pool = new_pool()
    assert pool_attribute(pool, name) == 1
    ok(driver.cuMemPoolDestroy(pool))


def test_a_pool_gives_memory_back_by_default():
    pool = new_pool()
    assert pool_attribute(pool, "RELEASE_THRESHOLD") == 0
    ok(driver.cuMemPoolDestroy(pool))


def test_a_pool_with_allocations_can_be_destroyed(stream):
    pool = new_pool()
    address = ok(driver.cuMemAllocFromPoolAsync(64, pool, stream))
    assert driver.cuMemPoolDestroy(pool) == (SUCCESS,)
    assert driver.cuMemFreeAsync(address, stream) == (SUCCESS,)
    assert finishes(stream)


@pytest.mark.multi_device
def test_a_pool_of_another_device_is_refused():
    pool = new_pool(1)
    assert driver.cuDeviceSetMemPool(0, pool) == (INVALID_VALUE,)
    ok(driver.cuMemPoolDestroy(pool))


@told_ordinals
@pytest.mark.multi_device
def test_the_device_of_the_stream_decides(make_stream, other_context):
    there = make_stream(NON_BLOCKING, context=other_context)
    address = ok(driver.cuMemAllocAsync(64, there))
    ordinal = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    assert ok(driver.cuPointerGetAttribute(ordinal, address)) == 1
    ok(driver.cuMemFreeAsync(address, there))
    assert finishes(there)


@pytest.mark.simulated
@pytest.mark.no_races(False)  # it is one
def test_use_after_free_in_the_order_of_the_stream_is_an_illegal_address(make_memory):
    """A real device often does not notice."""
    memory = make_memory()
    stream = ok(driver.cuStreamCreate(1))
    address = ok(driver.cuMemAllocAsync(64, stream))
    with latch(stream):
        ok(driver.cuMemFreeAsync(address, stream))
        ok(driver.cuMemcpyDtoDAsync(memory, address, 64, stream))
    illegal = Result.CUDA_ERROR_ILLEGAL_ADDRESS
    assert driver.cuStreamSynchronize(stream) == (illegal,)
    ok(driver.cuStreamDestroy(stream))


@pytest.mark.simulated
@pytest.mark.multi_device
def test_the_memory_of_a_device_is_limited(other_context):
    free, _ = ok(driver.cuMemGetInfo())
    assert driver.cuMemAlloc(free + 1)[0] == OUT_OF_MEMORY
    with current(other_context):
        address = ok(driver.cuMemAlloc(1 << 20))
        ok(driver.cuMemFree(address))


# ---- pools of host memory ---------------------------------------------------


@pytest.fixture
def host_pool():
    needs_host_pools()
    pool = new_pool(kind=driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_HOST_NUMA)
    yield pool
    ok(driver.cuMemPoolDestroy(pool))


def access_of(device):
    access = driver.CUmemAccessDesc()
    access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = device
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return access


def test_no_device_may_access_a_host_pool_until_it_is_told(host_pool):
    location = access_of(0).location
    assert int(ok(driver.cuMemPoolGetAccess(host_pool, location))) == 0
    ok(driver.cuMemPoolSetAccess(host_pool, [access_of(0)], 1))
    assert int(ok(driver.cuMemPoolGetAccess(host_pool, location))) == 3


def test_memory_of_a_host_pool(host_pool, stream):
    ok(driver.cuMemPoolSetAccess(host_pool, [access_of(0)], 1))
    first, second = (
        int(ok(driver.cuMemAllocFromPoolAsync(5000, host_pool, stream))) for _ in range(2)
    )
    assert finishes(stream)
    ok(driver.cuMemsetD8Async(second, 9, 5000, stream))
    assert finishes(stream)
    assert ctypes.string_at(second, 5000) == bytes([9]) * 5000
    assert driver.cuStreamWriteValue32(stream, second, 1, 0) == (INVALID_VALUE,)
    assert driver.cuStreamWaitValue32(stream, second, 1, 0) == (INVALID_VALUE,)
    attribute = driver.CUpointer_attribute
    kind = ok(driver.cuPointerGetAttribute(attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, second))
    assert kind == driver.CUmemorytype.CU_MEMORYTYPE_HOST
    # Of these two the first counts from the start of the pool.
    start = attribute.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR
    assert int(ok(driver.cuPointerGetAttribute(start, first))) == 0
    assert [int(each) for each in ok(driver.cuMemGetAddressRange(second + 7))] == [second, 5000]
    with no_context():
        assert driver.cuMemGetAddressRange(second)[0] == INVALID_CONTEXT
    assert driver.cuMemHostGetDevicePointer(second, 0)[0] == INVALID_VALUE
    assert driver.cuMemHostGetFlags(second)[0] == INVALID_VALUE
    for address in (first, second):
        ok(driver.cuMemFreeAsync(address, stream))
    assert finishes(stream)


def test_a_host_pool_waits_for_no_other_stream(host_pool, make_stream):
    mine, other = make_stream(NON_BLOCKING), make_stream()
    with latch(other):
        address = ok(Background(lambda: allocated(host_pool, mine)).answer)
        ok(driver.cuMemFreeAsync(address, mine))
        assert Background(lambda: driver.cuStreamSynchronize(mine)).answer == (SUCCESS,)


def allocated(pool, stream):
    address = ok(driver.cuMemAllocFromPoolAsync(1 << 20, pool, stream))
    return *driver.cuStreamSynchronize(stream), address


# ---- what a free holds up ---------------------------------------------------


@pytest.mark.parametrize("kind", ["pinned", "device", "registered"])
def test_while_a_free_waits_others_do(
    kind, context, stream, make_stream, make_event, make_memory, pinned, pages
):
    other, busy, idle, memory = make_stream(), make_event(), make_event(), make_memory()
    if kind == "registered":
        ok(driver.cuMemHostRegister(pages, mmap.PAGESIZE, 0))
        free = partial(driver.cuMemHostUnregister, pages)
    elif kind == "pinned":
        free = partial(driver.cuMemFreeHost, ok(driver.cuMemHostAlloc(64, 0)))
    else:
        free = partial(driver.cuMemFree, ok(driver.cuMemAlloc(64)))
    records = []

    def a_record_waits():
        records.append(Background(partial(driver.cuEventRecord, busy, other), context))
        return records[-1].is_blocked

    with latch(stream) as held:
        freeing = Background(free, context)
        assert becomes(True, a_record_waits)  # not at once: the thread may be slow to get there
        assert freeing.is_blocked
        waiting = [
            Background(call, context)
            for call in (
                partial(driver.cuMemsetD8Async, memory, 1, 64, other),
                partial(driver.cuMemcpyAsync, pinned, memory, 64, other),
                partial(driver.cuMemAlloc, 64),
                partial(driver.cuMemHostAlloc, 64, 0),
                partial(driver.cuStreamCreate, 0),
                partial(driver.cuEventCreate, 0),
            )
        ]
        assert all(each.is_blocked for each in waiting)
        for call in (  # these do not wait
            partial(driver.cuEventQuery, idle),
            partial(driver.cuStreamIsCapturing, stream),
            partial(driver.cuStreamWriteValue32, other, pinned, 1, 0),
            partial(driver.cuStreamSynchronize, other),
        ):
            assert Background(call, context).answer[0] == SUCCESS
        held.release()
        assert freeing.answer == (SUCCESS,)
        answers = [each.answer for each in (*records, *waiting)]
    assert [answer[0] for answer in answers] == [SUCCESS] * len(answers)
    assert finishes(other)
    *_, device, host, made_stream, made_event = (answer[-1] for answer in answers)
    ok(driver.cuMemFree(device))
    ok(driver.cuMemFreeHost(host))
    ok(driver.cuStreamDestroy(made_stream))
    ok(driver.cuEventDestroy(made_event))


@pytest.mark.simulated  # a GPU reads and writes what the program has mapped, or crashes
def test_memory_that_was_freed_does_not_become_memory_of_the_host():
    """Or a copy to it would overwrite what the program has mapped there since."""
    size = 1 << 20
    address = int(ok(driver.cuMemAlloc(size)))
    ok(driver.cuMemFree(address))
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    arguments = (
        ctypes.c_size_t(size),
        mmap.PROT_READ | mmap.PROT_WRITE,
        flags,
        -1,
        ctypes.c_long(0),
    )
    mapped = libc.mmap(ctypes.c_void_p(address), *arguments)
    source = (ctypes.c_char * 64)()
    assert driver.cuMemcpy(address, ctypes.addressof(source), 64) == (INVALID_VALUE,)
    libc.munmap(ctypes.c_void_p(mapped), ctypes.c_size_t(size))
