"""Events, waits and values in memory: the calls that order streams and the host."""

from __future__ import annotations

import itertools
import struct
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, NamedTuple

from .clocks import Clock, QueuedWait, join
from .functions import HOUSEKEEPING
from .graphs import WAITS_EXTERNAL

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .clocks import Floor, Lane, Recorded, WaitKey
    from .functions import Call
    from .graphs import Captures
    from .world import World

_HANDLE = struct.Struct("<Q")
_WORD = struct.Struct("<Q")
_EXTERNAL = 1  # CU_EVENT_RECORD_EXTERNAL and CU_EVENT_WAIT_EXTERNAL


class Order:
    """Applies calls on events, streams and contexts that order work."""

    def __init__(self, world: World, captures: Captures, words: Words) -> None:
        self.world = world
        self._captures = captures
        self._words = words
        self._greens: dict[int, int] = {}  # contexts of green contexts, by their handles
        self._exported: set[int] = set()  # events that other processes may wait for, or record

    def record(self, call: Call) -> None:
        lane = self.world.lane(call)
        event = call.words[0]
        if lane.capture is not None and _flags(call) & _EXTERNAL:
            lane.capture.node.records.append(event)
            return
        self.world.clocks.record(event, lane, call.stack)
        if event in self._exported:
            self._tell_outside(event)

    def export_event(self, call: Call) -> None:
        self._exported.add(call.words[1])
        self._tell_outside(call.words[1])

    def open_event(self, call: Call) -> None:
        """Apply cuIpcOpenEventHandle."""
        self._exported.add(_HANDLE.unpack(call.fetched[0])[0])
        self.world.not_seen("events of other processes, which may order anything told to these")

    def _tell_outside(self, event: int) -> None:
        """Note that other processes may order their work behind what an event has recorded."""
        recorded = self.world.clocks.recorded(event)
        if recorded is not None and recorded.capture is None:
            join(self.world.clocks.told_outside, recorded.clock)

    def _hear_outside(self) -> None:
        """Note a wait for an event that another process may have recorded."""
        join(self.world.clocks.possibly_known, self.world.clocks.told_outside)

    def wait_event(self, call: Call) -> None:
        lane = self.world.lane(call)
        event = call.words[1]
        recorded = self.world.clocks.recorded(event)
        if lane.capture is not None and call.words[2] & _EXTERNAL:
            lane.capture.node.waits.append(event)
            return
        if recorded is None:
            if lane.capture is None:  # recorded before the observation, if ever
                self.world.clocks.settle(lane)
                self.world.clocks.depend_on_unseen(lane)
                self._hear_outside()
            return
        if event in self._exported:
            self._hear_outside()
        if recorded.capture is not None and lane.capture is None:
            if not recorded.capture.lanes:  # the capture has ended
                return
            lane = self._captures.enter_capture(lane, recorded.capture)
        self.world.clocks.settle(lane)
        self._words.follow(lane, recorded)
        self.world.timeline.must_wait(lane, recorded.lasts)
        wait = QueuedWait(lane.time + 1, call.stack, event, recorded)
        self.world.clocks.queue_wait(lane, wait)

    def record_context(self, call: Call) -> None:
        context, event = call.words
        self.world.clocks.record_context(event, context or call.context)

    def wait_context(self, call: Call) -> None:
        context, event = call.words
        recorded = self.world.clocks.recorded(event)
        if recorded is not None:
            self._words.follow(self.world.clocks.floor_of(context or call.context), recorded)
            for lane in self.world.clocks.lanes_of(context or call.context):
                self.world.timeline.must_wait(lane, recorded.lasts)
                wait = QueuedWait(lane.time + 1, call.stack, event, recorded)
                self.world.clocks.queue_wait(lane, wait)

    def green_context(self, call: Call) -> None:
        (context,) = _WORD.unpack(call.fetched[0])
        self._greens[call.words[1]] = context

    def record_green(self, call: Call) -> None:
        part = self._part(call)
        if part:
            self.world.clocks.record_part(call.words[1], part)

    def wait_green(self, call: Call) -> None:
        part, recorded = self._part(call), self.world.clocks.recorded(call.words[1])
        if part and recorded is not None:
            self._words.follow(self.world.clocks.floor_of(part), recorded)

    def _part(self, call: Call) -> int:
        """Return the context of a green context, or 0 if it is unknown."""
        found = self._greens.get(call.words[0], 0)
        if not found:
            self.world.not_seen(f"{call.name} of a green context from before the observation")
        return found

    def wait_external(self, call: Call) -> None:
        """Apply a wait for an external semaphore, or for graphics calls."""
        lane = self.world.lane(call)
        self.world.clocks.wait_external(lane)
        self.world.not_seen(WAITS_EXTERNAL)
        if lane.capture is not None:
            lane.capture.node.waits_external = True

    def signal_external(self, call: Call) -> None:
        """Apply a signal: who waits for it may tell the program, or end a wait of a stream."""
        lane = self.world.lane(call)
        if lane.capture is not None:
            lane.capture.node.tells_host = True
        else:
            join(self.world.clocks.possibly_known, self.world.clocks.settle(lane))

    def drop_event(self, call: Call) -> None:
        self._exported.discard(call.words[0])
        self.world.clocks.drop_event(call.words[0])

    def new_stream(self, call: Call) -> None:
        self.world.clocks.created_stream(_HANDLE.unpack(call.fetched[0])[0], call.stack)

    def drop_stream(self, call: Call) -> None:
        self.world.clocks.drop_stream(call.words[0])

    def know_event(self, call: Call) -> None:
        recorded = self.world.clocks.recorded(call.words[0])
        if recorded is None or call.words[0] in self._exported:
            self._hear_outside()
        if recorded is not None and recorded.capture is None:
            self.world.host_knows(call, recorded.clock, recorded.lasts)

    def know_events(self, call: Call) -> None:
        for event in call.words[1:3]:
            recorded = self.world.clocks.recorded(event)
            if recorded is not None and recorded.capture is None:
                self.world.host_knows(call, recorded.clock, recorded.lasts)

    def know_stream(self, call: Call) -> None:
        lane = self.world.lane(call)
        if lane.capture is None:
            self.world.host_knows(call, self.world.clocks.settle(lane), lane.lasts)

    def know_context(self, call: Call) -> None:
        context = call.words[0] if call.words and call.words[0] else call.context
        lasts = [each for lane in self.world.clocks.lanes_of(context) for each in lane.lasts]
        self.world.host_knows(call, self.world.clocks.of_context(context), lasts)

    def host_function(self, call: Call) -> None:
        lane = self.world.lane(call)
        self.world.begin(call, lane)
        if lane.capture is not None:
            lane.capture.node.tells_host = True
        else:
            join(self.world.clocks.possibly_known, lane.clock)


def _flags(call: Call) -> int:
    return call.words[call.function.roles["flags"]] if "flags" in call.function.roles else 0


_MOST_VALUES = 64  # of one word
_MOST_ENDED = 4096  # waits that have ended and that events may still refer to
_AT_LEAST = 0  # the condition CU_STREAM_WAIT_VALUE_GEQ


class _Wait(NamedTuple):
    """A stream's wait for a value that was not written yet."""

    address: int
    value: int
    how: int

    def __str__(self) -> str:
        how = ("at least {}", "{}", "a bit of {:#x}", "a bit that {:#x} has not")[self.how & 3]
        return f"a value of {how.format(self.value)} at {self.address:#x}"

    def ends_with(self, written: int) -> bool:
        """Return whether a value ends the wait."""
        how, value = self.how & 3, self.value
        if how == _AT_LEAST:
            return written >= value
        if how == 1:
            return written == value
        return bool(written & value) if how == 2 else bool(~(written | value))


class _Write(NamedTuple):
    """A value that a stream writes to a word, or that the word had before."""

    value: int
    stream: int  # its number; 0 of the value from before
    time: int
    clock: Clock  # what the write is ordered after, the write included

    def is_before(self, clock: Clock) -> bool:
        """Return whether the write is known to be over."""
        return clock.get(self.stream, 0) >= self.time


class Words:
    """Applies writes of values, and the waits of streams for values."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._words: dict[int, deque[_Write]] = {}  # by address, oldest first
        self._waits: dict[WaitKey, _Wait] = {}
        self._ended: OrderedDict[WaitKey, Clock] = OrderedDict()  # what each has ended after

    def write_value(self, call: Call) -> None:
        lane = self.world.lane(call)
        _, time = self.world.begin(call, lane)
        (before,) = _values(call)
        self._value_written(lane, time, call.words[1], call.words[2], before)

    def wait_value(self, call: Call) -> None:
        lane = self.world.lane(call)
        _, time = self.world.begin(call, lane)
        wait, (before,) = _Wait(*call.words[1:4]), _values(call)
        self._queued(lane, time, call, wait, before)
        if call.account == HOUSEKEEPING:  # a latch of a test, which is no order of the program
            return
        self.await_value(lane, (call.number, wait.address), wait, before)

    def values(self, call: Call) -> None:
        lane = self.world.lane(call)
        _, time = self.world.begin(call, lane)
        data, before = call.fetched[1], _values(call)
        if len(data) // 48 != call.words[1]:
            self.world.not_seen("a batch of memory operations that is too long")
        for which, at in enumerate(range(0, len(data), 48)):
            operation, word, value, how = struct.unpack_from("<I4xQQI", data, at)
            there = before[which] if which < len(before) else None
            if operation in (1, 4):
                wait = _Wait(word, value, how)
                self._queued(lane, time, call, wait, there)
                self.await_value(lane, (call.number, word), wait, there)
            elif operation in (2, 5):
                self._value_written(lane, time, word, value, there)

    def _queued(self, lane: Lane, time: int, call: Call, wait: _Wait, before: int | None) -> None:
        if before is None or not wait.ends_with(before):
            self.world.clocks.queue_wait(lane, QueuedWait(time, call.stack, call.number, wait))

    def _value_written(
        self, lane: Lane, time: int, address: int, value: int, before: int | None
    ) -> None:
        if lane.capture is not None:
            self.world.not_seen("values that a graph writes or waits for")
            lane.capture.node.tells_host = True  # who reads the value
            return
        written = self._words.get(address)
        if written is None:
            written = self._words[address] = deque(maxlen=_MOST_VALUES)
            if before is not None:
                written.append(_Write(before, 0, 0, {}))
        clock = dict(lane.clock)
        is_news = not written or written[-1].value != value  # else it was there before
        written.append(_Write(value, lane.id, time, clock))
        if is_news:
            self.world.tells_host(address, clock)
        for key, wait in list(self._waits.items()):
            if wait.address == address and wait.ends_with(value):
                self._end(key, clock)

    def await_value(self, lane: Lane, key: WaitKey, wait: _Wait, before: int | None) -> None:
        """Order a stream after what ends a wait for a value, now or later."""
        if lane.capture is not None:
            self.world.not_seen("values that a graph writes or waits for")
            lane.capture.node.awaits.append(wait)  # of each launch
            return
        if wait.value == 0 and wait.how & 3 == _AT_LEAST:  # any value is
            return
        written = self._words.get(wait.address, ())
        if not written and before is not None and wait.ends_with(before):
            return  # somebody has put it there who is not seen
        self.world.clocks.settle(lane)
        ends = [
            each
            for at, each in enumerate(written)
            if wait.ends_with(each.value) and not self._is_overwritten(wait, written, at, lane)
        ]
        if not ends:
            self._waits[key] = wait
            lane.held_by |= {key}
            return
        # Any of them may end it: it is ordered after what all of them are.
        for stream in set.intersection(*(set(each.clock) for each in ends)):
            time = min(each.clock[stream] for each in ends)
            if lane.clock.get(stream, 0) < time:
                lane.follow({stream: time})

    @staticmethod
    def _is_overwritten(wait: _Wait, written: Iterable[_Write], at: int, lane: Lane) -> bool:
        """Return whether a write cannot end a wait, as another value surely follows it before."""
        one, *others = itertools.islice(written, at, None)
        return any(
            not wait.ends_with(each.value)
            and each.is_before(lane.clock)
            and one.is_before(each.clock)
            for each in others
        )

    def word_changed(self, key: WaitKey, value: int) -> bool:
        """Apply the change of a word by the host; return whether a stream waited for it."""
        wait = self._waits.get(key)
        if wait is not None and wait.ends_with(value):
            self._end(key, self.world.clocks.host_clock())
        return wait is not None or key in self._ended

    def _end(self, key: WaitKey, clock: Clock) -> None:
        """End a wait after a clock: its stream and all streams that wait for that stream go on."""
        del self._waits[key]
        self._ended[key] = clock
        if len(self._ended) > _MOST_ENDED:
            self._ended.popitem(last=False)
        clocks = self.world.clocks
        followers: tuple[Lane | Floor, ...] = (*clocks.lanes(), *clocks.floors.values())
        for other in followers:
            if key in other.held_by:
                other.held_by -= {key}
                other.follow(clock)
        self.world.collector.release(key, clock, self.world.clocks.possibly_known)

    def follow(self, lane: Lane | Floor, recorded: Recorded) -> None:
        """Order a stream or a context after an event, and the queued waits that precede it."""
        lane.follow(recorded.clock)
        for key in recorded.held_by:
            clock = self._ended.get(key)
            if clock is not None:
                lane.follow(clock)
            elif key in self._waits:
                lane.held_by |= {key}

    def writers_for(self, queued: QueuedWait) -> dict[int, int] | None:
        """Return the numbers of the queued writes that would end a wait for a value, by stream.

        It is `None` if a write is known to be over, after which the wait is.
        """
        wait, pending = queued.until, dict[int, int]()
        for each in self._words.get(wait.address, ()):
            if wait.ends_with(each.value):
                if each.is_before(self.world.clocks.known_to_any_thread):
                    return None
                pending.setdefault(each.stream, each.time)
        is_over = not pending and (queued.place, wait.address) in self._ended  # by the host
        return None if is_over else pending

    def forget(self) -> None:
        """Forget all values: the missing records may include later writes."""
        self._words.clear()
        self._waits.clear()
        for lane in self.world.clocks.lanes():
            lane.held_by = frozenset()


_VALUE = struct.Struct("<QQ")  # whether it is known, and the value


def _values(call: Call) -> list[int | None]:
    """Return the values that words of the host had before the call; `None` if unknown."""
    return [value if is_known else None for is_known, value in _VALUE.iter_unpack(call.fetched[0])]
