"""Memory operations: values that streams write and wait for."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from cuda.bindings import driver

from userstream._driver.copies import device_address
from userstream._driver.library import device_attribute
from userstream._driver.pointers import can_access, is_of_pool, place_of
from userstream._driver.status import call
from userstream.errors import DriverError, NotSupportedError

Bits: TypeAlias = Literal[32, 64]

_Attribute = driver.CUdevice_attribute
_64_BITS = _Attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS
_NOR = _Attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR
_FLUSH = _Attribute.CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES

_Type = driver.CUstreamBatchMemOpType
_Flags = driver.CUstreamWaitValue_flags
COMPARISONS = 3  # the bits of the flags that say how to compare
FLUSH_FLAG = int(_Flags.CU_STREAM_WAIT_VALUE_FLUSH)
_NOR_FLAG = int(_Flags.CU_STREAM_WAIT_VALUE_NOR)
_BARRIERS = driver.CUstreamMemoryBarrier_flags
BARRIERS = {
    "system": int(_BARRIERS.CU_STREAM_MEMORY_BARRIER_TYPE_SYS),
    "gpu": int(_BARRIERS.CU_STREAM_MEMORY_BARRIER_TYPE_GPU),
}


def require_values(device: int, *, bits: Bits = 32, flags: int = 0) -> None:
    """Raise `NotSupportedError` if a device lacks a feature that an operation needs."""
    if bits == 64:
        _require(device, _64_BITS, "64-bit values; use 32-bit ones")
    if flags & COMPARISONS == _NOR_FLAG:
        _require(device, _NOR, "the NOR comparison; wait with another one")
    if flags & FLUSH_FLAG:
        require_flush(device)


def require_flush(device: int) -> None:
    """Raise `NotSupportedError` if a device cannot flush remote writes."""
    _require(device, _FLUSH, "flushes of remote writes; leave the flush out")


def _require(device: int, attribute: driver.CUdevice_attribute, lacking: str) -> None:
    if not device_attribute(device, attribute):
        raise NotSupportedError(f"device {device} does not support {lacking}", device=device)


def device_word(address: int, width: int, device: int) -> int:
    """Return the device address of a word; raise if no stream can write or wait for the word."""
    where = f"address {address:#x}"
    if address % width:
        raise ValueError(f"{where} is not a multiple of {width}, the size of the value")
    place = place_of(address)
    if place is None:
        raise ValueError(
            f"{where} is not in memory that CUDA knows; use device memory or pinned host memory"
        )
    if place.is_managed:
        raise ValueError(
            f"{where} is in managed memory, where CUDA does not support this; use device memory or "
            "pinned host memory"
        )
    if place.is_host and is_of_pool(address):
        raise ValueError(
            f"{where} is in a pool of host memory (as results of asnumpy are), where CUDA does not "
            "support this; use device memory or other pinned host memory"
        )
    if not place.covers(address, width):
        raise ValueError(f"a value of {width} bytes at {where} extends beyond its allocation")
    if place.is_host:
        return device_address(address)
    if not can_access(address):
        raise ValueError(f"{where} is in memory that device {device} cannot access")
    return address


def write_value(
    handle: driver.CUstream, address: int, value: int, *, bits: Bits, stream: object
) -> None:
    """Queue a write of a value to memory."""
    write = driver.cuStreamWriteValue32 if bits == 32 else driver.cuStreamWriteValue64
    call(write, handle, address, value, 0, stream=stream)


def wait_value(
    handle: driver.CUstream, address: int, value: int, flags: int, *, bits: Bits, stream: object
) -> None:
    """Make a stream wait until a value in memory satisfies a comparison."""
    wait = driver.cuStreamWaitValue32 if bits == 32 else driver.cuStreamWaitValue64
    call(wait, handle, address, value, flags, stream=stream)


def value_operation(
    kind: Literal["WRITE", "WAIT"], address: int, value: int, flags: int, bits: Bits
) -> driver.CUstreamBatchMemOpParams:
    """Return the write of a value, or the wait for a value, as part of a batch."""
    operation = driver.CUstreamBatchMemOpParams()
    word: Any = operation.writeValue if kind == "WRITE" else operation.waitValue
    word.operation = getattr(_Type, f"CU_STREAM_MEM_OP_{kind}_VALUE_{bits}")
    word.address = address
    if bits == 32:
        word.value = driver.cuuint32_t(value)
    else:
        word.value64 = driver.cuuint64_t(value)
    word.flags = flags
    return operation


def flush_operation() -> driver.CUstreamBatchMemOpParams:
    """Return a flush of remote writes as part of a batch."""
    operation = driver.CUstreamBatchMemOpParams()
    operation.flushRemoteWrites.operation = _Type.CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES
    return operation


def barrier_operation(scope: str) -> driver.CUstreamBatchMemOpParams:
    """Return a memory barrier as part of a batch."""
    operation = driver.CUstreamBatchMemOpParams()
    operation.memoryBarrier.operation = _Type.CU_STREAM_MEM_OP_BARRIER
    operation.memoryBarrier.flags = BARRIERS[scope]
    return operation


def submit_batch(
    handle: driver.CUstream, operations: list[driver.CUstreamBatchMemOpParams], stream: object
) -> None:
    """Queue several memory operations as one batch.

    Raises
    ------
    NotSupportedError
        The device lacks one of them. It cannot be asked which barriers it has.
    """
    try:
        call(driver.cuStreamBatchMemOp, handle, len(operations), operations, 0, stream=stream)
    except DriverError as error:
        if error.code != driver.CUresult.CUDA_ERROR_NOT_SUPPORTED:
            raise
        raise NotSupportedError(
            f"the device of {stream!r} does not support one of these operations, usually a "
            "MemoryBarrier; leave it out",
            device=error.device,
            stream=error.stream,
        ) from error
