"""Copies, each queued on a stream; none of them blocks with memory that the driver knows."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from cuda.bindings import driver

from userstream._driver.status import call

if TYPE_CHECKING:
    from typing import Any

_UNIFIED = driver.CUmemorytype.CU_MEMORYTYPE_UNIFIED
_DEVICE = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE


class Copy(NamedTuple):
    """What one call moves: `slices` of `rows` of `width` bytes."""

    width: int
    rows: int
    slices: int
    to_offset: int
    to_pitch: int
    to_height: int  # rows from one slice to the next
    from_offset: int
    from_pitch: int
    from_height: int


def copy(to: int, source: int, size: int, handle: driver.CUstream, stream: object) -> None:
    """Copy contiguous memory."""
    call(driver.cuMemcpyAsync, to, source, size, handle, stream=stream)


def copy_shaped(to: int, source: int, what: Copy, handle: driver.CUstream, stream: object) -> None:
    """Copy rows that are apart."""
    parameters = driver.CUDA_MEMCPY3D()
    parameters.dstMemoryType = parameters.srcMemoryType = _UNIFIED
    _fill(parameters, to, source, what)
    call(driver.cuMemcpy3DAsync, parameters, handle, stream=stream)


def copy_peer(
    to: int,
    source: int,
    size: int,
    *,
    contexts: tuple[driver.CUcontext, driver.CUcontext],
    handle: driver.CUstream,
    stream: object,
) -> None:
    """Copy contiguous memory between devices; `contexts` are those of the target and the source."""
    call(
        driver.cuMemcpyPeerAsync, to, contexts[0], source, contexts[1], size, handle, stream=stream
    )


def copy_shaped_peer(
    to: int,
    source: int,
    what: Copy,
    *,
    contexts: tuple[driver.CUcontext, driver.CUcontext],
    handle: driver.CUstream,
    stream: object,
) -> None:
    """Copy rows that are apart between devices."""
    parameters = driver.CUDA_MEMCPY3D_PEER()
    parameters.dstMemoryType = parameters.srcMemoryType = _DEVICE
    parameters.dstContext, parameters.srcContext = contexts
    _fill(parameters, to, source, what)
    call(driver.cuMemcpy3DPeerAsync, parameters, handle, stream=stream)


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
