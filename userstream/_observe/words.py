"""Words in memory that streams write and wait for."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from userstream._observe.clocks import Clock, join

if TYPE_CHECKING:
    from userstream._observe.clocks import Lane
    from userstream._observe.records import Call
    from userstream._observe.world import World


class Words:
    """Applies what streams write for each other to wait for."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._words: dict[int, tuple[int, Clock]] = {}

    def write_value(self, call: Call) -> None:
        lane = self.world.lane(call)
        self.world.begin(call, lane)
        self._value_written(lane, call.words[1], call.words[2])

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

    def _value_written(self, lane: Lane, word: int, value: int) -> None:
        if lane.capture is not None:
            self.world.not_seen("values that a graph writes or waits for")
            return
        self._words[word] = (value, dict(lane.clock))
        join(self.world.clocks.maybe, lane.clock)
        self.world.finds.drop_held(word)
        for other in self.world.clocks.lanes():
            if word in other.held_by:
                other.held_by -= {word}
                # When it gets there is not known: it counts as ordered behind all until now.
                join(other.clock, lane.clock)

    def _value_awaited(self, lane: Lane, word: int, value: int, how: int) -> None:
        if lane.capture is not None:
            self.world.not_seen("values that a graph writes or waits for")
            return
        written = self._words.get(word)
        if written is not None and _satisfies(written[0], value, how):
            join(lane.clock, written[1])
        else:
            lane.held_by |= {word}


def _satisfies(written: int, value: int, how: int) -> bool:
    how &= 3
    if how == 0:
        return written >= value
    if how == 1:
        return written == value
    return bool(written & value) if how == 2 else bool(~(written | value))
