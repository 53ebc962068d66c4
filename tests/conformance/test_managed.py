"""Managed memory: advice, prefetches, and what is known of a range."""

from __future__ import annotations

import ctypes
from contextlib import suppress

import pytest
from cuda.bindings import driver

from conformance.support import (
    CUDA_12,
    INVALID_DEVICE,
    INVALID_VALUE,
    SUCCESS,
    Capture,
    finishes,
    ok,
)

pytestmark = pytest.mark.skipif(CUDA_12, reason="needs the locations of CUDA 13's bindings")

Advise = driver.CUmem_advise
Attribute = driver.CUmem_range_attribute
Type = driver.CUmemLocationType
SIZE = 4 * 4096
NOWHERE, CPU = -2, -1


def place(kind, number=0):
    location = driver.CUmemLocation()
    location.type = kind
    location.id = number
    return location


DEVICE = Type.CU_MEM_LOCATION_TYPE_DEVICE
HOST = Type.CU_MEM_LOCATION_TYPE_HOST
NUMA = Type.CU_MEM_LOCATION_TYPE_HOST_NUMA


@pytest.fixture
def managed():
    address = int(ok(driver.cuMemAllocManaged(SIZE, 1)))
    yield address
    ok(driver.cuMemFree(address))


def advise(address, advice, location=None, size=SIZE):
    return driver.cuMemAdvise(address, size, advice, location or place(DEVICE))[0]


def attribute(name, address, size=SIZE, width=4):
    which = getattr(Attribute, f"CU_MEM_RANGE_ATTRIBUTE_{name}")
    answer = ok(driver.cuMemRangeGetAttribute(width, which, address, size))
    return list(answer) if width > 4 else int(answer)


def test_nothing_is_advised_at_first(managed):
    assert attribute("READ_MOSTLY", managed) == 0
    assert attribute("PREFERRED_LOCATION", managed) == NOWHERE
    assert attribute("LAST_PREFETCH_LOCATION", managed) == NOWHERE
    assert attribute("ACCESSED_BY", managed, width=8) == [NOWHERE, NOWHERE]


def test_memory_that_is_mostly_read(managed):
    assert advise(managed, Advise.CU_MEM_ADVISE_SET_READ_MOSTLY) == SUCCESS
    assert attribute("READ_MOSTLY", managed) == 1
    assert advise(managed, Advise.CU_MEM_ADVISE_UNSET_READ_MOSTLY) == SUCCESS
    assert attribute("READ_MOSTLY", managed) == 0


def test_where_memory_is_mostly_read_does_not_matter(managed):
    assert advise(managed, Advise.CU_MEM_ADVISE_SET_READ_MOSTLY, place(DEVICE, 99)) == SUCCESS
    assert attribute("READ_MOSTLY", managed) == 1


@pytest.mark.parametrize(
    ("location", "expected"), [(place(DEVICE, 0), 0), (place(HOST), CPU)], ids=["device", "host"]
)
def test_a_preferred_location(managed, location, expected):
    assert advise(managed, Advise.CU_MEM_ADVISE_SET_PREFERRED_LOCATION, location) == SUCCESS
    assert attribute("PREFERRED_LOCATION", managed) == expected
    with suppress(TypeError):  # older bindings do not know it
        assert attribute("PREFERRED_LOCATION_TYPE", managed) == int(location.type)
    assert advise(managed, Advise.CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION) == SUCCESS
    assert attribute("PREFERRED_LOCATION", managed) == NOWHERE


def test_who_accesses_the_memory(managed):
    assert advise(managed, Advise.CU_MEM_ADVISE_SET_ACCESSED_BY, place(DEVICE)) == SUCCESS
    assert attribute("ACCESSED_BY", managed, width=8) == [0, NOWHERE]
    assert advise(managed, Advise.CU_MEM_ADVISE_SET_ACCESSED_BY, place(HOST)) == SUCCESS
    assert set(attribute("ACCESSED_BY", managed, width=8)) == {0, CPU}
    assert advise(managed, Advise.CU_MEM_ADVISE_UNSET_ACCESSED_BY, place(DEVICE)) == SUCCESS
    assert attribute("ACCESSED_BY", managed, width=8) == [CPU, NOWHERE]


def test_advice_is_of_pages(managed):
    assert advise(managed, Advise.CU_MEM_ADVISE_SET_READ_MOSTLY, size=4096) == SUCCESS
    assert attribute("READ_MOSTLY", managed, size=4096) == 1
    assert attribute("READ_MOSTLY", managed) == 0


@pytest.mark.parametrize(
    ("advice", "location"),
    [
        (Advise.CU_MEM_ADVISE_SET_PREFERRED_LOCATION, place(DEVICE, 99)),
        (Advise.CU_MEM_ADVISE_SET_ACCESSED_BY, place(DEVICE, 99)),
        (Advise.CU_MEM_ADVISE_SET_ACCESSED_BY, place(NUMA)),
        (Advise.CU_MEM_ADVISE_SET_PREFERRED_LOCATION, place(Type.CU_MEM_LOCATION_TYPE_INVALID)),
    ],
    ids=["preferred", "accessed", "accessed by a node", "nowhere"],
)
def test_advice_about_no_such_place(managed, advice, location):
    assert advise(managed, advice, location) == INVALID_VALUE


@pytest.mark.parametrize("size", [0, SIZE + 1], ids=["nothing", "too much"])
def test_advice_about_what_is_not_there(managed, size):
    assert advise(managed, Advise.CU_MEM_ADVISE_SET_READ_MOSTLY, size=size) == INVALID_VALUE


def test_advice_about_other_memory(memory, pinned):
    for address in (memory, pinned):
        result = advise(address, Advise.CU_MEM_ADVISE_SET_READ_MOSTLY, size=256)
        assert result == INVALID_VALUE


@pytest.mark.parametrize(
    ("location", "expected"), [(place(DEVICE), 0), (place(HOST), CPU)], ids=["device", "host"]
)
def test_a_prefetch(managed, stream, location, expected):
    ok(driver.cuMemPrefetchAsync(managed, SIZE, location, 0, stream))
    assert finishes(stream)
    assert attribute("LAST_PREFETCH_LOCATION", managed) == expected


def test_a_prefetch_keeps_the_contents(managed, stream):
    ctypes.memset(managed, 7, SIZE)
    ok(driver.cuMemPrefetchAsync(managed, SIZE, place(DEVICE), 0, stream))
    assert finishes(stream)
    assert set(ctypes.string_at(managed, SIZE)) == {7}


@pytest.mark.parametrize(
    ("size", "location", "flags", "result"),
    [
        (0, place(DEVICE), 0, INVALID_VALUE),
        (SIZE + 1, place(DEVICE), 0, INVALID_VALUE),
        (SIZE, place(DEVICE, 99), 0, INVALID_DEVICE),
        (SIZE, place(DEVICE), 1, INVALID_VALUE),
    ],
    ids=["nothing", "too much", "no device", "flags"],
)
def test_a_prefetch_of_what_cannot_be(managed, stream, size, location, flags, result):
    assert driver.cuMemPrefetchAsync(managed, size, location, flags, stream) == (result,)


def test_a_prefetch_of_other_memory(memory, stream):
    result = driver.cuMemPrefetchAsync(memory, 256, place(DEVICE), 0, stream)
    assert result == (INVALID_VALUE,)


def test_several_attributes_at_once(managed):
    advise(managed, Advise.CU_MEM_ADVISE_SET_READ_MOSTLY)
    names = ["READ_MOSTLY", "PREFERRED_LOCATION"]
    which = [getattr(Attribute, f"CU_MEM_RANGE_ATTRIBUTE_{name}") for name in names]
    answer = ok(driver.cuMemRangeGetAttributes([4, 4], which, 2, managed, SIZE))
    assert [int(each) for each in answer] == [1, NOWHERE]


def test_attributes_of_other_memory(memory):
    which = Attribute.CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY
    assert driver.cuMemRangeGetAttribute(4, which, memory, 256)[0] == INVALID_VALUE


@pytest.mark.parametrize("width", [0, 3, 8])
def test_an_answer_of_another_width(managed, width):
    which = Attribute.CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY
    assert driver.cuMemRangeGetAttribute(width, which, managed, SIZE)[0] != SUCCESS


def test_memory_is_discarded(managed, stream):
    ok(driver.cuMemDiscardBatchAsync([driver.CUdeviceptr(managed)], [SIZE], 1, 0, stream))
    ok(driver.cuMemsetD8Async(managed, 3, SIZE, stream))
    assert finishes(stream)
    assert set(ctypes.string_at(managed, SIZE)) == {3}


def test_a_batch_of_prefetches(managed, stream):
    halves = [driver.CUdeviceptr(managed), driver.CUdeviceptr(managed + SIZE // 2)]
    sizes, places = [SIZE // 2] * 2, [place(DEVICE), place(HOST)]
    ok(driver.cuMemPrefetchBatchAsync(halves, sizes, 2, places, [0, 1], 2, 0, stream))
    assert finishes(stream)
    assert attribute("LAST_PREFETCH_LOCATION", managed, SIZE // 2) == 0
    assert attribute("LAST_PREFETCH_LOCATION", managed + SIZE // 2, SIZE // 2) == CPU
    assert attribute("LAST_PREFETCH_LOCATION", managed) == NOWHERE


@pytest.mark.parametrize("begins", [[1], [0, 2]], ids=["not at 0", "beyond the end"])
def test_a_batch_whose_places_begin_wrongly(managed, stream, begins):
    halves = [driver.CUdeviceptr(managed), driver.CUdeviceptr(managed + SIZE // 2)]
    places = [place(DEVICE)] * len(begins)
    result = driver.cuMemPrefetchBatchAsync(
        halves, [SIZE // 2] * 2, 2, places, begins, len(begins), 0, stream
    )
    assert result == (INVALID_VALUE,)


def test_no_prefetch_is_captured(managed, stream):
    with Capture(stream):
        result = driver.cuMemPrefetchAsync(managed, SIZE, place(DEVICE), 0, stream)
        assert result != (SUCCESS,)


# ---- pools of managed memory --------------------------------------------------


@pytest.fixture
def managed_pool():
    properties = driver.CUmemPoolProps()
    properties.allocType = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_MANAGED
    properties.location.type = DEVICE
    pool = ok(driver.cuMemPoolCreate(properties))
    yield pool
    ok(driver.cuMemPoolDestroy(pool))


def test_memory_of_a_managed_pool_is_managed(managed_pool, stream):
    address = ok(driver.cuMemAllocFromPoolAsync(SIZE, managed_pool, stream))
    assert finishes(stream)
    which = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_MANAGED
    assert int(ok(driver.cuPointerGetAttribute(which, address))) == 1
    ctypes.memset(int(address), 1, SIZE)
    ok(driver.cuMemFreeAsync(address, stream))
    assert finishes(stream)
