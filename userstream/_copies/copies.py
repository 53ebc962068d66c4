"""`asnumpy`, `asnumpy_async` and `copyto`: copies in order with the producers of their operands.

Each tries the fast path, if there is one for its direction, and then takes the general path: make
views of the operands, resolve their streams, and copy between the edges (`_in_order`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from userstream import _buffers, _driver, _process
from userstream._buffers.view import used_strides
from userstream._copies import fast_path, layout, operands, pinned, staging
from userstream._copies.operands import (
    DeviceArray,
    broadcast_strides,
    check_out,
    check_same,
    check_target,
    device_array,
    pinned_address,
    surplus_axes,
)
from userstream._copies.staging import NOT_CAPTURED, CopyLane
from userstream._driver import core
from userstream._engine.host_wait import Deadline
from userstream._ordering.resolver import resolve_copy, resolve_views
from userstream.errors import CaptureError, UnknownProducerError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from userstream._buffers.view import View
    from userstream._copies.fast_path import Wanted
    from userstream._engine.events import Pending
    from userstream._ordering.ordering import Ordering
    from userstream._stream.stream import Stream
    from userstream.typing import Buffer, Buffers

T = TypeVar("T")

_BYTE = np.dtype(np.uint8)
_STAGED = 16 << 20  # bytes of a host array that are copied aside, so that the host does not wait
_FEW = 64  # driver calls for one array
_FOREVER = Deadline(None)


def asnumpy(buffer: Buffers, out: np.ndarray | None, wanted: Wanted, timeout: float | None) -> Any:
    """Copy a buffer or a collection of buffers to the host."""
    if wanted[0].is_closed or _process.halted or wanted[2] is not None:
        _check(wanted)
    deadline = _FOREVER if timeout is None else Deadline(timeout)  # one for all arrays
    kind = _buffers.view_classes.get(type(buffer)) or _buffers.kind_of(buffer)
    if kind is not None and kind.is_single and (out is None or isinstance(out, np.ndarray)):
        view = kind(buffer)
        copied = fast_path.to_host(view, out, wanted, deadline)
        return _asnumpy(view, out, wanted, deadline) if copied is None else copied[0]

    def copy(view: View, out: np.ndarray | None = None) -> np.ndarray:
        copied = fast_path.to_host(view, out, wanted, deadline)
        return _asnumpy(view, out, wanted, deadline) if copied is None else copied[0]

    return operands.copied(buffer, copy, out)


def _check(wanted: Wanted) -> None:
    table, stream, name, _ = wanted
    table.check_open()
    table.check_name(name, stream)


def _asnumpy(view: View, out: np.ndarray | None, wanted: Wanted, deadline: Deadline) -> np.ndarray:
    """Copy an array to the host on the general path."""
    result = operands.if_on_host(view, out)
    if result is not None:
        return result
    source = operands.Operand(view, device_array(view))  # refuses a buffer without a shape
    ordering = resolve_views((view,), *wanted, reads=(view,))

    def copy(lane: CopyLane) -> np.ndarray:
        packed = operands.packed(source, ordering, lane.kept)
        if out is not None:
            check_out(out, packed.shape, packed.dtype)
            _into(out, packed, lane)
            return out
        return _to_host(packed, lane)

    return _in_order(ordering, copy, deadline, release=False)


def asnumpy_async(
    buffer: Buffers, out: np.ndarray | None, wanted: Wanted
) -> tuple[Any, list[Pending]]:
    """Queue copies of a buffer or a collection to the host.

    Returns the arrays in its form, and the points where the arrays are filled: one per lane, the
    last. Host memory is page-locked here, because otherwise the driver would wait.
    """
    if wanted[0].is_closed or _process.halted or wanted[2] is not None:
        _check(wanted)
    kind = _buffers.view_classes.get(type(buffer)) or _buffers.kind_of(buffer)
    if kind is not None and kind.is_single and (out is None or isinstance(out, np.ndarray)):
        result, point = _queue(kind(buffer), out, wanted)
        return result, [] if point is None else [point]
    points: dict[int, Pending] = {}

    def queue(view: View, out: np.ndarray | None = None) -> np.ndarray:
        result, point = _queue(view, out, wanted)
        if point is not None:
            points[id(point.target)] = point
        return result

    def join(pieces: Sequence[tuple[View, Any]], whole: Any) -> np.ndarray:
        dtype = device_array(pieces[0][0]).dtype
        return pinned.empty(tuple(whole.shape), dtype)

    return operands.copied(buffer, queue, out, joined=join), list(points.values())


def _queue(view: View, out: np.ndarray | None, wanted: Wanted) -> tuple[np.ndarray, Pending | None]:
    """Queue a copy of an array to the host; return the array, and the point behind the copy.

    There is no point behind an array that is on the host already.
    """
    queued = fast_path.queue_to_host(view, out, wanted)
    if queued is not None:
        return queued
    on_host = operands.if_on_host(view, out)
    if on_host is not None:
        return on_host, None
    array = device_array(view)  # refuses a buffer without a shape
    target = None
    if out is not None:
        check_out(out, array.shape, array.dtype)
        target = _PinnedArray(out, "out=")
    source = operands.Operand(view, array)
    ordering = resolve_views((view,), *wanted, reads=(view,))

    def copy(lane: CopyLane) -> tuple[np.ndarray, Pending]:
        packed = operands.packed(source, ordering, lane.kept)
        result = _queue_to_host(packed, lane, target)
        return result, ordering.lane.completion()

    return _in_order(ordering, copy, None, release=True, may_wait=False)


def copyto(
    dst: Buffer, src: Buffer | np.generic, wanted: Wanted, timeout: float | None, *, wait: bool
) -> Stream:
    """Copy one array to another; return the stream of the copy."""
    if wanted[0].is_closed or _process.halted or wanted[2] is not None:
        _check(wanted)
    deadline = _FOREVER if timeout is None else Deadline(timeout)
    to = view = None
    if type(dst) is not np.ndarray:
        to = operands.target_of(dst)
    elif wait:
        kind = _buffers.view_classes.get(type(src)) or _buffers.kind_of(src)
        if kind is not None and kind.is_single:
            view = kind(src)
            copied = fast_path.to_host(view, dst, wanted, deadline, as_is=True)
            if copied is not None:
                return copied[1].consumer
    if view is not None:
        source = operands.operand(view)
    else:
        source = None if type(src) is np.ndarray else operands.source_of(src)
    if to is None and source is None:
        raise TypeError("both are on the host: use numpy.copyto")
    pinned_array = None
    if not wait and source is None:
        pinned_array = _PinnedArray(operands.as_array(src), "the source")
    elif not wait and to is None:
        pinned_array = _PinnedArray(operands.writable(dst), "the target")
    if to is not None and to.view.layout.shape is None:
        to = operands.typed_as(to, operands.as_array(src) if source is None else source.array)
    if source is not None and source.view.layout.shape is None:
        source = operands.typed_as(source, operands.as_array(dst) if to is None else to.array)
    ordering = _resolve(to, source, wanted)

    def copy(lane: CopyLane) -> None:
        if source is None:
            assert to is not None
            if pinned_array is None:
                _from_host(operands.as_array(src), to.array, lane)
            else:
                _queue_from_host(pinned_array, to.array, lane)
            return
        packed = source.array
        if source.view.packs:
            packed = operands.packed(source, ordering, lane.kept, if_scattered=to is None)
        if to is not None:
            _between(to.array, packed, lane)
            return
        out = operands.writable(dst) if pinned_array is None else pinned_array.array
        packed = packed._replace(shape=out.shape, strides=broadcast_strides(packed, out.shape))
        check_out(out, packed.shape, packed.dtype)
        if pinned_array is None:
            _into(out, packed, lane)
        else:
            _queue_to_host(packed, lane, pinned_array)

    _in_order(ordering, copy, deadline, release=True, may_wait=wait)
    return ordering.consumer


def _resolve(
    to: operands.Operand | None, source: operands.Operand | None, wanted: Wanted
) -> Ordering:
    views = [operand.view for operand in (to, source) if operand is not None]
    ordering = resolve_copy(views, *wanted)
    if ordering is not None:
        return ordering
    table, stream, name, producer = wanted
    if stream is None:  # for two devices, the user stream of the target's
        stream = table.user_stream(views[0].device, name)
    reads = () if source is None else (source.view,)
    return resolve_views(views, table, stream, name, producer, reads=reads)


# -- between the edges -----------------------------------------------------------------------------


def _in_order(
    ordering: Ordering,
    copy: Callable[[CopyLane], T],
    deadline: Deadline | None,
    *,
    release: bool,
    may_wait: bool = True,
) -> T:
    """Run a copy between its acquire and release edges.

    A copy that the host has waited for needs no release: whatever the producers do next comes
    after the copy. One that failed may still run on the GPU: its objects are held, and its
    producers wait, in any case.

    Where a producer can continue after the copy only once the host has waited for that, `may_wait`
    decides between that wait and an error.
    """
    lane, rest = ordering.lane, ordering.rest
    if rest is not None:
        rest.may_wait = may_wait
        if not may_wait and rest.after and not rest.may_order_devices:
            raise UnknownProducerError(
                "the producer of a buffer is unknown, so it could continue only when the copy is "
                "done: pass producer=, the stream that writes it, or None if nothing is pending, "
                "or wait for the copy",
                device=rest.after[0],
            )
    try:
        exported = ordering.acquire(deadline, to_be_released=release)
    except CaptureError:
        # The advice in the error of the edge would lead to the error that a copy is captured.
        lane.usable(NOT_CAPTURED)
        raise
    handle = lane.raw_handle or lane.live()
    if not lane.is_context_independent or not core.are_free(handle, handle):
        lane.usable(NOT_CAPTURED)  # queries again, and raises the right error
    kept: list[object] = [exported]
    # If an exception of a signal handler frees this use before its end, later calls add the release
    # edges and hold the objects.
    order = ordering if rest is None or rest.thread is None else None
    use = core.use(lane, order, (ordering.buffers, kept))
    try:
        result = copy(CopyLane(lane, deadline, kept))
        if release:
            ordering.release(use.ticket, deadline)
        use.ticket.end()
    except BaseException as error:
        staging.release_after_error(ordering, use, error)
        raise
    return result


class _PinnedArray:
    """A page-locked array of the user with its address; raises for pageable memory."""

    __slots__ = ("address", "array")

    def __init__(self, array: np.ndarray, what: str) -> None:
        self.array = array
        address = pinned_address(array) if array.size else 0
        if address is None:
            raise ValueError(
                f"{what} is in pageable memory, which the driver can copy only while the caller "
                "waits; pass an array of pinned_empty() or pinned_like(), or call asnumpy(), or "
                "copyto() without wait=False, which copy through page-locked memory of their own"
            )
        self.address = address


# -- to the host -----------------------------------------------------------------------------------


def _to_host(source: DeviceArray, lane: CopyLane) -> np.ndarray:
    """Copy an array to new host memory, and wait for the copy.

    The result has the order in memory that the array has. It is read-only where elements share
    memory, as in NumPy's broadcast views.
    """
    if 0 in source.shape:
        return np.empty(source.shape, source.dtype)
    result = _cached(source, lane)
    return _pageable(source, lane) if result is None else result


def _cached(source: DeviceArray, lane: CopyLane) -> np.ndarray | None:
    """Copy to page-locked memory of the cache; return `None` if the limit forbids a block."""
    chosen = layout.host_copy_plan(source.shape, source.strides, source.dtype.itemsize)
    memory = pinned.take(chosen.side.nbytes, lane.device)
    if memory is None:
        return None
    to = memory.address + chosen.side.offset
    lane.copy_and_wait(to, source.address, chosen.moves, memory)
    return chosen.array(memory, source.shape, source.dtype)


def _into(out: np.ndarray, source: DeviceArray, lane: CopyLane) -> None:
    if 0 in source.shape:
        return
    to = pinned_address(out)
    if to is not None and not layout.may_alias(out.shape, out.strides, out.itemsize):
        plan = layout.moves(source.shape, out.itemsize, out.strides, source.strides)
        if _is_direct(plan):
            lane.copy_and_wait(to, source.address, plan, out)
            return
    staged = _cached(source, lane) if out.nbytes <= 2 * staging.SIZE else None
    if staged is None:
        staging.fetch(lane, source, out)
    else:
        np.copyto(out, staged)


def _is_direct(plan: layout.Moves) -> bool:
    """Return whether a copy is fast without staging memory."""
    if not plan.axes:
        return True
    return not layout.has_short_rows(plan) and layout.copies(plan)[0] <= _FEW


def _pageable(source: DeviceArray, lane: CopyLane) -> np.ndarray:
    """Copy to pageable memory, through page-locked chunks."""
    chosen = layout.host_copy_plan(source.shape, source.strides, source.dtype.itemsize)
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


def _queue_to_host(source: DeviceArray, lane: CopyLane, target: _PinnedArray | None) -> np.ndarray:
    """Queue a copy of an array to page-locked memory, new or the target's."""
    if 0 in source.shape:
        return np.empty(source.shape, source.dtype) if target is None else target.array
    if target is not None:
        out = target.array
        if layout.may_alias(out.shape, out.strides, out.itemsize):
            raise ValueError(
                f"the elements of the target may share memory (shape {out.shape}, strides "
                f"{out.strides})"
            )
        lane.kept.append(out)
        plan = layout.moves(source.shape, out.itemsize, out.strides, source.strides)
        lane.move(target.address, source.address, plan)
        return out
    chosen = layout.host_copy_plan(source.shape, source.strides, source.dtype.itemsize)
    memory = pinned.take_or_raise(chosen.side.nbytes, source.device)
    lane.kept.append(memory)
    lane.move(memory.address + chosen.side.offset, source.address, chosen.moves)
    return chosen.array(memory, source.shape, source.dtype)


# -- from the host ---------------------------------------------------------------------------------


def _broadcast(source: np.ndarray, to: DeviceArray) -> np.ndarray:
    check_same(to.dtype, source.dtype)
    check_target(to)
    if source.shape == to.shape:
        return source
    surplus = surplus_axes(source.shape, to.shape)
    return np.broadcast_to(source[(0,) * surplus + (...,)], to.shape)  # ... : no scalar


def _from_host(source: np.ndarray, to: DeviceArray, lane: CopyLane) -> None:
    """Copy a host array to an array; the host array may be reused on return.

    Up to 16 MiB are copied aside, and the host does not wait. It waits for a larger array; after a
    timeout or a Ctrl-C the contents of the target are undefined, and the GPU may still read the
    host array if that is page-locked.
    """
    source = _broadcast(source, to)
    if 0 in to.shape:
        return
    if source.nbytes > fast_path.ASIDE and (address := pinned_address(source)) is not None:
        plan = layout.moves(to.shape, to.dtype.itemsize, to.strides, source.strides)
        # Behind no work this copy is over sooner than a copy on the host would be.
        if _is_direct(plan) and (source.nbytes > _STAGED or lane.is_idle_soon()):
            lane.copy_and_wait(to.address, address, plan, source)
            return
    if source.nbytes <= _STAGED:
        memory = pinned.take(source.nbytes, lane.device)
        if memory is not None:
            lane.kept.append(memory)
            start, plan = staging.stage(to, source, memory)
            lane.move(to.address, start, plan)
            return
    staging.send(lane, to, source)


def _queue_from_host(source: _PinnedArray, to: DeviceArray, lane: CopyLane) -> None:
    """Queue a copy of a page-locked array, which may not be changed until the copy is over."""
    array = _broadcast(source.array, to)
    if 0 in to.shape:
        return
    lane.kept.append(array)
    plan = layout.moves(to.shape, to.dtype.itemsize, to.strides, array.strides)
    lane.move(to.address, source.address, plan)


# -- between devices, and on one -------------------------------------------------------------------


def _between(to: DeviceArray, source: DeviceArray, lane: CopyLane) -> None:
    """Queue a copy of an array to another; the host does not wait."""
    check_same(to.dtype, source.dtype)
    check_target(to)
    if source.shape != to.shape:
        source = source._replace(shape=to.shape, strides=broadcast_strides(source, to.shape))
    if 0 in to.shape or (
        to.address == source.address
        and used_strides(to.shape, to.strides) == used_strides(to.shape, source.strides)
    ):
        return
    _refuse_overlap(to, source)
    plan = layout.moves(to.shape, to.dtype.itemsize, to.strides, source.strides)
    peers = None
    if to.device != source.device:
        contexts = _driver.contexts
        peers = contexts.primary_context(to.device), contexts.primary_context(source.device)
    lane.move(to.address, source.address, plan, peers)


def _refuse_overlap(to: DeviceArray, source: DeviceArray) -> None:
    """Raise if two arrays overlap, where the driver defines no result, or interleave."""
    to_span = layout.spread(to.shape, to.strides, to.dtype.itemsize)
    span = layout.spread(source.shape, source.strides, source.dtype.itemsize)
    to_begin, begin = to.address - to_span.offset, source.address - span.offset
    if begin < to_begin + to_span.nbytes and to_begin < begin + span.nbytes:
        raise ValueError(
            "the target and the source overlap in memory, or interleave; copy through another "
            "buffer"
        )
