"""Copies between device buffers, of one device or of two."""

from __future__ import annotations

from typing import TYPE_CHECKING

from userstream import _driver
from userstream._transfer import _layout
from userstream._transfer._arrays import broadcast_strides, check_same, check_target
from userstream._transfer._lane import Lane

if TYPE_CHECKING:
    from userstream._driver import Peers
    from userstream._stream.stream import Stream
    from userstream._transfer._arrays import DeviceArray
    from userstream._waiting import Deadline


def between(
    to: DeviceArray, source: DeviceArray, stream: Stream, deadline: Deadline | None = None
) -> None:
    """Copy an array to another behind the work on `stream`; waits for nothing."""
    check_same(to, source)
    check_target(to)
    source = source._replace(shape=to.shape, strides=broadcast_strides(source, to.shape))
    lane = Lane(stream, to.device, deadline)
    if 0 in to.shape or _is_same(to, source):
        return
    _refuse_overlap(to, source)
    plan = _layout.moves(to.shape, to.dtype.itemsize, to.strides, source.strides)
    lane.move(to.address, source.address, plan, _peers(to, source))


def _peers(to: DeviceArray, source: DeviceArray) -> Peers | None:
    if to.device == source.device:
        return None
    return _driver.primary_context(to.device), _driver.primary_context(source.device)


def _is_same(to: DeviceArray, source: DeviceArray) -> bool:
    """Tell whether each element is its own copy; along an axis of one no step is ever taken."""
    return to.address == source.address and all(
        count == 1 or step == from_step
        for count, step, from_step in zip(to.shape, to.strides, source.strides, strict=True)
    )


def _refuse_overlap(to: DeviceArray, source: DeviceArray) -> None:
    """Refuse what the driver leaves undefined. Two interleaved arrays are refused as well."""
    (to_begin, to_end), (begin, end) = (_extent(array) for array in (to, source))
    if begin < to_end and to_begin < end:
        raise ValueError(
            "the target and the source overlap in memory, or interleave; copy through another "
            "buffer"
        )


def _extent(array: DeviceArray) -> tuple[int, int]:
    span = _layout.spread(array.shape, array.strides, array.dtype.itemsize)
    lowest = array.address - span.offset
    return lowest, lowest + span.nbytes
