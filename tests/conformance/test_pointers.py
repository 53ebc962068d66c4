"""cuPointerGetAttribute: what the driver knows about an address of each kind."""

from __future__ import annotations

import ctypes
import mmap

import pytest
from cuda.bindings import driver

from conformance.support import (
    INVALID_VALUE,
    SUCCESS,
    current,
    elsewhere,
    finishes,
    no_context,
    ok,
    told_ordinals,
)

Attribute = driver.CUpointer_attribute
CONTEXT = Attribute.CU_POINTER_ATTRIBUTE_CONTEXT
MEMORY_TYPE = Attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
DEVICE_POINTER = Attribute.CU_POINTER_ATTRIBUTE_DEVICE_POINTER
HOST_POINTER = Attribute.CU_POINTER_ATTRIBUTE_HOST_POINTER
IS_MANAGED = Attribute.CU_POINTER_ATTRIBUTE_IS_MANAGED
ORDINAL = Attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
RANGE_START = Attribute.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR
RANGE_SIZE = Attribute.CU_POINTER_ATTRIBUTE_RANGE_SIZE
MEMPOOL = Attribute.CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE
MAPPED = Attribute.CU_POINTER_ATTRIBUTE_MAPPED
BUFFER_ID = Attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID

HOST = driver.CUmemorytype.CU_MEMORYTYPE_HOST
DEVICE = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
SIZE = 4096


@pytest.fixture
def addresses(context, make_stream):
    """An address of each kind of memory."""
    stream = make_stream()
    area = mmap.mmap(-1, mmap.PAGESIZE)
    view = (ctypes.c_char * mmap.PAGESIZE).from_buffer(area)
    registered = ctypes.addressof(view)
    ok(driver.cuMemHostRegister(registered, mmap.PAGESIZE, 0))
    kinds = {
        "device": int(ok(driver.cuMemAlloc(SIZE))),
        "pool": int(ok(driver.cuMemAllocAsync(SIZE, stream))),
        "managed": int(
            ok(driver.cuMemAllocManaged(SIZE, driver.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL))
        ),
        "pinned": int(ok(driver.cuMemHostAlloc(SIZE, 0))),
        "registered": registered,
    }
    yield kinds
    ok(driver.cuMemFreeAsync(kinds["pool"], stream))
    assert finishes(stream)
    ok(driver.cuMemFree(kinds["device"]))
    ok(driver.cuMemFree(kinds["managed"]))
    ok(driver.cuMemFreeHost(kinds["pinned"]))
    ok(driver.cuMemHostUnregister(registered))
    del view
    area.close()


def ask(attribute, address):
    return ok(driver.cuPointerGetAttribute(attribute, address))


def ask_many(attributes, address):
    return ok(driver.cuPointerGetAttributes(len(attributes), attributes, address))


KINDS = ["device", "pool", "managed", "pinned", "registered"]
kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("device", DEVICE),
        ("pool", DEVICE),
        ("managed", DEVICE),
        ("pinned", HOST),
        ("registered", HOST),
    ],
)
def test_memory_type(addresses, kind, expected):
    assert ask(MEMORY_TYPE, addresses[kind]) == expected


@kinds
def test_is_managed(addresses, kind):
    assert bool(ask(IS_MANAGED, addresses[kind])) == (kind == "managed")


@kinds
def test_device_ordinal(addresses, kind):
    assert ask(ORDINAL, addresses[kind]) == 0


@kinds
def test_context(addresses, context, kind):
    expected = 0 if kind == "pool" else int(context)
    assert int(ask(CONTEXT, addresses[kind])) == expected


@kinds
def test_pool(addresses, kind):
    expected = int(ok(driver.cuDeviceGetDefaultMemPool(0))) if kind == "pool" else 0
    assert int(ask(MEMPOOL, addresses[kind])) == expected


@kinds
def test_range(addresses, kind):
    address = addresses[kind] + 100
    assert int(ask(RANGE_START, address)) == addresses[kind]
    assert int(ask(RANGE_SIZE, address)) >= SIZE


@kinds
def test_device_pointer(addresses, kind):
    address = addresses[kind] + 16
    assert int(ask(DEVICE_POINTER, address)) == address


@kinds
def test_host_pointer(addresses, kind):
    address = addresses[kind] + 16
    result, pointer = driver.cuPointerGetAttribute(HOST_POINTER, address)
    if kind in {"device", "pool"}:
        assert result == INVALID_VALUE
    else:
        assert (result, int(pointer)) == (SUCCESS, address)


@kinds
def test_mapped(addresses, kind):
    assert bool(ask(MAPPED, addresses[kind]))


def test_buffer_ids_differ(addresses):
    ids = {int(ask(BUFFER_ID, addresses[kind])) for kind in ("device", "managed", "pinned")}
    assert len(ids) == 3


def test_the_end_of_an_allocation_belongs_to_it(addresses):
    assert ask(ORDINAL, addresses["device"] + SIZE - 1) == 0


@told_ordinals
@pytest.mark.multi_device
def test_memory_of_another_device(make_memory, other_context):
    memory = make_memory(context=other_context)
    assert ask(ORDINAL, memory) == 1
    assert int(ask(CONTEXT, memory)) == int(other_context)


@kinds
def test_attributes_need_no_context(addresses, kind):
    assert elsewhere(lambda: ask(ORDINAL, addresses[kind])) == 0


@pytest.mark.multi_device
def test_attributes_do_not_depend_on_the_current_context(addresses, other_context):
    with current(other_context):
        assert ask(ORDINAL, addresses["device"]) == 0


@pytest.mark.parametrize(
    "attribute", [MEMORY_TYPE, ORDINAL, CONTEXT, RANGE_START], ids=lambda a: a.name
)
@pytest.mark.parametrize("kind", ["host", "null"])
def test_an_unknown_address_is_an_invalid_value(attribute, kind):
    buffer = ctypes.create_string_buffer(64)
    address = ctypes.addressof(buffer) if kind == "host" else 0
    assert driver.cuPointerGetAttribute(attribute, address)[0] == INVALID_VALUE


def test_freed_memory_is_unknown():
    address = ok(driver.cuMemAlloc(1 << 22))
    ok(driver.cuMemFree(address))
    assert driver.cuPointerGetAttribute(ORDINAL, address)[0] == INVALID_VALUE


def test_unregistered_memory_is_unknown():
    area = mmap.mmap(-1, mmap.PAGESIZE)
    view = (ctypes.c_char * mmap.PAGESIZE).from_buffer(area)
    ok(driver.cuMemHostRegister(ctypes.addressof(view), mmap.PAGESIZE, 0))
    ok(driver.cuMemHostUnregister(ctypes.addressof(view)))
    assert driver.cuPointerGetAttribute(ORDINAL, ctypes.addressof(view))[0] == INVALID_VALUE
    del view
    area.close()


# ---- several attributes at once ---------------------------------------------


@kinds
def test_several_attributes_agree_with_single_ones(addresses, kind):
    wanted = [MEMORY_TYPE, ORDINAL, IS_MANAGED, RANGE_START]
    several = ask_many(wanted, addresses[kind])
    single = [ask(attribute, addresses[kind]) for attribute in wanted]
    assert [int(value) for value in several] == [int(value) for value in single]


@told_ordinals
@pytest.mark.parametrize("kind", ["host", "null"])
def test_several_attributes_of_an_unknown_address_are_empty(kind):
    buffer = ctypes.create_string_buffer(64)
    address = ctypes.addressof(buffer) if kind == "host" else 0
    memory_type, ordinal, managed, context = ask_many(
        [MEMORY_TYPE, ORDINAL, IS_MANAGED, CONTEXT], address
    )
    assert int(memory_type) == 0
    assert ordinal == -2
    assert not managed
    assert int(context) == 0


def test_several_attributes_without_a_context(addresses):
    with no_context():
        assert ask_many([ORDINAL], addresses["device"]) == [0]
