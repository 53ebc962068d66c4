"""The races that were found, one entry for each pair of lines."""

from __future__ import annotations

import itertools
import re
from collections import OrderedDict, deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from .finding_types import Apart, Operation, Race, accesses_of
from .log import PROGRAM, line_of, owner_of
from .memory import ASSUMED, KINDS, LEARNED
from .remedies import Between, advised

if TYPE_CHECKING:
    from collections.abc import Callable

    from .clocks import Clock, Lane, WaitKey
    from .finding_types import Stack
    from .log import Stacks
    from .memory import Guess, Guesses, Span
    from .trials import Trial, Trials


ACCESSES = "accesses"  # a race of two accesses without order, named by what they do
BLOCK_FREE = "free of a block"  # kind of an operation: by a caching allocator, and no call
_ORDERED_BY_EDGES = (ACCESSES, "use before allocation")
# Why a race is only possible.
TOLD = (
    "a future, a host function, a value or another process may have told the program that the "
    "first is over"
)
ORDERED_EXTERNALLY = (
    "one of the two comes behind a wait for an external semaphore, or for graphics, which may "
    "order it after the other"
)
UNWRITTEN = "a stream waited for a value in memory, and what wrote that value was not seen"
ORDERED = "with the first held, the second waited for it, in 3 trials"
_MOST_APART = 16  # pairs of addresses of one race
_MOST_SUSPECTS = 10_000  # of one wait for a value
_MOST_ENDED = 4096  # waits that have ended and that an earlier access may still be behind
_MOST_NAMED = 20_000  # threads that have ended: a report may still show what the newest ones did


class RecordedOperation:
    """An operation of a stream, or a wait of the host, as the analysis keeps it.

    Others are named by their numbers: references would keep all that ever was alive.
    """

    __slots__ = (
        "after",
        "began",
        "captured",
        "ended",
        "entry",
        "guesses",
        "kind",
        "lane",
        "name",
        "stack",
        "thread",
        "touches",
        "waited",
    )

    def __init__(  # noqa: PLR0917 -- made for each call: keywords would take longer
        self,
        name: str,
        stack: int,
        thread: int,
        lane: Lane | None,
        began: int = 0,
        ended: int = 0,
    ) -> None:
        self.name = name
        self.stack = stack
        self.thread = thread
        self.lane = lane
        self.began = began
        self.ended = ended
        self.kind = ""  # "free" or "allocate"
        self.captured = -1  # the stack that captured it, for a node of a launched graph
        self.guesses: Guesses | None = None  # of a kernel
        self.entry = -1  # its number in the timeline
        self.waited = False  # the host waited in the call
        self.after: tuple[int, ...] = ()  # entries of other streams that it waits for
        self.touches: tuple[Span, ...] = ()


class Side:
    """One side of a race."""

    __slots__ = ("access", "guess", "known", "operation")

    def __init__(
        self,
        operation: RecordedOperation,
        access: str,
        known: str = "exact",
        guess: Guess | None = None,
    ) -> None:
        self.operation = operation
        self.access = access
        self.known = known
        self.guess = guess  # set if the race is possible only because of this guess


class RaceMemory(NamedTuple):
    """The memory that a race is about."""

    start: int
    end: int
    kind: int
    allocated: int = -1  # the stack of the allocating call


class Suspect(NamedTuple):
    """Two operations that race, as far as is known when the second is queued."""

    kind: str
    place: RaceMemory
    first: Side
    second: Side
    reason: str = ""  # why the race is only possible; empty if it is certain
    # Searches the operation up to which they are in order: slow, and once for each entry.
    until: Callable[[], RecordedOperation | None] = lambda: None
    between: tuple[int, int] | None = None  # stacks between which the host has written
    # Addresses of both, if only a caching allocator knows whether they are in the same buffer.
    apart: tuple[int, int] | None = None
    times: int = 1  # how many such pairs there are


class HeldSuspect(NamedTuple):
    """A suspect with a side whose stream waits for values that were not written yet."""

    suspect: Suspect
    waits: frozenset[WaitKey]
    sides: tuple[tuple[int, int, frozenset[WaitKey]], ...]  # stream, number there, waits: of each

    def released(self, wait: WaitKey, clock: Clock, told: Clock) -> HeldSuspect | None:
        """Return the suspect after a wait has ended at a clock; `None` if that end orders it.

        A race is possible if the host was perhaps told of one side before it ended the wait.
        """
        suspect = self.suspect
        for stream, time, waits in self.sides:
            if wait in waits:
                continue
            if clock.get(stream, 0) >= time:
                return None
            if told.get(stream, 0) >= time and not suspect.reason:
                suspect = suspect._replace(reason=TOLD)
        return self._replace(suspect=suspect, waits=self.waits - {wait})

    def undecided(self) -> Suspect:
        """Return the suspect if its waits have not ended: what ends them may order its sides.

        A kernel or a copy may write the value, so the race is possible whatever is learned.
        """
        one, other = (
            Side(each.operation, each.access, each.known)
            for each in (self.suspect.first, self.suspect.second)
        )
        return self.suspect._replace(first=one, second=other, reason=UNWRITTEN)


class StreamFacts(NamedTuple):
    """Facts about a stream that reports print."""

    name: str
    device: int | None
    handle: int | None = None
    origin: str = ""  # where it was created


_HOST = StreamFacts("the host", None)


class _Entry:
    __slots__ = ("apart", "between", "count", "entries", "guesses", "race", "trial")

    def __init__(
        self,
        race: Race,
        guesses: tuple[Guess | None, Guess | None],
        between: Between | None,
        trial: Trial,
    ) -> None:
        self.race = race
        self.trial = trial
        self.between = between  # the lines between which the host has written
        self.apart: list[Apart] = []
        self.guesses = guesses
        self.count = 0
        self.entries = (-1, -1)

    def settled(self) -> Race | None:
        """Return the race as known now, or `None` if both operations only read."""
        race = self.race
        sides = [_settled(race.first, self.guesses[0]), _settled(race.second, self.guesses[1])]
        first, second = sides
        if (first, second) == (race.first, race.second):
            return race
        writers = [side for side in sides if side.access == "write"]
        if not writers:
            return None
        possible = all(side.known == ASSUMED for side in writers)
        kind = _kind_of_accesses(first, second)
        reason = race.reason if possible else ""
        return replace(
            race, kind=kind, first=first, second=second, possible=possible, reason=reason
        )


def _settled(side: Operation, guess: Guess | None) -> Operation:
    writes = None if guess is None else guess.writes
    if writes is None:
        return side
    return replace(side, access="write" if writes else "read", known=LEARNED)


def _decided(race: Race) -> Race:
    """Return a race as its trials decide it."""
    if race.confirmed is False:
        return replace(race, possible=True, reason=ORDERED)
    # In that trial, nothing has told the program, or ordered the second after the first.
    if race.confirmed and race.reason in {TOLD, ORDERED_EXTERNALLY}:
        return replace(race, possible=False, reason="")
    return race


def _kind_of_accesses(first: Operation, second: Operation) -> str:
    one, other = accesses_of(first, second)
    return f"{other} after {one}"


_NUMBERED = re.compile(r"thread \d+$")  # by the system
_DEFAULT = re.compile(r"^Thread-\d+")


def _default_name(stack: Stack) -> str:
    """Return the default name of a thread by its stack, without the number of the thread."""
    for frame, called in itertools.pairwise(stack):
        if frame.filename.endswith("/threading.py") and frame.name.endswith("run"):
            return f"Thread ({called.name.rpartition('.')[2]})"
    return "Thread" if stack else "an unnamed thread"


class RaceCollector:
    """Collects the races of an observation: one entry for each pair of lines."""

    def __init__(
        self, stacks: Stacks, describe: Callable[[Lane], StreamFacts], trials: Trials
    ) -> None:
        self._stacks = stacks
        self._trials = trials
        self._describe = describe
        self._races: dict[tuple[Any, ...], _Entry] = {}
        self._held: list[HeldSuspect] = []
        self._ended: OrderedDict[WaitKey, tuple[Clock, Clock]] = OrderedDict()  # waits for values
        # By the numbers of the log: the name without Python's, and the best one known then.
        self._threads: dict[int, tuple[str, str]] = {}
        self._ended_threads: deque[int] = deque()
        self._given: dict[str, str] = {}  # names that Python gives, by those of unnamed threads

    # -- races ------------------------------------------------------------------------------------

    def race(self, suspect: Suspect) -> None:
        """Add a race between two operations."""
        self._add(self._races, suspect)

    def hold(self, held: HeldSuspect) -> None:
        """Add a race that the end of a wait for a value shows to be one or none, or may show."""
        for wait in held.waits & self._ended.keys():
            left = held.released(wait, *self._ended[wait])
            if left is None:
                return
            held = left
        if not held.waits:
            self._add(self._races, held.suspect)
            return
        if len(self._held) == _MOST_SUSPECTS:
            self._add(self._races, self._held.pop(0).undecided())
        self._held.append(held)

    def release(self, wait: WaitKey, clock: Clock, told: Clock) -> None:
        """Decide on the races that were held back, when a stream goes on after a clock."""
        self._ended[wait] = clock, dict(told)
        if len(self._ended) > _MOST_ENDED:
            self._ended.popitem(last=False)
        kept = []
        for each in self._held:
            left = each.released(wait, clock, told) if wait in each.waits else each
            if left is None:
                continue
            if left.waits:
                kept.append(left)
            else:
                self._add(self._races, left.suspect)
        self._held = kept

    def _add(self, entries: dict[tuple[Any, ...], _Entry], suspect: Suspect) -> None:
        first, second = suspect.first, suspect.second
        lines = (self._place(first.operation), self._place(second.operation))
        guesses = (first.guess, second.guess)
        which = [each and (id(each.learned), each.offsets) for each in guesses]
        accesses = (first.access, first.known, second.access, second.known)
        is_apart = suspect.apart is not None
        key = (suspect.kind, lines, suspect.place.kind, accesses, suspect.reason, is_apart, *which)
        entry = entries.get(key)
        if entry is None:
            between = suspect.between and self._between(*suspect.between)
            trial = self._trials.of((suspect.kind, frozenset(lines)))
            entry = entries[key] = _Entry(self._race(suspect), guesses, between, trial)
        if suspect.apart is not None and len(entry.apart) < _MOST_APART:
            one, other = suspect.apart
            entry.apart.append((one, other, first.operation.ended, second.operation.ended))
        entry.count += suspect.times
        entry.entries = (first.operation.entry, second.operation.entry)
        if entries is self._races and second.operation.kind != BLOCK_FREE:
            is_edge = suspect.kind in _ORDERED_BY_EDGES
            self._trials.suspect(entry.trial, first.operation, second.operation, is_edge=is_edge)

    def _race(self, suspect: Suspect) -> Race:
        kind, place = suspect.kind, suspect.place
        one, other = self._operation(suspect.first), self._operation(suspect.second)
        until = suspect.until()
        return Race(
            kind=_kind_of_accesses(one, other) if kind == ACCESSES else kind,
            address=place.start,
            nbytes=place.end - place.start,
            memory=KINDS[place.kind],
            allocated=self._stacks[place.allocated],
            framework=None,
            first=one,
            second=other,
            ordered_until=None if until is None else self._operation(Side(until, "")),
            possible=bool(suspect.reason),
            count=1,
            advice="",
            reason=suspect.reason,
            _times=(suspect.first.operation.ended, suspect.second.operation.ended),
        )

    def unwritten(self) -> int:
        """Return the number of waits for values that were not seen to end, and may order races."""
        return len({wait for each in self._held.copy() for wait in each.waits})

    def races(self) -> list[Race]:
        """Return the races, each with the number of times that it was found.

        A pair of lines is one race of each pair of accesses, whichever came first, and is not
        possible if it is certain once.
        """
        entries = self._races.copy()  # another thread adds to it
        held: dict[tuple[Any, ...], _Entry] = {}
        for each in self._held.copy():
            self._add(held, each.undecided())
        found: dict[tuple[Any, ...], Race] = {}
        betweens: dict[tuple[Any, ...], Between | None] = {}
        lines: dict[tuple[Any, ...], tuple[Any, Any]] = {}
        for key, entry in (*entries.items(), *held.items()):
            settled = entry.settled()
            if settled is None:
                continue
            race = replace(
                settled,
                count=entry.count,
                first=self._named(settled.first),
                second=self._named(settled.second),
                _entries=entry.entries,
                _apart=tuple(entry.apart),
                confirmed=entry.trial.verdict,
                remedied=entry.trial.remedied,
                undecided=entry.trial.undecided if self._trials.are_made else "",
            )
            same = (
                frozenset(key[1]),
                tuple(sorted(accesses_of(race.first, race.second))),
                key[2],
                bool(entry.apart),
            )
            before = found.get(same)
            if before is not None and before.possible == race.possible:
                is_back = key[0] == ACCESSES and key[1] == lines[same][::-1] != lines[same]
                found[same] = replace(
                    before,
                    count=before.count + race.count,
                    _is_mutual=before._is_mutual or is_back,
                )
            elif before is None or before.possible:
                found[same] = race
                betweens[same], lines[same] = entry.between, key[1]
        return [advised(_decided(race), betweens[same]) for same, race in found.items()]

    def _between(self, before: int, after: int) -> Between:
        """Return two lines of one function, the innermost that was running all the time."""
        stack, later = self._stacks[before], self._stacks[after]
        innermost = line_of(stack), line_of(later)
        common = Between(*innermost)
        for one, other in zip(stack, later, strict=False):
            if (one.filename, one.name) != (other.filename, other.name):
                break
            if owner_of(one) == PROGRAM:
                calls = one is not innermost[0], other is not innermost[1]
                common = Between(one, other, *calls)
            if one.lineno != other.lineno:
                break
        return common

    # -- how it is shown --------------------------------------------------------------------------

    def _place(self, operation: RecordedOperation) -> object:
        line = line_of(self._stacks[operation.stack])
        place = operation.name if line is None else (line.filename, line.lineno)
        if operation.captured < 0:
            return place
        line = line_of(self._stacks[operation.captured])
        return place, None if line is None else (line.filename, line.lineno)

    def _operation(self, side: Side) -> Operation:
        done = side.operation
        stream = _HOST if done.lane is None else self._describe(done.lane)
        stack = self._stacks[done.stack]
        return Operation(
            name=done.name,
            access=side.access,
            known=side.known,
            stream=stream.name,
            device=stream.device,
            thread=self.thread_name(done.thread),
            line=line_of(stack),
            stack=stack,
            captured=None if done.captured < 0 else line_of(self._stacks[done.captured]),
            handle=stream.handle,
            origin=stream.origin,
        )

    def thread_seen(self, number: int, system: int, name: str) -> None:
        """Add a thread: its number in the log and in the system, and its name there, if any."""
        unnamed = f"thread {system}"
        self._threads[number] = unnamed, self._given.get(unnamed) or name or unnamed

    def thread_ended(self, number: int) -> None:
        """Forget the name of the thread that ended longest ago, if there are too many."""
        self._ended_threads.append(number)
        if len(self._ended_threads) > _MOST_NAMED:
            unnamed, _ = self._threads.pop(self._ended_threads.popleft(), ("", ""))
            self._given.pop(unnamed, None)

    def name_thread(self, system: int, name: str) -> None:
        """Set the name that Python gives a thread, by its number in the system.

        The name may come later than calls of the thread.
        """
        self._given[f"thread {system}"] = name

    def _named(self, operation: Operation) -> Operation:
        """Return an operation with the name of its thread as it is known now, as in every run.

        A thread may end before anybody asks for its name, and then it has the name that Python
        gives by default, without its number: that of the function that it runs.
        """
        name = self._given.get(operation.thread, operation.thread)
        if _NUMBERED.match(name):
            name = _default_name(operation.stack)
        return replace(operation, thread=_DEFAULT.sub("Thread", name))

    def thread_name(self, number: int) -> str:
        """Return the name of a thread."""
        _, name = self._threads.get(number, ("", "an unknown thread"))
        return self._given.get(name, name)
