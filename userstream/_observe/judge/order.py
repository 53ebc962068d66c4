"""Events, waits and values in memory: the calls that order streams and the host."""

from __future__ import annotations

import struct
from collections import deque
from typing import TYPE_CHECKING

from .clocks import Clock, join

if TYPE_CHECKING:
    from .captures import Captures
    from .clocks import Lane
    from .functions import Call
    from .world import World

_EXTERNAL = 1  # CU_EVENT_RECORD_EXTERNAL and CU_EVENT_WAIT_EXTERNAL


class Order:
    """Applies calls on events, streams and contexts that order work."""

    def __init__(self, world: World, captures: Captures) -> None:
        self.world = world
        self._captures = captures

    def record(self, call: Call) -> None:
        lane = self.world.lane(call)
        event = call.words[0]
        if lane.capture is not None and _flags(call) & _EXTERNAL:
            lane.capture.graph.records.append(event)
            return
        self.world.clocks.record(event, lane)

    def wait_event(self, call: Call) -> None:
        lane = self.world.lane(call)
        event = call.words[1]
        recorded = self.world.clocks.recorded(event)
        if lane.capture is not None and call.words[2] & _EXTERNAL:
            lane.capture.graph.waits.append(event)
            return
        if recorded is None:
            if lane.capture is None:  # recorded before the observation, if ever
                self.world.clocks.settle(lane)
                self.world.clocks.depend_on_unseen(lane)
            return
        if recorded.capture is not None and lane.capture is None:
            if not recorded.capture.lanes:  # the capture has ended
                return
            lane = self._captures.enter_capture(lane, recorded.capture)
        join(self.world.clocks.settle(lane), recorded.clock)
        lane.held_by |= recorded.held_by
        self.world.timeline.must_wait(lane, recorded.lasts)

    def record_context(self, call: Call) -> None:
        context, event = call.words
        self.world.clocks.record_context(event, context or call.context)

    def wait_context(self, call: Call) -> None:
        context, event = call.words
        recorded = self.world.clocks.recorded(event)
        if recorded is not None:
            self.world.clocks.raise_floor(context or call.context, recorded.clock)
            for lane in self.world.clocks.lanes_of(context or call.context):
                self.world.timeline.must_wait(lane, recorded.lasts)

    def drop_event(self, call: Call) -> None:
        self.world.clocks.drop_event(call.words[0])

    def drop_stream(self, call: Call) -> None:
        self.world.clocks.drop_stream(call.words[0])

    def know_event(self, call: Call) -> None:
        recorded = self.world.clocks.recorded(call.words[0])
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
        if lane.capture is None:
            join(self.world.clocks.possibly_known, lane.clock)


def _flags(call: Call) -> int:
    return call.words[call.function.roles["flags"]] if "flags" in call.function.roles else 0


_MOST_VALUES = 64  # of one word
_AT_LEAST = 0  # the condition CU_STREAM_WAIT_VALUE_GEQ


class Words:
    """Applies writes of values, and the waits of streams for values."""

    def __init__(self, world: World) -> None:
        self.world = world
        # By address: the values that streams write there, oldest first, with what each write is
        # ordered after.
        self._words: dict[int, deque[tuple[int, Clock]]] = {}

    def write_value(self, call: Call) -> None:
        lane = self.world.lane(call)
        self.world.begin(call, lane)
        self._value_written(lane, call.words[1], call.words[2], call.fetched[0])

    def wait_value(self, call: Call) -> None:
        lane = self.world.lane(call)
        self.world.begin(call, lane)
        self._value_awaited(lane, *call.words[1:4])

    def values(self, call: Call) -> None:
        lane = self.world.lane(call)
        self.world.begin(call, lane)
        data = call.fetched[0]
        if len(data) // 48 != call.words[1]:
            self.world.not_seen("a batch of memory operations that is too long")
        for at in range(0, len(data), 48):
            operation, word, value, how = struct.unpack_from("<I4xQQI", data, at)
            if operation in (1, 4):
                self._value_awaited(lane, word, value, how)
            elif operation in (2, 5):
                self._value_written(lane, word, value)

    def _value_written(self, lane: Lane, word: int, value: int, before: bytes = b"") -> None:
        if lane.capture is not None:
            self.world.not_seen("values that a graph writes or waits for")
            return
        written = self._words.get(word)
        if written is None:
            written = self._words[word] = deque(maxlen=_MOST_VALUES)
            if before:  # read by the host: a wait for this value orders nothing
                written.append((int.from_bytes(before, "little"), {}))
        written.append((value, dict(lane.clock)))
        join(self.world.clocks.possibly_known, lane.clock)
        self.world.finds.drop_held(word)
        for other in self.world.clocks.lanes():
            if word in other.held_by:
                other.held_by -= {word}
                # The moment is unknown: treat the stream as ordered after all work until now.
                join(other.clock, lane.clock)

    def _value_awaited(self, lane: Lane, word: int, value: int, how: int) -> None:
        if lane.capture is not None:
            self.world.not_seen("values that a graph writes or waits for")
            return
        if value == 0 and how & 3 == _AT_LEAST:  # any value is
            return
        # The wait may end with the first of the newest values that all satisfy it: a later write
        # of such a value orders nothing.
        first: Clock | None = None
        for written, clock in reversed(self._words.get(word, ())):
            if not _satisfies(written, value, how):
                break
            first = clock
        if first is None:
            lane.held_by |= {word}
        else:
            join(lane.clock, first)


def _satisfies(written: int, value: int, how: int) -> bool:
    how &= 3
    if how == _AT_LEAST:
        return written >= value
    if how == 1:
        return written == value
    return bool(written & value) if how == 2 else bool(~(written | value))
