"""`asnumpy` and `copyto`: copies in order with the producers of what is copied.

Below these two are the copies themselves, between arrays and behind the work of a stream: the order
with others, and to keep the buffers alive, is the business of the two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from userstream import _buffers, _driver
from userstream._copies import layout, operands, pinned, queued, short, staging
from userstream._copies.arrays import (
    DeviceArray,
    broadcast_strides,
    check_out,
    check_same,
    check_target,
    device_array,
    pinned_address,
    surplus_axes,
)
from userstream._copies.copy_lane import CopyLane
from userstream._copies.ordered import in_order
from userstream._engine import held_objects
from userstream._engine.host_wait import Deadline
from userstream._ordering import resolve_views
from userstream.errors import UnsupportedBufferError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from userstream._buffers.view import View
    from userstream._driver.copies import Peers
    from userstream._driver.core import Lease
    from userstream._stream.stream import Stream
    from userstream._table import Table
    from userstream.typing import Buffer, Buffers, Producer, StreamLike

_BYTE = np.dtype(np.uint8)
_STAGED = 16 << 20  # bytes of a host array that are copied aside, so that nothing is waited for
_FEW = 64  # driver calls for one array
_AUTO = "auto"
_FOREVER = Deadline(None)


def asnumpy(
    buffer: Buffers,
    out: np.ndarray | None,
    *,
    stream: StreamLike | None,
    producer: Producer,
    streams: Mapping[int, Stream],
    table: Table,
    name: str | None,
    timeout: float | None,
) -> Any:
    """Copy a buffer, or what a collection holds, to the host."""
    deadline = _FOREVER if timeout is None else Deadline(timeout)  # one for all that is copied
    usual = stream is None and producer is _AUTO
    kind = _buffers.learned.get(type(buffer)) or _buffers.kind_of(buffer)
    single: View | None = None
    if kind is not None and kind.is_single and (out is None or isinstance(out, np.ndarray)):
        single = kind(buffer)
        if usual:  # before all that takes time to make
            result = short.to_host(single, out, streams, deadline)
            if result is not None:
                return result
            usual = False

    def copy(view: View, out: np.ndarray | None = None) -> np.ndarray:
        if usual:
            result = short.to_host(view, out, streams, deadline)
            if result is not None:
                return result
        result = operands.if_on_host(view, out)
        if result is not None:
            return result
        source = operands.Operand(view, device_array(view))  # refuses what has no shape
        ordering = resolve_views((view,), table, stream, name, producer, reads=(view,))

        def fetch() -> np.ndarray:
            _keep, packed = operands.packed(source, ordering)
            return to_host(packed, ordering.consumer, out, deadline)

        return in_order(ordering, fetch, release=False, deadline=deadline)

    if single is not None:
        return copy(single, out)
    return operands.copied(buffer, copy, out)


def copyto(
    dst: Buffer,
    src: Buffer | np.generic,
    *,
    stream: StreamLike | None,
    producer: Producer,
    streams: Mapping[int, Stream],
    table: Table,
    name: str | None,
    timeout: float | None,
    wait: bool,
) -> Stream:
    """Copy one array to another; return the stream that it was queued on."""
    deadline = _FOREVER if timeout is None else Deadline(timeout)
    view = None
    if wait and stream is None and producer is _AUTO and type(dst) is np.ndarray:
        consumer = short.copyto(dst, src, streams, timeout)
        if consumer is not None:
            return consumer
        kind = _buffers.learned.get(type(src)) or _buffers.kind_of(src)
        if kind is not None and kind.is_single:
            view = kind(src)
            if _is_as(dst, view) and short.to_host(view, dst, streams, deadline) is not None:
                return streams[view.device]
    to = operands.target_of(dst)
    source = operands.source_of(src) if view is None else operands.operand(view)
    target = to or source
    if target is None:
        raise TypeError("both are on the host: use numpy.copyto")
    place = None
    if not wait and source is None:
        place = queued.Place(operands.as_array(src), "the source")
    elif not wait and to is None:
        place = queued.Place(operands.writable(dst), "the target")
    views = [operand.view for operand in (to, source) if operand is not None]
    if stream is None:
        stream = table.user_stream(target.array.device, name)

    read = () if source is None else (source.view,)
    ordering = resolve_views(views, table, stream, name, producer, reads=read)
    consumer = ordering.consumer

    kept: list[object] = []

    def copy() -> None:
        if source is None:
            assert to is not None
            if place is None:
                from_host(operands.as_array(src), to.array, consumer, deadline)
            else:
                queued.from_host(place, to.array, consumer, kept)
            return
        _keep, packed = operands.packed(source, ordering, if_scattered=to is None)
        if to is not None:
            between(to.array, packed, consumer, deadline)
        elif place is None:
            into_host(operands.writable(dst), packed, consumer, deadline)
        else:
            queued.into_host(place, packed, consumer, kept)

    in_order(ordering, copy, release=True, deadline=deadline, memory=kept, may_wait=wait)
    return consumer


def _is_as(host: np.ndarray, view: View) -> bool:
    """Tell whether a host array can take a buffer as it is; what is refused is said elsewhere."""
    try:
        there = view.layout
    except UnsupportedBufferError:
        return False
    return host.flags.writeable and (host.shape, host.dtype) == (there.shape, there.dtype)


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
        check_out(out, source.shape, source.dtype)
    lane = CopyLane(stream, source.device, deadline)
    if out is not None:
        _into(out, source, lane)
        return out
    if 0 in source.shape:
        return np.empty(source.shape, source.dtype)
    result = _cached(source, lane)
    return _pageable(source, lane) if result is None else result


def _cached(source: DeviceArray, lane: CopyLane) -> np.ndarray | None:
    """Copy to page-locked memory of the cache; return `None` if it has none left."""
    chosen = layout.way(source.shape, source.strides, source.dtype.itemsize)
    memory = pinned.take(chosen.side.nbytes, lane.device)
    if memory is None:
        return None
    to = memory.address + chosen.side.offset
    lane.copy_and_wait(to, source.address, chosen.moves, memory)
    return chosen.array(memory, source.shape, source.dtype)


def into_host(
    out: np.ndarray, source: DeviceArray, stream: Stream, deadline: Deadline | None = None
) -> None:
    """Copy an array to a host array as `to_host`, but broadcast it to the shape of the array."""
    source = source._replace(shape=out.shape, strides=broadcast_strides(source, out.shape))
    check_out(out, source.shape, source.dtype)
    _into(out, source, CopyLane(stream, source.device, deadline))


def _into(out: np.ndarray, source: DeviceArray, lane: CopyLane) -> None:
    if 0 in source.shape:
        return
    to = pinned_address(out)
    if to is not None and not layout.may_alias(out.shape, out.strides, out.itemsize):
        plan = layout.moves(source.shape, out.itemsize, out.strides, source.strides)
        if _is_direct(plan):
            lane.copy_and_wait(to, source.address, plan, out)
            return
    if out.nbytes > 2 * staging.SIZE:
        staging.fetch(lane, source, out)
        return
    staged = _cached(source, lane)
    if staged is None:
        staging.fetch(lane, source, out)
    else:
        np.copyto(out, staged)


def _is_direct(plan: layout.Moves) -> bool:
    """Tell whether a copy needs no staging to be fast."""
    if not plan.axes:
        return True
    return not layout.has_short_rows(plan) and layout.copies(plan)[0] <= _FEW


def _pageable(source: DeviceArray, lane: CopyLane) -> np.ndarray:
    """Copy to memory that is not page-locked, because the cache has none left."""
    chosen = layout.way(source.shape, source.strides, source.dtype.itemsize)
    memory = np.empty(chosen.side.nbytes, _BYTE)
    if not chosen.moves.axes:  # one run of bytes, whatever its shape
        start = source.address + chosen.moves.from_offset
        staging.fetch(lane, DeviceArray(start, memory.shape, (1,), _BYTE, source.device), memory)
        return chosen.array(memory, source.shape, source.dtype)
    # One element stands for all of a broadcast axis, on both sides.
    shape = tuple(
        count if stride else 1 for count, stride in zip(source.shape, source.strides, strict=True)
    )
    target = chosen.side.array(memory, shape, source.dtype)
    staging.fetch(lane, source._replace(shape=shape), target)
    return chosen.array(memory, source.shape, source.dtype)


def from_host(
    source: np.ndarray, to: DeviceArray, stream: Stream, deadline: Deadline | None = None
) -> None:
    """Copy a host array to an array behind the work on `stream`; it may be reused on return.

    Up to 16 MiB are copied aside, and nothing is waited for. A larger array is waited for; after a
    timeout or a Ctrl-C what that holds is undefined, and the GPU may still read the array if
    it is page-locked.
    """
    check_same(to.dtype, source.dtype)
    check_target(to)
    surplus = surplus_axes(source.shape, to.shape)
    source = np.broadcast_to(source[(0,) * surplus + (...,)], to.shape)  # ... : no scalar
    lane = CopyLane(stream, to.device, deadline)
    if 0 in to.shape:
        return
    if source.nbytes > short.ASIDE and (address := pinned_address(source)) is not None:
        plan = layout.moves(to.shape, to.dtype.itemsize, to.strides, source.strides)
        # Behind no work it is over sooner than one on the host would be.
        if _is_direct(plan) and (source.nbytes > _STAGED or lane.is_idle_soon()):
            lane.copy_and_wait(to.address, address, plan, source)
            return
    if source.nbytes <= _STAGED:
        memory = pinned.take(source.nbytes, lane.device)
        if memory is not None:
            _send(lane, to, source, memory)
            return
    staging.send(lane, to, source)


def _send(lane: CopyLane, to: DeviceArray, source: np.ndarray, memory: Lease) -> None:
    start, plan = staging.stage(to, source, memory)
    use = lane.use(memory)
    try:
        lane.move(to.address, start, plan, None)
        held_objects.keep(use.ticket.lane, use.ticket)
    except BaseException:
        # The GPU may be reading the staging memory, into which the next copy would write.
        held_objects.hold_after_error(use)
        raise


def between(
    to: DeviceArray, source: DeviceArray, stream: Stream, deadline: Deadline | None = None
) -> None:
    """Copy an array to another behind the work on `stream`; waits for nothing."""
    check_same(to.dtype, source.dtype)
    check_target(to)
    source = source._replace(shape=to.shape, strides=broadcast_strides(source, to.shape))
    lane = CopyLane(stream, to.device, deadline)
    if 0 in to.shape or _is_same(to, source):
        return
    _refuse_overlap(to, source)
    plan = layout.moves(to.shape, to.dtype.itemsize, to.strides, source.strides)
    lane.move(to.address, source.address, plan, _peers(to, source))


def _peers(to: DeviceArray, source: DeviceArray) -> Peers | None:
    if to.device == source.device:
        return None
    return _driver.contexts.primary_context(to.device), _driver.contexts.primary_context(
        source.device
    )


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
    span = layout.spread(array.shape, array.strides, array.dtype.itemsize)
    lowest = array.address - span.offset
    return lowest, lowest + span.nbytes
