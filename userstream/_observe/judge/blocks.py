"""Blocks of the caching allocators of frameworks, with the lines that allocated them."""

from __future__ import annotations

import functools
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from .log import OWN, json_of, text_of
from .stacks import Frame, Stack, line_of, owner_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from .found import Race
    from .functions import Call
    from .stacks import Stacks

_MOST = 20_000  # blocks of one framework that are kept: the newest


class Block(NamedTuple):
    """Memory that a caching allocator gave to a tensor or an array."""

    start: int
    end: int
    time: int  # on the clock of the log; 0 for blocks from before the history
    stack: Callable[[], Stack]  # of the allocating line
    framework: str


class Blocks:
    """The blocks that are known, of any time."""

    def __init__(self, stacks: Stacks) -> None:
        self._stacks = stacks
        self._allocated: deque[Block] = deque(maxlen=_MOST)  # as they were allocated
        self._listed: list[Block] = []  # of frameworks that give a list of all, the last one
        self._parts: list[bytes] = []  # of a list of which more is to come

    def block(self, call: Call) -> None:
        """Add the block that a framework has just allocated."""
        start, end = call.words
        stack = functools.partial(self._stack, call.stack)
        framework = text_of(call.fetched[0])
        self._allocated.append(Block(start, end, call.began, stack, framework))

    def _stack(self, number: int) -> Stack:
        """Return a stack without the frames of userstream's hook."""
        stack = self._stacks[number]
        while stack and owner_of(stack[-1]) == OWN:
            stack = stack[:-1]
        return stack

    def blocks(self, call: Call) -> None:
        """Set the list of all blocks, which comes in parts."""
        self._parts += call.fetched
        (is_more,) = call.words
        if is_more:
            return
        told = json_of([b"".join(self._parts)])
        self._parts = []
        frames = [
            Frame(filename, line, name, self._stacks.whose(filename))
            for filename, line, name in told["frames"]
        ]
        stacks = told["stacks"]

        def stack(number: int) -> Callable[[], Stack]:
            return lambda: tuple(frames[which] for which in stacks[number])

        self._listed = [
            Block(start, end, time, stack(number), framework)
            for start, end, time, framework, number in told["blocks"]
        ]

    def at(self, address: int, time: int) -> Block | None:
        """Return the block that contained an address at a time; 0 is the end of the observation."""
        found: Block | None = None
        for block in (*self._listed, *self._allocated):
            if block.start <= address < block.end and (not time or block.time <= time):
                found = block if found is None or block.time >= found.time else found
        return found

    def are_one(self, race: Race) -> bool | None:
        """Return whether a race is of one buffer; `None` if no allocator tells."""
        answers = [self._is_one(*pair) for pair in race._apart]
        if not answers or True in answers:
            return True
        return None if None in answers else False

    def _is_one(self, address: int, other: int, time: int, other_time: int) -> bool | None:
        one = self.at(address, time)
        if one is None:
            return None
        return self.at(other, other_time) is one

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
