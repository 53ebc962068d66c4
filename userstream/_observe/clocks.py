"""What happened before what: a vector clock for each stream, and one for the host.

A clock says, for each stream, how many of its operations are over once its owner gets to this
point. All threads of the host share a clock: queues and locks of Python, by which threads tell each
other of what they know, cannot be seen.
"""

from __future__ import annotations

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
        )  # words that it waits for, and nobody has written
        self.recent: deque[Any] = deque(maxlen=_RECENT)


class Recorded(NamedTuple):
    """What an event stands for."""

    clock: Clock
    capture: Any  # that it is part of
    held_by: frozenset[int]


class _Floor:
    """What all later work of a context waits for."""

    def __init__(self) -> None:
        self.clock: Clock = {}
        self.version = 0


class Clocks:
    """The clocks of all streams, of the host and of the events."""

    def __init__(self) -> None:
        self.host: Clock = {}
        self.maybe: Clock = {}  # what a host function or a future can have told the host
        self.kept: Clock = {}  # what userstream itself knows as well, for its own pinned memory
        self._host_version = 1
        self._lanes: dict[object, Lane] = {}
        self._floors: dict[int, _Floor] = {}
        self._events: dict[int, Recorded] = {}
        self._dying: list[Lane] = []
        self._count = 0

    # -- streams ----------------------------------------------------------------------------------

    def lane(self, handle: int, context: int, thread: int) -> Lane:
        """Return the stream of a handle, or what stands for it in a capture."""
        key: object
        if handle > 2:
            key, kind = handle, "stream"
        elif handle == 2:
            key, kind = (context, thread), "per-thread"
        else:
            key, kind = (context, LEGACY), LEGACY
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = self.new_lane(handle, context, kind)
            lane.thread = thread
        return lane.captured or lane

    def new_lane(self, handle: int, context: int, kind: str) -> Lane:
        """Make one that no handle leads to."""
        self._count += 1
        return Lane(self._count, handle, context, kind)

    def seen_stream(self, handle: int, context: int, *, blocking: bool) -> Lane:
        """Note what a stream is, before anything is done on it."""
        lane = self._lanes[handle] = self.new_lane(handle, context, "stream")
        lane.blocking = blocking
        return lane

    def drop_stream(self, handle: int) -> None:
        """Forget a handle, which another stream may get; its work goes on."""
        lane = self._lanes.pop(handle, None)
        if lane is not None:
            self._dying.append(lane)

    def lanes_of(self, context: int) -> list[Lane]:
        """Return the streams of a context that were used."""
        return [lane for lane in self._lanes.values() if lane.context == context]

    def lanes(self) -> Iterable[Lane]:
        """Return all streams that were used."""
        return self._lanes.values()

    # -- order ------------------------------------------------------------------------------------

    def settle(self, lane: Lane) -> Clock:
        """Let a stream know all that its next operation waits for anyway; return its clock."""
        clock = lane.clock
        if lane.capture is not None:
            return clock
        if lane.seen_host != self._host_version:
            join(clock, self.host)
            lane.seen_host = self._host_version
        floor = self._floors.get(lane.context)
        if floor is not None and lane.seen_floor != floor.version:
            join(clock, floor.clock)
            lane.seen_floor = floor.version
        if lane.kind == LEGACY:
            for other in self._lanes.values():
                if other.blocking and other.context == lane.context:
                    join(clock, other.clock)
        elif lane.blocking:
            legacy = self._lanes.get((lane.context, LEGACY))
            if legacy is not None:
                join(clock, legacy.clock)
        return clock

    def step(self, lane: Lane, what: Any) -> int:
        """Put an operation on a stream; return its number there."""
        clock = self.settle(lane)
        lane.time += 1
        clock[lane.id] = lane.time
        lane.recent.append((lane.time, what))
        return lane.time

    def record(self, event: int, lane: Lane) -> None:
        """Let an event stand for what is on the stream now."""
        self._events[event] = Recorded(dict(self.settle(lane)), lane.capture, lane.held_by)

    def recorded(self, event: int) -> Recorded | None:
        """Return what an event stands for."""
        return self._events.get(event)

    def record_clock(self, event: int, clock: Clock) -> None:
        """Let an event stand for a clock."""
        self._events[event] = Recorded(clock, None, frozenset())

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

    def host_knows(self, clock: Clock) -> None:
        """Let the host, and all that it queues from now on, know of this."""
        join(self.host, clock)
        join(self.kept, clock)
        self._host_version += 1
        if self._dying:
            self._bury()

    def _bury(self) -> None:
        """Take the streams out of all clocks whose work all that comes is ordered behind."""
        passed = [lane for lane in self._dying if self.host.get(lane.id, 0) >= lane.time]
        for lane in passed:
            self._dying.remove(lane)
            lane.gone = True
            clocks = [
                self.host,
                self.maybe,
                self.kept,
                *(each.clock for each in self._lanes.values()),
            ]
            for clock in clocks:
                clock.pop(lane.id, None)

    def forget_all(self) -> None:
        """Take everything until now as known to all: something was lost."""
        for lane in self._lanes.values():
            join(self.host, lane.clock)
        self._host_version += 1
        self._events.clear()
