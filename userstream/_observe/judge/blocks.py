"""Blocks of the caching allocators of frameworks, with the lines that allocated them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from .log import BLOCKS
from .log import Block as LogBlock
from .log import block as log_block
from .stacks import Frame, Stack, line_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .found import Race


class Block(NamedTuple):
    """Memory that a caching allocator gave to a tensor or an array."""

    start: int
    end: int
    time: int  # on the clock of the log; 0 for blocks from before the history
    stack: Callable[[], Stack]  # of the allocating line
    framework: str


class Blocks:
    """The blocks that are known, of any time."""

    def __init__(self, blocks: Iterable[Block] = ()) -> None:
        self._newest_first = sorted(blocks, key=lambda block: -block.time)

    def at(self, address: int, time: int) -> Block | None:
        """Return the block that contained an address at a time; 0 is the end of the observation."""
        for block in self._newest_first:
            if block.start <= address < block.end and (not time or block.time <= time):
                return block
        return None

    def name(self, race: Race) -> Race:
        """Return a race with the framework and the line of its block, if the block is known.

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

    def as_block(self) -> LogBlock:
        """Return the blocks as a block of a log, in which each frame and each stack stands once."""
        frames: dict[tuple[Any, ...], int] = {}
        stacks: dict[tuple[int, ...], int] = {}
        rows = []
        for each in self._newest_first:
            stack = tuple(
                frames.setdefault(
                    (frame.filename, frame.lineno, frame.name, getattr(frame, "whose", 0)),
                    len(frames),
                )
                for frame in each.stack()
            )
            number = stacks.setdefault(stack, len(stacks))
            rows.append((each.start, each.end, each.time, each.framework, number))
        return log_block(BLOCKS, {"frames": list(frames), "stacks": list(stacks), "blocks": rows})


def read_blocks(found: LogBlock) -> Blocks:
    """Return the blocks that a block of a log describes."""
    told = found.json()
    frames = [Frame(*frame) for frame in told["frames"]]

    def stack(number: int) -> Callable[[], Stack]:
        return lambda: tuple(frames[which] for which in told["stacks"][number])

    return Blocks(
        Block(start, end, time, stack(number), framework)
        for start, end, time, framework, number in told["blocks"]
    )
