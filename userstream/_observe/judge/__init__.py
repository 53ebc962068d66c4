"""The judge: reads the log of an observation, and says which operations race.

It imports nothing but the standard library, so that a log can be judged on any machine, without
CUDA and without the program. `Judge` takes the records of a `log`. Its `Engine` dispatches the
calls to `allocations`, `copies`, `graphs`, `launches`, `order` and `stalls`. These share the
`world`: `clocks`, `memory`, `races` and `trials`. What a judge has found is a `Findings`, and those
of several processes are a `Report`, which `reports` writes as files.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, NamedTuple

from . import log
from .allocations import Allocations, ArrayCalls, Blocks, Contexts
from .copies import Copies, Pinned
from .finding_types import covers
from .findings import Findings, Process, Report
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
    from .finding_types import Race, Stall, Suppression
    from .trials import Pair
    from .world import Work


_APART = (
    "two streams at once in memory that a caching allocator may have cut up, where one operation "
    "may reach the other's bytes: observe(allocations=True) tells"
)


class Judge:
    """The findings of one log, which is given a piece at a time.

    Parameters
    ----------
    possible : bool
        Whether `races` includes possible races.
    suppressions : sequence of dict
        The races that are not reported; see `found.read_suppressions`.
    stall : float
        The shortest call, in seconds, that counts as a stall.
    strict : bool
        Whether a host thread knows only what it has waited for itself.
    timeline : int
        The largest number of operations on the page.
    forbidden : sequence of int, optional
        Handles of streams on which the program should queue nothing, beside the legacy default
        stream; `None` if it may use all.
    trials : int
        How often a pair of lines may be held to make its race happen.
    """

    def __init__(
        self,
        *,
        possible: bool = False,
        suppressions: Sequence[Suppression] = (),
        stall: float = 1e-4,
        strict: bool = False,
        timeline: int = 20_000,
        forbidden: Sequence[int] | None = None,
        trials: int = 0,
    ) -> None:
        self.header: dict[str, Any] = {}
        self.end: str | None = None  # why the recording ended
        self.is_cut = False  # the log has no end, and gets none
        self.asked: Callable[[Any], object] = lambda _: None  # with questions of the program
        self._possible = possible
        self._suppressions = suppressions
        self._last_note = 0  # the time of the last question, or of the end
        self._not_recorded: Sequence[str] = ()  # sentences
        notes = {
            log.HEADER: self._header,
            log.NAMES: self._names,
            log.UNSEEN: self._unseen,
            log.QUESTION: self._question,
            log.END: self._ended,
        }
        self._engine = Engine(
            notes, stall=stall, strict=strict, timeline=timeline, forbidden=forbidden
        )
        self._engine.world.trials.most_of_pair = trials

    def take(self, data: bytes) -> int:
        """Apply the whole records at the begin of some bytes; return how many bytes they have."""
        return self._engine.take(data)

    @property
    def number(self) -> int:
        """The number of the last record that was taken."""
        return self._engine.number

    def orders(self) -> list[Pair | int]:
        """Return the pairs that the recorder is to try, and the numbers of pairs to leave out."""
        trials = self._engine.world.trials
        orders, trials.orders = trials.orders, []
        return orders

    # -- records that are no calls ----------------------------------------------------------------

    def _header(self, call: Call) -> None:
        _, pid, monotonic, wall = call.words
        self.header = {
            **log.header_of(call.fetched[0]),
            "pid": pid,
            "monotonic": monotonic,
            "time": wall,
        }
        self._engine.world.stacks.package = self.header.get("package", "")
        self._engine.world.trials.are_made = self.header.get("confirm") == "yes"

    def _names(self, call: Call) -> None:
        world, told = self._engine.world, log.json_of(call.fetched)
        for handle, name in told.get("streams", {}).items():
            world.clocks.name_stream(int(handle), name)
        for number, name in told.get("threads", {}).items():
            world.collector.name_thread(int(number), name)

    def _unseen(self, call: Call) -> None:
        self._not_recorded = log.json_of(call.fetched)

    def _question(self, call: Call) -> None:
        self._last_note = call.ended
        self.asked(log.json_of(call.fetched))

    def _ended(self, call: Call) -> None:
        self._last_note = call.ended
        self._engine.finish()
        self.end = log.text_of(call.fetched[0])
        (without_stack,) = call.words
        if without_stack:
            self._engine.world.unseen["lines of calls with more different stacks than fit"] = (
                without_stack
            )

    # -- findings ---------------------------------------------------------------------------------

    def watched(self) -> float:
        """Return the seconds from the begin of the log to its last record."""
        began: int = self.header.get("monotonic", 0)
        return max(0, self._last_note - began, self._engine.time - began) * 1e-9

    @property
    def hangs(self) -> Hangs:
        """The reports of streams that make no progress."""
        return self._engine.hangs

    def races(self) -> tuple[Race, ...]:
        """Return the races, one for each pair of lines."""
        return tuple(race for race in self._all_races() if self._possible or not race.possible)

    def _all_races(self) -> list[Race]:
        return [
            self._engine.blocks.name(race)
            for race in self._engine.world.collector.races()
            if self._engine.blocks.are_one(race)
            and not any(covers(each, race) for each in self._suppressions)
        ]

    def stalls(self) -> tuple[Stall, ...]:
        """Return the calls in which the host waited or was held up, longest first."""
        return self._engine.stalls.found()

    def not_seen(self) -> tuple[str, ...]:
        """Return sentences that say what could not be observed."""
        world = self._engine.world
        counted = world.unseen.copy()
        are_one = self._engine.blocks.are_one
        apart = sum(race.count for race in world.collector.races() if are_one(race) is None)
        if apart:
            counted[_APART] = apart
        unwritten = world.collector.unwritten()
        if unwritten:
            counted["writes of values in memory that streams waited for"] = unwritten
        if self._engine.lost:
            counted["calls that came faster than they could be analyzed"] = self._engine.lost
        found = [f"{what} ({count})" for what, count in counted.items()]
        if self.header.get("stacks") == "no":
            found.append("lines: the frames of this interpreter cannot be read")
        found += self._not_recorded
        if self.is_cut:
            found.append(
                "what came after the end of this log: "
                "the program was killed, was replaced by exec, or still runs"
            )
        return tuple(found)

    def stack(self, number: int) -> tuple[Any, ...]:
        """Return the frames of a stack, by its number in the log."""
        return self._engine.world.stacks[number]

    def calls(self) -> dict[str, int]:
        """Return how often each driver function was called."""
        return dict(sorted(self._engine.counts.items()))

    def findings(self, seconds: float | None = None, *, operations: int = 0) -> Findings:
        """Return the findings as plain data.

        Parameters
        ----------
        seconds : float, optional
            How long was recorded, if the log does not tell.
        operations : int
            The largest number of operations in the timeline: the newest.
        """
        world, header = self._engine.world, self.header
        timeline = world.timeline.as_dict(
            operations, world.stacks, world.describe, world.collector.thread_name
        )
        return Findings(
            process=Process(
                pid=header.get("pid", 0),
                rank=header.get("rank"),
                command=header.get("command", ()),
                directory=header.get("directory"),
                began=header.get("time", 0),
                monotonic=header.get("monotonic", 0),
                userstream=header.get("userstream", ""),
            ),
            seconds=self.watched() if seconds is None else seconds,
            end=self.end,
            races=tuple(self._all_races()),
            stalls=self.stalls(),
            forbidden=self._engine.stalls.forbidden(),
            allowed=tuple(self._engine.stalls.allowed.items()),
            wrong_streams=self._engine.wrong_streams.found(),
            hangs=self._engine.hangs.found(),
            calls=self.calls(),
            streams=world.clocks.count_streams(),
            not_seen=self.not_seen(),
            timeline=timeline,
        )

    def report(self, seconds: float | None = None, *, operations: int = 0) -> Report:
        """Return the report of this log alone; see `findings`."""
        return Report([self.findings(seconds, operations=operations)], possible=self._possible)


def judged(
    source: log.Source, judge: Judge, progress: Callable[[], object] = lambda: None
) -> Judge:
    """Return the judge after it has taken a whole log; call `progress` after each piece of it.

    Raises
    ------
    LogError
        The log cannot be read.
    """
    for _ in log.read_log(source, judge):
        progress()
    if not judge.header:
        raise log.LogError(
            "this log has no header: its process was killed at once, or could not write the file "
            "(a limit of the size of files, as of `ulimit -f`, or a full disk)"
        )
    judge.is_cut = judge.end is None
    return judge


# -- the analysis: each record is applied to the subject that it is about --------------------------

_TRIM = 4096  # calls, at least, between two looks for what can be forgotten
_MOST_WORKS = 1 << 13  # of a function
_BEGIN = struct.Struct("<IHBBQIiQQ").unpack_from  # of `HEAD`: what differs between equal calls
_BODY = 40  # the bytes of that


class _Entry(NamedTuple):
    """A driver function, with the methods that read and apply its calls."""

    name: str
    function: Function
    apply: Callable[[Call], Work | None]
    unpack: Callable[[bytes, int], tuple[int, ...]]
    size: int  # of a record without parts
    repeated: int  # where the words end that say which work a call queues; 0: they do not say it
    works: dict[bytes, Work]  # by context, result, these words and what is fetched


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
        self._untrimmed, self._until_trim = 0, _TRIM  # calls
        self._call = Call()
        self._pinned = Pinned(world)
        allocations, launches = Allocations(world), Launches(world)
        self._words = Words(world)
        captures = Captures(world, allocations, self._words.await_value, self._words.follow)
        self.hangs = Hangs(world, self._words, self.stalls)
        self.blocks = Blocks(world)  # of the caching allocators
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
            log.NOT_HELD: world.trials.not_held,
            log.LOST: self._lost,
            log.NOT_COMPARED: self._pinned.not_compared,
            log.BLOCK: self.blocks.block,
            log.BLOCKS: self.blocks.blocks,
            log.BLOCK_FREED: self.blocks.freed,
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
        call, table, perform = self._call, self._table, self.world.perform
        at, until = 0, len(data) - HEAD.size
        while at <= until:
            length, what, leaving, account, number, thread, stack, began, ended = _BEGIN(data, at)
            end = at + length
            if end > len(data):
                break
            entry = table.get(what)
            if entry is None:
                self._note(data, at, end)
                at = end
                continue
            call.leaving, call.account, call.number, call.thread = leaving, account, number, thread
            call.stack, call.began, call.ended = stack, began, ended
            call.name, call.function, call.entry = entry.name, entry.function, -1
            if self._called_by is not None:
                self._called_by(thread)
            self._untrimmed += 1
            if not entry.repeated:
                self._apply(entry, data, at, end)
            else:
                key = data[at + _BODY : at + entry.repeated] + data[at + entry.size : end]
                work = entry.works.get(key)
                if work is not None and not work.lane.is_dropped:
                    self.counts[entry.name] += 1
                    perform(call, work)
                else:
                    self._remember(entry, key, self._apply(entry, data, at, end))
            at = end
        self.time = call.ended
        if self._untrimmed >= self._until_trim:
            self._untrimmed = 0
            self._until_trim = max(_TRIM, self.world.trim())
        return at

    def _apply(self, entry: _Entry, data: bytes, at: int, end: int) -> Work | None:
        """Apply a call; return what equal calls may share, for a function that repeats it."""
        call = self._call
        call.context, call.result, *call.words = entry.unpack(data, at)
        if at + entry.size < end:
            call.fetched = parts_of(data, at + entry.size, end)
        knew = None
        if call.leaving:
            self.counts[call.name] = self.counts.get(call.name, 0) + 1
            call.waits = call.function.waits
            if self.stalls.blocks:
                knew = self.world.clocks.host_clock()
        work = entry.apply(call)
        if self.world.memory.freeing and call.function.orders_host:
            self.world.memory.drop_freed(self.world.clocks.known_to_any_thread)
        if call.leaving and (call.waits or knew is not None):
            self._host_learns(call, knew)
        return work

    @staticmethod
    def _remember(entry: _Entry, key: bytes, work: Work | None) -> None:
        if work is not None and work.can_repeat:
            if len(entry.works) == _MOST_WORKS:
                entry.works.clear()
            entry.works[key] = work

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
        head = struct.Struct(f"<{_BODY}xQi4x{function.words}Q")
        apply = _method(self._subjects, function.means)
        repeated = function.repeats and HEAD.size + 8 * function.repeats
        works = self.world.works[number]
        self._table[number] = _Entry(
            name, function, apply, head.unpack_from, head.size, repeated, works
        )

    def _thread_seen(self, call: Call) -> None:
        number, system = call.words
        self.world.collector.thread_seen(number, system, log.text_of(call.fetched[0]))

    def _thread_ends(self, call: Call) -> None:
        self.world.clocks.forget_thread(call.thread)
        self.world.collector.thread_ended(call.thread)

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
