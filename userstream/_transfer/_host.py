"""Copies between a device and the host."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np

from userstream._transfer import _chunks, _layout, _pinned, _ways
from userstream._transfer._arrays import (
    DeviceArray,
    broadcast_strides,
    check_out,
    check_same,
    check_target,
    pinned_address,
    surplus_axes,
)
from userstream._transfer._lane import Lane

if TYPE_CHECKING:
    from userstream._stream.stream import Stream
    from userstream._waiting import Deadline

_BYTE = np.dtype(np.uint8)
_STAGED = 16 << 20  # bytes of a host array that are copied aside, so that nothing is waited for
_FEW = 64  # driver calls for one array


def is_scattered(array: DeviceArray) -> bool:
    """Tell whether the framework of an array should make it contiguous before `to_host`."""
    return 0 not in array.shape and _ways.is_scattered(array)


def to_host(
    source: DeviceArray,
    stream: Stream,
    out: np.ndarray | None = None,
    deadline: Deadline | None = None,
) -> np.ndarray:
    """Copy an array to the host behind the work on `stream`, and wait for that copy.

    The result has the order in memory that the array has. It is read-only where elements share
    memory, as in NumPy's broadcast views. On an error, what `out` holds is undefined; and after a
    timeout or a Ctrl-C the GPU may still write a page-locked `out`.
    """
    if out is not None:
        check_out(out, source)
    lane = Lane(stream, source.device, deadline)
    if out is not None:
        _into(out, source, lane)
        return out
    if 0 in source.shape:
        return np.empty(source.shape, source.dtype)
    result = _cached(source, lane)
    return _pageable(source, lane) if result is None else result


def _cached(source: DeviceArray, lane: Lane) -> np.ndarray | None:
    """Copy to page-locked memory of the cache; return `None` if it has none left."""
    chosen = _ways.way(source)
    memory = _pinned.take(chosen.side.nbytes, lane.device)
    if memory is None:
        return None
    to = ctypes.addressof(memory) + chosen.side.offset
    lane.copy_and_wait(to, source.address, chosen.moves, memory)
    return chosen.array(memory, source.shape, source.dtype)


def into_host(
    out: np.ndarray, source: DeviceArray, stream: Stream, deadline: Deadline | None = None
) -> None:
    """Copy an array to a host array as `to_host`, but broadcast it to the shape of the array."""
    source = source._replace(shape=out.shape, strides=broadcast_strides(source, out.shape))
    check_out(out, source)
    _into(out, source, Lane(stream, source.device, deadline))


def _into(out: np.ndarray, source: DeviceArray, lane: Lane) -> None:
    if 0 in source.shape:
        return
    to = pinned_address(out)
    if to is not None and not _layout.may_alias(out.shape, out.strides, out.itemsize):
        plan = _layout.moves(source.shape, out.itemsize, out.strides, source.strides)
        if _is_direct(plan):
            lane.copy_and_wait(to, source.address, plan, out)
            return
    if out.nbytes > 2 * _chunks.SIZE:
        _chunks.to_host(lane, source, out)
        return
    staged = _cached(source, lane)
    if staged is None:
        _chunks.to_host(lane, source, out)
    else:
        np.copyto(out, staged)


def _is_direct(plan: _layout.Moves) -> bool:
    """Tell whether a copy needs no staging to be fast."""
    if not plan.axes:
        return True
    return not _layout.is_scattered(plan) and _layout.copies(plan)[0] <= _FEW


def _pageable(source: DeviceArray, lane: Lane) -> np.ndarray:
    """Copy to memory that is not page-locked, because the cache has none left."""
    chosen = _ways.way(source)
    memory = np.empty(chosen.side.nbytes, _BYTE)
    if not chosen.moves.axes:  # one run of bytes, whatever its shape
        start = source.address + chosen.moves.from_offset
        _chunks.to_host(lane, DeviceArray(start, memory.shape, (1,), _BYTE, source.device), memory)
        return chosen.array(memory, source.shape, source.dtype)
    # One element stands for all of a broadcast axis, on both sides.
    shape = tuple(
        count if stride else 1 for count, stride in zip(source.shape, source.strides, strict=True)
    )
    target = chosen.side.array(memory, shape, source.dtype)
    _chunks.to_host(lane, source._replace(shape=shape), target)
    return chosen.array(memory, source.shape, source.dtype)


def from_host(
    source: np.ndarray, to: DeviceArray, stream: Stream, deadline: Deadline | None = None
) -> None:
    """Copy a host array to an array behind the work on `stream`; it may be reused on return.

    Up to 16 MiB are copied aside, and nothing is waited for. A larger array is waited for; after a
    timeout or a Ctrl-C what that holds is undefined, and the GPU may still read the array if
    it is page-locked.
    """
    check_same(to, source)
    check_target(to)
    surplus = surplus_axes(source.shape, to.shape)
    source = np.broadcast_to(source[(0,) * surplus + (...,)], to.shape)  # ... : no scalar
    lane = Lane(stream, to.device, deadline)
    if 0 in to.shape:
        return
    if source.nbytes <= _STAGED:
        memory = _pinned.take(source.nbytes, lane.device)
        if memory is not None:
            _send(lane, to, source, memory)
            return
    elif (address := pinned_address(source)) is not None:
        plan = _layout.moves(to.shape, to.dtype.itemsize, to.strides, source.strides)
        if _is_direct(plan):
            lane.copy_and_wait(to.address, address, plan, source)
            return
    _chunks.from_host(lane, to, source)


def _send(lane: Lane, to: DeviceArray, source: np.ndarray, memory: _pinned.Lease) -> None:
    start, plan = _chunks.stage(to, source, memory)
    use = lane.use(memory)
    try:
        lane.move(to.address, start, plan, None)
        use.hold()
    except BaseException:
        use.hold_after_error()
        raise
