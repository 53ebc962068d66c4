"""The races and stalls that were found, one entry for each pair of lines."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from .found import Operation, Race, Stall, access_kind
from .memory import ASSUMED, KINDS, LEARNED
from .stacks import line_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from .clocks import Lane
    from .found import Stack
    from .memory import Guess, Guesses, Span
    from .stacks import Stacks


ACCESSES = "accesses"  # a race of two accesses, named by `access_kind`


class RecordedOperation:
    """An operation of a stream, or a wait of the host, as the analysis keeps it.

    Others are named by their numbers: references would keep all that ever was alive.
    """

    __slots__ = (
        "after",
        "began",
        "ended",
        "entry",
        "guesses",
        "kind",
        "lane",
        "launched",
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
        self.launched: str = ""  # where the graph was launched, for a node of a graph
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


class _Entry:
    __slots__ = ("count", "entries", "guesses", "race")

    def __init__(self, race: Race, guesses: tuple[Guess | None, Guess | None]) -> None:
        self.race = race
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
        kind = access_kind(first, second)
        return replace(race, kind=kind, first=first, second=second, possible=possible)


def _settled(side: Operation, guess: Guess | None) -> Operation:
    writes = None if guess is None else guess.writes
    if writes is None:
        return side
    return replace(side, access="write" if writes else "read", known=LEARNED)


class Finds:
    """All races and stalls of an observation."""

    def __init__(self, stacks: Stacks, describe: Callable[[Lane], tuple[str, int | None]]) -> None:
        self._stacks = stacks
        self._describe = describe
        self._races: dict[tuple[Any, ...], _Entry] = {}
        self._stalls: dict[tuple[str, Any], list[Any]] = {}
        self.threads: dict[int, str] = {}  # names of threads, by their numbers of the system

    # -- races ------------------------------------------------------------------------------------

    def race(
        self,
        kind: str,
        place: RaceMemory,
        first: Side,
        second: Side,
        *,
        until: Callable[[], RecordedOperation | None] = lambda: None,
        possible: bool = False,
        held_by: frozenset[int] = frozenset(),
    ) -> None:
        """Add a race between two operations."""
        lines = (self._place(first.operation), self._place(second.operation))
        guesses = (first.guess, second.guess)
        which = [each and (id(each.learned), each.offsets) for each in guesses]
        key = (kind, lines, possible, held_by, *which)
        entry = self._races.get(key)
        if entry is None:
            one, other = self._operation(first), self._operation(second)
            last = until()  # searched once per entry: the search is slow
            race = Race(
                kind=access_kind(one, other) if kind == ACCESSES else kind,
                address=place.start,
                nbytes=place.end - place.start,
                memory=KINDS[place.kind],
                allocated=self._stacks[place.allocated],
                framework=None,
                first=one,
                second=other,
                ordered_until=None if last is None else self._operation(Side(last, "")),
                possible=possible,
                count=1,
                advice=_advice(kind, one, other),
                _times=(first.operation.ended, second.operation.ended),
            )
            entry = self._races[key] = _Entry(race, guesses)
        entry.count += 1
        entry.entries = (first.operation.entry, second.operation.entry)

    def drop_held(self, word: int) -> None:
        """Forget races found while a stream waited for a value, which is written now."""
        for key in [key for key in self._races if word in key[3]]:
            del self._races[key]

    def count(self) -> int:
        """Return the number of entries."""
        return len(self._races)

    def races(self) -> list[Race]:
        """Return the races, each with the number of times that it was found."""
        counts: dict[tuple[Any, ...], int] = {}
        found: dict[tuple[Any, ...], Race] = {}
        # Entries that differ in the awaited values or in the kernel alone are one race.
        for (_, lines, *_), entry in self._races.copy().items():
            race = entry.settled()
            if race is not None:
                key = (race.kind, lines, race.possible)
                counts[key] = counts.get(key, 0) + entry.count
                found.setdefault(key, replace(race, _entries=entry.entries))
        return [replace(race, count=counts[key]) for key, race in found.items()]

    # -- stalls -----------------------------------------------------------------------------------

    def stall(self, name: str, stack: int, thread: int, lane: Lane | None, seconds: float) -> None:
        """Add the duration of a call that stalled."""
        line = line_of(self._stacks[stack])
        key = (name, None if line is None else (line.filename, line.lineno))
        entry = self._stalls.get(key)
        if entry is None:
            stream = None if lane is None else self._describe(lane)[0]
            entry = self._stalls[key] = [0.0, 0.0, 0, stream, self.thread_name(thread), stack]
        entry[0] += seconds
        entry[1] = max(entry[1], seconds)
        entry[2] += 1

    def stalls(self) -> list[Stall]:
        """Return the stalls, the longest first."""
        found = []
        for (name, _), told in self._stalls.copy().items():  # as `races`
            seconds, longest, count, stream, thread, index = told
            stack = self._stacks[index]
            line = line_of(stack)
            found.append(Stall(name, seconds, longest, count, stream, thread, line, stack))
        return sorted(found, key=lambda stall: -stall.seconds)

    # -- how it is shown --------------------------------------------------------------------------

    def _place(self, operation: RecordedOperation) -> object:
        stack: Stack = self._stacks[operation.stack]
        line = line_of(stack)
        return operation.name if line is None else (line.filename, line.lineno)

    def _operation(self, side: Side) -> Operation:
        done = side.operation
        stream, device = ("the host", None) if done.lane is None else self._describe(done.lane)
        stack = self._stacks[done.stack]
        name = f"{done.name} in {done.launched}" if done.launched else done.name
        return Operation(
            name=name,
            access=side.access,
            known=side.known,
            stream=stream,
            device=device,
            thread=self.thread_name(done.thread),
            line=line_of(stack),
            stack=stack,
        )

    def thread_name(self, native: int) -> str:
        """Return the name of a thread."""
        return self.threads.get(native, f"thread {native}")


def _place(operation: Operation) -> str:
    line = operation.line
    return operation.name if line is None else f"{line.filename.rpartition('/')[2]}:{line.lineno}"


def _advice(kind: str, first: Operation, second: Operation) -> str:
    where = "the second" if second.line is None else _place(second)
    if kind == "host overwrote the source of a copy":
        return (
            "the copy may read what was written later: wait for it (us.wait(), an event) before "
            f"its source is written again, or copy from another buffer; noticed at {where}"
        )
    if kind == "host read before the copy":
        return "nothing waited for the copy: us.wait(), or an event, before its result is read"
    if kind == "use after free" and first.stream == second.stream:
        return (
            f"it was freed by {_place(first)}, on the same stream: free it after its last use, "
            "or allocate it again"
        )
    if kind == "use after free" and first.stream == "the host":
        return f"free it after its last use; it was freed by {_place(first)}"
    if kind == "use after free":
        return (
            f"free it on the stream that used it last, or let {second.stream} wait for "
            f"{first.stream} before (torch: tensor.record_stream)"
        )
    if kind == "use before allocation":
        return f"let {second.stream} wait for {first.stream}, on which it was allocated"
    return (
        f"nothing orders {second.stream} after {first.stream}: `with us.borrow(buffer):` around "
        f"{where}, or let {second.stream} wait for {first.stream}"
    )
