"""`CopyLane`: a stream to copy on, and until when."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeAlias

from userstream import _driver, _hooks
from userstream._copies import layout
from userstream._driver import core
from userstream._engine import events, held_objects, host_wait
from userstream.errors import UnsupportedBufferError, WaitTimeout

if TYPE_CHECKING:
    from userstream._copies.layout import Moves
    from userstream._driver.copies import Peers
    from userstream._driver.core import Use
    from userstream._engine.events import Pending
    from userstream._engine.host_wait import Deadline
    from userstream._engine.lane import Lane
    from userstream._stream.stream import Stream


NOT_CAPTURED = "; asnumpy and copyto cannot be captured: copy before or after the capture"


# Longer than a small copy takes, or a part of one, and no time for one who presses Ctrl-C.
_SPIN = 100_000  # nanoseconds

# Of a copy on to pageable memory: the host copies one part while the GPU copies the next.
PART = 512 << 10

_NOT_THERE = (
    "the copy is queued behind the work of the buffer's producer, and the contents of its "
    "destination are undefined: copy again once that work is done"
)


# As `fetch` in `_driver/native/copies.c` takes it.
Move: TypeAlias = tuple[int, int, int, int, int]


def too_late(lane: Lane, deadline: Deadline) -> Exception:
    """Return the error for a copy on a lane that was not done in time."""
    return host_wait.late((lane,), deadline.seconds, _NOT_THERE)


def fetch(  # noqa: PLR0917 -- to name them would cost as much as they do
    lane: Lane,
    after: Lane | None,
    move: Move,
    start: int,
    address: int,
    left: float | None,
    out: int,
    kept: tuple[object, ...],
) -> bool | Pending:
    """Copy a run of bytes to page-locked memory after the work of another lane.

    `move`, `start` and `address` are as in `fetch` in `_driver/native/copies.c`.

    In one call of the driver's room, which waits for the copy a short time, and not longer than
    `left`; with an address `out` it takes the bytes there as well. Returns True once that is done,
    else the point where the copy is over, and nothing is to be found at `out`. False says that
    nothing was queued, because a stream is being captured, the contexts are several, or so are the
    allocations that the array spans.

    `kept` is the lane, and what is copied: unless True is returned, it may be in `left`.
    """
    if host_wait.host_functions_thread:
        host_wait.refuse_in_host_function("a wait")
    pool = lane.pool
    if after is not None and after.pool is not pool:
        return False
    if after is not None and _hooks.edge_added:
        # `core.fetch` reports no edge, so that the edge is added before.
        if core.order(after, lane):
            return False
        after = None
    count = min(move[2] // PART, _driver.core.MOST_PARTS) if out else 1
    used: list[int] = []
    try:
        while len(used) < max(count, 1):
            used.append(pool.take())
        result = _driver.core.fetch(
            held_objects.left,
            kept,
            move,
            tuple(used),
            start,
            address,
            lane.raw_handle or lane.live(),
            lane.raw_context,
            # Each part is waited for so long: together not longer than is left.
            _SPIN if left is None else int(min(left * 1e9 / len(used), _SPIN)),
            0 if after is None else after.raw_handle or after.live(),
            out,
        )
        over = not result or _driver.core.is_fetched(result, lane, after)
    except BaseException:  # they may be recorded, so each is used again only once it has completed
        for event in used:
            pool.abandon(event)
        raise
    there: bool | Pending = over is not None
    if over is False:
        there = events.StreamPoint(pool, lane, lane.is_context_independent, used.pop())
    pool.give_back(*used)  # which nothing polls any more
    return there


def copy_and_wait(lane: Lane, to: int, source: int, size: int, deadline: Deadline) -> None:
    """Copy a run of bytes to page-locked memory, and wait for that, whatever context is current."""
    lane.usable(NOT_CAPTURED)
    _driver.copies.copy_within(lane, to, source, size)
    wait_until(lane.completion(), lane, deadline)


def wait_until(there: Pending, lane: Lane, deadline: Deadline) -> None:
    """Wait for a point on a lane."""
    try:
        host_wait.wait_until(there, deadline.left())
    except WaitTimeout:
        raise too_late(lane, deadline) from None


class CopyLane:
    """A stream to copy on, in its context, and the deadline of what is done there.

    Raises `CaptureError` where the stream is being captured: a copy in a graph is not for now.
    """

    __slots__ = ("_deadline", "_lane", "device")

    def __init__(self, stream: Stream, device: int, deadline: Deadline | None = None) -> None:
        self._lane = stream._resolve(device)  # whichever is current
        self._lane.usable(NOT_CAPTURED)
        self.device = device
        self._deadline = deadline or host_wait.Deadline(None)

    def wait(self, completion: Pending) -> None:
        """Wait for a point on this lane."""
        wait_until(completion, self._lane, self._deadline)

    def reach(self) -> None:
        """Wait until the stream has done what is queued on it now."""
        if not self._lane.is_idle():
            self.wait(self._lane.completion())

    def is_idle_soon(self) -> bool:
        """Tell whether the stream does what is queued on it, such as an edge, in a short time."""
        until = time.monotonic_ns() + _SPIN
        while not self._lane.is_idle():
            if time.monotonic_ns() > until:
                return False
        return True

    def left(self) -> float | None:
        """Return the seconds that are left."""
        return self._deadline.left()

    def too_late(self) -> Exception:
        """Return the error for a deadline that has passed."""
        return too_late(self._lane, self._deadline)

    def copy_and_wait(self, to: int, source: int, plan: Moves, memory: object) -> None:
        """Copy, and keep the memory alive until the GPU has finished, whatever comes in between."""
        use = self.use(memory)
        try:
            self.wait(self.copy(to, source, plan))
            use.ticket.end()
        except BaseException:
            # After a timeout or Ctrl-C the copy goes through all the same. Freed now, the memory
            # would be lent to another copy while the GPU still writes to it.
            held_objects.hold_after_error(use)
            raise

    def use(self, memory: object) -> Use:
        """Hold memory that is copied to or from, from now on."""
        return core.use(self._lane, None, memory)

    def copy(self, to: int, source: int, plan: Moves) -> Pending:
        """Queue a copy between two first elements; return the point where it is over."""
        return self._lane.within(self._copy, to, source, plan)

    def _copy(self, to: int, source: int, plan: Moves) -> Pending:
        self._move(to, source, plan)
        return self._lane.completion()

    def move(self, to: int, source: int, plan: Moves, peers: Peers | None) -> None:
        """Queue a copy that is not waited for, on one device or between two."""
        self._lane.within(self._move, to, source, plan, peers)

    def _move(self, to: int, source: int, plan: Moves, peers: Peers | None = None) -> None:
        lane, handle = self._lane, self._lane.live()
        if not plan.axes:
            to, source = to + plan.to_offset, source + plan.from_offset
            _driver.copies.copy(to, source, plan.width, handle, lane, peers=peers)
            return
        count, calls = layout.copies(plan)
        if count > layout.MOST_COPIES:
            raise UnsupportedBufferError(
                f"an array that is laid out like this takes {count} copies, more than "
                f"{layout.MOST_COPIES}; make it contiguous first, in its framework"
            )
        for what in calls:
            _driver.copies.copy_shaped(to, source, what, handle, lane, peers=peers)
