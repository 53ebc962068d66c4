"""Fast path of copies to the host: one run of bytes, in one native call.

It is for an array whose producer is at most one stream. Everything else takes the general path in
`copies`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from userstream import _hooks
from userstream._buffers.view import used_strides
from userstream._copies import layout, pinned, staging
from userstream._copies.operands import (
    address_of,
    check_out,
    elements,
    extent,
    is_pinned,
    numpy_dtype,
)
from userstream._driver import core
from userstream._engine import host_wait
from userstream._ordering.resolver import resolve_copy
from userstream.errors import HostBufferError, UnsupportedBufferError

if TYPE_CHECKING:
    from userstream._buffers.view import Form, View
    from userstream._copies.layout import Shape
    from userstream._driver.core import Point
    from userstream._engine.host_wait import Deadline
    from userstream._ordering.ordering import Ordering
    from userstream._table import Table
    from userstream.typing import Producer, StreamLike

ASIDE = 1 << 16  # bytes that are copied once more on the host sooner than the driver is queried

# Bytes of a copy to pageable memory: the host copies one part while the GPU copies the next.
PART = 512 << 10

# The arguments of `resolve_copy` and `resolve_views` after the buffers.
Wanted: TypeAlias = "tuple[Table, StreamLike | None, str | None, Producer]"

# As `fetch` in `_driver/native/copies.c` takes it.
Move: TypeAlias = tuple[int, int, int, int, int]


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Plan of a copy to the host that is one run of bytes."""

    move: Move
    width: int
    block: int  # bytes of the page-locked block for the run
    to: int  # offset of the run in the block
    offset: int  # of the first element in the block
    strides: Shape
    below: int  # bytes on the device from the lowest one to the first element
    span: int  # bytes on the device, from the lowest to the highest
    scattered: bool
    read_only: bool


@functools.lru_cache(maxsize=256)
def _copy_plan(shape: Shape, strides: Shape | None, itemsize: int) -> CopyPlan | None:
    """Return the plan for a layout; `None` if it is empty or more than one run of bytes."""
    there = extent(shape, strides, itemsize)
    if not there.nbytes:  # 0, or None: more than an array can have
        return None
    packing, covering = layout.host_copy_plans(shape, there.strides, itemsize)
    side, moves, _, read_only = covering or packing
    if moves.axes:
        return None
    to = side.offset + moves.to_offset
    return CopyPlan(
        move=(to, moves.from_offset, moves.width, there.offset, there.nbytes),
        width=moves.width,
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
def _plan_of_form(form: Form) -> tuple[CopyPlan, Shape, np.dtype] | None:
    """Return plan, shape and dtype of a form; `None` if it needs the general path."""
    try:
        dtype = numpy_dtype(form.dtype, "array")
    except UnsupportedBufferError:
        return None
    plan = _copy_plan(form.shape, form.strides, dtype.itemsize)
    # Non-contiguous arrays are packed by their framework.
    return None if plan is None or plan.scattered else (plan, form.shape, dtype)


def to_host(  # noqa: PLR0912 -- one function: this path runs on every copy
    view: View,
    out: np.ndarray | None,
    wanted: Wanted,
    deadline: Deadline,
    as_is: bool = False,
) -> tuple[np.ndarray, Ordering] | None:
    """Copy an array to the host, and wait; `None` if the array needs the general path.

    Some arrays that need it are errors. Returns the result, and the ordering of the copy. With
    `as_is`, an `out` of another shape or type needs the general path.
    """
    found = _one_run(view, wanted)
    if found is None:
        return None
    plan, move, address, shape, dtype = found
    # check_out() refuses a read-only `out`, which the general path does in other words.
    if as_is and (
        out is None or out.shape != shape or out.dtype != dtype or not out.flags.writeable
    ):
        return None
    ordering = resolve_copy((view,), *wanted)
    if ordering is None:
        return None
    memory: Any = None
    start = onward = 0
    if out is not None:
        if not as_is:  # otherwise checked above
            check_out(out, shape, dtype)
        if plan.width > ASIDE:
            targets = _target_addresses(out, plan)
            if targets is None:
                return None
            start, onward = targets
            memory = out
    if not start:
        memory = pinned.take_block(plan.block, ordering.lane.device)
        if memory is None:
            return None
        start = memory.address
    # Until the end of this use, its objects are alive: after the copy was queued, an exception of a
    # signal handler would otherwise free memory that the GPU still uses.
    use = core.use(ordering.lane, ordering, (ordering.buffers, memory))
    try:
        limit = None if deadline.seconds is None else deadline.remaining()
        fetch = partial(_hooks.waiting, _fetch) if _hooks.host_waits else _fetch
        queued = fetch(ordering, move, start, address, limit, onward)
        if queued is not None and queued is not True:
            staging.wait_until(queued, ordering.lane, deadline)
        use.ticket.end()
    except BaseException as error:
        staging.release_after_error(ordering, use, error)
        raise
    if queued is None:
        return None
    if out is None:
        out = _array(memory, plan, shape, dtype)
    elif memory is not out and (queued is not True or not onward):
        np.copyto(out, np.ndarray(shape, dtype, memory, plan.offset, plan.strides))
    return out, ordering


def queue_to_host(
    view: View, out: np.ndarray | None, wanted: Wanted
) -> tuple[np.ndarray, Point] | None:
    """Queue a copy to page-locked memory; return the array, and the point behind the copy.

    `None` if the array needs the general path, as for `to_host`.
    """
    found = _one_run(view, wanted)
    ordering = None if found is None else resolve_copy((view,), *wanted)
    if found is None or ordering is None:
        return None
    plan, move, address, shape, dtype = found
    lane = ordering.lane
    memory: Any = out
    if out is None:
        memory = pinned.take_block(plan.block, lane.device)
        if memory is None:
            return None
        start = memory.address
    else:
        check_out(out, shape, dtype)
        targets = _target_addresses(out, plan)
        if targets is None or not targets[0]:
            return None
        start = targets[0]
    use = core.use(lane, ordering, (ordering.buffers, memory))  # as above
    try:
        queued = core.queue_copy(ordering, use.ticket, move, start, address)
        if queued is None:
            use.ticket.end()
            return None
        point, result = queued
        if result:
            ordering.release(use.ticket, result=result)
    except BaseException as error:
        staging.release_after_error(ordering, use, error)
        raise
    return _array(memory, plan, shape, dtype) if out is None else out, point


def _array(memory: Any, plan: CopyPlan, shape: Shape, dtype: np.dtype) -> np.ndarray:
    array = np.ndarray(shape, dtype, memory, plan.offset, plan.strides)
    if plan.read_only:
        array.flags.writeable = False
    return array


def _one_run(view: View, wanted: Wanted) -> tuple[CopyPlan, Move, int, Shape, np.dtype] | None:
    """Return plan, move, address, shape and dtype of an array; `None`: the general path decides."""
    seen = view.quick_layout(view.buffer) if view.has_quick_layout else None
    if seen is not None:
        view.device, address, form = seen
        known = _plan_of_form(form)
        if known is None:
            return None
        plan, shape, dtype = known
        return plan, plan.move, address, shape, dtype
    try:
        device = view.device
    except (HostBufferError, UnsupportedBufferError):
        return None
    table, stream, name, _ = wanted
    if stream is None and name is None and device not in table.unnamed:
        return None
    address, shape, strides, dtype = elements(view)
    found = _copy_plan(shape, strides, dtype.itemsize)
    if (
        found is None
        or (view.packs and (found.scattered or view.is_disguised))
        or not (view.unchecked_place or view.place).covers(address - found.below, found.span)
    ):
        return None
    return found, (*found.move[:3], 0, 0), address, shape, dtype  # 0: the extent is checked


def _fetch(  # noqa: PLR0917 -- as above
    ordering: Ordering, move: Move, start: int, address: int, limit: float | None, out: int
) -> Literal[True] | Point | None:
    """Copy a run of bytes to page-locked memory after the work of the producer.

    See `fetch` in `_driver/native/copies.c`, which waits for the copy a short time, at most `limit`
    seconds. Returns `True` if the copy is over, otherwise the point behind the copy, or `None` if
    nothing was queued.
    """
    if host_wait.host_functions_thread:
        host_wait.refuse_in_host_function("a wait")
    producers = ordering.producers
    parts = max(1, min(move[2] // PART, core.MOST_PARTS)) if out else 1
    spin = staging.SPIN
    if limit is not None:
        spin = int(min(limit * 1e9 / parts, spin))  # for each part: together at most `limit`
    after = producers[0] if producers else None
    return core.fetch(ordering.lane, after, move, start, address, spin, parts, out)


def _target_addresses(out: np.ndarray, plan: CopyPlan) -> tuple[int, int] | None:
    """Return the address in `out` for a direct copy if pinned, or for a staged copy if pageable.

    Each is 0 where it does not apply; `None` if `out` needs the general path.
    """
    is_alike = plan.width == out.nbytes and (
        out.strides == plan.strides
        or used_strides(out.shape, out.strides) == used_strides(out.shape, plan.strides)
    )
    address = address_of(out)
    if is_pinned(out, address):
        return (address - plan.offset, 0) if is_alike else None
    if plan.width > 2 * staging.SIZE:
        return None
    return 0, address - plan.offset + plan.to if is_alike else 0
