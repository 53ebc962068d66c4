"""The short way of `asnumpy`, for what is usual: each call of a function counts here."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from userstream._copies import copy_lane, layout, pinned, staging
from userstream._copies.arrays import address_of, check_out, elements, extent, is_pinned
from userstream._copies.ordered import Acquired, in_order
from userstream._engine import holding
from userstream._ordering import ordering_of_lanes, usual_lanes_of_view
from userstream.errors import HostBufferError, UnsupportedBufferError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from userstream._buffers.view import View
    from userstream._copies.layout import Shape
    from userstream._engine.waiting import Deadline
    from userstream._ordering import Lanes
    from userstream._stream.stream import Stream

ASIDE = 1 << 16  # bytes of an array that are copied once more sooner than the driver is asked


@dataclass(frozen=True, slots=True)
class _Run:
    """An array that comes to the host in one run of bytes."""

    width: int
    nbytes: int  # of the memory for it
    to: int  # where the run begins there
    source: int  # and from the first element on the device
    offset: int  # of the first element in the memory
    strides: Shape
    below: int  # the first element on the device, from the lowest byte
    span: int  # bytes there, from the lowest to the highest
    scattered: bool
    read_only: bool


@functools.lru_cache(maxsize=256)
def _run(shape: Shape, strides: Shape | None, itemsize: int) -> _Run | None:
    """Return how an array is one run of bytes; `None` if it is not."""
    there = extent(shape, strides, itemsize)
    if not there.nbytes:  # or more than an array can have
        return None
    packing, covering = layout.ways(shape, there.strides, itemsize)
    side, plan, _, read_only = covering or packing
    if plan.axes:
        return None
    return _Run(
        width=plan.width,
        nbytes=side.nbytes,
        to=side.offset + plan.to_offset,
        source=plan.from_offset,
        offset=side.offset,
        strides=side.strides,
        below=there.offset,
        span=there.nbytes,
        scattered=packing.scattered,
        read_only=read_only,
    )


def to_host(
    view: View, out: np.ndarray | None, streams: Mapping[int, Stream], deadline: Deadline
) -> np.ndarray | None:
    """Copy an array, or return `None` if there is more to it, such as a refusal.

    That is for one whose producer is a stream, on a device that has its user stream, and which
    comes to page-locked memory in one run of bytes.
    """
    try:
        device = view.device
    except (HostBufferError, UnsupportedBufferError):
        return None
    consumer = streams.get(device)
    if consumer is None:
        return None
    address, shape, strides, dtype = elements(view)
    run = _run(shape, strides, dtype.itemsize)
    if (
        run is None
        or (view.packs and (run.scattered or view.is_disguised))
        or not (view.found or view.place).covers(address - run.below, run.span)
    ):
        return None
    width = run.width
    lowest = onward = 0
    if out is not None:
        check_out(out, shape, dtype)
        if width > ASIDE:
            ways = _ways_to(out, run)
            if ways is None:
                return None
            lowest, onward = ways
    lanes = usual_lanes_of_view(view, consumer)
    if lanes is None:
        return None
    memory: Any = out  # some stubs of NumPy know no ctypes array
    if not lowest:
        memory = pinned.take(run.nbytes, device)
        if memory is None:
            return None
        lowest = memory.address
    move = (lowest + run.to, address + run.source, width)
    is_there = _at_once(view, lanes, move, deadline, memory, onward=onward)
    if out is not None:
        if memory is not out and not (onward and is_there):
            np.copyto(out, np.ndarray(shape, dtype, memory, run.offset, run.strides))
        return out
    result = np.ndarray(shape, dtype, memory, run.offset, run.strides)
    if run.read_only:
        result.flags.writeable = False
    return result


def _ways_to(out: np.ndarray, run: _Run) -> tuple[int, int] | None:
    """Return the address of an array's memory if the GPU can fill it, and where else a run goes on.

    Each is 0 if that does not apply; `None` says that there is more to it.
    """
    alike = run.width == out.nbytes and (
        out.strides == run.strides
        or _steps(out.shape, out.strides) == _steps(out.shape, run.strides)
    )
    address = address_of(out)
    if is_pinned(out, address):
        return (address - run.offset, 0) if alike else None
    if run.width > 2 * staging.SIZE:
        return None
    return 0, address - run.offset + run.to if alike else 0


def _steps(shape: Shape, strides: Shape) -> list[int]:
    return [step for count, step in zip(shape, strides, strict=True) if count > 1]


def _at_once(
    view: View,
    lanes: Lanes,
    move: tuple[int, int, int],
    deadline: Deadline,
    memory: object,
    *,
    onward: int,
) -> bool:
    """Do as `in_order` would, in one call of the driver's room if that is possible.

    Tells whether that call has taken the bytes on to an address `onward`, if that is not 0.

    What is copied is held as there only once that call has not seen the end of the copy. It looks
    at no signal, and leaves in `holding.left` what is to be held: without that a third exception of
    signal handlers, in the handling of the second, would lose it.
    """
    _, lane, producer, _ = lanes
    kept = lane, view.held, memory
    acquired = None
    try:
        try:
            there = copy_lane.fetch(
                lane, *move, after=producer, left=deadline.left(), out=onward, kept=kept
            )
            if there is True:
                return True
            if there is not False:
                acquired = _acquired(lanes, deadline, kept)
                copy_lane.wait_until(there, lane, deadline)
                acquired.end(release=False)
                return False
        except BaseException as error:
            acquired = acquired or _acquired(lanes, deadline, kept)
            acquired.end_after(error)
            raise
    except BaseException as error:
        acquired = acquired or _acquired(lanes, deadline, kept)
        acquired.end_after(error)
        raise
    copy = functools.partial(copy_lane.copy_and_wait, lane, *move, deadline)
    ordering = ordering_of_lanes(lanes, (view.held,))
    in_order(ordering, copy, release=False, deadline=deadline, memory=memory)
    return False


def _acquired(lanes: Lanes, deadline: Deadline, kept: tuple[object, ...]) -> Acquired:
    """Take over what `copy_lane.fetch` has left."""
    _, *objects = kept
    acquired = Acquired(ordering_of_lanes(lanes, objects), deadline)
    holding.left.pop(id(kept), None)
    return acquired
