"""What the caching allocators of frameworks gave to whom: blocks of the driver's allocations."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from userstream._observe.stacks import line_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from userstream._observe.found import Race, Stack


class Block(NamedTuple):
    """The memory of a tensor or an array, as long as nothing else is given the same bytes."""

    start: int
    end: int
    time: int  # on the clock of the logger; 0 for what was there before all others
    stack: Callable[[], Stack]  # of who asked for it
    framework: str


class Blocks:
    """All that are known, of any time."""

    def __init__(self, blocks: Iterable[Block] = ()) -> None:
        self._newest_first = sorted(blocks, key=lambda block: -block.time)

    def at(self, address: int, time: int) -> Block | None:
        """Return the block that an address was in at some time; 0 is the end of all time."""
        for block in self._newest_first:
            if block.start <= address < block.end and (not time or block.time <= time):
                return block
        return None

    def name(self, race: Race) -> Race:
        """Return a race with the block that it is about, if that is known.

        Whether it is one is settled: the stream that a block was allocated on may be given it again
        before others have done with it, and may not touch it then.
        """
        first, second = (self.at(race.address, time) for time in race._times)
        block = first or second
        if block is None:
            return race
        stack = () if first is None else first.stack()
        named = replace(race, allocated=stack, framework=block.framework)
        if second is None or first is second:
            return named
        line = line_of(second.stack())
        where = "" if line is None else f" at {line.filename}:{line.lineno}"
        return replace(
            named,
            advice=f"it was freed in between, and allocated again{where}: keep it until "
            f"{race.first.stream} has done with it (torch: tensor.record_stream), or let "
            f"{race.second.stream} wait for {race.first.stream}",
        )
