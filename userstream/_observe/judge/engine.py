"""Apply the recorded calls, one after the other, to the state of the analysis."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

from . import log
from .allocations import Allocations, ArrayCalls, Blocks, Contexts
from .copies import Copies, Pinned
from .functions import NOT_FOLLOWED, Call, Function, watched
from .graphs import Captures, Nodes
from .launches import Launches
from .log import HEAD, line_of, parts_of
from .order import Order, Words
from .stalls import Hangs, Stalls, WrongStreams
from .world import World

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from .clocks import Clock

_TRIM = 4096  # calls between two looks for what can be forgotten


class _Entry(NamedTuple):
    """A driver function, with the methods that read and apply its calls."""

    name: str
    function: Function
    apply: Callable[[Call], None]
    unpack: Callable[[bytes, int], tuple[int, ...]]
    size: int  # of a record without parts


class Engine:
    """The analysis of a log: dispatches each record to the subject that applies the call.

    `notes` apply the records that are no calls and no part of the analysis.
    """

    def __init__(
        self,
        notes: Mapping[int, Callable[[Call], None]],
        *,
        stall: float,
        strict: bool = False,
        timeline: int = 0,
        forbidden: Sequence[int] | None = None,
    ) -> None:
        self.world = world = World(strict=strict, timeline=timeline)
        self.counts: dict[str, int] = {}
        self.time = 0  # of the last record
        self.lost = 0  # records that are missing
        self._stall = stall
        self.stalls = Stalls(world, stall)
        self.wrong_streams = WrongStreams(world, forbidden or ())
        if forbidden is not None:
            world.queued = self.wrong_streams.queued
        self._untrimmed = 0
        self._call = Call()
        self._pinned = Pinned(world)
        allocations, launches = Allocations(world), Launches(world)
        captures = Captures(world, allocations)
        self._words = Words(world)
        self.hangs = Hangs(world, self._words, self.stalls)
        self.blocks = Blocks(world.stacks)  # of the caching allocators
        self._notes: dict[int, Callable[[Call], None]] = {
            **notes,
            log.FUNCTION: self._define,
            log.THREAD: self._thread_seen,
            log.THREAD_ENDS: self._thread_ends,
            log.CODE: world.stacks.define_code,
            log.STACK: world.stacks.define_stack,
            log.CONTEXT: world.seen_context,
            log.SEEN_STREAM: captures.seen_stream,
            log.SEEN_MEMORY: allocations.seen_memory,
            log.SEEN_KERNEL: launches.seen_kernel,
            log.SOURCE_CHANGED: self._memory_changed,
            log.LEARNED: launches.learned,
            log.HELD: world.trials.held,
            log.MARKED: world.trials.marked,
            log.RELEASED: world.trials.released,
            log.LOST: self._lost,
            log.NOT_COMPARED: self._pinned.not_compared,
            log.BLOCK: self.blocks.block,
            log.BLOCKS: self.blocks.blocks,
            log.DECLARED: world.declarations.begin,
            log.DECLARED_NO_MORE: world.declarations.end,
            log.HOST_WAITS: self.stalls.host_waits,
            log.NO_STALLS: self.stalls.forbid,
            log.STALLS_ALLOWED: self.stalls.allow,
            log.TIMED_OUT: self.hangs.timed_out,
        }
        copies = Copies(world, self._pinned)
        self._subjects = (
            allocations,
            captures,
            copies,
            launches,
            ArrayCalls(world),
            Contexts(world),
            Nodes(world, captures, copies, launches),
            NotFollowed(world),
            Order(world, captures, self._words),
            self._words,
        )
        self._table: dict[int, _Entry] = {}
        self._called_by = world.clocks.called_by if strict else None

    def take(self, data: bytes) -> int:
        """Apply the whole records at the begin of some bytes; return how many bytes they have."""
        call, table, counts, called_by = self._call, self._table, self.counts, self._called_by
        freeing, stalls = self.world.memory.freeing, self.stalls
        words = memoryview(data)[: len(data) & ~7].cast("I")
        at, until = 0, len(data) - 7
        while at < until:
            end = at + words[at >> 2]
            if end > len(data):
                break
            entry = table.get(words[(at >> 2) + 1] & 0xFFFF)
            if entry is None:
                self._note(data, at, end)
                at = end
                continue
            (
                call.leaving,
                call.account,
                call.number,
                call.thread,
                call.stack,
                call.began,
                call.ended,
                call.context,
                call.result,
                *call.words,
            ) = entry.unpack(data, at)
            name, function, apply, _, size = entry
            call.name, call.function, call.entry = name, function, -1
            if at + size < end:
                call.fetched = parts_of(data, at + size, end)
            at = end
            if called_by is not None:
                called_by(call.thread)
            knew = None
            if call.leaving:
                counts[name] = counts.get(name, 0) + 1
                call.waits = function.waits
                if stalls.blocks:
                    knew = self.world.clocks.host_clock()
            apply(call)
            if freeing and function.orders_host:
                self.world.memory.drop_freed(self.world.clocks.known_to_any_thread)
            if call.leaving and (call.waits or knew is not None):
                self._host_learns(call, knew)
            self._untrimmed += 1
        self.time = call.ended
        if self._untrimmed >= _TRIM:
            self._untrimmed = 0
            self.world.memory.trim(self.world.is_known)
        return at

    @property
    def number(self) -> int:
        """The number of the last record."""
        return self._call.number

    def _note(self, data: bytes, at: int, end: int) -> None:
        """Apply a record that is no call; a record of an unknown type changes nothing."""
        call, head = self._call, at + HEAD.size
        _, what, *told, count = HEAD.unpack_from(data, at)
        (
            call.leaving,
            call.account,
            call.number,
            call.thread,
            call.stack,
            call.began,
            call.ended,
            call.context,
            call.result,
        ) = told
        call.words = list(struct.unpack_from(f"<{count}Q", data, head))
        call.fetched = parts_of(data, head + 8 * count, end)
        apply = self._notes.get(what)
        if apply is not None:
            apply(call)

    # -- definitions ------------------------------------------------------------------------------

    def _define(self, call: Call) -> None:
        """Define the number of a function; calls of an unknown function are only counted."""
        (number,) = call.words
        symbol = log.text_of(call.fetched[0])
        name, function = watched(symbol) or (symbol, Function("not_followed", 0))
        head = struct.Struct(f"<6xBBQIiQQQi4x{function.words}Q")
        apply = _method(self._subjects, function.means)
        self._table[number] = _Entry(name, function, apply, head.unpack_from, head.size)

    def _thread_seen(self, call: Call) -> None:
        number, system = call.words
        self.world.finds.thread_seen(number, system, log.text_of(call.fetched[0]))

    def _thread_ends(self, call: Call) -> None:
        self.world.clocks.forget_thread(call.thread)

    # -- calls ------------------------------------------------------------------------------------

    def _host_learns(self, call: Call, knew: Clock | None) -> None:
        """Apply a wait, or in a block of `no_stalls` any call."""
        if call.waits:
            self.stalls.call(call, knew)
            is_long = (call.ended - call.began) * 1e-9 >= self._stall
            if not call.result and (call.function.orders_host or is_long):
                self.world.timeline.host_waited(call)
        elif knew is not None and call.function.orders_host:
            self.stalls.asked(call, knew)

    def _lost(self, call: Call) -> None:
        """Treat all earlier work as ordered: the lost records may include an edge.

        Each thread says how many are lost until then, so that the same ones may be told again.
        """
        if call.words[0] <= self.lost:
            return
        self.lost = call.words[0]
        self.world.clocks.forget_all()
        self.world.memory.trim(lambda _: True)
        self.world.declarations.forget()
        self._pinned.forget()
        self._words.forget()
        self.stalls.forget()

    def _memory_changed(self, call: Call) -> None:
        """Apply a change of page-locked memory: a word that a stream waits for, or a source."""
        number, address, _, value = call.words
        if not self._words.word_changed((number, address), value):
            self._pinned.source_changed(call)

    def finish(self) -> None:
        """Report results of copies that the host was never seen to wait for."""
        self._pinned.finish()


def _method(subjects: Iterable[object], means: str) -> Callable[[Call], None]:
    """Return the method of that name, which exactly one of the subjects has."""
    (method,) = (getattr(each, means) for each in subjects if hasattr(type(each), means))
    found: Callable[[Call], None] = method
    return found


class NotFollowed:
    """Counts calls of functions that are not followed."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._first: dict[str, str] = {}  # where each was called first

    def not_followed(self, call: Call) -> None:
        name = call.name
        if name not in self._first:
            line = line_of(self.world.stacks[call.stack])
            at = "" if line is None else f", first at {line.filename}:{line.lineno}"
            self._first[name] = at
        reason = NOT_FOLLOWED.get(name, "not followed")
        self.world.not_seen(f"{name}: {reason}{self._first[name]}")
