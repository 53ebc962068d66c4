"""Waiting for values and writing them: the memory operations of a stream."""

from __future__ import annotations

import ctypes
import mmap

import pytest
from cuda.bindings import driver

from conformance.support import (
    INVALID_VALUE,
    LEGACY,
    NOT_READY,
    SUCCESS,
    Word,
    becomes,
    elsewhere,
    finishes,
    ok,
    stays,
)
from userstream.testing import latch

Flags = driver.CUstreamWaitValue_flags
GEQ = Flags.CU_STREAM_WAIT_VALUE_GEQ
EQ = Flags.CU_STREAM_WAIT_VALUE_EQ
AND = Flags.CU_STREAM_WAIT_VALUE_AND
NOR = Flags.CU_STREAM_WAIT_VALUE_NOR
Type = driver.CUstreamBatchMemOpType

ORDINARY = (ctypes.c_uint64 * 8)()  # outlives a write, should a driver accept one

COMPARISONS = {
    # name: flags, value, words that hold, words that let go
    "geq": (GEQ, 5, [0, 4, 0xFFFFFFFF], [5, 6, 0x7FFFFFFF]),
    "geq is cyclic": (GEQ, 0xFFFFFFFE, [0xFFFFFFFD], [0xFFFFFFFE, 0xFFFFFFFF, 0, 1]),
    "eq": (EQ, 5, [0, 4, 6, 0xFFFFFFFF], [5]),
    "and": (AND, 0b0110, [0, 0b1001], [0b0010, 0b1110]),
    "nor": (NOR, 0xFFFFFFF0, [0x0F, 0xFFFFFFFF], [0, 0x07]),
}
COMPARISONS_64 = {
    "geq": (GEQ, 1 << 40, [0, (1 << 40) - 1], [1 << 40, 1 << 41]),
    "eq": (EQ, 1 << 40, [0, 1 << 41], [1 << 40]),
    "and": (AND, 1 << 40, [0, 1 << 39], [1 << 40, 3 << 40]),
    "nor": (NOR, (1 << 64) - 2, [1, 3], [0, 2]),
}


def rows(table):
    return [
        pytest.param(flags, value, holding, going, id=name)
        for name, (flags, value, holding, going) in table.items()
    ]


def check_comparison(stream, word, wait, holding, going):
    """No stream stays held, whatever the driver answers."""
    for current in holding:
        word.value = current
        ok(wait())
        held = stays((NOT_READY,), lambda: driver.cuStreamQuery(stream))
        word.value = going[0]
        assert finishes(stream), hex(going[0])
        assert held, hex(current)
    for current in going:
        word.value = current
        ok(wait())
        let_go = finishes(stream)
        word.value = going[0]
        assert let_go, hex(current)


@pytest.mark.parametrize(("flags", "value", "holding", "going"), rows(COMPARISONS))
def test_waits_of_32_bits(stream, word, flags, value, holding, going):
    def wait():
        return driver.cuStreamWaitValue32(stream, word.address, value, flags)

    check_comparison(stream, word, wait, holding, going)


@pytest.mark.parametrize(("flags", "value", "holding", "going"), rows(COMPARISONS_64))
def test_waits_of_64_bits(stream, pinned, flags, value, holding, going):
    def wait():
        return driver.cuStreamWaitValue64(stream, pinned, value, flags)

    check_comparison(stream, Word(pinned, 8), wait, holding, going)


def test_a_write_of_32_bits(stream, pinned):
    Word(pinned, 8).value = (1 << 64) - 1
    ok(driver.cuStreamWriteValue32(stream, pinned, 5, 0))
    assert finishes(stream)
    assert Word(pinned, 8).value == (0xFFFFFFFF << 32) + 5


def test_a_write_of_64_bits(stream, pinned):
    ok(driver.cuStreamWriteValue64(stream, pinned, (1 << 40) + 5, 0))
    assert finishes(stream)
    assert Word(pinned, 8).value == (1 << 40) + 5


def test_a_write_without_a_barrier_is_refused(stream, word):
    no_barrier = driver.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER
    assert driver.cuStreamWriteValue32(stream, word.address, 5, no_barrier) == (INVALID_VALUE,)


def test_a_write_lets_another_stream_go(make_stream, word):
    waiting, writing = make_stream(), make_stream()
    ok(driver.cuStreamWaitValue32(waiting, word.address, 1, GEQ))
    before = driver.cuStreamQuery(waiting)
    word.write(writing, 1)
    assert finishes(waiting)
    assert before == (NOT_READY,)


def test_a_value_in_device_memory(make_stream, memory):
    waiting, writing = make_stream(), make_stream()
    ok(driver.cuMemsetD32(memory, 0, 1))
    ok(driver.cuStreamWaitValue32(waiting, memory, 1, GEQ))
    before = driver.cuStreamQuery(waiting)
    ok(driver.cuStreamWriteValue32(writing, memory, 1, 0))
    assert finishes(waiting)
    assert before == (NOT_READY,)


def test_values_work_on_the_legacy_stream(word):
    word.write(LEGACY, 3)
    assert finishes(LEGACY)
    assert word.value == 3


def test_a_wait_needs_no_context(stream, word):
    word.value = 1
    answer = elsewhere(lambda: driver.cuStreamWaitValue32(stream, word.address, 1, GEQ))
    assert answer == (SUCCESS,)
    assert finishes(stream)


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda s, a: driver.cuStreamWaitValue32(s, a, 1, GEQ), id="wait 32"),
        pytest.param(lambda s, a: driver.cuStreamWriteValue32(s, a, 1, 0), id="write 32"),
    ],
)
def test_words_are_aligned(stream, pinned, call):
    assert call(stream, pinned + 2) == (INVALID_VALUE,)


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda s, a: driver.cuStreamWaitValue64(s, a, 1, GEQ), id="wait 64"),
        pytest.param(lambda s, a: driver.cuStreamWriteValue64(s, a, 1, 0), id="write 64"),
    ],
)
def test_long_words_are_aligned(stream, pinned, call):
    assert call(stream, pinned + 4) == (INVALID_VALUE,)


@pytest.mark.parametrize("kind", ["host", "null"])
def test_words_lie_in_memory_of_the_driver(stream, kind):
    address = ctypes.addressof(ORDINARY) if kind == "host" else 0
    assert driver.cuStreamWriteValue32(stream, address, 1, 0) == (INVALID_VALUE,)


def test_words_in_registered_memory(stream):
    """The latch of these tests waits for such words."""
    area = mmap.mmap(-1, mmap.PAGESIZE)
    view = (ctypes.c_char * mmap.PAGESIZE).from_buffer(area)
    host = ctypes.addressof(view)
    ok(driver.cuMemHostRegister(host, mmap.PAGESIZE, driver.CU_MEMHOSTREGISTER_DEVICEMAP))
    address = int(ok(driver.cuMemHostGetDevicePointer(host, 0)))
    ok(driver.cuStreamWaitValue32(stream, address, 1, GEQ))
    held = stays((NOT_READY,), lambda: driver.cuStreamQuery(stream))
    Word(host).value = 1
    assert finishes(stream)
    assert held
    ok(driver.cuMemHostUnregister(host))
    del view
    area.close()


def test_words_in_managed_memory_are_refused(stream):
    attach = driver.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL
    address = int(ok(driver.cuMemAllocManaged(64, attach)))
    answer = driver.cuStreamWriteValue32(stream, address, 1, 0)
    assert finishes(stream)
    ok(driver.cuMemFree(address))
    assert answer == (INVALID_VALUE,)


@pytest.mark.parametrize("flags", [4, 8, 1 << 16])
def test_unknown_flags_of_a_wait(stream, word, flags):
    word.value = 1
    assert driver.cuStreamWaitValue32(stream, word.address, 1, flags) == (INVALID_VALUE,)


@pytest.mark.parametrize("flags", [2, 4, 1 << 16])
def test_unknown_flags_of_a_write(stream, word, flags):
    assert driver.cuStreamWriteValue32(stream, word.address, 1, flags) == (INVALID_VALUE,)


# ---- batches ----------------------------------------------------------------


def write(address, value, width=32):
    operation = driver.CUstreamBatchMemOpParams()
    operation.writeValue.operation = getattr(Type, f"CU_STREAM_MEM_OP_WRITE_VALUE_{width}")
    operation.writeValue.address = address
    if width == 32:
        operation.writeValue.value = driver.cuuint32_t(value)
    else:
        operation.writeValue.value64 = driver.cuuint64_t(value)
    operation.writeValue.flags = 0
    return operation


def wait(address, value, flags=GEQ):
    operation = driver.CUstreamBatchMemOpParams()
    operation.waitValue.operation = Type.CU_STREAM_MEM_OP_WAIT_VALUE_32
    operation.waitValue.address = address
    operation.waitValue.value = driver.cuuint32_t(value)
    operation.waitValue.flags = int(flags)
    return operation


def batch(stream, *operations, flags=0):
    return driver.cuStreamBatchMemOp(stream, len(operations), list(operations), flags)


def test_a_batch_of_writes(stream, pinned):
    ok(batch(stream, write(pinned, 1), write(pinned + 4, 2), write(pinned + 8, 1 << 40, width=64)))
    assert finishes(stream)
    assert (Word(pinned).value, Word(pinned + 4).value) == (1, 2)
    assert Word(pinned + 8, 8).value == 1 << 40


def test_a_batch_runs_in_order(stream, pinned):
    ok(batch(stream, wait(pinned, 1), write(pinned + 4, 2)))
    held = stays(0, lambda: Word(pinned + 4).value)
    Word(pinned).value = 1
    assert finishes(stream)
    assert held
    assert Word(pinned + 4).value == 2


def test_a_batch_waits_for_its_turn(stream, word):
    with latch(stream) as held:
        ok(batch(stream, write(word.address, 1)))
        assert stays(0, lambda: word.value)
        held.release()
        assert finishes(stream)
    assert word.value == 1


def test_a_batch_has_no_flags(stream, word):
    assert batch(stream, write(word.address, 1), flags=1) == (INVALID_VALUE,)


def test_a_batch_checks_its_operations(stream, word):
    assert batch(stream, write(word.address, 1), write(word.address + 2, 1)) == (INVALID_VALUE,)


def test_a_refused_batch_does_nothing(stream, pinned):
    batch(stream, write(pinned, 1), write(pinned + 2, 1))
    assert finishes(stream)
    assert Word(pinned).value == 0


def test_the_latch_itself(stream, word):
    """What holds streams in all these tests."""
    with latch(stream) as held:
        word.write(stream, 1)
        assert not held.is_released
        assert stays(0, lambda: word.value)
    assert held.is_released
    assert becomes(1, lambda: word.value)
