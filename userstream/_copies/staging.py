"""The lane of a copy, and copies through page-locked chunks of what is too large for the cache.

There are two chunks per device: while the GPU fills or reads one, the host reads or fills the
other.
"""

from __future__ import annotations

import itertools
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from userstream import _driver, _process, errors
from userstream._copies import layout, pinned
from userstream._driver import core
from userstream._engine import held_objects, host_wait
from userstream.errors import UnsupportedBufferError, WaitTimeout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from userstream._copies.layout import Moves
    from userstream._copies.operands import DeviceArray
    from userstream._driver.copies import Copy, Peers
    from userstream._driver.core import Lease, Use
    from userstream._engine.events import Pending
    from userstream._engine.host_wait import Deadline
    from userstream._engine.lane import Lane
    from userstream._ordering.ordering import Ordering

NOT_CAPTURED = "; asnumpy and copyto cannot be captured: copy before or after the capture"

# Nanoseconds: longer than a small copy or a part of a copy takes, and too short to delay Ctrl-C.
SPIN = 100_000

_UNDEFINED = (
    "the copy is queued behind the work of the buffer's producer, and the contents of its "
    "destination are undefined: copy again once that work is done"
)


class CopyLane:
    """The lane of one copy, the deadline of its waits, and the objects that the copy uses.

    `kept` is alive until the lane has passed the copy: memory is added before a copy of it is
    queued.
    """

    __slots__ = ("_deadline", "_lane", "device", "kept")

    def __init__(self, lane: Lane, deadline: Deadline | None, kept: list[object]) -> None:
        self._lane = lane
        self._deadline = deadline or host_wait.Deadline(None)
        self.device = lane.device
        self.kept = kept

    def wait(self, completion: Pending) -> None:
        """Wait on the host for a point on this lane."""
        wait_until(completion, self._lane, self._deadline)

    def reach(self) -> None:
        """Wait on the host until the lane has done the work that is queued now."""
        if not self._lane.is_idle():
            self.wait(self._lane.completion())

    def is_idle_soon(self) -> bool:
        """Return whether the lane completes its queued work, such as an edge, in a short time."""
        until = time.monotonic_ns() + SPIN
        while not self._lane.is_idle():
            if time.monotonic_ns() > until:
                return False
        return True

    def remaining(self) -> float | None:
        """Return the remaining seconds; `None` without a timeout."""
        return self._deadline.remaining()

    def timeout_error(self) -> Exception:
        """Return the error for a deadline that has passed."""
        return _timeout_error(self._lane, self._deadline)

    def copy_and_wait(self, to: int, source: int, plan: Moves, memory: object) -> None:
        """Copy, and wait on the host; `memory` is kept until the GPU has finished."""
        self.kept.append(memory)
        self.wait(self.copy(to, source, plan))

    def copy(self, to: int, source: int, plan: Moves) -> Pending:
        """Queue a copy between two first elements; return the point where the copy is over."""
        self.move(to, source, plan)
        return self._lane.completion()

    def move(self, to: int, source: int, plan: Moves, peers: Peers | None = None) -> None:
        """Queue a copy between two first elements, on one device or between two."""
        lane = self._lane
        if not plan.axes:
            to, source = to + plan.to_offset, source + plan.from_offset
            _driver.copies.copy_within(lane, to, source, plan.width, peers)
            return
        count, calls = layout.copies(plan)
        if count > layout.MOST_COPIES:
            raise UnsupportedBufferError(
                f"an array that is laid out like this takes {count} copies, more than "
                f"{layout.MOST_COPIES}; make it contiguous first, in its framework"
            )
        lane.within(self._copy_each, to, source, calls, peers)

    def _copy_each(self, to: int, source: int, calls: Iterator[Copy], peers: Peers | None) -> None:
        handle = self._lane.live()
        for each in calls:
            _driver.copies.copy_shaped(to, source, each, handle, self._lane, peers=peers)


def wait_until(there: Pending, lane: Lane, deadline: Deadline) -> None:
    """Wait on the host for a point on a lane."""
    try:
        host_wait.wait_until(there, deadline.remaining())
    except WaitTimeout:
        raise _timeout_error(lane, deadline) from None


def _timeout_error(lane: Lane, deadline: Deadline) -> Exception:
    return host_wait.late((lane,), deadline.seconds, _UNDEFINED)


def release_after_error(ordering: Ordering, use: Use, error: BaseException) -> None:
    """Order the producers after a copy that failed, and hold its objects until it is over.

    After a timeout or Ctrl-C the GPU still copies. If this fails, later calls try again.
    """
    if use.ticket not in core.in_use:  # ended
        return
    try:
        ordering.release(use.ticket, after_error=True)
    except Exception as failure:
        held_objects.hold_later(use)
        errors._report_failures([failure], error)


# -- chunks ----------------------------------------------------------------------------------------

SIZE = 4 << 20

_turns: dict[int, _process.RLock] = {}
_spare: dict[int, tuple[Lease, Lease]] = {}  # by device; the limit does not count


def fetch(lane: CopyLane, source: DeviceArray, out: np.ndarray) -> None:
    """Copy a device array to a host array of its shape; on an error parts of it are written."""
    source, out = _small_elements(source, out)
    # A scattered part is copied with the gaps between its elements, which must fit as well.
    parts = _parts(source, SIZE // layout.MOST_SPREAD if source.is_scattered else SIZE)
    lane.reach()  # before the chunks are taken: a blocked stream must not keep them from others

    def copy(chunks: tuple[Lease, Lease]) -> None:
        queued: list[_Fetched] = []
        for index, chunk in zip(parts, itertools.cycle(chunks), strict=False):
            queued.append(_fetch(lane, source.part(index), _part(out, index), chunk))
            if len(queued) == len(chunks):
                queued.pop(0).unload(lane)
        for each in queued:
            each.unload(lane)

    _with_chunks(lane, copy)


class _Fetched(NamedTuple):
    """A part of an array that the GPU is copying to a chunk."""

    there: Pending
    staged: np.ndarray
    out: np.ndarray

    def unload(self, lane: CopyLane) -> None:
        lane.wait(self.there)
        np.copyto(self.out, self.staged)


def _fetch(lane: CopyLane, part: DeviceArray, out: np.ndarray, chunk: Lease) -> _Fetched:
    chosen = layout.host_copy_plan(part.shape, part.strides, part.dtype.itemsize, most=SIZE)
    to = chunk.address + chosen.side.offset
    there = lane.copy(to, part.address, chosen.moves)
    return _Fetched(there, chosen.array(chunk, part.shape, part.dtype), out)


def send(lane: CopyLane, to: DeviceArray, source: np.ndarray) -> None:
    """Copy a host array to a device array of its shape, and wait for it."""
    to, source = _small_elements(to, source)
    lane.reach()  # before the chunks are taken, as in `fetch`

    def copy(chunks: tuple[Lease, Lease]) -> None:
        queued: list[Pending] = []
        for index, chunk in zip(_parts(to, SIZE), itertools.cycle(chunks), strict=False):
            if len(queued) == len(chunks):
                lane.wait(queued.pop(0))
            part = to.part(index)
            start, plan = stage(part, _part(source, index), chunk)
            queued.append(lane.copy(part.address, start, plan))
        for each in queued:
            lane.wait(each)

    _with_chunks(lane, copy)


def stage(to: DeviceArray, source: np.ndarray, memory: Lease) -> tuple[int, Moves]:
    """Copy a host array to page-locked memory; return its address there and the copy to queue."""
    side = layout.packed(to.shape, to.strides, to.dtype.itemsize)
    np.copyto(side.array(memory, to.shape, to.dtype), source)
    plan = layout.moves(to.shape, to.dtype.itemsize, to.strides, side.strides)
    return memory.address + side.offset, plan


def _small_elements(array: DeviceArray, host: np.ndarray) -> tuple[DeviceArray, np.ndarray]:
    """Return both arrays, as bytes if an element is larger than a chunk."""
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
    left, device = lane.remaining(), lane.device
    turn = _turns.get(device) or _turns.setdefault(device, _process.RLock())
    try:
        if not turn.acquire(timeout=-1 if left is None else min(left, threading.TIMEOUT_MAX)):
            raise lane.timeout_error()
        chunks = _spare.pop(device, None)
        if chunks is None:
            chunks = pinned.take_always(SIZE, device), pinned.take_always(SIZE, device)
        lane.kept.append(chunks)  # after an error the GPU may still use them
        copy(chunks)
        lane.kept.pop()
        _spare[device] = chunks
    finally:
        # `release` raises if this thread does not have the lock, as after a Ctrl-C in `acquire`. It
        # is the first call here: a signal in an earlier call would leave the lock held forever.
        try:  # noqa: SIM105
            turn.release()
        except RuntimeError:
            pass


def trim() -> threading.Thread | None:
    """Free the unused page-locked memory; return the thread that frees it, or `None`."""
    _spare.clear()
    return pinned.trim()


def _forget() -> None:
    _turns.clear()
    _spare.clear()


_process.after_fork(_forget)
