"""Copies that are queued and not waited for: `asnumpy_async`, and `copyto` with ``wait=False``.

Host memory in them is page-locked, or the driver would wait itself. It is in a list that is held
from before the copy is queued until the stream has passed it, even if all references are dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from userstream._copies import host_arrays, layout, operands, pinned
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
from userstream._ordering import resolve_views

if TYPE_CHECKING:
    from collections.abc import Sequence

    from userstream._buffers.view import View
    from userstream._engine.lane import Lane
    from userstream._stream.stream import Stream
    from userstream._table import Table
    from userstream.typing import Buffers, Producer, StreamLike


def asnumpy(
    buffer: Buffers,
    out: np.ndarray | None,
    *,
    stream: StreamLike | None,
    producer: Producer,
    table: Table,
    name: str | None,
) -> tuple[Any, Sequence[Lane]]:
    """Queue copies of what a buffer or a collection holds.

    Returns the arrays in its form, and the lanes that fill them.
    """
    lanes: dict[int, Lane] = {}

    def queue(view: View, out: np.ndarray | None = None) -> np.ndarray:
        result = operands.if_on_host(view, out)
        if result is not None:
            return result
        array = device_array(view)  # refuses what has no shape
        place = None
        if out is not None:
            check_out(out, array.shape, array.dtype)
            place = Place(out, "out=")
        source = operands.Operand(view, array)
        kept: list[object] = []
        ordering = resolve_views((view,), table, stream, name, producer, reads=(view,))

        def copy() -> np.ndarray:
            _keep, packed = operands.packed(source, ordering)
            lanes[id(ordering.lane)] = ordering.lane
            return to_host(packed, ordering.consumer, place, kept)

        return in_order(ordering, copy, release=True, memory=kept, may_wait=False)

    def join(pieces: Sequence[tuple[View, Any]], whole: Any) -> np.ndarray:
        dtype = device_array(pieces[0][0]).dtype
        return host_arrays.empty(tuple(whole.shape), dtype)

    return operands.copied(buffer, queue, out, joined=join), list(lanes.values())


class Place:
    """A page-locked array of a user's, and where it is; another is refused, with the reason."""

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


def to_host(
    source: DeviceArray, stream: Stream, place: Place | None, kept: list[object]
) -> np.ndarray:
    """Queue a copy of an array to a place or to new memory; what it uses is added to `kept`."""
    lane = CopyLane(stream, source.device)
    if 0 in source.shape:
        return np.empty(source.shape, source.dtype) if place is None else place.array
    if place is not None:
        out = place.array
        if layout.may_alias(out.shape, out.strides, out.itemsize):
            raise ValueError(
                f"the elements of the target may share memory (shape {out.shape}, strides "
                f"{out.strides})"
            )
        kept.append(out)
        plan = layout.moves(source.shape, out.itemsize, out.strides, source.strides)
        lane.move(place.address, source.address, plan, None)
        return out
    way = layout.way(source.shape, source.strides, source.dtype.itemsize)
    memory = pinned.take_or_raise(way.side.nbytes, source.device)
    kept.append(memory)
    lane.move(memory.address + way.side.offset, source.address, way.moves, None)
    return way.array(memory, source.shape, source.dtype)


def into_host(place: Place, source: DeviceArray, stream: Stream, kept: list[object]) -> None:
    """As `to_host`, but broadcast to the shape of the place."""
    out = place.array
    source = source._replace(shape=out.shape, strides=broadcast_strides(source, out.shape))
    check_out(out, source.shape, source.dtype)
    to_host(source, stream, place, kept)


def from_host(place: Place, to: DeviceArray, stream: Stream, kept: list[object]) -> None:
    """Queue a copy from a place, which may not be changed until that is done."""
    source = place.array
    check_same(to.dtype, source.dtype)
    check_target(to)
    surplus = surplus_axes(source.shape, to.shape)
    source = np.broadcast_to(source[(0,) * surplus + (...,)], to.shape)  # ... : no scalar
    lane = CopyLane(stream, to.device)
    if 0 in to.shape:
        return
    kept.append(source)
    plan = layout.moves(to.shape, to.dtype.itemsize, to.strides, source.strides)
    lane.move(to.address, place.address, plan, None)
