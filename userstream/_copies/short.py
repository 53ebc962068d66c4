"""The short way of `asnumpy`, for what is usual: each call of a function counts here."""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from userstream._copies import copy_lane, layout, pinned, staging
from userstream._copies.arrays import check_out, device_array, pinned_address
from userstream._copies.ordered import Acquired, in_order
from userstream._ordering import usual_ordering_of_view
from userstream.errors import HostBufferError, UnsupportedBufferError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from userstream._buffers.view import View
    from userstream._copies.layout import Shape
    from userstream._engine.waiting import Deadline
    from userstream._ordering import Ordering
    from userstream._stream.stream import Stream

ASIDE = 1 << 16  # bytes of an array that are copied once more sooner than the driver is asked


class _Run(NamedTuple):
    """An array that comes to the host in one run of bytes."""

    width: int
    nbytes: int  # of the memory for it
    to: int  # where the run begins there
    source: int  # and from the first element on the device
    offset: int  # of the first element in the memory
    strides: Shape
    scattered: bool
    read_only: bool


@functools.lru_cache(maxsize=256)
def _run(shape: Shape, strides: Shape, itemsize: int) -> _Run | None:
    """Return how an array is one run of bytes; `None` if it is not."""
    if 0 in shape:
        return None
    packing, covering = layout.ways(shape, strides, itemsize)
    side, plan, _, read_only = covering or packing
    if plan.axes:
        return None
    width, _, to, source = plan
    to += side.offset
    scattered = packing.scattered
    return _Run(width, side.nbytes, to, source, side.offset, side.strides, scattered, read_only)


def to_host(
    view: View, out: np.ndarray | None, streams: Mapping[int, Stream], deadline: Deadline
) -> np.ndarray | None:
    """Copy an array, or return `None` if there is more to it.

    That is for one whose producer is a stream, on a device that has its user stream, and which
    comes to page-locked memory in one run of bytes.
    """
    try:
        consumer = streams.get(view.device)
    except (HostBufferError, UnsupportedBufferError):
        return None
    if consumer is None:
        return None
    address, shape, strides, dtype, device = source = device_array(view)
    run = _run(shape, strides, dtype.itemsize)
    if run is None or (view.packs and (run.scattered or view.is_disguised)):
        return None
    width, nbytes, to, start, offset, strides, _, read_only = run
    if out is not None:
        check_out(out, source)
        if width > ASIDE and (width > 2 * staging.SIZE or pinned_address(out) is not None):
            return None
    ordering = usual_ordering_of_view(view, consumer)
    if ordering is None:
        return None
    memory: Any = pinned.take(nbytes, device)  # some stubs of NumPy know no ctypes array
    if memory is None:
        return None
    result = np.ndarray(shape, dtype, memory, offset, strides)
    start += address
    to += ctypes.addressof(memory)
    _at_once(ordering, to, start, width, deadline=deadline, memory=memory)
    if out is not None:
        np.copyto(out, result)
        return out
    if read_only:
        result.flags.writeable = False
    return result


def _at_once(
    ordering: Ordering, to: int, start: int, width: int, *, deadline: Deadline, memory: object
) -> None:
    """Do as `in_order` would, in one call of the driver's room if that is possible."""
    lane, producers = ordering.lane, ordering.producers
    ordering.may_wait = True
    acquired = Acquired(ordering, deadline, memory)
    try:
        try:
            before = producers[0] if producers else None
            done = copy_lane.fetch(lane, to, start, width, after=before, deadline=deadline)
            acquired.end(release=False)
        except BaseException as error:
            acquired.end_after(error)
            raise
    except BaseException as error:
        acquired.end_after(error)
        raise
    if not done:
        copy = functools.partial(copy_lane.copy_and_wait, lane, to, start, width, deadline)
        in_order(ordering, copy, release=False, deadline=deadline, memory=memory)
