"""Vector clocks of streams, events and host threads: the happens-before relation.

A clock says, for each stream, how many of its operations are over once its owner gets to this
point. All threads of the host share a clock by default: queues and locks of Python, by which
threads tell each other of what they know, cannot be seen. In strict mode each thread has its own.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

Clock = dict[int, int]
WaitKey = tuple[int, int]  # of a wait for a value: the number of its call, and the address
# Key of all waits for something outside of CUDA, such as an external semaphore: their ends are not
# seen, and they may order anything.
EXTERNAL: WaitKey = (0, 0)

LEGACY = "legacy"
PER_THREAD = "per-thread"  # the default stream of a thread
NODE = "node"  # of a graph
LEGACY_NAME = "the legacy default stream"
NODE_NAME = "a node of a graph"
_RECENT = 512  # operations of a stream whose names are kept, and waits for a report of a hang


def join(into: Clock, other: Clock) -> None:
    """Raise each component of a clock to that of another clock."""
    for lane, time in other.items():
        if into.get(lane, 0) < time:
            into[lane] = time


def is_news(clock: Clock, known: Clock) -> bool:
    """Return whether a clock includes work that another clock does not."""
    return any(known.get(lane, 0) < time for lane, time in clock.items())


class Lane:
    """A stream, or its stand-in while the stream is captured."""

    __slots__ = (
        "blocking",
        "capture",
        "captured",
        "clock",
        "context",
        "created",
        "first",
        "handle",
        "held_by",
        "id",
        "is_dropped",
        "is_finished",
        "is_implicit",
        "kind",
        "last",
        "name",
        "number",
        "part",
        "pending",
        "recent",
        "seen_beside",
        "seen_floor",
        "seen_host",
        "thread",
        "time",
        "version",
        "waits",
    )

    def __init__(self, number: int, handle: int, context: int, kind: str) -> None:
        self.id = number
        self.handle = handle
        self.context = context
        self.part = context  # the green context, if the stream is of one
        self.kind = kind  # "stream", "legacy" or "per-thread"
        self.number = 0  # of the stream in reports; default streams have none
        self.name = ""  # that somebody has given it
        self.created = -1  # the stack of the call that created it
        self.first = -1  # the stack of the call that first used it
        self.blocking = kind == PER_THREAD
        self.is_implicit = kind in {LEGACY, PER_THREAD}  # may wait for streams that no call names
        self.thread = 0
        self.time = 0
        self.clock: Clock = {}
        self.version = 0  # grows with the clock, so that other streams join only what is new
        self.seen_beside: dict[int, int] = {}  # versions of the streams in `beside`
        self.seen_host = 0
        self.seen_floor = 0
        self.captured: Lane | None = None  # the stand-in of the stream during a capture
        self.capture: Any = None  # the capture in which this is a stand-in
        self.is_dropped = False  # no handle refers to it any more
        self.is_finished = False  # destroyed, and the host knows the end of its work
        self.held_by: frozenset[WaitKey] = frozenset()  # waits for values that were not written yet
        self.recent: deque[Any] = deque(maxlen=_RECENT)
        self.waits: deque[QueuedWait] = deque()  # not known to be over: the oldest ones
        self.last = -1  # its newest entry in the timeline
        self.pending: tuple[int, ...] = ()  # entries that its next operation waits for

    def follow(self, clock: Clock) -> None:
        """Order later work of the stream after a clock."""
        join(self.clock, clock)
        self.version += 1

    @property
    def lasts(self) -> tuple[int, ...]:
        """Timeline entries that a wait for this stream waits for."""
        return self.pending if self.last < 0 else (self.last, *self.pending)


class Recorded(NamedTuple):
    """The state of a stream when an event was recorded."""

    clock: Clock
    capture: Any  # the capture that the event is part of
    held_by: frozenset[WaitKey]
    lasts: tuple[int, ...] = ()  # entries of the timeline
    stream: int = 0  # the number of the stream; 0 if the event is of several
    stack: int = -1  # of the call that recorded the event


class QueuedWait(NamedTuple):
    """A wait that is queued on a stream, for an event or for a value in memory."""

    time: int  # the number of the first operation behind it
    stack: int
    place: int  # the event, or the number of the call that waits for a value
    until: Any  # the `Recorded`, or the condition of the value


class Floor:
    """Clock that all later work of a context is ordered after."""

    def __init__(self) -> None:
        self.clock: Clock = {}
        self.version = 0
        self.held_by: frozenset[WaitKey] = frozenset()  # as of a stream

    def follow(self, clock: Clock) -> None:
        """Order later work of the context after a clock."""
        join(self.clock, clock)
        self.version += 1


class _Host:
    """Completed work known to the host: to all threads, or in strict mode to one."""

    __slots__ = ("clock", "version")

    def __init__(self) -> None:
        self.clock: Clock = {}
        self.version = 0  # unique, so that a stream can compare it with `seen_host`


class Clocks:
    """The clocks of all streams, of the host and of the events."""

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict
        self._host = _Host()  # the thread of the current call
        self._hosts = {} if strict else {0: self._host}  # by thread
        self.possibly_known: Clock = {}  # possibly known, by a host function or a future
        self.told_outside: Clock = {}  # what events have told to other processes
        self.known_to_any_thread: Clock = {}  # known to any thread, userstream included
        self._versions = 0
        self.streams: dict[object, Lane] = {}  # by handle; default streams by their contexts
        self._blocking: dict[int, list[Lane]] = {}  # blocking streams, by context
        self.floors: dict[int, Floor] = {}  # by context
        self._events: dict[int, Recorded] = {}
        self._destroyed: list[Lane] = []  # streams whose work may be in flight
        self._names: dict[int, str] = {}  # of streams, by handle
        self._created: dict[int, int] = {}  # stacks of the calls that created streams, by handle
        # Numbers of streams, by handle and creation. A stream that the same line creates again
        # with the same handle keeps its number, as in a loop that creates one in each turn.
        self._numbers: dict[tuple[int, int], int] = {}
        self._unseen: dict[int, tuple[int, int]] = {}  # by stream: first and last unseen work
        # By stream: the first and the last wait for something outside of CUDA. A wait is removed
        # once the host knows that it is over.
        self._external: dict[int, tuple[int, int]] = {}
        self._dropped = 0
        self._finished = 0  # streams since all clocks were compared with those that are left
        self._count = 0

    # -- the host ---------------------------------------------------------------------------------

    def called_by(self, thread: int) -> None:
        """Set the host thread that makes the next call."""
        if not self._strict:
            return
        host = self._hosts.get(thread)
        if host is None:
            # Its parent thread is unknown, but knew no more than all threads together.
            host = self._hosts[thread] = _Host()
            for other in self._hosts.values():
                join(host.clock, other.clock)
            self._changed(host)
        self._host = host

    def host_knows(self, clock: Clock) -> None:
        """Record that the host knows the completion of the work in a clock."""
        join(self._host.clock, clock)
        join(self.known_to_any_thread, clock)
        self._changed(self._host)
        if self._external:
            self._end_external_waits()
        if self._destroyed:
            self._forget_finished_streams()

    def host_clock(self) -> Clock:
        """Return the clock of the work that the host knows to be over."""
        return dict(self._host.clock)

    def is_known(self, lane: Lane, time: int) -> bool:
        """Return whether every host thread knows that an operation has completed."""
        if lane.is_finished:
            return True
        return all(host.clock.get(lane.id, 0) >= time for host in self._hosts.values())

    def known_to_every_thread(self) -> Clock:
        """Return the clock of the work that every host thread knows to be over."""
        known: Clock | None = None
        for host in self._hosts.values():
            clock = host.clock
            known = {
                lane: time if known is None else min(time, known.get(lane, 0))
                for lane, time in clock.items()
            }
        return known or {}

    def forget_thread(self, thread: int) -> None:
        """Forget the clock of a thread that has ended."""
        if self._strict:
            self._hosts.pop(thread, None)

    def _changed(self, host: _Host) -> None:
        self._versions += 1
        host.version = self._versions

    # -- streams ----------------------------------------------------------------------------------

    def lane(self, handle: int, context: int, thread: int) -> Lane:
        """Return the stream of a handle, or its stand-in during a capture."""
        key: object
        if handle > 2:
            found = self.streams.get(handle)
            if found is not None:
                return found.captured or found
            key, kind = handle, "stream"
        elif handle == 2:
            key, kind = (context, thread), PER_THREAD
        else:
            key, kind = (context, LEGACY), LEGACY
        lane = self.streams.get(key)
        if lane is None:
            lane = self.streams[key] = self.new_lane(handle, context, kind)
            lane.thread = thread
            if kind == "stream":
                self._number(lane)
            if lane.blocking:
                self._blocking.setdefault(context, []).append(lane)
        return lane.captured or lane

    def new_lane(self, handle: int, context: int, kind: str) -> Lane:
        """Create a stream that no handle refers to."""
        self._count += 1
        return Lane(self._count, handle, context, kind)

    def seen_stream(
        self, handle: int, context: int, *, blocking: bool, pending: bool = False
    ) -> Lane:
        """Add a stream at its first use; `pending` says that earlier work is in flight on it."""
        self._drop_lane(handle)
        lane = self.streams[handle] = self.new_lane(handle, context, "stream")
        self._number(lane)
        if blocking:
            lane.blocking = lane.is_implicit = True
            self._blocking.setdefault(context, []).append(lane)
        if pending:
            self.depend_on_unseen(lane)
        return lane

    def created_stream(self, handle: int, stack: int) -> None:
        """Record the call that created a stream."""
        self._created[handle] = stack

    def name_stream(self, handle: int, name: str) -> None:
        """Set the name of a stream that exists."""
        self._names[handle] = name
        lane = self.streams.get(handle)
        if lane is not None:
            lane.name = name

    def _number(self, lane: Lane) -> None:
        """Set name and number of a stream for reports, and the call that created it."""
        lane.name = self._names.get(lane.handle, "")
        lane.created = self._created.get(lane.handle, -1)
        key = (lane.handle, lane.created)
        lane.number = self._numbers.setdefault(key, len(self._numbers) + 1)

    def drop_stream(self, handle: int) -> None:
        """Forget a handle that another stream may get. The work of the stream continues."""
        self._created.pop(handle, None)
        self._names.pop(handle, None)
        self._drop_lane(handle)

    def _drop_lane(self, handle: int) -> None:
        lane = self.streams.pop(handle, None)
        if lane is not None:
            lane.is_dropped = True
            self._destroyed.append(lane)
            self._dropped += 1

    def lanes_of(self, context: int) -> list[Lane]:
        """Return the used streams of a context, with destroyed ones whose work may be in flight."""
        return [lane for lane in self.lanes() if lane.context == context]

    def lanes(self) -> Iterable[Lane]:
        """Return all used streams, with destroyed ones whose work may be in flight."""
        return (*self.streams.values(), *self._destroyed)

    def count_streams(self) -> int:
        """Return the number of streams that were used, destroyed ones included."""
        return len(self.streams) + self._dropped

    def beside(self, lane: Lane) -> Iterable[Lane]:
        """Return the streams that a stream waits for implicitly: legacy and blocking streams."""
        if lane.capture is not None:
            return ()
        if lane.kind == LEGACY:
            return self._blocking.get(lane.context, ())
        if lane.blocking:
            legacy = self.streams.get((lane.context, LEGACY))
            if legacy is not None:
                return (legacy,)
        return ()

    # -- work that was queued before the observation ----------------------------------------------

    def depend_on_unseen(self, lane: Lane) -> None:
        """Queue a placeholder for work from before the observation."""
        lane.time = lane.clock[lane.id] = time = lane.time + 1
        lane.version += 1
        first, _ = self._unseen.get(lane.id, (time, time))
        if self.known_to_any_thread.get(lane.id, 0) >= first:
            first = time
        self._unseen[lane.id] = (first, time)

    def may_follow_unseen(self, lane: Lane) -> bool:
        """Return whether a stream is ordered after unseen work that may still be in flight."""
        kept, clock = self.known_to_any_thread, lane.clock
        return any(
            kept.get(each, 0) < last and clock.get(each, 0) >= first
            for each, (first, last) in self._unseen.items()
        )

    # -- waits for something outside of CUDA ------------------------------------------------------

    def wait_external(self, lane: Lane) -> None:
        """Queue a wait for something outside of CUDA: it may order any work before later work."""
        self.settle(lane)
        lane.time = lane.clock[lane.id] = time = lane.time + 1
        lane.version += 1
        first, _ = self._external.get(lane.id, (time, time))
        self._external[lane.id] = first, time
        self._hold_external(lane)

    def _hold_external(self, lane: Lane) -> None:
        """Set whether a stream is behind a wait for something outside of CUDA."""
        waits = self._external.items()
        if any(lane.clock.get(each, 0) >= first for each, (first, _) in waits):
            lane.held_by |= {EXTERNAL}
        else:
            lane.held_by -= {EXTERNAL}

    def _end_external_waits(self) -> None:
        """Remove the waits that the host knows to be over: they may have ordered all until now."""
        known = self.known_to_any_thread
        waits = self._external.items()
        pending = {each: wait for each, wait in waits if known.get(each, 0) < wait[1]}
        if len(pending) < len(self._external):
            self._external = pending
            for lane in self.lanes():
                join(self.possibly_known, lane.clock)
                self._hold_external(lane)

    def forget_external_waits(self, lanes: Iterable[Lane]) -> None:
        """Forget the waits of the stand-ins of streams that were captured."""
        for lane in lanes:
            self._external.pop(lane.id, None)

    # -- order ------------------------------------------------------------------------------------

    def settle(self, lane: Lane, beside: Iterable[Lane] | None = None) -> Clock:
        """Join the next operation's implicit dependencies into a stream's clock; return it."""
        clock = lane.clock
        if lane.capture is not None:
            return clock
        if lane.seen_host != self._host.version:
            lane.follow(self._host.clock)
            lane.seen_host = self._host.version
        if self.floors:
            floor = self.floors.get(lane.context)
            if floor is not None and lane.seen_floor != floor.version:
                lane.follow(floor.clock)
                lane.held_by |= floor.held_by
                lane.seen_floor = floor.version
            if lane.part != lane.context and lane.part in self.floors:
                lane.follow(self.floors[lane.part].clock)
                lane.held_by |= self.floors[lane.part].held_by
        if beside is None:
            beside = self.beside(lane) if lane.is_implicit else ()
        seen = lane.seen_beside
        for other in beside:
            if seen.get(other.id) != other.version:
                seen[other.id] = other.version
                lane.follow(other.clock)
                lane.held_by |= other.held_by
        return clock

    def step(self, lane: Lane, what: Any, beside: Iterable[Lane] | None = None) -> int:
        """Queue an operation after its implicit dependencies; return its number on the stream."""
        if beside != () or lane.seen_host != self._host.version or self.floors:
            self.settle(lane, beside)
        lane.time = lane.clock[lane.id] = time = lane.time + 1
        lane.version += 1
        lane.recent.append((time, what))
        if self._external:
            self._hold_external(lane)
        return time

    def record(self, event: int, lane: Lane, stack: int = -1) -> None:
        """Record an event on a stream."""
        clock, lasts = dict(self.settle(lane)), lane.lasts
        self._events[event] = Recorded(clock, lane.capture, lane.held_by, lasts, lane.id, stack)

    def queue_wait(self, lane: Lane, wait: QueuedWait) -> None:
        """Keep a wait that is queued on a stream, until it is known to be over."""
        if lane.capture is not None:
            return
        known = self.known_to_any_thread.get(lane.id, 0)
        while lane.waits and lane.waits[0].time <= known:
            lane.waits.popleft()
        if len(lane.waits) < _RECENT:  # what is stuck is stuck behind the oldest
            lane.waits.append(wait)

    def recorded(self, event: int) -> Recorded | None:
        """Return the record of an event, or `None` for an event whose record was not seen."""
        return self._events.get(event)

    def recorded_on(self, lane: Lane) -> list[Recorded]:
        """Return the records of events on a stream."""
        return [each for each in self._events.values() if each.stream == lane.id]

    def record_context(self, event: int, context: int) -> None:
        """Record an event after all work of a context."""
        lanes = self.lanes_of(context)
        lasts = tuple(each for lane in lanes for each in lane.lasts)
        held_by = frozenset[WaitKey]().union(*(lane.held_by for lane in lanes))
        self._events[event] = Recorded(self.of_context(context), None, held_by, lasts)

    def record_part(self, event: int, part: int) -> None:
        """Record an event after all work of a green context."""
        clock: Clock = {}
        held_by = frozenset[WaitKey]()
        for lane in self.lanes():
            if lane.part == part:
                join(clock, self.settle(lane))
                held_by |= lane.held_by
        self._events[event] = Recorded(clock, None, held_by)

    def drop_event(self, event: int) -> None:
        """Forget an event whose handle another event may get."""
        self._events.pop(event, None)

    def of_context(self, context: int) -> Clock:
        """Return the join of the clocks of all streams of a context."""
        clock: Clock = {}
        for lane in self.lanes_of(context):
            join(clock, lane.clock)
        return clock

    def floor_of(self, context: int) -> Floor:
        """Return what all later work of a context, including new streams, is ordered after."""
        return self.floors.setdefault(context, Floor())

    def _forget_finished_streams(self) -> None:
        """Remove destroyed streams from all clocks once the host knows the end of their work."""
        passed = [lane for lane in self._destroyed if self.is_known(lane, lane.time)]
        if not passed:
            return
        for lane in passed:
            self._destroyed.remove(lane)
            if lane.blocking:  # The legacy default stream waited for its work until now.
                self._blocking[lane.context].remove(lane)
                for legacy in self.beside(lane):
                    legacy.seen_beside.pop(lane.id, None)
            self._unseen.pop(lane.id, None)
            lane.is_finished = True
            # Its operations have it as their stream: such a cycle stays until a full collection.
            lane.recent.clear()
        # Also from events: a wait for one would bring the stream back into other clocks.
        clocks = [
            *(host.clock for host in self._hosts.values()),
            self.possibly_known,
            self.told_outside,
            self.known_to_any_thread,
            *(each.clock for each in self.lanes()),
            *(each.clock for each in self.floors.values()),
            *(each.clock for each in self._events.values() if each.capture is None),
        ]
        gone = {lane.id for lane in passed}
        self._finished += len(gone)
        # Words in memory have clocks as well. All of a clock is looked at so seldom that many
        # streams which come and go beside many others cost no more than these.
        is_due = self._finished > len(clocks)
        if is_due:
            self._finished = 0
            alive = {lane.id for lane in self.lanes()}
        for clock in clocks:
            for each in clock.keys() - alive if is_due else gone:
                clock.pop(each, None)

    def forget_all(self) -> None:
        """Treat all earlier work as known to every thread, because records were lost."""
        for lane in self.lanes():
            join(self.known_to_any_thread, lane.clock)
            for host in self._hosts.values():
                join(host.clock, lane.clock)
        for host in self._hosts.values():
            self._changed(host)
        self._events.clear()
        self._end_external_waits()
        self._forget_finished_streams()
