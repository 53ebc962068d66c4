"""Copies of what is too large for the cache: through two page-locked chunks per device.

While the GPU fills or reads one of them, the host reads or fills the other.
"""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from userstream import _process
from userstream._copies import layout, pinned
from userstream._engine import held_objects

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from userstream._copies.arrays import DeviceArray
    from userstream._copies.copy_lane import CopyLane
    from userstream._copies.layout import Moves
    from userstream._driver.core import Lease
    from userstream._engine.events import Pending

SIZE = 4 << 20

_turns: dict[int, _process.RLock] = {}
_spare: dict[int, tuple[Lease, Lease]] = {}  # by device; they are there past the limit too


def fetch(lane: CopyLane, source: DeviceArray, out: np.ndarray) -> None:
    """Copy a device array to a host array of its shape; on an error parts of it are written."""
    source, out = _small_elements(source, out)
    scattered = layout.is_scattered(source.shape, source.strides, source.dtype.itemsize)
    # What a scattered part comes with, from between its elements, has to fit as well.
    parts = _parts(source, SIZE // layout.MOST_SPREAD if scattered else SIZE)
    lane.reach()  # a stream that is held up does not keep the chunks from others

    def copy(chunks: tuple[Lease, Lease]) -> None:
        queued: list[_Fetched] = []
        try:
            for index, chunk in zip(parts, itertools.cycle(chunks), strict=False):
                queued.append(_fetch(lane, source.part(index), _part(out, index), chunk))
                if len(queued) == len(chunks):
                    queued.pop(0).unload(lane)
            for each in queued:
                each.unload(lane)
        finally:  # after a timeout or Ctrl-C: without it their events would leave the pool for good
            for each in queued:
                each.there.abandon()

    _with_chunks(lane, copy)


class _Fetched(NamedTuple):
    """A part that is on its way to a chunk."""

    there: Pending
    staged: np.ndarray
    out: np.ndarray

    def unload(self, lane: CopyLane) -> None:
        lane.wait(self.there)
        np.copyto(self.out, self.staged)


def _fetch(lane: CopyLane, part: DeviceArray, out: np.ndarray, chunk: Lease) -> _Fetched:
    chosen = layout.way(part.shape, part.strides, part.dtype.itemsize, most=SIZE)
    to = chunk.address + chosen.side.offset
    there = lane.copy(to, part.address, chosen.moves)
    return _Fetched(there, chosen.array(chunk, part.shape, part.dtype), out)


def send(lane: CopyLane, to: DeviceArray, source: np.ndarray) -> None:
    """Copy a host array to a device array of its shape, and wait for it."""
    to, source = _small_elements(to, source)
    lane.reach()  # as above

    def copy(chunks: tuple[Lease, Lease]) -> None:
        queued: list[Pending] = []
        try:
            for index, chunk in zip(_parts(to, SIZE), itertools.cycle(chunks), strict=False):
                if len(queued) == len(chunks):
                    lane.wait(queued.pop(0))
                part = to.part(index)
                start, plan = stage(part, _part(source, index), chunk)
                queued.append(lane.copy(part.address, start, plan))
            for each in queued:
                lane.wait(each)
        finally:
            for each in queued:
                each.abandon()

    _with_chunks(lane, copy)


def stage(to: DeviceArray, source: np.ndarray, memory: Lease) -> tuple[int, Moves]:
    """Copy a host array to page-locked memory; return where it begins, and the copy from there."""
    side = layout.packed(to.shape, to.strides, to.dtype.itemsize)
    np.copyto(side.array(memory, to.shape, to.dtype), source)
    plan = layout.moves(to.shape, to.dtype.itemsize, to.strides, side.strides)
    return memory.address + side.offset, plan


def _small_elements(array: DeviceArray, host: np.ndarray) -> tuple[DeviceArray, np.ndarray]:
    """Return two arrays as bytes if one element fills more than a chunk."""
    if array.dtype.itemsize <= SIZE:
        return array, host
    return array.as_bytes(), host[..., np.newaxis].view(np.uint8)


def _parts(array: DeviceArray, limit: int) -> Iterator[tuple[slice, ...]]:
    return layout.pieces(array.shape, array.strides, array.dtype.itemsize, limit)


def _part(array: np.ndarray, index: tuple[slice, ...]) -> np.ndarray:
    whole: tuple[Any, ...] = (*index, ...)  # an array also where there are no axes
    part: np.ndarray = array[whole]
    return part


def _with_chunks(lane: CopyLane, copy: Callable[[tuple[Lease, Lease]], None]) -> None:
    """Lend the two chunks of a device to a function, for one thread at a time.

    No context manager of `contextlib`: a signal in its frames would keep the chunks from all other
    threads for as long as the traceback exists.
    """
    left, device = lane.left(), lane.device
    turn = _turns.get(device) or _turns.setdefault(device, _process.RLock())
    try:
        if not turn.acquire(timeout=-1 if left is None else min(left, threading.TIMEOUT_MAX)):
            raise lane.too_late()
        chunks = _spare.pop(device, None) or _new(lane)
        use = lane.use(chunks)
        try:
            copy(chunks)
            use.ticket.end()
        except BaseException:
            held_objects.hold_after_error(use)
            raise
        _spare[device] = chunks
    finally:
        # It refuses if this thread does not have it: right also if a Ctrl-C came in between. It is
        # the first call here: a signal in one before it would leave the turn taken for good.
        try:  # noqa: SIM105
            turn.release()
        except RuntimeError:
            pass


def _new(lane: CopyLane) -> tuple[Lease, Lease]:
    return (
        pinned.take_always(SIZE, lane.device),
        pinned.take_always(SIZE, lane.device),
    )


def trim() -> threading.Thread | None:
    """Free the page-locked memory that is not in use; return the thread that does it, if any."""
    _spare.clear()
    return pinned.trim()


def _forget() -> None:
    _turns.clear()
    _spare.clear()


_process.after_fork(_forget)
