"""Values in memory that a stream writes and waits for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from userstream import _driver, _numbers
from userstream._buffers import type_name
from userstream._stream._addresses import address_and_size
from userstream._stream._capture import CapturedStream
from userstream._stream._operations import (
    FlushRemoteWrites,
    MemoryBarrier,
    MemoryOperation,
    WaitFlags,
    WaitValue,
    WriteValue,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cuda.bindings import driver

    from userstream.typing import Buffer

_MOST_OPERATIONS = 255  # of one batch, says CUDA


class ValueStream(CapturedStream):
    """Memory operations of a `Stream`."""

    __slots__ = ()

    def write_value_32(self, address: int | Buffer, value: int) -> None:
        """Write a value of 32 bits to memory when the stream gets there.

        Parameters
        ----------
        address : int, CUdeviceptr or GPU buffer
            Where: device memory or pinned host memory, at a multiple of 4. Of a buffer, its start.
        value : int
            What, from 0 to 2³² - 1.

        Raises
        ------
        ValueError
            ``value`` does not fit; or the address is not aligned, in no memory that CUDA knows, in
            managed memory or a pool of host memory (as results of `asnumpy` are), in memory that
            the device cannot access, or ends behind its allocation.
        TypeError
            ``value`` or ``address`` is none.
        CaptureError
            The legacy default stream would break a capture.
        ClosedError, ForkedError, DriverError
            The stream is closed, CUDA may not be used, or the driver refused.

        Notes
        -----
        Earlier work of the stream is visible before the value is. Orders no buffer and keeps none
        alive: the memory must stay until the stream got there. Under capture it becomes a node.
        Thread-safe; does not block. Driver call: ``cuStreamWriteValue32``, with its memory
        barrier. After baracuda's ``write_value_32``.

        Examples
        --------
        >>> from cuda.core import Device
        >>> from userstream import Stream
        >>> Device(0).set_current()
        >>> writer, reader = Stream.create(), Stream.create()
        >>> word = Device(0).allocate(4, stream=writer)
        >>> writer.write_value_32(word, 0)
        >>> reader.wait(writer)
        >>> reader.wait_value_32(word, 1)  # holds the reader
        >>> writer.write_value_32(word, 1)
        >>> reader.sync(timeout=10)
        """
        self._here(self._write, WriteValue(address, value))

    def write_value_64(self, address: int | Buffer, value: int) -> None:
        """Write a value of 64 bits to memory when the stream gets there.

        Parameters
        ----------
        address : int, CUdeviceptr or GPU buffer
            As for `write_value_32`, at a multiple of 8.
        value : int
            What, from 0 to 2⁶⁴ - 1.

        Raises
        ------
        NotSupportedError
            The device has no such operations on 64 bits.
        ValueError, TypeError, CaptureError, ClosedError, ForkedError, DriverError
            As `write_value_32`.

        Notes
        -----
        As `write_value_32`. Driver call: ``cuStreamWriteValue64``.

        Examples
        --------
        >>> from cuda.core import Device
        >>> from userstream import Stream
        >>> Device(0).set_current()
        >>> stream = Stream.create()
        >>> stream.write_value_64(Device(0).allocate(8, stream=stream), 1 << 40)
        """
        self._here(self._write, WriteValue(address, value, 64))

    def wait_value_32(self, address: int | Buffer, value: int, flags: int = WaitFlags.GEQ) -> None:
        """Hold the stream until the value of 32 bits in memory compares with one.

        Parameters
        ----------
        address : int, CUdeviceptr or GPU buffer
            As for `write_value_32`.
        value : int
            What to compare with, from 0 to 2³² - 1.
        flags : WaitFlags or int, default WaitFlags.GEQ
            How to compare.

        Raises
        ------
        NotSupportedError
            The device lacks ``NOR`` or ``FLUSH``.
        ValueError, TypeError, CaptureError, ClosedError, ForkedError, DriverError
            As `write_value_32`; or ``flags`` is none.

        Notes
        -----
        No host wait. If nobody writes the value the stream is held for ever, and then freeing
        memory (not that of a pool), `wait_for_device` and loading a module (as the first launch of
        a kernel does) wait for ever as well; `close` returns, but the driver keeps the stream.
        Orders no buffer and keeps none alive. Under capture it becomes a node. Thread-safe; does
        not block. Driver call: ``cuStreamWaitValue32``. After baracuda's ``wait_value_32``.

        Examples
        --------
        >>> from cuda.core import Device
        >>> from userstream import Stream, WaitFlags
        >>> Device(0).set_current()
        >>> stream = Stream.create()
        >>> word = Device(0).allocate(4, stream=stream)
        >>> stream.write_value_32(word, 6)
        >>> stream.wait_value_32(word, 2, WaitFlags.AND)
        >>> stream.sync(timeout=10)
        """
        self._here(self._wait_value, WaitValue(address, value, flags))

    def wait_value_64(self, address: int | Buffer, value: int, flags: int = WaitFlags.GEQ) -> None:
        """Hold the stream until the value of 64 bits in memory compares with one.

        Parameters
        ----------
        address : int, CUdeviceptr or GPU buffer
            As for `write_value_32`, at a multiple of 8.
        value : int
            What to compare with, from 0 to 2⁶⁴ - 1.
        flags : WaitFlags or int, default WaitFlags.GEQ
            How to compare.

        Raises
        ------
        NotSupportedError
            The device has no such operations on 64 bits, or lacks ``NOR`` or ``FLUSH``.
        ValueError, TypeError, CaptureError, ClosedError, ForkedError, DriverError
            As `wait_value_32`.

        Notes
        -----
        As `wait_value_32`. Driver call: ``cuStreamWaitValue64``.

        Examples
        --------
        >>> from cuda.core import Device
        >>> from userstream import Stream, WaitFlags
        >>> Device(0).set_current()
        >>> stream = Stream.create()
        >>> word = Device(0).allocate(8, stream=stream)
        >>> stream.write_value_64(word, 1 << 40)
        >>> stream.wait_value_64(word, 1 << 40, WaitFlags.EQ)
        >>> stream.sync(timeout=10)
        """
        self._here(self._wait_value, WaitValue(address, value, flags, 64))

    def batch_mem_op(self, ops: Iterable[MemoryOperation], flags: int = 0) -> None:
        """Do several memory operations in order, as one.

        Parameters
        ----------
        ops : iterable of WriteValue, WaitValue, MemoryBarrier and FlushRemoteWrites
            1 to 255 of them.
        flags : int, default 0
            The driver has none yet.

        Raises
        ------
        NotSupportedError
            The device lacks one of the operations.
        ValueError, TypeError, CaptureError, ClosedError, ForkedError, DriverError
            As `write_value_32` and `wait_value_32`, for any of the operations; none is done then.

        Notes
        -----
        As `write_value_32` and `wait_value_32`. Driver call: ``cuStreamBatchMemOp``. After
        baracuda's ``batch_mem_op``.

        Examples
        --------
        >>> from cuda.core import Device
        >>> from userstream import Stream, WaitValue, WriteValue
        >>> Device(0).set_current()
        >>> stream = Stream.create()
        >>> word = Device(0).allocate(4, stream=stream)
        >>> stream.batch_mem_op([WriteValue(word, 1), WaitValue(word, 1)])
        >>> stream.sync(timeout=10)
        """
        if _numbers.integer(flags, "flags") != 0:
            raise ValueError(f"cuStreamBatchMemOp has no flags yet: pass 0, not {flags!r}")
        try:
            operations = iter(ops)
        except TypeError:
            raise TypeError(
                "batch_mem_op takes an iterable of operations, such as a list, not "
                f"{type_name(ops)}"
            ) from None
        batch = list(operations)
        if not 1 <= len(batch) <= _MOST_OPERATIONS:
            raise ValueError(f"a batch has 1 to {_MOST_OPERATIONS} operations, not {len(batch)}")
        self._here(self._batch, batch)

    def _write(self, operation: WriteValue) -> None:
        handle, where = self._workable(), self._word(operation)
        _driver.write_value(handle, where, operation.value, bits=operation.bits, stream=self)

    def _wait_value(self, operation: WaitValue) -> None:
        handle, where = self._workable(), self._word(operation)
        value, flags = operation.value, operation.flags
        _driver.wait_value(handle, where, value, flags, bits=operation.bits, stream=self)

    def _batch(self, operations: list[MemoryOperation]) -> None:
        handle = self._workable()
        parameters = []
        for number, operation in enumerate(operations):
            try:
                parameters.append(self._parameters(operation))
            except Exception as error:
                error.add_note(f"that is operation {number} of the batch")
                raise
        _driver.submit_batch(handle, parameters, self)

    def _parameters(self, operation: MemoryOperation) -> driver.CUstreamBatchMemOpParams:
        match operation:
            case WriteValue(value=value, bits=bits):
                return _driver.write_operation(self._word(operation), value, bits)
            case WaitValue(value=value, flags=flags, bits=bits):
                return _driver.wait_operation(self._word(operation), value, flags, bits)
            case MemoryBarrier(scope=scope):
                return _driver.barrier_operation(scope)
            case FlushRemoteWrites():
                _driver.require_flush(self._device())
                return _driver.flush_operation()
        raise TypeError(
            "a batch consists of WriteValue, WaitValue, MemoryBarrier and FlushRemoteWrites, not "
            f"{type_name(operation)}"
        )

    def _word(self, operation: WriteValue | WaitValue) -> int:
        """Return where the device sees the word of an operation, if it may be used."""
        device, width = self._device(), operation.bits // 8
        flags = int(getattr(operation, "flags", 0))  # NumPy's would overflow
        _driver.require_values(device, bits=operation.bits, flags=flags)
        address, size = address_and_size(operation.address)
        if size is not None and size < width:
            raise ValueError(
                f"a value of {width} bytes does not fit into this "
                f"{type_name(operation.address)} of {size} bytes"
            )
        return _driver.device_word(address, width, device)

    def _workable(self) -> driver.CUstream:
        """Return the handle, or raise `CaptureError` if queueing work would break a capture."""
        handle = self._live()
        _driver.capture_status(handle, self)
        return handle
