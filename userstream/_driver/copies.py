"""Copies that streams perform, page-locked host memory, and access to managed memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from cuda.bindings import driver

from userstream._driver.contexts import within
from userstream._driver.status import SUCCESS, call, failed, raised
from userstream._driver.streams import relaxed

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


class Lane(Protocol):
    """A stream in its context."""

    @property
    def handle(self) -> driver.CUstream | None: ...
    @property
    def context(self) -> driver.CUcontext: ...


# Of a copy between two devices: the contexts of the target and of the source.
Peers: TypeAlias = tuple[driver.CUcontext, driver.CUcontext]

_UNIFIED = driver.CUmemorytype.CU_MEMORYTYPE_UNIFIED
_DEVICE = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE


class Copy(NamedTuple):
    """The bytes that one call copies: `slices` of `rows` of `width` bytes."""

    width: int
    rows: int
    slices: int
    to_offset: int
    to_pitch: int
    to_height: int  # rows from one slice to the next
    from_offset: int
    from_pitch: int
    from_height: int


def copy_within(lane: Lane, to: int, source: int, size: int, peers: Peers | None = None) -> None:
    """Copy contiguous memory on a lane, whichever context is current."""
    handle, context = lane.handle, lane.context
    if peers is not None:
        there, here = peers
        arguments = (to, there, source, here, size, handle)
        within(context, _call_for, lane, driver.cuMemcpyPeerAsync, *arguments)
        return
    try:
        if driver.cuCtxGetCurrent()[1] != context:
            within(context, _call_for, lane, driver.cuMemcpyAsync, to, source, size, handle)
            return
        (status,) = driver.cuMemcpyAsync(to, source, size, handle)
    except (RuntimeError, ValueError) as error:
        raise raised("cuMemcpyAsync", error) from error
    if status != SUCCESS:
        raise failed("cuMemcpyAsync", status, lane)


def _call_for(lane: Lane, function: Callable[..., Any], *arguments: object) -> None:
    call(function, *arguments, stream=lane)


def copy_shaped(
    to: int,
    source: int,
    what: Copy,
    handle: driver.CUstream,
    stream: object,
    *,
    peers: Peers | None = None,
) -> None:
    """Copy rows with gaps between them."""
    if peers is None:
        parameters = driver.CUDA_MEMCPY3D()
        parameters.dstMemoryType = parameters.srcMemoryType = _UNIFIED
        _fill(parameters, to, source, what)
        call(driver.cuMemcpy3DAsync, parameters, handle, stream=stream)
    else:
        parameters = driver.CUDA_MEMCPY3D_PEER()
        parameters.dstMemoryType = parameters.srcMemoryType = _DEVICE
        parameters.dstContext, parameters.srcContext = peers
        _fill(parameters, to, source, what)
        call(driver.cuMemcpy3DPeerAsync, parameters, handle, stream=stream)


def copy_on_device(
    to: int, source: int, size: int, handle: driver.CUstream, stream: object
) -> None:
    """Copy contiguous memory within one device, by a call that refuses other memory."""
    call(driver.cuMemcpyDtoDAsync, to, source, size, handle, stream=stream)


def _fill(parameters: Any, to: int, source: int, what: Copy) -> None:
    parameters.dstDevice = to + what.to_offset
    parameters.dstPitch = what.to_pitch
    parameters.dstHeight = what.to_height
    parameters.srcDevice = source + what.from_offset
    parameters.srcPitch = what.from_pitch
    parameters.srcHeight = what.from_height
    parameters.WidthInBytes = what.width
    parameters.Height = what.rows
    parameters.Depth = what.slices


def allocate_pinned(context: driver.CUcontext, size: int) -> int:
    """Allocate page-locked host memory for all devices; return its address."""
    flags = driver.CU_MEMHOSTALLOC_PORTABLE
    return int(within(context, relaxed, call, driver.cuMemHostAlloc, size, flags))


def free_pinned(context: driver.CUcontext, address: int) -> None:
    """Free memory of `allocate_pinned`. Waits for the device."""
    within(context, relaxed, call, driver.cuMemFreeHost, address)


def device_address(address: int) -> int:
    """Return the address of page-locked host memory for the device of the current context."""
    return int(relaxed(call, driver.cuMemHostGetDevicePointer, address, 0))


ATTACHMENTS = {
    "global": int(driver.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL),
    "host": int(driver.CUmemAttach_flags.CU_MEM_ATTACH_HOST),
    "single": int(driver.CUmemAttach_flags.CU_MEM_ATTACH_SINGLE),
}


def attach_memory(address: int, to: str, handle: driver.CUstream, stream: object) -> None:
    """Queue a change of the access to a whole allocation of managed memory."""
    call(driver.cuStreamAttachMemAsync, handle, address, 0, ATTACHMENTS[to], stream=stream)
