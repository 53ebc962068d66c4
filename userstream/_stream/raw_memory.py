"""Operations on raw memory: writes, waits for values, copies and attachments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from userstream import _driver, _numbers
from userstream._buffers import type_name
from userstream._stream.addresses import address_and_size
from userstream._stream.operations import (
    FlushRemoteWrites,
    MemoryBarrier,
    MemoryOperation,
    WaitValue,
    WriteValue,
)
from userstream.errors import DeviceMismatchError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cuda.bindings import driver

    from userstream._engine.lane import Lane
    from userstream.typing import Buffer

_MOST_OPERATIONS = 255  # of one batch, says CUDA


def write_value(lane: Lane, operation: WriteValue) -> None:
    """Enqueue the write of a value."""
    lane.live()
    lane.within(_write, lane, operation)


def wait_value(lane: Lane, operation: WaitValue) -> None:
    """Enqueue a wait for a value."""
    lane.live()
    lane.within(_wait_value, lane, operation)


def submit(lane: Lane, ops: Iterable[MemoryOperation], flags: int) -> None:
    """Enqueue a batch of memory operations."""
    if _numbers.integer(flags, "flags") != 0:
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
    lane.live()
    lane.within(_batch, lane, batch)


def copy(lane: Lane, dst: int | Buffer, src: int | Buffer, nbytes: int | None) -> None:
    """Enqueue a copy between two places in the memory of one device."""
    lane.live()
    lane.within(_copy, lane, dst, src, nbytes)


def attach(lane: Lane, memory: int | Buffer, to: Literal["global", "host", "single"]) -> None:
    """Enqueue the attachment of managed memory."""
    if to not in ("global", "host", "single"):
        raise ValueError(f'to must be "global", "host" or "single", not {to!r}')
    lane.live()
    lane.within(_attach, lane, memory, to)


def _write(lane: Lane, operation: WriteValue) -> None:
    handle, where = lane.usable(), _word(lane, operation)
    _driver.values.write_value(handle, where, operation.value, bits=operation.bits, stream=lane)


def _wait_value(lane: Lane, operation: WaitValue) -> None:
    handle, where = lane.usable(), _word(lane, operation)
    value, flags = operation.value, operation.flags
    _driver.values.wait_value(handle, where, value, flags, bits=operation.bits, stream=lane)


def _batch(lane: Lane, operations: list[MemoryOperation]) -> None:
    handle = lane.usable()
    parameters = []
    for number, operation in enumerate(operations):
        try:
            parameters.append(_parameters(lane, operation))
        except Exception as error:
            error.add_note(f"that is operation {number} of the batch")
            raise
    _driver.values.submit_batch(handle, parameters, lane)


def _parameters(lane: Lane, operation: MemoryOperation) -> driver.CUstreamBatchMemOpParams:
    match operation:
        case WriteValue(value=value, bits=bits):
            return _driver.values.write_operation(_word(lane, operation), value, bits)
        case WaitValue(value=value, flags=flags, bits=bits):
            return _driver.values.wait_operation(_word(lane, operation), value, flags, bits)
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
    """Return the device address of an operation's word; refuse one that cannot be used."""
    device, width = lane.device, operation.bits // 8
    flags = int(getattr(operation, "flags", 0))  # NumPy's would overflow
    _driver.values.require_values(device, bits=operation.bits, flags=flags)
    address, size = address_and_size(operation.address)
    if size is not None and size < width:
        raise ValueError(
            f"a value of {width} bytes does not fit into this "
            f"{type_name(operation.address)} of {size} bytes"
        )
    return _driver.values.device_word(address, width, device)


def _copy(lane: Lane, dst: int | Buffer, src: int | Buffer, nbytes: int | None) -> None:
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


def _attach(lane: Lane, memory: int | Buffer, to: str) -> None:
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
    size = _numbers.integer(nbytes, "nbytes")
    if size < 0:
        raise ValueError(f"nbytes must be at least 0, not {nbytes!r}")
    for role, there in (("dst", dst), ("src", src)):
        if there is not None and size > there:
            raise ValueError(f"nbytes={nbytes!r} is more than {role} has: {there}")
    return size
