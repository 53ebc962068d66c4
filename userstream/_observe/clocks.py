"""What happened before what: a vector clock for each stream, and for the host.

A clock says, for each stream, how many of its operations are over once its owner gets to this
point. All threads of the host share a clock by default: queues and locks of Python, by which
threads tell each other of what they know, cannot be seen. In strict mode each thread has its own.
"""

from __future__ import annotations

import os
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

Clock = dict[int, int]

LEGACY = "legacy"
_RECENT = 512  # operations of a stream whose names are kept


def join(into: Clock, other: Clock) -> None:
    """Let `into` know all that `other` knows."""
    for lane, time in other.items():
        if into.get(lane, 0) < time:
            into[lane] = time


class Lane:
    """A stream, or what it is while it is captured."""

    __slots__ = (
        "blocking",
        "capture",
        "captured",
        "clock",
        "context",
        "gone",
        "handle",
        "held_by",
        "id",
        "kind",
        "last",
        "pending",
        "recent",
        "seen_floor",
        "seen_host",
        "thread",
        "time",
    )

    def __init__(self, number: int, handle: int, context: int, kind: str) -> None:
        self.id = number
        self.handle = handle
        self.context = context
        self.kind = kind  # "stream", "legacy" or "per-thread"
        self.blocking = kind == "per-thread"
        self.thread = 0
        self.time = 0
        self.clock: Clock = {}
        self.seen_host = 0
        self.seen_floor = 0
        self.captured: Lane | None = None  # what stands for it in a capture
        self.capture: Any = None  # if this stands for a stream there
        self.gone = False  # destroyed, and the host knows of all that it did
        self.held_by: frozenset[int] = (
            frozenset()
        )  # words that it waits for, and that were not written
        self.recent: deque[Any] = deque(maxlen=_RECENT)
        self.last = -1  # its newest entry in the timeline
        self.pending: tuple[int, ...] = ()  # entries that its next one waits for

    @property
    def lasts(self) -> tuple[int, ...]:
        """Entries of the timeline: whatever waits for this stream waits for these."""
        return self.pending if self.last < 0 else (self.last, *self.pending)


class Recorded(NamedTuple):
    """What an event stands for."""

    clock: Clock
    capture: Any  # that it is part of
    held_by: frozenset[int]
    lasts: tuple[int, ...] = ()  # entries of the timeline


class _Floor:
    """What all later work of a context waits for."""

    def __init__(self) -> None:
        self.clock: Clock = {}
        self.version = 0


class _Host:
    """What the host knows: all of its threads, or in strict mode one of them."""

    __slots__ = ("clock", "version")

    def __init__(self) -> None:
        self.clock: Clock = {}
        self.version = 0  # no two of all hosts alike, so that a stream knows what it has seen


class Clocks:
    """The clocks of all streams, of the host and of the events."""

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict
        self._host = _Host()  # of the thread that makes the call that is being applied
        self._hosts = {} if strict else {0: self._host}  # by thread
        self.maybe: Clock = {}  # what a host function or a future can have told the host
        self.kept: Clock = {}  # what userstream itself knows as well, for its own pinned memory
        self._versions = 0
        self._lanes: dict[object, Lane] = {}
        self._blocking: dict[int, list[Lane]] = {}  # of them, by context
        self._floors: dict[int, _Floor] = {}
        self._events: dict[int, Recorded] = {}
        self._dying: list[Lane] = []  # destroyed, and the host does not know the end of their work
        self._unseen: dict[int, tuple[int, int]] = {}  # by stream: first and last unseen work
        self._dropped = 0
        self._count = 0

    # -- the host ---------------------------------------------------------------------------------

    def called_by(self, thread: int) -> None:
        """Say which thread of the host makes the next call."""
        if not self._strict:
            return
        host = self._hosts.get(thread)
        if host is None:
            # The thread that began it cannot be seen, but knew no more than all of them together.
            host = self._hosts[thread] = _Host()
            for other in self._hosts.values():
                join(host.clock, other.clock)
            self._changed(host)
        self._host = host

    def host_knows(self, clock: Clock) -> None:
        """Let the host, and all that it queues from now on, know of this."""
        join(self._host.clock, clock)
        join(self.kept, clock)
        self._changed(self._host)
        if self._dying:
            self._bury()

    def is_known(self, lane: Lane, time: int) -> bool:
        """Tell whether the host, whichever thread of it, knows that an operation is over."""
        return lane.gone or all(host.clock.get(lane.id, 0) >= time for host in self._hosts.values())

    def forget_ended_threads(self) -> None:
        """Let nothing be kept for the sake of a thread that makes no more calls."""
        if self._strict:
            for thread in [
                each for each in self._hosts if not os.path.exists(f"/proc/self/task/{each}")
            ]:
                del self._hosts[thread]

    def _changed(self, host: _Host) -> None:
        self._versions += 1
        host.version = self._versions

    # -- streams ----------------------------------------------------------------------------------

    def lane(self, handle: int, context: int, thread: int) -> Lane:
        """Return the stream of a handle, or what stands for it in a capture."""
        key: object
        if handle > 2:
            found = self._lanes.get(handle)
            if found is not None:
                return found.captured or found
            key, kind = handle, "stream"
        elif handle == 2:
            key, kind = (context, thread), "per-thread"
        else:
            key, kind = (context, LEGACY), LEGACY
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = self.new_lane(handle, context, kind)
            lane.thread = thread
            if lane.blocking:
                self._blocking.setdefault(context, []).append(lane)
        return lane.captured or lane

    def new_lane(self, handle: int, context: int, kind: str) -> Lane:
        """Make one that no handle leads to."""
        self._count += 1
        return Lane(self._count, handle, context, kind)

    def seen_stream(
        self, handle: int, context: int, *, blocking: bool, pending: bool = False
    ) -> Lane:
        """Add a stream at its first use; `pending` says that earlier work is in flight on it."""
        self.drop_stream(handle)
        lane = self._lanes[handle] = self.new_lane(handle, context, "stream")
        if blocking:
            lane.blocking = True
            self._blocking.setdefault(context, []).append(lane)
        if pending:
            self.depend_on_unseen(lane)
        return lane

    def drop_stream(self, handle: int) -> None:
        """Forget a handle, which another stream may get; its work continues."""
        lane = self._lanes.pop(handle, None)
        if lane is not None:
            self._dying.append(lane)
            self._dropped += 1

    def lanes_of(self, context: int) -> list[Lane]:
        """Return the used streams of a context, with destroyed ones whose work may be in flight."""
        return [lane for lane in self.lanes() if lane.context == context]

    def lanes(self) -> Iterable[Lane]:
        """Return all used streams, with destroyed ones whose work may be in flight."""
        return (*self._lanes.values(), *self._dying)

    def count_streams(self) -> int:
        """Return the number of streams that were used, destroyed ones included."""
        return len(self._lanes) + self._dropped

    def beside(self, lane: Lane) -> Iterable[Lane]:
        """Return the streams that a stream waits for without being told to."""
        if lane.capture is not None:
            return ()
        if lane.kind == LEGACY:
            return self._blocking.get(lane.context, ())
        if lane.blocking:
            legacy = self._lanes.get((lane.context, LEGACY))
            if legacy is not None:
                return (legacy,)
        return ()

    # -- work that was queued before the observation ----------------------------------------------

    def depend_on_unseen(self, lane: Lane) -> None:
        """Put work that was not seen on a stream: it was queued before the observation began."""
        lane.time = lane.clock[lane.id] = time = lane.time + 1
        first, _ = self._unseen.get(lane.id, (time, time))
        if self.kept.get(lane.id, 0) >= first:
            first = time
        self._unseen[lane.id] = (first, time)

    def may_follow_unseen(self, lane: Lane) -> bool:
        """Return whether a stream is ordered after unseen work that may still be in flight."""
        kept, clock = self.kept, lane.clock
        return any(
            kept.get(each, 0) < last and clock.get(each, 0) >= first
            for each, (first, last) in self._unseen.items()
        )

    # -- order ------------------------------------------------------------------------------------

    def settle(self, lane: Lane, beside: Iterable[Lane] | None = None) -> Clock:
        """Let a stream know all that its next operation waits for anyway; return its clock."""
        clock = lane.clock
        if lane.capture is not None:
            return clock
        if lane.seen_host != self._host.version:
            join(clock, self._host.clock)
            lane.seen_host = self._host.version
        if self._floors:
            floor = self._floors.get(lane.context)
            if floor is not None and lane.seen_floor != floor.version:
                join(clock, floor.clock)
                lane.seen_floor = floor.version
        for other in self.beside(lane) if beside is None else beside:
            join(clock, other.clock)
        return clock

    def step(self, lane: Lane, what: Any, beside: Iterable[Lane] | None = None) -> int:
        """Put an operation on a stream, behind those beside it; return its number there."""
        clock = self.settle(lane, beside)
        lane.time = clock[lane.id] = time = lane.time + 1
        lane.recent.append((time, what))
        return time

    def record(self, event: int, lane: Lane) -> None:
        """Let an event stand for what is on the stream now."""
        self._events[event] = Recorded(
            dict(self.settle(lane)), lane.capture, lane.held_by, lane.lasts
        )

    def recorded(self, event: int) -> Recorded | None:
        """Return what an event stands for."""
        return self._events.get(event)

    def record_context(self, event: int, context: int) -> None:
        """Let an event stand for everything in a context."""
        lasts = tuple(each for lane in self.lanes_of(context) for each in lane.lasts)
        self._events[event] = Recorded(self.of_context(context), None, frozenset(), lasts)

    def drop_event(self, event: int) -> None:
        """Forget an event, whose handle another one may get."""
        self._events.pop(event, None)

    def of_context(self, context: int) -> Clock:
        """Return what everything in a context comes to."""
        clock: Clock = {}
        for lane in self.lanes_of(context):
            join(clock, lane.clock)
        return clock

    def raise_floor(self, context: int, clock: Clock) -> None:
        """Let all later work of a context wait, that of new streams too."""
        floor = self._floors.setdefault(context, _Floor())
        join(floor.clock, clock)
        floor.version += 1

    def _bury(self) -> None:
        """Take the streams out of all clocks whose work all that comes is ordered behind."""
        passed = [lane for lane in self._dying if self.is_known(lane, lane.time)]
        if not passed:
            return
        for lane in passed:
            self._dying.remove(lane)
            if lane.blocking:  # until here: the legacy default stream waits for its work
                self._blocking[lane.context].remove(lane)
            self._unseen.pop(lane.id, None)
            lane.gone = True
        # Events too: they would bring it back, and be recorded again with it forever.
        alive = {lane.id for lane in (*self._lanes.values(), *self._dying)}
        clocks = [
            *(host.clock for host in self._hosts.values()),
            self.maybe,
            self.kept,
            *(each.clock for each in self.lanes()),
            *(each.clock for each in self._floors.values()),
            *(each.clock for each in self._events.values() if each.capture is None),
        ]
        for clock in clocks:
            for gone in clock.keys() - alive:
                del clock[gone]

    def forget_all(self) -> None:
        """Take everything until now as known to all: something was lost."""
        for lane in self.lanes():
            join(self.kept, lane.clock)
            for host in self._hosts.values():
                join(host.clock, lane.clock)
        for host in self._hosts.values():
            self._changed(host)
        self._events.clear()
        self._bury()
