"""Fast path of `asnumpy` for contiguous arrays of known types."""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from userstream import _buffers, _driver
from userstream._copies import copy_lane, layout, pinned, staging
from userstream._copies.arrays import (
    address_of,
    check_out,
    elements,
    extent,
    is_pinned,
    numpy_dtype,
)
from userstream._copies.ordered import Acquired, in_order
from userstream._engine import held_objects, host_wait
from userstream._engine.lanes import of_frameworks
from userstream._ordering import Ordering, resolve_copy, settings
from userstream.errors import HostBufferError, UnsupportedBufferError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from userstream._buffers.view import Form, View
    from userstream._copies.copy_lane import Move
    from userstream._copies.layout import Shape
    from userstream._engine.events import Pending
    from userstream._engine.host_wait import Deadline
    from userstream._engine.lane import Lane
    from userstream._stream.stream import Stream

ASIDE = 1 << 16  # bytes of an array that are copied once more sooner than the driver is asked

# Seconds, for a small copy behind no work. To hold what it uses, and order its producer, would take
# longer.
_AT_ONCE = 10e-6

_FOREVER = host_wait.Deadline(None)


@dataclass(frozen=True, slots=True)
class _Run:
    """An array that comes to the host in one run of bytes."""

    move: Move
    width: int
    block: int  # bytes of the page-locked block that has it
    to: int  # where the run begins there
    offset: int  # of the first element there
    strides: Shape
    below: int  # the first element on the device, from the lowest byte
    span: int  # bytes there, from the lowest to the highest
    scattered: bool
    read_only: bool


# How an array comes to the host, and as what.
_What: TypeAlias = "tuple[_Run, Move, Shape, np.dtype]"


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
    to = side.offset + plan.to_offset
    return _Run(
        move=(to, plan.from_offset, plan.width, there.offset, there.nbytes),
        width=plan.width,
        block=pinned.rounded(side.nbytes),
        to=to,
        offset=side.offset,
        strides=side.strides,
        below=there.offset,
        span=there.nbytes,
        scattered=packing.scattered,
        read_only=read_only,
    )


@functools.lru_cache(maxsize=256)
def _what(form: Form) -> _What | None:
    """Return the cached copy plan for an array layout; `None` if it needs the general path."""
    try:
        dtype = numpy_dtype(form.dtype, "array")
    except UnsupportedBufferError:
        return None
    run = _run(form.shape, form.strides, dtype.itemsize)
    # Non-contiguous arrays are packed by their framework.
    return None if run is None or run.scattered else (run, run.move, form.shape, dtype)


def asnumpy(
    buffer: Any, out: Any, streams: Mapping[int, Stream], timeout: float | None
) -> np.ndarray | None:
    """Copy an array without creating a view; `None` if the array needs the general path."""
    found = _at_a_glance(buffer, streams)
    if found is None or (out is not None and not isinstance(out, np.ndarray)):
        return None
    what, address, ordering = found
    deadline = _FOREVER if timeout is None else host_wait.Deadline(timeout)
    return _copied(what, address, ordering, buffer, out, timeout, deadline)


def copyto(
    out: np.ndarray, buffer: Any, streams: Mapping[int, Stream], timeout: float | None
) -> Stream | None:
    """As `asnumpy`, to an array that can take a buffer as it is; return the stream of the copy."""
    found = _at_a_glance(buffer, streams)
    if found is None:
        return None
    what, address, ordering = found
    _, _, shape, dtype = what
    if out.shape != shape or out.dtype != dtype or not out.flags.writeable:
        return None  # to be broadcast, or refused
    deadline = _FOREVER if timeout is None else host_wait.Deadline(timeout)
    done = _copied(what, address, ordering, buffer, out, timeout, deadline)
    return None if done is None else ordering.consumer


def asnumpy_async(
    buffer: Any, out: Any, streams: Mapping[int, Stream]
) -> tuple[np.ndarray, list[Lane]] | None:
    """Queue a copy of an array that a glance is enough for, and return the lanes that fill it.

    There are none if it is small, and over by the time that all the rest would take.
    """
    found = _at_a_glance(buffer, streams)
    if found is None or (out is not None and not isinstance(out, np.ndarray)):
        return None
    # `fetch` waits, which that thread may not.
    if host_wait.host_functions_thread == threading.get_ident():
        return None
    what, address, ordering = found
    left = _AT_ONCE if what[0].width <= ASIDE else 0.0
    later: list[Lane] = []
    result = _copied(what, address, ordering, buffer, out, left, _FOREVER, later)
    return None if result is None else (result, later)


def _at_a_glance(buffer: Any, streams: Mapping[int, Stream]) -> tuple[_What, int, Ordering] | None:
    """Return what is copied of an array, where it is, and the lanes; `None` if there is more to it.

    That is for one of a framework, on a device that has its user stream, where all is as an earlier
    copy has left it. It is what `to_host` finds out with a view.
    """
    kind = _buffers.learned.get(type(buffer))
    if kind is None or not kind.is_glanced or settings.SYNC or settings.BY_DEVICE:
        return None
    seen = kind.glance(buffer)
    if seen is None:
        return None
    device, address, form = seen
    what = _what(form)
    if what is None:
        return None
    handle, owner = kind.framework.current_stream(device)  # type: ignore[union-attr]
    try:
        consumer, source = streams[device], of_frameworks[device][handle]
    except KeyError:  # the first time, a stream that has to be created, or the per-thread one
        return None
    lane = consumer._lane
    if lane is None:
        return None
    producers = () if source is lane else (source,)
    return what, address, Ordering(consumer, lane, producers, owner, (buffer,), False)


def to_host(
    view: View, out: np.ndarray | None, streams: Mapping[int, Stream], deadline: Deadline
) -> np.ndarray | None:
    """Copy an array, or return `None` if the array needs the general path, such as for an error.

    That is for one whose producer is a stream, on a device that has its user stream, and which
    comes to page-locked memory in one run of bytes.
    """
    try:
        device = view.device
    except (HostBufferError, UnsupportedBufferError):
        return None
    if device not in streams:
        return None
    address, shape, strides, dtype = elements(view)
    run = _run(shape, strides, dtype.itemsize)
    if (
        run is None
        or (view.packs and (run.scattered or view.is_disguised))
        or not (view.found or view.place).covers(address - run.below, run.span)
    ):
        return None
    ordering = resolve_copy(view, streams)
    if ordering is None:
        return None
    known: Move = (*run.move[:3], 0, 0)
    what = run, known, shape, dtype
    left = None if deadline.seconds is None else deadline.left()
    return _copied(what, address, ordering, view.held, out, left, deadline)


def _copied(  # noqa: PLR0917 -- to name them would cost as much as they do
    what: _What,
    address: int,
    ordering: Ordering,
    held: object,
    out: np.ndarray | None,
    left: float | None,
    deadline: Deadline,
    later: list[Lane] | None = None,
) -> np.ndarray | None:
    """Copy an array to the host in one native call, or through `in_order`.

    `held` is what keeps the array alive. `None` if its memory does not reach so far. With a list
    `later` nothing is waited for: the lane is added there, unless the copy is over at once. Then
    `None` may also say that it has to be queued in another way.

    What is copied is held as there only once that call has not seen the end of the copy. It looks
    at no signal, and leaves in `left` what is to be held: without that a third exception of
    signal handlers, in the handling of the second, would lose it.
    """
    run, move, shape, dtype = what
    lane, producers = ordering.lane, ordering.producers
    producer = producers[0] if producers else None
    memory: Any = out  # some stubs of NumPy know no ctypes array
    start = onward = 0
    if out is not None:
        check_out(out, shape, dtype)
        if run.width > ASIDE or later is not None:
            ways = _ways_to(out, run)
            if ways is None or not (ways[0] or later is None):
                return None
            start, onward = ways
    if not start:
        memory = pinned.take_block(run.block, lane.device)
        if memory is None:
            return None
        start = memory.address
    kept = lane, held, memory
    acquired = None
    try:
        try:
            # Nobody waits for a copy that is queued for later: its queries are a future's.
            mine = _driver.account.PROGRAM if later is None else _driver.account.FUTURE
            there = _driver.account.on(
                mine, copy_lane.fetch, lane, producer, move, start, address, left, onward, kept
            )
            if type(there) is not bool:
                acquired = _acquired(ordering, deadline, kept)
                _end(acquired, there, lane, deadline, later)
        except BaseException as error:
            acquired = acquired or _acquired(ordering, deadline, kept)
            acquired.end_after(error)
            raise
    except BaseException as error:
        acquired = acquired or _acquired(ordering, deadline, kept)
        acquired.end_after(error)
        raise
    if there is False and (
        later is not None or not _copied_in_order(move, start, address, ordering, kept, deadline)
    ):
        return None
    if out is not None:
        if memory is not out and not (onward and there is True):
            np.copyto(out, np.ndarray(shape, dtype, memory, run.offset, run.strides))
        return out
    result = np.ndarray(shape, dtype, memory, run.offset, run.strides)
    if run.read_only:
        result.flags.writeable = False
    return result


def _end(
    acquired: Acquired, there: Pending, lane: Lane, deadline: Deadline, later: list[Lane] | None
) -> None:
    """Wait for a copy that is not over yet, or hold what it uses and order its producer."""
    if later is None:
        copy_lane.wait_until(there, lane, deadline)
    else:
        there.abandon()
        later.append(lane)
    acquired.end(release=later is not None)


def _copied_in_order(  # noqa: PLR0917 -- as above
    move: Move,
    start: int,
    address: int,
    ordering: Ordering,
    kept: tuple[Lane, object, object],
    deadline: Deadline,
) -> bool:
    """Copy as `in_order` does; `False` if no memory has all of the array."""
    to, source, width, below, span = move
    if span:
        place = _driver.pointers.place_of(address - below)
        if place is None or not place.covers(address - below, span):
            return False
    lane, held, memory = kept
    copy = functools.partial(
        copy_lane.copy_and_wait, lane, start + to, address + source, width, deadline
    )
    ordering.buffers = (held,)
    in_order(ordering, copy, release=False, deadline=deadline, memory=memory)
    return True


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


def _acquired(ordering: Ordering, deadline: Deadline, kept: tuple[object, ...]) -> Acquired:
    """Take over what `copy_lane.fetch` has left."""
    _, *objects = kept
    ordering.buffers = objects
    acquired = Acquired(ordering, deadline)
    held_objects.left.pop(id(kept), None)
    return acquired
