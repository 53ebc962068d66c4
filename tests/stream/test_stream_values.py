"""`Stream`: values that it writes and waits for, raw copies, attachments."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver
from cuda.core import Device

import userstream as us
from helpers import (
    CAI,
    checked,
    current_context,
    device_attribute,
    device_current,
    device_memory,
    in_thread,
    instantiated,
    managed_memory,
    needs_host_pools,
    pinned_memory,
    refused_in_a_child,
    upload,
)
from userstream import (
    FlushRemoteWrites,
    MemoryBarrier,
    WaitFlags,
    WaitValue,
    WriteValue,
    testing,
)

GEQ, EQ, AND, NOR, FLUSH = WaitFlags


class Word:
    """A word of pinned memory."""

    def __init__(self, address: int, kind: type = ctypes.c_uint32) -> None:
        self.address = address
        self._word = kind.from_address(address)  # type: ignore[attr-defined]

    @property
    def value(self) -> int:
        return int(self._word.value)

    @value.setter
    def value(self, value: int) -> None:
        self._word.value = value


@pytest.fixture
def pinned() -> Iterator[int]:
    with pinned_memory() as address:
        ctypes.memset(address, 0, 256)
        yield address


def test_a_write(stream: us.Stream, pinned: int) -> None:
    word = Word(pinned, ctypes.c_uint64)
    word.value = (1 << 64) - 1
    before = current_context()
    stream.write_value_32(pinned, 5)
    stream.sync(timeout=10)
    assert word.value == (0xFFFFFFFF << 32) + 5
    in_thread(lambda: stream.write_value_64(pinned, 1 << 40))
    stream.sync(timeout=10)
    assert word.value == 1 << 40
    assert current_context() == before


WAITS = [
    (32, GEQ, 5, 4, 6),
    (32, GEQ, 0xFFFFFFFE, 0xFFFFFFFD, 1),
    (32, EQ, 5, 6, 5),
    (32, AND, 6, 9, 2),
    (32, NOR, 0xFFFFFFF0, 0x0F, 0),
    (64, GEQ, 1 << 40, 1 << 39, 1 << 41),
    (64, EQ, 1 << 40, 1 << 41, 1 << 40),
    (64, AND, 1 << 40, 1 << 39, 1 << 40),
    (64, NOR, (1 << 64) - 2, 1, 0),
]


@pytest.mark.parametrize(("bits", "flags", "value", "holding", "going"), WAITS)
def test_a_wait(
    stream: us.Stream, pinned: int, bits: int, flags: int, value: int, holding: int, going: int
) -> None:
    word = Word(pinned, ctypes.c_uint32 if bits == 32 else ctypes.c_uint64)
    wait = stream.wait_value_32 if bits == 32 else stream.wait_value_64
    for again in (
        lambda: wait(pinned, value, flags),
        lambda: stream.batch_mem_op([WaitValue(pinned, value, flags, bits)]),  # type: ignore[arg-type]
    ):
        word.value = holding
        again()
        with pytest.raises(us.WaitTimeout):
            stream.sync(timeout=0.01)
        word.value = going
        stream.sync(timeout=10)


def test_a_wait_compares_geq_by_default(stream: us.Stream, pinned: int) -> None:
    for wait in (stream.wait_value_32, stream.wait_value_64):
        Word(pinned).value = 6
        wait(pinned, 5)
        stream.sync(timeout=10)


def test_the_memory_of_what_was_copied_to_the_host(stream: us.Stream, memory: int) -> None:
    needs_host_pools()
    where = us.asnumpy(CAI(memory)).ctypes.data
    for use in (stream.write_value_32, stream.wait_value_32):
        with pytest.raises(ValueError, match="pool of host memory"):
            use(where, 1)


def test_device_memory_and_buffers(stream: us.Stream, memory: int) -> None:
    other = us.Stream.create(0)
    for where in (memory, driver.CUdeviceptr(memory), CAI(memory), np.uint64(memory)):
        stream.write_value_32(where, 0)
        stream.sync(timeout=10)
        other.wait_value_32(where, 1)
        assert not other.is_done
        stream.write_value_32(where, 1)
        other.sync(timeout=10)
    other.close()


def test_a_batch(stream: us.Stream, pinned: int) -> None:
    first, second = Word(pinned), Word(pinned + 4)
    stream.batch_mem_op(
        [
            WaitValue(pinned, 1),
            MemoryBarrier(),
            MemoryBarrier("gpu"),
            WriteValue(pinned + 4, 2),
            WriteValue(pinned + 8, 1 << 40, 64),
        ]
    )
    with pytest.raises(us.WaitTimeout):
        stream.sync(timeout=0.01)
    assert second.value == 0
    first.value = 1
    stream.sync(timeout=10)
    assert second.value == 2
    assert Word(pinned + 8, ctypes.c_uint64).value == 1 << 40


def test_the_largest_batch(stream: us.Stream, pinned: int) -> None:
    stream.batch_mem_op(WriteValue(pinned, value) for value in range(255))
    stream.sync(timeout=10)
    assert Word(pinned).value == 254


def test_operations_are_values() -> None:
    assert WriteValue(4, 1) == WriteValue(4, 1, 32)
    assert hash(WaitValue(4, 1)) == hash(WaitValue(4, 1, GEQ))
    with pytest.raises(AttributeError):
        WriteValue(4, 1).value = 2  # type: ignore[misc]


def test_registered_host_memory(stream: us.Stream) -> None:
    area = mmap.mmap(-1, mmap.PAGESIZE)
    view = (ctypes.c_char * mmap.PAGESIZE).from_buffer(area)
    host = ctypes.addressof(view)
    with device_current(0):
        checked(driver.cuMemHostRegister(host, mmap.PAGESIZE, 2))
        stream.write_value_32(host, 5)
        stream.sync(timeout=10)
        checked(driver.cuMemHostUnregister(host))
    assert Word(host).value == 5
    with pytest.raises(ValueError, match="not in memory that CUDA knows"):
        stream.write_value_32(host, 5)


def test_on_the_default_streams(pinned: int) -> None:
    for value, stream in enumerate((us.Stream.legacy_default(), us.Stream.per_thread_default())):
        for thread in (in_thread, lambda function: function()):

            def use(stream: us.Stream = stream, value: int = value) -> None:
                stream.write_value_32(pinned, value + 1)
                stream.wait_value_32(pinned, value + 1)
                stream.sync(timeout=10)

            thread(use)
        assert Word(pinned).value == value + 1


@pytest.mark.multi_device
def test_another_device_is_current(pinned: int) -> None:
    with (
        us.Stream.create(1) as stream,
        device_current(0),
    ):
        stream.write_value_32(pinned, 3)
        with device_memory(1) as address:
            stream.write_value_32(address, 3)
            stream.sync(timeout=10)
    assert Word(pinned).value == 3


def test_under_capture_they_are_nodes(stream: us.Stream, pinned: int) -> None:
    with stream.capture() as graph:
        stream.write_value_32(pinned, 1)
        stream.wait_value_32(pinned, 1)
        stream.batch_mem_op([WriteValue(pinned, 2)])
    assert len(graph.nodes()) == 3
    stream.sync(timeout=10)
    assert Word(pinned).value == 0
    instantiated(graph).launch(stream)
    stream.sync(timeout=10)
    assert Word(pinned).value == 2


# -- refusals ---------------------------------------------------------------------------------

USES: list[Callable[[us.Stream, object], None]] = [
    lambda stream, where: stream.write_value_32(where, 1),
    lambda stream, where: stream.write_value_64(where, 1),
    lambda stream, where: stream.wait_value_32(where, 0),
    lambda stream, where: stream.wait_value_64(where, 0),
    lambda stream, where: stream.batch_mem_op([WriteValue(where, 1)]),
    lambda stream, where: stream.batch_mem_op([MemoryBarrier(), WaitValue(where, 0)]),
]


@pytest.mark.parametrize("use", USES)
def test_bad_addresses(stream: us.Stream, use: Callable[[us.Stream, object], None]) -> None:
    host = np.zeros(8, np.uint32)
    with device_memory(0, 258) as address, managed_memory() as managed:
        for where, error, match in (
            (address + 2, ValueError, "multiple of"),
            (0, ValueError, "not in memory that CUDA knows"),
            (-8, ValueError, "-8 is not an address"),
            (1 << 64, ValueError, "18446744073709551616 is not an address"),
            (np.int64(-8), ValueError, "-8 is not an address"),
            (host.ctypes.data, ValueError, "not in memory that CUDA knows"),
            (managed, ValueError, "managed memory"),
            (address + 256, ValueError, "extends beyond its allocation"),
            (True, TypeError, "not True"),
            (np.True_, TypeError, "a number or a buffer, not .*True"),
            (1.5, TypeError, "float"),
            (None, TypeError, "NoneType"),
            ("0", TypeError, "str"),
            (host, us.UnsupportedBufferError, "host memory"),
            (CAI(address, (2,), typestr="|u1"), ValueError, "does not fit into"),
        ):
            with pytest.raises(error, match=match):
                use(stream, where)
        assert stream.is_done, "nothing was queued"


def test_a_word_is_as_wide_as_its_alignment(stream: us.Stream, memory: int) -> None:
    stream.write_value_32(memory + 4, 1)
    with pytest.raises(ValueError, match="multiple of 8"):
        stream.write_value_64(memory + 4, 1)
    stream.sync(timeout=10)


@pytest.mark.parametrize(("bits", "value"), [(32, -1), (32, 1 << 32), (64, -1), (64, 1 << 64)])
def test_bad_values(stream: us.Stream, pinned: int, bits: int, value: int) -> None:
    for use in (
        stream.write_value_32 if bits == 32 else stream.write_value_64,
        stream.wait_value_32 if bits == 32 else stream.wait_value_64,
        lambda where, value: WriteValue(where, value, bits),  # type: ignore[arg-type]
        lambda where, value: WaitValue(where, value, GEQ, bits),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match=f"not an unsigned number of {bits} bits"):
            use(pinned, value)
        for wrong in (1.0, "1", None, True):
            with pytest.raises(TypeError, match=f"value must be an integer, not {wrong!r}"):
                use(pinned, wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("flags", [4, 8, -1, 1 << 31, 5 | FLUSH])
def test_bad_flags(stream: us.Stream, pinned: int, flags: int) -> None:
    with pytest.raises(ValueError, match=r"WaitFlags\.GEQ"):
        stream.wait_value_32(pinned, 0, flags)
    with pytest.raises(ValueError, match=r"WaitFlags\.GEQ"):
        WaitValue(pinned, 0, flags)


def test_numbers_of_numpy(stream: us.Stream, pinned: int) -> None:
    where = np.uint64(pinned)
    stream.write_value_32(where, np.uint8(7))  # type: ignore[arg-type]
    stream.wait_value_32(where, np.int64(7), np.int32(EQ))  # type: ignore[arg-type]
    bits: Any = np.int64(64)
    write, wait = WriteValue(where, np.uint64(9), bits), WaitValue(where, 9, np.uint8(EQ), bits)  # type: ignore[arg-type]
    stream.batch_mem_op([write, wait], np.int8(0))  # type: ignore[arg-type]
    stream.sync(timeout=10)
    assert Word(pinned).value == 9


@pytest.mark.parametrize("wrong", [0.0, "0", None, False])
def test_numbers_that_are_no_integers(stream: us.Stream, pinned: int, wrong: Any) -> None:
    for use, name in (
        (lambda: stream.wait_value_32(pinned, 0, wrong), "flags"),
        (lambda: WaitValue(pinned, 0, wrong), "flags"),
        (lambda: WriteValue(pinned, 0, wrong), "bits"),
        (lambda: WaitValue(pinned, 0, bits=wrong), "bits"),
        (lambda: stream.batch_mem_op([WriteValue(pinned, 0)], wrong), "flags"),
        (lambda: stream.wait_event(stream.record(), wrong), "flags"),
    ):
        with pytest.raises(TypeError, match=f"{name} must be an integer, not {wrong!r}"):
            use()


@pytest.mark.simulated
def test_a_barrier_that_the_device_lacks(stream: us.Stream) -> None:
    for each in (stream, us.Stream.legacy_default()):
        with (
            testing.inject("cuStreamBatchMemOp", 801, this_thread=True),
            pytest.raises(
                us.NotSupportedError, match=r"does not support .* MemoryBarrier; leave it out"
            ),
        ):
            each.batch_mem_op([MemoryBarrier("gpu")])


def test_bad_batches(stream: us.Stream, pinned: int) -> None:
    write = WriteValue(pinned, 1)
    for ops, error, match in (
        ([], ValueError, "1 to 255"),
        ([write] * 256, ValueError, "1 to 255"),
        ([write, None], TypeError, "NoneType"),
        ([write, (pinned, 1)], TypeError, "tuple"),
        ([write, WriteValue(pinned + 2, 1)], ValueError, "multiple of 4"),
    ):
        with pytest.raises(error, match=match) as caught:
            stream.batch_mem_op(ops)  # type: ignore[arg-type]
        if len(ops) == 2:
            assert caught.value.__notes__ == ["that is operation 1 of the batch"]
    for ops, name in ((None, "NoneType"), (write, "WriteValue")):
        with pytest.raises(TypeError, match=f"an iterable of operations, .*not .*{name}"):
            stream.batch_mem_op(ops)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no flags yet"):
        stream.batch_mem_op([write], 1)
    with pytest.raises(ValueError, match="32 bits; there are 64 bits as well"):
        WriteValue(pinned, 1 << 40)
    with pytest.raises(ValueError, match="bits must be 32 or 64"):
        WriteValue(pinned, 1, 16)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='"system" or "gpu"'):
        MemoryBarrier("block")  # type: ignore[arg-type]
    stream.sync(timeout=10)
    assert Word(pinned).value == 0, "of a batch that is refused, nothing is done"


def test_a_flush_where_the_device_has_it(stream: us.Stream, pinned: int) -> None:
    which = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES
    if device_attribute(which):
        stream.wait_value_32(pinned, 0, GEQ | FLUSH)
        stream.batch_mem_op([FlushRemoteWrites()])
        stream.sync(timeout=10)
    else:
        with pytest.raises(us.NotSupportedError, match="flushes"):
            stream.wait_value_32(pinned, 0, GEQ | FLUSH)


def test_beside_a_capture_on_a_blocking_stream(pinned: int, memory: int) -> None:
    legacy = us.Stream.legacy_default()
    with (
        us.Stream.create(0, nonblocking=False) as captured,
        device_current(0),
        captured.capture(),
    ):
        for use in (
            lambda: legacy.write_value_32(pinned, 1),
            lambda: legacy.wait_value_32(pinned, 0),
            lambda: legacy.batch_mem_op([WriteValue(pinned, 1)]),
            lambda: legacy.memcpy_dtod(memory, memory + 64, 8),
            lambda: legacy.attach_mem_async(memory, "global"),
        ):
            with pytest.raises(us.CaptureError, match="blocking stream of its context"):
                use()


def test_a_closed_stream(stream: us.Stream, memory: int) -> None:
    stream.close()
    for use in (
        *(lambda use=use: use(stream, memory) for use in USES),
        lambda: stream.memcpy_dtod(memory, memory + 64, 8),
        lambda: stream.attach_mem_async(memory),
    ):
        with pytest.raises(us.ClosedError, match="is closed"):
            use()


# -- raw copies -------------------------------------------------------------------------------


@pytest.fixture
def numbers(memory: int) -> int:
    """256 bytes on device 0, numbered."""
    with device_current(0):
        upload(memory, bytes(range(256)), 256)
    return memory


def bytes_at(address: int, size: int) -> bytes:
    out = bytearray(size)
    with device_current(0):
        checked(driver.cuMemcpyDtoH(np.frombuffer(out, np.uint8), address, size))
    return bytes(out)


def test_a_copy(stream: us.Stream, numbers: int) -> None:
    before = current_context()
    with device_memory(0) as other, testing.latch(stream) as latch:
        stream.memcpy_dtod(CAI(other, (16,)), CAI(numbers, (4, 1, 4), strides=(16, 99, 4)))
        in_thread(lambda: stream.memcpy_dtod(other + 64, driver.CUdeviceptr(numbers), 8))
        stream.memcpy_dtod(other + 80, CAI(numbers + 4, (2,)))
        stream.memcpy_dtod(CAI(other + 96, (4,)), numbers, 4)
        stream.memcpy_dtod(other, numbers, 0)
        assert not stream.is_done
        latch.release()
        stream.sync(timeout=10)
        assert bytes_at(other, 64) == bytes(range(64))
        assert bytes_at(other + 64, 8) == bytes(range(8))
        assert bytes_at(other + 80, 8) == bytes(range(4, 12))
        assert bytes_at(other + 96, 4) == bytes(range(4))
    assert current_context() == before


def test_buffers_of_cuda_core(stream: us.Stream) -> None:
    with device_current(0):
        Device(0).set_current()
        first, second = (Device(0).allocate(64, stream=stream) for _ in range(2))
        stream.memcpy_dtod(first, second)
        stream.sync(timeout=10)


def test_copies_that_are_refused(stream: us.Stream, memory: int, pinned: int) -> None:
    with device_memory(0) as other:
        for arguments, error, match in (
            ((other, memory), ValueError, "pass nbytes"),
            ((CAI(other, (4,)), CAI(memory, (5,))), ValueError, "dst has 16 bytes and src 20"),
            ((CAI(other, (4,)), CAI(memory, (4,)), 17), ValueError, "more than dst has"),
            ((other, CAI(memory, (4,)), 17), ValueError, "more than src has"),
            ((other, memory, -1), ValueError, "nbytes must be at least 0, not -1"),
            ((other, memory, 257), ValueError, "extend beyond the allocation"),
            ((other + 8, memory, 256), ValueError, "extend beyond the allocation"),
            ((memory, memory, 4), ValueError, "overlap"),
            ((memory + 4, memory, 8), ValueError, "overlap"),
            ((other, pinned, 8), ValueError, "src .* pinned host memory"),
            ((pinned, other, 8), ValueError, "dst .* pinned host memory"),
            ((other, np.zeros(2)), us.UnsupportedBufferError, "host memory"),
            ((0, other, 8), ValueError, "not in memory that CUDA knows"),
            ((other, memory, 1.5), TypeError, "nbytes must be an integer, not 1.5"),
            ((-8, memory, 8), ValueError, "-8 is not an address"),
            ((other, None, 8), TypeError, "NoneType"),
            ((True, other, 8), TypeError, "not True"),
            ((CAI(other, (2, 2), strides=(4, 8)), memory), ValueError, "side by side"),
        ):
            with pytest.raises(error, match=match):
                stream.memcpy_dtod(*arguments)  # type: ignore[arg-type]
        assert stream.is_done


@pytest.mark.multi_device
def test_a_copy_stays_on_its_device(stream: us.Stream, memory: int) -> None:
    with device_memory(1) as other:
        for arguments in ((memory, other, 8), (other, memory, 8)):
            with pytest.raises(us.DeviceMismatchError, match="device 1") as error:
                stream.memcpy_dtod(*arguments)
            assert error.value.devices == (0, 1)


def test_a_captured_copy(stream: us.Stream, numbers: int) -> None:
    with device_memory(0) as other:
        with stream.capture() as graph:
            stream.memcpy_dtod(other, numbers, 8)
        instantiated(graph).launch(stream)
        stream.sync(timeout=10)
        assert bytes_at(other, 8) == bytes(range(8))


# -- attachments ------------------------------------------------------------------------------


def test_attachments(stream: us.Stream) -> None:
    with managed_memory() as address:
        stream.attach_mem_async(address)
        stream.attach_mem_async(CAI(address), "host")
        us.Stream.legacy_default().attach_mem_async(driver.CUdeviceptr(address), "global")
        stream.sync(timeout=10)


def test_attachments_that_are_refused(stream: us.Stream, memory: int, pinned: int) -> None:
    with managed_memory() as address:
        for arguments, error, match in (
            ((memory,), ValueError, "not in managed memory"),
            ((pinned,), ValueError, "not in managed memory"),
            ((0,), ValueError, "not in managed memory"),
            ((np.zeros(4).ctypes.data,), ValueError, "not in managed memory"),
            ((address + 64,), ValueError, "start of its allocation"),
            ((address, "device"), ValueError, '"host"'),
            ((address, 1), ValueError, '"host"'),
            ((None,), TypeError, "NoneType"),
        ):
            with pytest.raises(error, match=match):
                stream.attach_mem_async(*arguments)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"cannot be attached to .* alone"):
            us.Stream.legacy_default().attach_mem_async(address)
        with stream.capture(), pytest.raises(us.CaptureError, match="cannot be captured"):
            stream.attach_mem_async(address)


@pytest.mark.simulated
def test_a_driver_that_refuses(stream: us.Stream, memory: int, pinned: int) -> None:
    for function, use in (
        ("cuStreamWriteValue32", lambda: stream.write_value_32(memory, 1)),
        ("cuStreamWaitValue64", lambda: stream.wait_value_64(memory, 1)),
        ("cuStreamBatchMemOp", lambda: stream.batch_mem_op([WriteValue(memory, 1)])),
        ("cuMemHostGetDevicePointer", lambda: stream.write_value_32(pinned, 1)),
        ("cuMemcpyDtoDAsync", lambda: stream.memcpy_dtod(memory, memory + 64, 8)),
    ):
        with testing.inject(function, 2, this_thread=True), pytest.raises(us.DriverError) as error:
            use()
        assert error.value.function == function
    assert stream.is_done


def test_in_a_forked_child() -> None:
    refused_in_a_child(
        """
        lambda: stream.write_value_32(4096, 1),
        lambda: stream.wait_value_32(4096, 1),
        lambda: stream.batch_mem_op([us.WriteValue(4096, 1)]),
        lambda: stream.memcpy_dtod(1, 2, 3),
        lambda: stream.attach_mem_async(1),
        """
    )
