"""Virtual memory: addresses, physical memory, and mappings between them."""

from __future__ import annotations

import os

import pytest
from cuda.bindings import driver

from conformance.support import INVALID_DEVICE, INVALID_VALUE, SUCCESS, ok
from helpers import content, virtual_memory

FILE = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
MINIMUM = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
MEMORY, ACCESS = virtual_memory()


@pytest.fixture
def size():
    return int(ok(driver.cuMemGetAllocationGranularity(MEMORY, MINIMUM)))


@pytest.fixture
def physical(size):
    handle = ok(driver.cuMemCreate(size, MEMORY, 0))
    yield handle
    ok(driver.cuMemRelease(handle))


@pytest.fixture
def address(size):
    reserved = ok(driver.cuMemAddressReserve(2 * size, 0, 0, 0))
    yield int(reserved)
    ok(driver.cuMemAddressFree(reserved, 2 * size))


@pytest.fixture
def mapped(address, physical, size):
    ok(driver.cuMemMap(address, size, 0, physical, 0))
    yield address
    ok(driver.cuMemUnmap(address, size))


def test_a_mapping_with_access_is_memory(mapped, size):
    ok(driver.cuMemSetAccess(mapped, size, [ACCESS], 1))
    ok(driver.cuMemsetD8(mapped, 4, 256))
    assert content(mapped) == {4}


def test_nobody_has_access_at_first(mapped):
    assert driver.cuMemsetD8(mapped, 4, 256) == (INVALID_VALUE,)


def test_the_access_is_told(mapped, size):
    assert int(ok(driver.cuMemGetAccess(ACCESS.location, mapped))) == 0
    ok(driver.cuMemSetAccess(mapped, size, [ACCESS], 1))
    assert int(ok(driver.cuMemGetAccess(ACCESS.location, mapped))) == int(ACCESS.flags)


def test_two_mappings_share_their_memory(mapped, physical, size):
    ok(driver.cuMemMap(mapped + size, size, 0, physical, 0))
    ok(driver.cuMemSetAccess(mapped, 2 * size, [ACCESS], 1))
    ok(driver.cuMemsetD8(mapped, 6, 256))
    assert content(mapped + size) == {6}
    ok(driver.cuMemUnmap(mapped + size, size))


@pytest.fixture
def two_mappings(mapped, size):
    handle = ok(driver.cuMemCreate(size, MEMORY, 0))
    ok(driver.cuMemMap(mapped + size, size, 0, handle, 0))
    ok(driver.cuMemRelease(handle))
    yield mapped
    ok(driver.cuMemUnmap(mapped + size, size))


@pytest.mark.parametrize("how", ["fill", "rows", "copy to it", "copy from it"])
def test_what_is_mapped_side_by_side_is_as_one(two_mappings, size, memory, how):
    ok(driver.cuMemSetAccess(two_mappings, 2 * size, [ACCESS], 1))
    part = two_mappings + size - 128  # the half of it lies in each
    ok(driver.cuMemsetD8(memory, 9, 256))
    if how == "fill":
        ok(driver.cuMemsetD8(part, 9, 256))
    elif how == "rows":
        ok(driver.cuMemsetD2D8(part, 64, 9, 64, 4))
    else:
        ok(driver.cuMemcpyDtoD(part, memory, 256))
    if how == "copy from it":
        ok(driver.cuMemsetD8(memory, 1, 256))
        ok(driver.cuMemcpyDtoD(memory, part, 256))
        part = memory
    assert content(part) == {9}


@pytest.mark.parametrize("without", ["access", "memory"])
def test_a_fill_that_ends_where_there_is_no_memory(mapped, physical, size, without):
    if without == "access":
        ok(driver.cuMemMap(mapped + size, size, 0, physical, 0))
    ok(driver.cuMemSetAccess(mapped, size, [ACCESS], 1))
    assert driver.cuMemsetD8(mapped + size - 128, 9, 256) == (INVALID_VALUE,)
    if without == "access":
        ok(driver.cuMemUnmap(mapped + size, size))


def test_the_memory_outlives_its_handle(address, size):
    handle = ok(driver.cuMemCreate(size, MEMORY, 0))
    ok(driver.cuMemMap(address, size, 0, handle, 0))
    ok(driver.cuMemRelease(handle))
    ok(driver.cuMemSetAccess(address, size, [ACCESS], 1))
    ok(driver.cuMemsetD8(address, 1, 256))
    ok(driver.cuMemUnmap(address, size))


def test_what_is_not_mapped_is_no_memory(address):
    assert driver.cuMemsetD8(address, 1, 256) == (INVALID_VALUE,)


def test_a_mapping_is_not_freed_as_memory_is(mapped):
    assert driver.cuMemFree(mapped) == (INVALID_VALUE,)


@pytest.mark.simulated  # a GPU takes them for memory of the host, and crashes
def test_addresses_that_are_only_reserved_are_not_copied(address, memory):
    assert driver.cuMemcpyDtoH(bytearray(256), address, 256) == (INVALID_VALUE,)
    assert driver.cuMemcpy(memory, address, 256) == (INVALID_VALUE,)


@pytest.mark.parametrize("alignment", [1 << 62, 1 << 63])
def test_more_addresses_than_there_are(size, alignment):
    assert driver.cuMemAddressReserve((1 << 64) - size, alignment, 0, 0)[0] != SUCCESS
    assert driver.cuMemCreate((1 << 64) - size, MEMORY, 0)[0] != SUCCESS


@pytest.mark.parametrize("bytes_off", [1, 4096])
def test_a_size_that_is_no_multiple(size, bytes_off):
    assert driver.cuMemCreate(size + bytes_off, MEMORY, 0)[0] == INVALID_VALUE
    assert driver.cuMemAddressReserve(size + bytes_off, 0, 0, 0)[0] == INVALID_VALUE


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda size: driver.cuMemCreate(0, MEMORY, 0), id="no bytes"),
        pytest.param(lambda size: driver.cuMemCreate(size, MEMORY, 1), id="flags"),
        pytest.param(lambda size: driver.cuMemAddressReserve(0, 0, 0, 0), id="no addresses"),
        pytest.param(lambda size: driver.cuMemAddressReserve(size, 3, 0, 0), id="alignment"),
    ],
)
def test_what_cannot_be_made(call, size):
    assert call(size)[0] == INVALID_VALUE


def test_memory_of_no_such_device(size):
    assert driver.cuMemCreate(size, virtual_memory(99)[0], 0)[0] == INVALID_DEVICE


def test_a_place_is_mapped_once(mapped, physical, size):
    assert driver.cuMemMap(mapped, size, 0, physical, 0)[0] == INVALID_VALUE


def test_addresses_that_are_not_reserved(physical, size):
    assert driver.cuMemMap(size, size, 0, physical, 0)[0] == INVALID_VALUE


def test_addresses_in_use_are_not_freed(mapped, size):
    assert driver.cuMemAddressFree(mapped, 2 * size)[0] == INVALID_VALUE


def test_the_properties_are_told(physical):
    found = ok(driver.cuMemGetAllocationPropertiesFromHandle(physical))
    assert found.type == MEMORY.type
    assert found.location.id == 0


def test_the_handle_of_a_mapping(mapped):
    handle = ok(driver.cuMemRetainAllocationHandle(mapped))
    ok(driver.cuMemRelease(handle))


def test_memory_goes_through_a_file_descriptor(address, size):
    shared, _ = virtual_memory()
    shared.requestedHandleTypes = FILE
    exported = ok(driver.cuMemCreate(size, shared, 0))
    file = int(ok(driver.cuMemExportToShareableHandle(exported, FILE, 0)))
    imported = ok(driver.cuMemImportFromShareableHandle(file, FILE))
    os.close(file)
    ok(driver.cuMemMap(address, size, 0, exported, 0))
    ok(driver.cuMemMap(address + size, size, 0, imported, 0))
    ok(driver.cuMemSetAccess(address, 2 * size, [ACCESS], 1))
    ok(driver.cuMemsetD8(address, 8, 256))
    assert content(address + size) == {8}
    ok(driver.cuMemUnmap(address, 2 * size))
    for handle in (exported, imported):
        ok(driver.cuMemRelease(handle))


def test_memory_without_handles_is_not_exported(physical):
    assert driver.cuMemExportToShareableHandle(physical, FILE, 0)[0] != SUCCESS
