"""Operations of a stream on raw memory: values, batches, copies, attachments, and gates."""

from __future__ import annotations

import ctypes
import enum
import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, SupportsIndex

import numpy as np
from cuda.bindings import driver

from userstream import _arguments, _buffers, _driver, _process
from userstream._buffers import type_name
from userstream._buffers.view import contiguous_strides, used_strides
from userstream.errors import DeviceMismatchError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from userstream._engine.lane import Lane
    from userstream.typing import Buffer


class WaitFlags(enum.IntEnum):
    """Comparisons of `Stream.wait_value_32` between memory (*m*) and the given value (*v*).

    A comparison can be combined with ``FLUSH``, as in ``WaitFlags.EQ | WaitFlags.FLUSH``, but not
    with another comparison: ``EQ | AND`` is ``NOR``. The values are the driver's
    ``CUstreamWaitValue_flags``.

    Attributes
    ----------
    GEQ
        Until ``m - v >= 0``, as a signed number of that width, so that counters may wrap around.
    EQ
        Until ``m == v``.
    AND
        Until ``m & v != 0``.
    NOR
        Until ``~(m | v) != 0``. Not supported by every device.
    FLUSH
        Make other devices' writes that precede the value visible after the wait. Not supported by
        every device.

    Examples
    --------
    >>> import userstream as us
    >>> from cuda.core import Device
    >>> Device(0).set_current()
    >>> stream = us.get_stream(0)
    >>> word = Device(0).allocate(4, stream=stream)
    >>> stream.write_value_32(word, 3)
    >>> stream.wait_value_32(word, 3, us.WaitFlags.EQ)
    >>> stream.sync(timeout=10)
    """

    __module__ = "userstream"

    GEQ = 0
    EQ = 1
    AND = 2
    NOR = 3
    FLUSH = 1 << 30


class MemoryOperation:
    """Base class of the operations of `Stream.batch_mem_op`."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class WriteValue(MemoryOperation):
    """A write of `Stream.batch_mem_op`.

    Parameters
    ----------
    address : int, CUdeviceptr or GPU buffer
        The destination, as for `Stream.write_value_32`.
    value : int
        The value to write; an unsigned number of that many bits.
    bits : {32, 64}, default 32
        The width of the value.

    Raises
    ------
    TypeError, ValueError
        *value* is not an unsigned number of *bits* bits, or *bits* is neither 32 nor 64.

    Examples
    --------
    >>> import userstream as us
    >>> from cuda.core import Device
    >>> Device(0).set_current()
    >>> stream = us.get_stream(0)
    >>> word = Device(0).allocate(4, stream=stream)
    >>> stream.batch_mem_op([us.WriteValue(word, 1)])
    """

    __module__ = "userstream"

    address: int | Buffer
    value: int
    bits: _driver.values.Bits = 32

    def __post_init__(self) -> None:
        _check_value(self.value, self.bits)


@dataclass(frozen=True, slots=True)
class WaitValue(MemoryOperation):
    """A wait of `Stream.batch_mem_op`.

    Parameters
    ----------
    address : int, CUdeviceptr or GPU buffer
        The location to poll, as for `Stream.wait_value_32`.
    value : int
        The value to compare with; an unsigned number of that many bits.
    flags : WaitFlags or int, default WaitFlags.GEQ
        The comparison.
    bits : {32, 64}, default 32
        The width of the value.

    Raises
    ------
    TypeError, ValueError
        *value* is not an unsigned number of *bits* bits, *bits* is neither 32 nor 64, or *flags* is
        not a `WaitFlags`.

    Examples
    --------
    >>> import userstream as us
    >>> from cuda.core import Device
    >>> Device(0).set_current()
    >>> stream = us.get_stream(0)
    >>> word = Device(0).allocate(4, stream=stream)
    >>> stream.batch_mem_op([us.WriteValue(word, 7), us.WaitValue(word, 7, us.WaitFlags.EQ)])
    >>> stream.sync(timeout=10)
    """

    __module__ = "userstream"

    address: int | Buffer
    value: int
    flags: int = WaitFlags.GEQ
    bits: _driver.values.Bits = 32

    def __post_init__(self) -> None:
        _check_value(self.value, self.bits)
        flags = _arguments.integer(self.flags, "flags")
        if flags & ~(_driver.values.COMPARISONS | _driver.values.FLUSH_FLAG):
            raise ValueError(
                "flags of a wait must be one of WaitFlags.GEQ, EQ, AND and NOR, or that | FLUSH, "
                f"not {self.flags!r}"
            )


@dataclass(frozen=True, slots=True)
class FlushRemoteWrites(MemoryOperation):
    """A flush of `Stream.batch_mem_op`: makes other devices' earlier writes visible.

    Examples
    --------
    >>> import userstream as us
    >>> stream = us.get_stream(0)
    >>> try:
    ...     stream.batch_mem_op([us.FlushRemoteWrites()])
    ... except us.NotSupportedError:
    ...     pass  # not every device has it
    """

    __module__ = "userstream"


@dataclass(frozen=True, slots=True)
class MemoryBarrier(MemoryOperation):
    """A memory barrier of `Stream.batch_mem_op`.

    Parameters
    ----------
    scope : {"system", "gpu"}, default "system"
        The observers that see earlier writes before later ones: the whole system, or this GPU.

    Raises
    ------
    ValueError
        *scope* is neither ``"system"`` nor ``"gpu"``.

    Examples
    --------
    >>> import userstream as us
    >>> stream = us.get_stream(0)
    >>> try:
    ...     stream.batch_mem_op([us.MemoryBarrier("gpu")])
    ... except us.NotSupportedError:
    ...     pass  # not every device has it
    """

    __module__ = "userstream"

    scope: Literal["system", "gpu"] = "system"

    def __post_init__(self) -> None:
        if self.scope not in ("system", "gpu"):
            raise ValueError(
                f'the scope of a barrier must be "system" or "gpu", not {self.scope!r}'
            )


def _check_value(value: int, bits: int) -> None:
    width = _arguments.integer(bits, "bits")
    if width not in (32, 64):
        raise ValueError(f"bits must be 32 or 64, not {bits!r}")
    if not 0 <= _arguments.integer(value, "value") < 1 << width:
        wider = "; there are 64 bits as well" if width == 32 and 0 <= value < 1 << 64 else ""
        raise ValueError(f"{value!r} is not an unsigned number of {bits} bits{wider}")


_MOST_OPERATIONS = 255  # CUDA's limit for one batch


def write_value(lane: Lane, operation: WriteValue) -> None:
    """Enqueue the write of a value; the lane's context is current."""
    handle, where = lane.usable(), _word(lane, operation)
    _driver.values.write_value(handle, where, operation.value, bits=operation.bits, stream=lane)


def wait_value(lane: Lane, operation: WaitValue) -> None:
    """Enqueue a wait for a value; the lane's context is current."""
    handle, where = lane.usable(), _word(lane, operation)
    value, flags = operation.value, operation.flags
    _driver.values.wait_value(handle, where, value, flags, bits=operation.bits, stream=lane)


def submit(lane: Lane, ops: Iterable[MemoryOperation], flags: int) -> None:
    """Enqueue a batch of memory operations; the lane's context is current."""
    if _arguments.integer(flags, "flags") != 0:
        raise ValueError(f"cuStreamBatchMemOp has no flags yet: pass 0, not {flags!r}")
    try:
        operations = iter(ops)
    except TypeError:
        raise TypeError(
            f"batch_mem_op takes an iterable of operations, such as a list, not {type_name(ops)}"
        ) from None
    batch = list(operations)
    if not 1 <= len(batch) <= _MOST_OPERATIONS:
        raise ValueError(f"a batch must have 1 to {_MOST_OPERATIONS} operations, not {len(batch)}")
    handle = lane.usable()
    parameters = []
    for number, operation in enumerate(batch):
        try:
            parameters.append(_parameters(lane, operation))
        except Exception as error:
            error.add_note(f"that is operation {number} of the batch")
            raise
    _driver.values.submit_batch(handle, parameters, lane)


def _parameters(lane: Lane, operation: MemoryOperation) -> driver.CUstreamBatchMemOpParams:
    match operation:
        case WriteValue(value=value, bits=bits):
            return _driver.values.value_operation("WRITE", _word(lane, operation), value, 0, bits)
        case WaitValue(value=value, flags=flags, bits=bits):
            word = _word(lane, operation)
            return _driver.values.value_operation("WAIT", word, value, flags, bits)
        case MemoryBarrier(scope=scope):
            return _driver.values.barrier_operation(scope)
        case FlushRemoteWrites():
            _driver.values.require_flush(lane.device)
            return _driver.values.flush_operation()
    raise TypeError(
        "a batch must consist of WriteValue, WaitValue, MemoryBarrier and FlushRemoteWrites, not "
        f"{type_name(operation)}"
    )


def _word(lane: Lane, operation: WriteValue | WaitValue) -> int:
    """Return the device address of an operation's word; raise if the address is unusable."""
    device, width = lane.device, operation.bits // 8
    flags = int(getattr(operation, "flags", 0))  # a NumPy integer would overflow
    _driver.values.require_values(device, bits=operation.bits, flags=flags)
    address, size = address_and_size(operation.address)
    if size is not None and size < width:
        raise ValueError(
            f"a value of {width} bytes does not fit into this "
            f"{type_name(operation.address)} of {size} bytes"
        )
    return _driver.values.device_word(address, width, device)


def copy(lane: Lane, dst: int | Buffer, src: int | Buffer, nbytes: int | None) -> None:
    """Enqueue a copy within the memory of one device; the lane's context is current."""
    handle = lane.usable()
    (to, to_size), (from_, from_size) = address_and_size(dst), address_and_size(src)
    size = _size_of_copy(to_size, from_size, nbytes)
    if size == 0:
        return
    for role, address in (("dst", to), ("src", from_)):
        _check_place(lane, role, address, size)
    if abs(to - from_) < size:
        raise ValueError(f"dst ({to:#x}) and src ({from_:#x}) overlap in a copy of {size} bytes")
    _driver.copies.copy_on_device(to, from_, size, handle, lane)


def _check_place(lane: Lane, role: str, address: int, size: int) -> None:
    place = _driver.pointers.place_of(address)
    if place is None:
        raise ValueError(f"{role} ({address:#x}) is not in memory that CUDA knows")
    if place.kind == "pinned":
        raise ValueError(
            f"{role} ({address:#x}) is in pinned host memory; memcpy_dtod copies between "
            "device memory"
        )
    if not place.covers(address, size):
        raise ValueError(
            f"{size} bytes at {role} ({address:#x}) extend beyond the allocation there, of "
            f"{place.size} bytes at {place.start:#x}"
        )
    own = lane.device
    if place.device != own and not place.is_managed:
        raise DeviceMismatchError(
            f"{role} ({address:#x}) is in the memory of device {place.device}, and {lane!r} is "
            f"on device {own}; memcpy_dtod copies within one device",
            devices=[own, place.device],
            stream=repr(lane),
        )


def attach(lane: Lane, memory: int | Buffer, to: Literal["global", "host", "single"]) -> None:
    """Enqueue the attachment of managed memory; the lane's context is current."""
    if to not in ("global", "host", "single"):
        raise ValueError(f'to must be "global", "host" or "single", not {to!r}')
    handle = lane.usable(", and an attachment cannot be captured")
    if to == "single" and int(handle) == _driver.streams.LEGACY:
        raise ValueError(
            f"memory cannot be attached to {lane!r} alone: CUDA does not allow it; pass "
            'to="global", or use another stream'
        )
    address, _size = address_and_size(memory)
    place = _driver.pointers.place_of(address)
    if place is None or not place.is_managed:
        raise ValueError(f"address {address:#x} is not in managed memory, so it cannot be attached")
    if place.start != address:
        raise ValueError(
            f"address {address:#x} is not the start of its allocation, which is at "
            f"{place.start:#x}; managed memory is attached as a whole"
        )
    _driver.copies.attach_memory(address, to, handle, lane)


def _size_of_copy(dst: int | None, src: int | None, nbytes: int | None) -> int:
    if nbytes is None:
        if dst is None and src is None:
            raise ValueError("the size of a copy between two addresses is not known: pass nbytes")
        if dst is not None and src is not None and dst != src:
            raise ValueError(
                f"dst has {dst} bytes and src {src}: pass buffers of one size, or nbytes"
            )
        return src if dst is None else dst  # type: ignore[return-value] # one of them is known
    size = _arguments.integer(nbytes, "nbytes")
    if size < 0:
        raise ValueError(f"nbytes must be at least 0, not {nbytes!r}")
    for role, there in (("dst", dst), ("src", src)):
        if there is not None and size > there:
            raise ValueError(f"nbytes={nbytes!r} is more than {role} has: {there}")
    return size


def address_and_size(memory: int | Buffer) -> tuple[int, int | None]:
    """Return the address of raw memory or of a contiguous buffer, and the size of a buffer."""
    if isinstance(memory, (bool, np.bool_)):
        raise TypeError(f"an address is a number or a buffer, not {memory!r}")
    if isinstance(memory, (int, driver.CUdeviceptr)):
        return _checked(int(memory)), None
    if _buffers.kind_of(memory) is None and isinstance(memory, SupportsIndex):  # NumPy's integers
        return _checked(memory.__index__()), None
    info = _buffers.view_of(memory).info()
    if info.address is None or info.parts:
        raise ValueError(f"{type_name(memory)} is made of several buffers; pass one of them")
    if info.strides is not None and info.shape is not None and info.nbytes:
        count = math.prod(info.shape)
        dense = contiguous_strides(info.shape, info.nbytes // count)
        if used_strides(info.shape, info.strides) != used_strides(info.shape, dense):
            raise ValueError(
                f"the elements of this {type_name(memory)} do not lie side by side in C "
                f"order (strides {info.strides}); pass a contiguous one"
            )
    return info.address, info.nbytes


def _checked(address: int) -> int:
    if not 0 <= address < 1 << 64:
        raise ValueError(f"{address} is not an address: addresses are from 0 to 2**64 - 1")
    return address


_PAGE = 4096
_WIDTH = 4
_free_words: dict[int, deque[int]] = {}  # addresses of page-locked 32-bit words, by device


class Gate:
    """A 32-bit word that a stream waits for: at `address`, until it reaches `value`."""

    __slots__ = ("_device", "address", "value")

    def __init__(self, device: int) -> None:
        self._device = device
        self.address = 0  # unless the gate has a word
        self.value = 0

    def take(self) -> None:
        """Take a word and choose the value that releases the stream."""
        words = _free_words.get(self._device) or _free_words.setdefault(self._device, deque())
        address = 0
        while not address:  # another thread may take the words of a new page
            try:
                address = words.pop()
            except IndexError:
                context = _driver.contexts.primary_context(self._device)
                page = _driver.copies.allocate_pinned(context, _PAGE)
                words.extend(range(page, page + _PAGE, _WIDTH))
        # Increment the value of the previous use: pending waits of that use (GEQ) are satisfied as
        # well. A smaller value could block those waits forever, so `address` is set last.
        self.value = (ctypes.c_uint32.from_address(address).value + 1) & 0xFFFFFFFF
        self.address = address

    def release(self) -> None:
        """Release the stream. The word can be reused at once."""
        if self.address:
            # Write before giving the word back: an exception of a signal handler between the two
            # steps loses the word. In the other order it would block the stream forever.
            _process.fence()  # make earlier writes visible to the stream first
            ctypes.c_uint32.from_address(self.address).value = self.value
            address, self.address = self.address, 0
            _free_words[self._device].append(address)
