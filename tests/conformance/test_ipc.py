"""Memory and events of one process in another: cuIpc, and memory pools that are exported."""

from __future__ import annotations

import ctypes
import os
import tempfile

import pytest
from cuda.bindings import driver

from conformance.support import (
    INVALID_CONTEXT,
    INVALID_HANDLE,
    INVALID_VALUE,
    NOT_READY,
    SUCCESS,
    Word,
    completes,
    finishes,
    ok,
)
from helpers import content, run_python

INTERPROCESS = 4 | 2  # without timing
LAZY = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.value

START = """
import ctypes
import sys
from cuda.bindings import driver
assert driver.cuInit(0)[0] == 0
context = driver.cuDevicePrimaryCtxRetain(0)[1]
driver.cuCtxSetCurrent(context)
stream = driver.cuStreamCreate(1)[1]
"""
OPEN_MEMORY = """
handle = driver.CUipcMemHandle()
ctypes.memmove(handle.getPtr(), bytes.fromhex(sys.argv[1]), 64)
result, address = driver.cuIpcOpenMemHandle(handle, 1)
"""
OPEN_EVENT = """
handle = driver.CUipcEventHandle()
ctypes.memmove(handle.getPtr(), bytes.fromhex(sys.argv[1]), 64)
result, event = driver.cuIpcOpenEventHandle(handle)
assert result == 0, result
"""


def bytes_of(handle: driver.CUipcMemHandle | driver.CUipcEventHandle) -> bytes:
    return ctypes.string_at(handle.getPtr(), 64)


def in_another_process(code: str, handle: driver.CUipcMemHandle | driver.CUipcEventHandle) -> str:
    done = run_python(START + code, bytes_of(handle).hex())
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- memory -----------------------------------------------------------------


def test_another_process_reads_and_writes_the_memory(memory):
    ok(driver.cuMemsetD8(memory, 7, 256))
    handle = ok(driver.cuIpcGetMemHandle(memory))
    printed = in_another_process(
        OPEN_MEMORY
        + """
assert result == 0, result
read = bytearray(256)
assert driver.cuMemcpyDtoH(read, address, 256)[0] == 0
print(set(read))
assert driver.cuMemsetD8(address, 9, 256)[0] == 0
assert driver.cuIpcCloseMemHandle(address)[0] == 0
assert driver.cuMemsetD8(address, 9, 256)[0] == 1
""",
        handle,
    )
    assert printed == "{7}\n"
    assert content(memory) == {9}


def test_another_process_may_open_the_memory_twice(memory):
    handle = ok(driver.cuIpcGetMemHandle(memory))
    printed = in_another_process(
        OPEN_MEMORY
        + """
again = driver.cuIpcOpenMemHandle(handle, 1)
print(int(result), int(again[0]))
""",
        handle,
    )
    assert printed == "0 0\n"


def test_the_flag_is_required(memory):
    handle = ok(driver.cuIpcGetMemHandle(memory))
    printed = in_another_process(
        OPEN_MEMORY + "print(int(driver.cuIpcOpenMemHandle(handle, 0)[0]))", handle
    )
    assert printed == "1\n"


def test_memory_that_is_shared_stays_what_it_was(memory):
    ok(driver.cuMemsetD8(memory, 3, 256))
    ok(driver.cuIpcGetMemHandle(memory))
    assert content(memory) == {3}
    assert int(ok(driver.cuMemGetAddressRange(memory))[0]) == memory


def test_each_question_gives_a_handle(memory):
    first, second = (ok(driver.cuIpcGetMemHandle(memory)) for _ in range(2))
    assert bytes_of(first) == bytes_of(second)


def test_the_process_itself_cannot_open_its_memory(memory):
    handle = ok(driver.cuIpcGetMemHandle(memory))
    assert driver.cuIpcOpenMemHandle(handle, LAZY)[0] == INVALID_CONTEXT


def test_a_handle_of_zeros_is_none():
    assert driver.cuIpcOpenMemHandle(driver.CUipcMemHandle(), LAZY)[0] != SUCCESS


def test_memory_that_is_gone_is_not_opened():
    address = ok(driver.cuMemAlloc(256))
    handle = ok(driver.cuIpcGetMemHandle(address))
    ok(driver.cuMemFree(address))
    with tempfile.TemporaryFile() as other:  # it may get the number of a descriptor
        other.write(bytes(256))
        other.flush()
        assert in_another_process(OPEN_MEMORY + "print(int(result) != 0)", handle) == "True\n"


def test_pinned_memory_is_not_shared(pinned):
    assert driver.cuIpcGetMemHandle(pinned)[0] == INVALID_VALUE


def test_memory_of_a_pool_is_not_shared(stream):
    address = ok(driver.cuMemAllocAsync(64, stream))
    assert driver.cuIpcGetMemHandle(address)[0] == INVALID_VALUE
    ok(driver.cuMemFreeAsync(address, stream))
    assert finishes(stream)


def test_memory_that_is_not_open_is_not_closed(memory):
    assert driver.cuIpcCloseMemHandle(memory) == (INVALID_VALUE,)


# ---- events -----------------------------------------------------------------


@pytest.fixture
def shared_event(make_event):
    return make_event(INTERPROCESS)


def test_an_event_of_several_processes_has_no_timing():
    assert driver.cuEventCreate(4)[0] == INVALID_VALUE


def test_a_shared_event_works_as_any_other(shared_event, stream, word):
    ok(driver.cuStreamWaitValue32(stream, word.address, 1, 0))
    ok(driver.cuEventRecord(shared_event, stream))
    assert driver.cuEventQuery(shared_event) == (NOT_READY,)
    word.value = 1
    assert completes(shared_event)
    ok(driver.cuEventSynchronize(shared_event))


def test_a_stream_waits_for_a_shared_event(shared_event, make_stream, word, pinned):
    first, second = make_stream(), make_stream()
    passed = Word(pinned + 8)
    ok(driver.cuStreamWaitValue32(first, word.address, 1, 0))
    ok(driver.cuEventRecord(shared_event, first))
    ok(driver.cuStreamWaitEvent(second, shared_event, 0))
    passed.write(second, 1)
    assert driver.cuStreamQuery(second) == (NOT_READY,)
    assert passed.value == 0
    word.value = 1
    assert finishes(second)
    assert passed.value == 1


def test_another_process_sees_that_the_event_is_pending(shared_event, stream, word):
    handle = ok(driver.cuIpcGetEventHandle(shared_event))
    ok(driver.cuStreamWaitValue32(stream, word.address, 1, 0))
    ok(driver.cuEventRecord(shared_event, stream))
    code = OPEN_EVENT + "print(int(driver.cuEventQuery(event)[0]))"
    assert in_another_process(code, handle) == "600\n"
    word.value = 1
    assert completes(shared_event)
    assert in_another_process(code, handle) == "0\n"


def test_another_process_records_the_event(shared_event):
    handle = ok(driver.cuIpcGetEventHandle(shared_event))
    printed = in_another_process(
        OPEN_EVENT
        + """
print(int(driver.cuEventRecord(event, stream)[0]), int(driver.cuEventSynchronize(event)[0]))
print(int(driver.cuStreamWaitEvent(stream, event, 0)[0]))
print(int(driver.cuStreamSynchronize(stream)[0]), int(driver.cuEventDestroy(event)[0]))
""",
        handle,
    )
    assert printed == "0 0\n0\n0 0\n"
    assert completes(shared_event)


def test_an_ordinary_event_is_not_shared(event):
    assert driver.cuIpcGetEventHandle(event)[0] == INVALID_HANDLE


def test_the_process_itself_cannot_open_its_event(shared_event):
    handle = ok(driver.cuIpcGetEventHandle(shared_event))
    assert driver.cuIpcOpenEventHandle(handle)[0] == INVALID_CONTEXT


# ---- pools ------------------------------------------------------------------

FILE = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
DEVICE = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
PINNED = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED


def pool_for(handle_types=FILE, location=DEVICE):
    properties = driver.CUmemPoolProps()
    properties.allocType = PINNED
    properties.handleTypes = handle_types
    properties.location.type = location
    properties.location.id = 0
    return driver.cuMemPoolCreate(properties)


@pytest.fixture
def pool():
    made = ok(pool_for())
    yield made
    ok(driver.cuMemPoolDestroy(made))


@pytest.fixture
def pool_memory(pool, stream):
    address = ok(driver.cuMemAllocFromPoolAsync(256, pool, stream))
    ok(driver.cuMemsetD8Async(address, 5, 256, stream))
    assert finishes(stream)
    yield int(address)
    ok(driver.cuMemFreeAsync(address, stream))
    assert finishes(stream)


@pytest.fixture
def imported(pool):
    file = ok(driver.cuMemPoolExportToShareableHandle(pool, FILE, 0))
    made = ok(driver.cuMemPoolImportFromShareableHandle(file, FILE, 0))
    os.close(int(file))
    yield made
    ok(driver.cuMemPoolDestroy(made))


def test_a_pool_for_other_processes_works_as_any_other(pool_memory):
    assert content(pool_memory) == {5}


def test_an_imported_pointer_is_the_same_memory(pool_memory, imported, stream):
    exported = ok(driver.cuMemPoolExportPointer(pool_memory))
    address = ok(driver.cuMemPoolImportPointer(imported, exported))
    assert int(address) != pool_memory
    assert content(int(address)) == {5}
    ok(driver.cuMemsetD8Async(address, 6, 256, stream))
    assert finishes(stream)
    assert content(pool_memory) == {6}
    ok(driver.cuMemFreeAsync(address, stream))
    assert finishes(stream)
    assert content(pool_memory) == {6}


def test_an_imported_pool_allocates_nothing(imported, stream):
    assert driver.cuMemAllocFromPoolAsync(64, imported, stream)[0] == INVALID_VALUE
    assert driver.cuDeviceSetMemPool(0, imported) == (INVALID_VALUE,)


def test_an_ordinary_pool_has_no_handle():
    pool = ok(pool_for(driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_NONE))
    assert driver.cuMemPoolExportToShareableHandle(pool, FILE, 0)[0] == INVALID_VALUE
    ok(driver.cuMemPoolDestroy(pool))


def test_a_pool_of_the_host_is_not_shared():
    host = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_HOST
    assert pool_for(location=host)[0] == INVALID_VALUE


def test_what_two_pools_export_differs(stream):
    pools = [ok(pool_for()) for _ in range(2)]
    for pool in pools:
        os.close(ok(driver.cuMemPoolExportToShareableHandle(pool, FILE, 0)))
    memory = [ok(driver.cuMemAllocFromPoolAsync(256, pool, stream)) for pool in pools]
    exported = [ok(driver.cuMemPoolExportPointer(address)) for address in memory]
    first, second = (ctypes.string_at(each.getPtr(), 64) for each in exported)
    assert first != second
    for address in memory:
        ok(driver.cuMemFreeAsync(address, stream))
    assert finishes(stream)
    for pool in pools:
        ok(driver.cuMemPoolDestroy(pool))


def test_memory_of_an_ordinary_pool_is_not_exported(stream):
    address = ok(driver.cuMemAllocAsync(64, stream))
    assert driver.cuMemPoolExportPointer(address)[0] == INVALID_VALUE
    ok(driver.cuMemFreeAsync(address, stream))
    assert finishes(stream)


def test_memory_of_no_pool_is_not_exported(memory):
    assert driver.cuMemPoolExportPointer(memory)[0] == INVALID_VALUE


def test_the_handle_types_of_a_pool(pool_memory):
    attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES
    assert int(ok(driver.cuPointerGetAttribute(attribute, pool_memory))) == int(FILE)
