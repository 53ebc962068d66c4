"""Findings that are no races: waits of the host, and operations on streams to be avoided."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from . import log
from .clocks import LEGACY, is_news
from .found import Stall, WrongStream
from .functions import PROGRAM
from .log import PROGRAM as PROGRAM_CODE
from .log import line_of, owner_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .clocks import Clock, Lane
    from .functions import Call
    from .races import RecordedOperation
    from .world import World

_OF_USERSTREAM = "a wait of userstream"
# Nanoseconds from which on a call in which the host learns nothing, such as an allocation, counts
# as a wait for the GPU. Shorter ones take that long on a busy machine.
_HELD_UP = 10_000_000


class _Block(NamedTuple):
    """A block of `no_stalls`: its thread, or `None` for all threads."""

    thread: int | None


class _Wait:
    """A wait of userstream that goes on, in which it polls."""

    __slots__ = ("began", "depth", "has_learned")

    def __init__(self, began: int) -> None:
        self.began = began
        self.depth = 0  # of waits within each other
        self.has_learned = False  # that work is over


class _Entry:
    """The stalls of one function in one line."""

    __slots__ = ("block", "count", "longest", "name", "seconds", "stack", "stream", "thread")

    def __init__(self, name: str, stack: int, thread: int, stream: str | None, block: int) -> None:
        self.name = name
        self.stack = stack
        self.thread = thread
        self.stream = stream
        self.block = block
        self.seconds = self.longest = 0.0
        self.count = 0

    def add(self, seconds: float) -> None:
        self.seconds += seconds
        self.longest = max(self.longest, seconds)
        self.count += 1


class Stalls:
    """All stalls of an observation: one entry for each function and line.

    A call is a stall if it took `shortest` seconds. In a block of `no_stalls` it is one, however
    long it took, if the host has learned in it that work is over: that depends on no timing.
    """

    def __init__(self, world: World, shortest: float) -> None:
        self._world = world
        self._shortest = shortest
        self._found: dict[Any, _Entry] = {}
        self._forbidden: dict[Any, _Entry] = {}
        self._reasons: dict[int, list[str]] = {}  # of open blocks that allow stalls, by thread
        self.blocks: dict[int, _Block] = {}  # open ones that forbid stalls, by their numbers
        self.allowed: dict[str, int] = {}  # how many were allowed, by the reason
        self._waits: dict[int, _Wait] = {}  # by thread

    # -- records ----------------------------------------------------------------------------------

    def call(self, call: Call, knew: Clock | None) -> None:
        """Apply a call in which the host may have waited; `knew` is what the host knew before it.

        It is `None` unless a block forbids stalls.
        """
        nanoseconds = call.ended - call.began
        waited = nanoseconds >= _HELD_UP or (knew is not None and self._has_learned(call, knew))
        lane = None if call.function.stream is None else self._world.lane(call)
        self._add(call, call.name, lane, nanoseconds * 1e-9, waited=waited)

    def asked(self, call: Call, knew: Clock) -> None:
        """Apply a query, which is part of a wait of userstream or none."""
        wait = self._waits.get(call.thread)
        if wait is not None and self._has_learned(call, knew):
            wait.has_learned = True

    def _has_learned(self, call: Call, knew: Clock) -> bool:
        return call.account == PROGRAM and is_news(self._world.clocks.host_clock(), knew)

    def host_waits(self, call: Call) -> None:
        """Apply the begin or the end of a wait of userstream."""
        (begins,) = call.words
        if begins:
            self._waits.setdefault(call.thread, _Wait(call.began)).depth += 1
            return
        wait = self._waits.get(call.thread)
        if wait is None:
            return
        wait.depth -= 1
        if not wait.depth:
            del self._waits[call.thread]
            nanoseconds = call.ended - wait.began
            waited = wait.has_learned or nanoseconds >= _HELD_UP
            self._add(call, _OF_USERSTREAM, None, nanoseconds * 1e-9, waited=waited)

    def forbid(self, call: Call) -> None:
        """Apply the begin or the end of a block of `no_stalls`."""
        number, begins, is_for_all = call.words
        if begins:
            self.blocks[number] = _Block(None if is_for_all else call.thread)
        else:
            self.blocks.pop(number, None)

    def allow(self, call: Call) -> None:
        """Apply the begin or the end of a block of `stall_allowed`."""
        (begins,) = call.words
        reasons = self._reasons.setdefault(call.thread, [])
        if begins:
            reasons.append(log.text_of(call.fetched[0]))
        elif reasons:
            reasons.pop()
        if not reasons:
            del self._reasons[call.thread]

    def forget(self) -> None:
        """Forget what goes on: records are missing, and its end may be among them."""
        self._waits.clear()
        self._reasons.clear()

    def _add(
        self, call: Call, name: str, lane: Lane | None, seconds: float, *, waited: bool
    ) -> None:
        is_long = seconds >= self._shortest and not self._is_of_trial(call, seconds)
        blocks = [
            number
            for number, block in self.blocks.items()
            if waited and (block.thread is None or block.thread == call.thread)
        ]
        if not (is_long or blocks):
            return
        reasons = self._reasons.get(call.thread)
        if reasons:
            self.allowed[reasons[-1]] = self.allowed.get(reasons[-1], 0) + 1
            return
        if is_long:
            self._enter(self._found, call, name, lane, 0).add(seconds)
        for number in blocks:
            self._enter(self._forbidden, call, name, lane, number).add(seconds)

    def _is_of_trial(self, call: Call, seconds: float) -> bool:
        """Return whether the recorder held a stream meanwhile, to make a race happen."""
        return self._world.trials.was_held(call.ended - int(seconds * 1e9), call.ended)

    def _enter(
        self, entries: dict[Any, _Entry], call: Call, name: str, lane: Lane | None, block: int
    ) -> _Entry:
        line = line_of(self._world.stacks[call.stack])
        key = (name, None if line is None else (line.filename, line.lineno), block)
        entry = entries.get(key)
        if entry is None:
            stream = None if lane is None else self._world.describe(lane).name
            entry = entries[key] = _Entry(name, call.stack, call.thread, stream, block)
        return entry

    # -- findings ---------------------------------------------------------------------------------

    def found(self) -> tuple[Stall, ...]:
        """Return the stalls, the longest first."""
        return self._told(self._found)

    def forbidden(self) -> tuple[Stall, ...]:
        """Return the waits in blocks of `no_stalls`, the longest first."""
        return self._told(self._forbidden)

    def _told(self, entries: dict[Any, _Entry]) -> tuple[Stall, ...]:
        found = []
        for each in entries.values():
            stack = self._world.stacks[each.stack]
            thread = self._world.finds.thread_name(each.thread)
            durations = (each.seconds, each.longest, each.count)
            found.append(
                Stall(each.name, *durations, each.stream, thread, line_of(stack), stack, each.block)
            )
        return tuple(sorted(found, key=lambda stall: -stall.seconds))


class WrongStreams:
    """The operations that lines of the program queue on streams to be avoided.

    These are the legacy default stream, if the program works on other streams as well, and the
    streams with the handles in `forbidden`.
    """

    def __init__(self, world: World, forbidden: Iterable[int]) -> None:
        self._world = world
        self._forbidden = frozenset(forbidden)
        self._found: dict[tuple[int, str, int], tuple[RecordedOperation, int]] = {}
        self._others: set[int] = set()  # stacks of operations on other streams

    def queued(self, operation: RecordedOperation, lane: Lane) -> None:
        """Apply an operation that the program has queued, and not while it captures a graph."""
        if lane.kind != LEGACY and lane.handle not in self._forbidden:
            self._others.add(operation.stack)
            return
        key = (operation.stack, operation.name, lane.id)
        first, count = self._found.get(key, (operation, 0))
        self._found[key] = first, count + 1

    def found(self) -> tuple[WrongStream, ...]:
        """Return one finding for each line, function and stream, in the order of their begin."""
        world = self._world

        def is_of_program(stack: int) -> bool:
            line = line_of(world.stacks[stack])
            return line is not None and owner_of(line) == PROGRAM_CODE

        uses_others = any(map(is_of_program, self._others.copy()))  # another thread adds to it
        found: dict[Any, WrongStream] = {}
        for first, count in self._found.copy().values():
            lane = first.lane
            assert lane is not None
            is_forbidden = lane.handle in self._forbidden or uses_others
            if not (is_forbidden and is_of_program(first.stack)):
                continue
            stack, stream = world.stacks[first.stack], world.describe(lane)
            line = line_of(stack)
            key = (first.name, stream.name, line and (line.filename, line.lineno))
            before = found.get(key)
            thread = world.finds.thread_name(first.thread)
            found[key] = WrongStream(
                *(first.name, stream.name, stream.device),
                count if before is None else before.count + count,
                *(thread, line, stack),
            )
        return tuple(found.values())
