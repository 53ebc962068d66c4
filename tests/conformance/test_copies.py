"""Copies and fills: what they do, when they return, what they refuse."""

from __future__ import annotations

import ctypes
import itertools

import pytest
from cuda.bindings import driver

from conformance.support import (
    INVALID_CONTEXT,
    INVALID_VALUE,
    LEGACY,
    NOT_READY,
    SUCCESS,
    Background,
    current,
    elsewhere,
    finishes,
    no_context,
    ok,
    stays,
)
from userstream.testing import latch

SIZE = 256


def upload(memory, pageable, context=None):
    """Copy, and wait until the bytes are there: the call returns when they are staged."""

    def copy():
        ok(driver.cuMemcpyHtoD(memory, ctypes.addressof(pageable), SIZE))
        ok(driver.cuCtxSynchronize())

    elsewhere(copy, context or ok(driver.cuCtxGetCurrent()))


@pytest.fixture
def pageable():
    """Ordinary host memory: the bytes 0, 1, 2, ..."""
    return (ctypes.c_uint8 * SIZE)(*range(SIZE))


def contents(address, size=SIZE):
    """The bytes of device memory."""
    host = (ctypes.c_uint8 * size)()
    ok(driver.cuMemcpyDtoH(ctypes.addressof(host), address, size))
    return bytes(host)


def test_to_the_device_and_back(memory, pageable):
    upload(memory, pageable)
    assert contents(memory) == bytes(range(SIZE))


def test_between_device_memory(make_memory, pageable):
    source, destination = make_memory(), make_memory()
    upload(source, pageable)
    ok(driver.cuMemcpyDtoD(destination, source, SIZE))
    assert contents(destination) == bytes(range(SIZE))


def test_a_part(memory, pageable):
    ok(driver.cuMemsetD8(memory, 0, SIZE))
    ok(driver.cuMemcpyHtoD(memory + 8, ctypes.addressof(pageable), 4))
    assert contents(memory)[6:14] == bytes([0, 0, 0, 1, 2, 3, 0, 0])


@pytest.mark.parametrize("direction", ["host to device", "device to host", "any"])
def test_unified_copies_find_the_direction(memory, pageable, direction):
    host = ctypes.addressof(pageable)
    ok(driver.cuMemcpy(memory, host, SIZE))
    if direction == "host to device":
        assert contents(memory) == bytes(range(SIZE))
    elif direction == "device to host":
        ctypes.memset(host, 0, SIZE)
        ok(driver.cuMemcpy(host, memory, SIZE))
        assert bytes(pageable) == bytes(range(SIZE))
    else:
        other = (ctypes.c_uint8 * SIZE)()
        ok(driver.cuMemcpy(ctypes.addressof(other), host, SIZE))
        assert bytes(other) == bytes(range(SIZE))


def test_asynchronous_copies_keep_the_order(memory, pageable, pinned, stream):
    ok(driver.cuMemcpyHtoDAsync(memory, ctypes.addressof(pageable), SIZE, stream))
    ok(driver.cuMemcpyDtoHAsync(pinned, memory, SIZE, stream))
    assert finishes(stream)
    assert ctypes.string_at(pinned, SIZE) == bytes(range(SIZE))


def test_a_copy_to_pinned_memory_does_not_wait(memory, pinned, stream):
    ok(driver.cuMemsetD8Async(memory, 7, SIZE, stream))
    with latch(stream) as held:
        copying = Background(lambda: driver.cuMemcpyDtoHAsync(pinned, memory, SIZE, stream))
        assert copying.answer == (SUCCESS,)
        assert stays(b"\0", lambda: ctypes.string_at(pinned, 1))
        held.release()
        assert finishes(stream)
    assert ctypes.string_at(pinned, SIZE) == bytes([7]) * SIZE


def test_a_copy_to_pageable_memory_waits(memory, pageable, stream):
    host = ctypes.addressof(pageable)
    ok(driver.cuMemsetD8Async(memory, 7, SIZE, stream))
    with latch(stream) as held:
        copying = Background(lambda: driver.cuMemcpyDtoHAsync(host, memory, SIZE, stream))
        assert copying.is_blocked
        held.release()
        assert copying.answer == (SUCCESS,)
    assert bytes(pageable) == bytes([7]) * SIZE


def test_a_copy_between_two_places_of_the_host_waits(pageable, pinned, stream):
    """Page-locked memory as well."""
    ctypes.memmove(pinned, ctypes.addressof(pageable), 16)
    with latch(stream) as held:
        copying = Background(lambda: driver.cuMemcpyAsync(pinned + 16, pinned, 16, stream))
        assert copying.is_blocked
        held.release()
        assert copying.answer == (SUCCESS,)
    assert ctypes.string_at(pinned + 16, 16) == bytes(range(16))


def test_a_small_copy_from_pageable_memory_may_be_reused_at_once(memory, pageable, stream):
    host = ctypes.addressof(pageable)
    ok(driver.cuMemcpyHtoDAsync(memory, host, SIZE, stream))
    ctypes.memset(host, 0, SIZE)
    assert finishes(stream)
    assert contents(memory) == bytes(range(SIZE))


def test_a_small_copy_from_pageable_memory_does_not_wait(memory, pageable, stream):
    host = ctypes.addressof(pageable)
    with latch(stream) as held:
        copying = Background(lambda: driver.cuMemcpyHtoDAsync(memory, host, SIZE, stream))
        assert copying.answer == (SUCCESS,)
        ctypes.memset(host, 0, SIZE)
        held.release()
        assert finishes(stream)
    assert contents(memory) == bytes(range(SIZE))


def test_a_copy_between_device_memory_does_not_wait(make_memory, stream):
    source, destination = make_memory(), make_memory()
    with latch(stream):
        copying = Background(lambda: driver.cuMemcpyDtoDAsync(destination, source, SIZE, stream))
        assert copying.answer == (SUCCESS,)
        assert driver.cuStreamQuery(stream) == (NOT_READY,)


def test_a_synchronous_copy_does_not_wait_for_non_blocking_streams(
    context, memory, pageable, stream
):
    host = ctypes.addressof(pageable)
    with latch(stream):
        copying = Background(lambda: driver.cuMemcpyHtoD(memory, host, SIZE), context)
        assert copying.answer == (SUCCESS,)


def test_a_synchronous_copy_waits_for_blocking_streams(context, memory, pageable, make_stream):
    host = ctypes.addressof(pageable)
    with latch(make_stream(0)) as held:
        copying = Background(lambda: driver.cuMemcpyDtoH(host, memory, SIZE), context)
        assert copying.is_blocked
        held.release()
        assert copying.answer == (SUCCESS,)


def test_asynchronous_copies_need_no_context(make_memory, stream):
    source, destination = make_memory(), make_memory()
    answer = elsewhere(lambda: driver.cuMemcpyDtoDAsync(destination, source, SIZE, stream))
    assert answer == (SUCCESS,)
    assert finishes(stream)


def test_synchronous_copies_need_a_context(memory, pageable):
    with no_context():
        answer = driver.cuMemcpyHtoD(memory, ctypes.addressof(pageable), SIZE)
    assert answer == (INVALID_CONTEXT,)


@pytest.mark.simulated
@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda d, h, s: driver.cuMemcpyHtoD(d, h, SIZE + 1), id="to the device"),
        pytest.param(lambda d, h, s: driver.cuMemcpyDtoH(h, d, SIZE + 1), id="to the host"),
        pytest.param(lambda d, h, s: driver.cuMemcpyDtoD(d, d + 8, SIZE), id="on the device"),
        pytest.param(lambda d, h, s: driver.cuMemcpyHtoDAsync(d, h, SIZE + 1, s), id="async"),
        pytest.param(lambda d, h, s: driver.cuMemsetD8(d, 0, SIZE + 1), id="fill"),
    ],
)
def test_copies_beyond_the_end_are_refused(memory, stream, call):
    """A real device may be harmed: its allocations are larger than asked for."""
    host = ctypes.create_string_buffer(2 * SIZE)
    assert call(memory, ctypes.addressof(host), stream) == (INVALID_VALUE,)


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda h, s: driver.cuMemcpyHtoD(0, h, 8), id="to null"),
        pytest.param(lambda h, s: driver.cuMemcpyDtoH(h, 0, 8), id="from null"),
        pytest.param(lambda h, s: driver.cuMemcpyHtoDAsync(0, h, 8, s), id="to null, async"),
        pytest.param(lambda h, s: driver.cuMemsetD8(0, 0, 8), id="fill null"),
    ],
)
def test_null_cannot_be_copied(pageable, stream, call):
    assert call(ctypes.addressof(pageable), stream) == (INVALID_VALUE,)


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda d, h: driver.cuMemcpyHtoD(d, h, 0), id="to the device"),
        pytest.param(lambda d, h: driver.cuMemcpyDtoH(h, d, 0), id="to the host"),
        pytest.param(lambda d, h: driver.cuMemcpyDtoD(d, d, 0), id="on the device"),
        pytest.param(lambda d, h: driver.cuMemsetD8(d, 0, 0), id="fill"),
    ],
)
def test_nothing_can_be_copied(memory, pageable, call):
    assert call(memory, ctypes.addressof(pageable)) == (SUCCESS,)


def shaped(dimensions, pitch=0, width=1, height=1, depth=1, x=0, z=0, kind=None):
    """A description of a copy between two kinds of memory, its addresses left out."""
    copy = driver.CUDA_MEMCPY2D() if dimensions == 2 else driver.CUDA_MEMCPY3D()
    device = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    copy.srcMemoryType, copy.dstMemoryType = kind or device, device
    copy.srcPitch = copy.dstPitch = pitch
    copy.WidthInBytes, copy.Height, copy.srcXInBytes = width, height, x
    if dimensions == 3:
        copy.Depth, copy.srcZ = depth, z
        copy.srcHeight = copy.dstHeight = height
    return copy


HUGE = 1 << 62
TOO_LARGE = {
    "fill of words": lambda d, s: driver.cuMemsetD32(d, 0, HUGE),
    "fill of words, async": lambda d, s: driver.cuMemsetD32Async(d, 0, HUGE, s),
    "fill of halves": lambda d, s: driver.cuMemsetD16(d, 0, 1 << 63),
    "rows": lambda d, s: driver.cuMemsetD2D8Async(d, HUGE, 0, 4, 5, s),
    "words in rows": lambda d, s: driver.cuMemsetD2D32Async(d, 16, 0, HUGE, 2, s),
}
SHAPES = {
    "2D, rows": lambda: shaped(2, pitch=HUGE, width=4, height=5),
    "2D, width": lambda: shaped(2, width=(1 << 64) - 1, height=2, x=8),
    "3D, rows": lambda: shaped(3, pitch=HUGE, width=4, height=5),
    "3D, slices": lambda: shaped(3, pitch=1 << 32, width=4, height=1 << 32, depth=2),
    "3D, offset": lambda: shaped(3, pitch=1 << 32, width=4, height=1 << 16, z=1 << 20),
}


@pytest.mark.simulated
@pytest.mark.parametrize("call", TOO_LARGE.values(), ids=TOO_LARGE.keys())
def test_fills_of_more_than_there_can_be_are_refused(memory, stream, call):
    """A real device does not look: it fills, and the context does not get over that."""
    assert call(memory, stream) == (INVALID_VALUE,)
    assert finishes(stream)


@pytest.mark.simulated
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_copies_of_more_than_there_can_be_are_refused(make_memory, stream, shape):
    copy = shape()
    copy.srcDevice, copy.dstDevice = make_memory(), make_memory()
    two = isinstance(copy, driver.CUDA_MEMCPY2D)
    now, later = (
        (driver.cuMemcpy2D, driver.cuMemcpy2DAsync)
        if two
        else (driver.cuMemcpy3D, driver.cuMemcpy3DAsync)
    )
    assert now(copy) == (INVALID_VALUE,)
    assert later(copy, stream) == (INVALID_VALUE,)
    assert finishes(stream)


@pytest.mark.simulated
def test_rows_of_a_fill_do_not_overlap(memory, stream):
    assert driver.cuMemsetD2D8Async(memory, 4, 0, 8, 2, stream) == (INVALID_VALUE,)
    assert driver.cuMemsetD2D8Async(memory, 0, 0, 1, HUGE, stream) == (INVALID_VALUE,)


@pytest.mark.simulated
@pytest.mark.parametrize("empty", ["width", "height"])
def test_a_copy_of_nothing_ends_at_once(make_memory, stream, empty):
    """However many rows or slices of nothing it has."""
    copy = shaped(3, width=8, height=2, depth=1 << 40)
    copy.srcDevice, copy.dstDevice = make_memory(), make_memory()
    if empty == "width":
        copy.WidthInBytes = 0
    else:
        copy.Height = copy.srcHeight = copy.dstHeight = 0
    driver.cuMemcpy3DAsync(copy, stream)
    assert finishes(stream)


@pytest.mark.simulated
@pytest.mark.parametrize("size", [64, 1 << 20])
def test_memory_that_was_freed_is_nobodys(memory, stream, size):
    """It is not the host's, so that a late copy changes nothing of the program."""
    freed = int(ok(driver.cuMemAlloc(size)))
    ok(driver.cuMemFree(freed))
    assert driver.cuMemcpyAsync(freed, memory, 64, stream) == (INVALID_VALUE,)
    assert driver.cuMemcpyAsync(memory, freed, 64, stream) == (INVALID_VALUE,)


NOBODYS = 0x10000  # the lowest address that a program may use


@pytest.mark.simulated
@pytest.mark.parametrize("kind", ["UNIFIED", "HOST"])
def test_a_box_at_an_address_that_is_nobodys(memory, stream, kind):
    """A real driver reads it, as any program would, and the process ends."""
    kind = getattr(driver.CUmemorytype, f"CU_MEMORYTYPE_{kind}")
    copy = shaped(3, pitch=8, width=8, height=2, depth=2, kind=kind)
    copy.dstDevice, copy.srcHost, copy.srcDevice = memory, NOBODYS, NOBODYS
    assert driver.cuMemcpy3D(copy) == (INVALID_VALUE,)
    assert driver.cuMemcpy3DAsync(copy, stream) == (INVALID_VALUE,)
    assert finishes(stream)


# ---- fills ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fill", "pattern", "count", "expected"),
    [
        pytest.param(driver.cuMemsetD8, 0xAB, 8, b"\xab" * 8, id="8"),
        pytest.param(driver.cuMemsetD16, 0xABCD, 4, b"\xcd\xab" * 4, id="16"),
        pytest.param(driver.cuMemsetD32, 0x01020304, 2, b"\x04\x03\x02\x01" * 2, id="32"),
    ],
)
def test_fills_of_each_width(memory, fill, pattern, count, expected):
    ok(driver.cuMemsetD8(memory, 0, SIZE))
    ok(fill(memory, pattern, count))
    assert contents(memory)[:9] == expected + b"\0"


@pytest.mark.parametrize(
    ("fill", "offset"), [(driver.cuMemsetD16, 1), (driver.cuMemsetD32, 2)], ids=["16", "32"]
)
def test_fills_are_aligned(memory, fill, offset):
    assert fill(memory + offset, 0, 1) == (INVALID_VALUE,)


def test_a_fill_of_rows(memory, stream):
    ok(driver.cuMemsetD8Async(memory, 0, SIZE, stream))
    ok(driver.cuMemsetD2D8Async(memory, 16, 1, 4, 3, stream))
    assert finishes(stream)
    row = b"\1" * 4 + b"\0" * 12
    assert contents(memory)[:64] == row * 3 + b"\0" * 16


# ---- copies of several dimensions -------------------------------------------


def test_a_copy_of_rows_between_pitches(make_memory, pageable, stream):
    source, destination = make_memory(), make_memory()
    upload(source, pageable)
    ok(driver.cuMemsetD8Async(destination, 0, SIZE, stream))
    copy = driver.CUDA_MEMCPY2D()
    copy.srcMemoryType = copy.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    copy.srcDevice, copy.srcPitch = source, 32
    copy.dstDevice, copy.dstPitch = destination, 8
    copy.WidthInBytes, copy.Height = 4, 3
    assert driver.cuMemcpy2DAsync(copy, stream) == (SUCCESS,)
    assert finishes(stream)
    gap = b"\0" * 4
    expected = bytes([0, 1, 2, 3]) + gap + bytes([32, 33, 34, 35]) + gap + bytes([64, 65, 66, 67])
    assert contents(destination)[:20] == expected


def test_a_copy_of_rows_to_the_host(memory, pageable, pinned, stream):
    upload(memory, pageable)
    copy = driver.CUDA_MEMCPY2D()
    copy.srcMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    copy.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_HOST
    copy.srcDevice, copy.srcPitch = memory, 16
    copy.dstHost, copy.dstPitch = pinned, 2
    copy.WidthInBytes, copy.Height = 2, 3
    assert driver.cuMemcpy2DAsync(copy, stream) == (SUCCESS,)
    assert finishes(stream)
    assert ctypes.string_at(pinned, 6) == bytes([0, 1, 16, 17, 32, 33])


def test_a_pitch_below_the_width_is_refused(make_memory):
    copy = driver.CUDA_MEMCPY2D()
    copy.srcMemoryType = copy.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    copy.srcDevice, copy.srcPitch = make_memory(), 2
    copy.dstDevice, copy.dstPitch = make_memory(), 16
    copy.WidthInBytes, copy.Height = 4, 3
    assert driver.cuMemcpy2D(copy) == (INVALID_VALUE,)


def test_a_copy_of_a_box(make_memory, pageable, stream):
    source, destination = make_memory(), make_memory()
    upload(source, pageable)
    copy = driver.CUDA_MEMCPY3D()
    copy.srcMemoryType = copy.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    copy.srcDevice, copy.srcPitch, copy.srcHeight = source, 8, 4
    copy.dstDevice, copy.dstPitch, copy.dstHeight = destination, 2, 2
    copy.WidthInBytes, copy.Height, copy.Depth = 2, 2, 2
    assert driver.cuMemcpy3DAsync(copy, stream) == (SUCCESS,)
    assert finishes(stream)
    assert contents(destination)[:8] == bytes([0, 1, 8, 9, 32, 33, 40, 41])


# ---- peers ------------------------------------------------------------------


@pytest.mark.multi_device
def test_a_copy_between_devices(contexts, make_memory, pageable, make_stream, other_context):
    source, destination = make_memory(context=other_context), make_memory()
    upload(source, pageable, other_context)
    stream = make_stream()
    ok(driver.cuMemcpyPeerAsync(destination, contexts[0], source, other_context, SIZE, stream))
    assert finishes(stream)
    assert contents(destination) == bytes(range(SIZE))


@pytest.mark.multi_device
def test_a_plain_copy_may_cross_devices(make_memory, pageable, stream, other_context):
    source, destination = make_memory(context=other_context), make_memory()
    upload(source, pageable, other_context)
    ok(driver.cuMemcpyDtoDAsync(destination, source, SIZE, stream))
    assert finishes(stream)
    assert contents(destination) == bytes(range(SIZE))


@pytest.fixture
def in_pools(contexts, make_stream, other_context):
    """Memory of the default pool of each of two devices; neither may access that of the other."""
    owners = [contexts[0], other_context]
    streams = [make_stream(context=owner) for owner in owners]
    made = [int(ok(driver.cuMemAllocAsync(SIZE, stream))) for stream in streams]
    assert all(finishes(stream) for stream in streams)
    yield made
    for address, stream in zip(made, streams, strict=True):
        ok(driver.cuMemFreeAsync(address, stream))


DEVICES = [0, 1]


@pytest.mark.multi_device
@pytest.mark.parametrize("current_device", DEVICES)
@pytest.mark.parametrize("side", ["destination", "source"])
@pytest.mark.parametrize(
    "copy", [driver.cuMemcpyDtoDAsync, driver.cuMemcpyAsync, driver.cuMemcpyDtoD, driver.cuMemcpy]
)
def test_a_plain_copy_reaches_a_pool_from_the_current_context(
    copy, side, current_device, contexts, in_pools, memory, make_stream
):
    """The device of the stream does not matter."""
    operands = (in_pools[1], memory) if side == "destination" else (memory, in_pools[1])
    streams = [(make_stream(context=contexts[device]),) for device in DEVICES]
    expected = SUCCESS if current_device == 1 else INVALID_VALUE
    with current(contexts[current_device]):
        for stream in streams if "Async" in copy.__name__ else [()]:
            assert copy(*operands, SIZE, *stream) == (expected,)
            assert all(finishes(*each) for each in streams)


@pytest.mark.multi_device
@pytest.mark.parametrize("named", list(itertools.product(DEVICES, DEVICES)))
@pytest.mark.parametrize("devices", list(itertools.product(DEVICES, DEVICES)))
def test_a_copy_that_names_contexts_reaches_pools_from_them(
    devices, named, contexts, in_pools, make_stream
):
    """The current context and the device of the stream do not matter."""
    sides = zip(devices, named, strict=True)
    operands = [each for at, by in sides for each in (in_pools[at], contexts[by])]
    streams = [make_stream(context=contexts[device]) for device in DEVICES]
    expected = SUCCESS if devices == named else INVALID_VALUE
    for context, stream in itertools.product(contexts[:2], streams):
        with current(context):
            assert driver.cuMemcpyPeerAsync(*operands, SIZE, stream) == (expected,)
        assert finishes(stream)


@pytest.mark.multi_device
def test_a_copy_between_pools(contexts, in_pools, pageable, stream, other_context):
    upload(in_pools[1], pageable, other_context)
    ok(driver.cuMemcpyPeerAsync(in_pools[0], contexts[0], in_pools[1], contexts[1], SIZE, stream))
    assert finishes(stream)
    assert contents(in_pools[0]) == bytes(range(SIZE))


@pytest.mark.multi_device
@pytest.mark.parametrize("kind", ["allocated", "of a pool"])
def test_a_fill_reaches_memory_from_the_device_of_its_stream(
    kind, contexts, in_pools, make_memory, make_stream, other_context
):
    address = in_pools[1] if kind == "of a pool" else make_memory(context=other_context)
    here, there = (make_stream(context=contexts[device]) for device in DEVICES)
    for context in contexts[:2]:
        with current(context):
            assert driver.cuMemsetD8Async(address, 1, SIZE, here) == (INVALID_VALUE,)
            assert driver.cuMemsetD8Async(address, 1, SIZE, there) == (SUCCESS,)
    assert finishes(there)
    assert driver.cuMemsetD8(address, 2, SIZE) == (INVALID_VALUE,)
    with current(other_context):
        assert driver.cuMemsetD8(address, 2, SIZE) == (SUCCESS,)
        assert contents(address) == bytes([2]) * SIZE


def batch(destinations, sources, stream):
    attributes = driver.CUmemcpyAttributes()
    order = driver.CUmemcpySrcAccessOrder
    attributes.srcAccessOrder = order.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    pointers = [[driver.CUdeviceptr(each) for each in side] for side in (destinations, sources)]
    sizes, count = [SIZE] * len(sources), len(sources)
    return driver.cuMemcpyBatchAsync(*pointers, sizes, count, [attributes], [0], 1, stream)[0]


def test_a_batch_of_copies(make_memory, pageable, stream):
    source, first, second = make_memory(), make_memory(), make_memory()
    upload(source, pageable)
    assert batch([first, second], [source, source], stream) == SUCCESS
    assert finishes(stream)
    assert contents(first) == contents(second) == bytes(range(SIZE))


def test_a_batch_needs_a_stream_of_its_own(make_memory):
    assert batch([make_memory()], [make_memory()], LEGACY) == INVALID_VALUE
