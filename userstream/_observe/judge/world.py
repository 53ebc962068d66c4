"""The state of an analysis: clocks, memory, declarations and findings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .clocks import LEGACY, Clocks, join
from .declarations import Declarations
from .functions import FUTURE, PROGRAM
from .memory import ASSUMED, EXACT, PINNED, Access, Allocation, Memory
from .races import ACCESSES, Finds, RaceMemory, RecordedOperation, Side
from .stacks import Stacks
from .timeline import Timeline

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .clocks import Clock, Lane
    from .functions import Call
    from .memory import Guess, Guesses, Span

Range = tuple[int, int]


class World:
    """The state of an analysis, with the operations that all subjects share."""

    def __init__(self, *, strict: bool = False, timeline: int = 0) -> None:
        self.stacks = stacks = Stacks()
        self.clocks = Clocks(strict=strict)
        self.memory = Memory()
        self.declarations = Declarations(self.memory)
        self.finds = Finds(stacks, self.describe)
        self.timeline = Timeline(timeline)
        self.devices: dict[int, int] = {}  # of contexts that were made while watching
        self.primary_devices: dict[int, int] = {}  # of primary contexts
        self.primaries: dict[int, int] = {}  # the primary context of each green one
        self.names: dict[int, str] = {}  # of streams, by handle
        self.unseen: dict[str, int] = {}  # what could not be followed, and how often

    def lane(self, call: Call) -> Lane:
        """Return the stream of a call, or the default stream if the call names none."""
        function = call.function
        if function.stream is None:
            handle = function.roles.get("default", 0)
        else:
            handle = call.words[function.stream]
        return self.clocks.lane(handle, call.context, call.thread)

    def begin(
        self, call: Call, lane: Lane, name: str | None = None
    ) -> tuple[RecordedOperation, int]:
        """Queue the operation of a call; return the operation and its number on the stream."""
        operation = RecordedOperation(
            name or call.name, call.stack, call.thread, lane, call.began, call.ended
        )
        beside = self.clocks.beside(lane)
        self.timeline.queued(operation, lane, beside)
        call.entry = operation.entry
        return operation, self.clocks.step(lane, operation, beside)

    def is_known(self, access: Access) -> bool:
        """Return whether every thread of the host has observed the completion of an access."""
        return self.clocks.is_known(access.lane, access.time)

    def touch(
        self,
        lane: Lane,
        time: int,
        operation: RecordedOperation,
        ranges: Iterable[Range],
        *,
        write: bool,
        known: str = EXACT,
        loose: bool = False,
    ) -> None:
        """Record accesses of one kind to several ranges, and report the races with them."""
        touches = tuple([(start, end, write, known) for start, end in ranges])
        self.touch_each(lane, time, operation, touches, loose=loose)

    def touch_each(
        self,
        lane: Lane,
        time: int,
        operation: RecordedOperation,
        touches: tuple[Span, ...],
        *,
        loose: bool = False,
    ) -> None:
        """Record the accesses of an operation, and report the races with them."""
        self.timeline.touched(touches)
        whole: Allocation | None = None  # often the allocation of the previous range
        for start, end, write, known in touches:
            if lane.capture is not None:
                access = Access(start, end, lane, time, operation, write, known, loose)
                for old in lane.capture.touch(access):
                    self.report(self.memory.elsewhere, old, access)
                continue
            if whole is None or not whole.start <= start < whole.end:
                whole = self.memory.find(start)
            if whole is None or end > whole.end:
                for part, begin, after in self.memory.parts(start, end):
                    access = Access(begin, after, lane, time, operation, write, known, loose)
                    self._touch(part, access)
            elif not whole.touch_again(start, end, lane, time, operation, write, known, loose):
                access = Access(start, end, lane, time, operation, write, known, loose)
                self._touch(whole, access)

    def _touch(self, allocation: Allocation, access: Access) -> None:
        if allocation.freed is not None:
            self.report_freed(allocation, access)
        # userstream reuses its pinned memory by queries of its own.
        kept = self.clocks.known_to_any_thread if allocation.kind == PINNED else None
        for old in allocation.touch(access, kept):
            self.report(allocation, old, access)

    def report(self, allocation: Allocation, old: Access, new: Access) -> None:
        """Report a race between two accesses."""
        kind = _kind(old, new)

        def last_in_order() -> RecordedOperation | None:
            until = new.lane.clock.get(old.lane.id, 0)
            return next((what for time, what in reversed(old.lane.recent) if time <= until), None)

        possible = self.clocks.possibly_known.get(old.lane.id, 0) >= old.time
        if old.loose or new.loose:
            possible = True
        guesses: tuple[Guess | None, Guess | None] = (None, None)
        if not (_surely_writes(old) or _surely_writes(new)):
            if not possible:  # else the race stays possible, whatever is learned
                guesses = _guess(old), _guess(new)
            possible = True
        start, end = max(old.start, new.start), min(old.end, new.end)
        self.finds.race(
            kind,
            RaceMemory(start, end, allocation.kind, self.allocated_at(allocation)),
            Side(old.operation, _access(old), old.known, guesses[0]),
            Side(new.operation, _access(new), new.known, guesses[1]),
            until=last_in_order,
            possible=possible,
            held_by=old.held_by | new.held_by,
        )

    def report_freed(self, allocation: Allocation, new: Access) -> None:
        """Report an access to memory that was freed before."""
        self.finds.race(
            "use after free",
            RaceMemory(new.start, new.end, allocation.kind, self.allocated_at(allocation)),
            Side(allocation.freed, "free"),
            Side(new.operation, _access(new), new.known),
        )

    @staticmethod
    def allocated_at(allocation: Allocation) -> int:
        """Return the stack of the call that allocated memory, or -1."""
        return -1 if allocation.operation is None else allocation.operation.stack

    def host_knew(self, access: Access) -> bool:
        """Return whether any thread has observed the completion of an access."""
        return (
            access.lane.is_finished
            or self.clocks.known_to_any_thread.get(access.lane.id, 0) >= access.time
        )

    def host_knows(self, call: Call, clock: Clock, lasts: Iterable[int] = ()) -> None:
        """Record what the host has learned from a successful query or wait."""
        if call.account == PROGRAM:
            self.clocks.host_knows(clock)
            self.timeline.host_waited(call, lasts)
            return
        join(self.clocks.known_to_any_thread, clock)
        if call.account == FUTURE:
            join(self.clocks.possibly_known, clock)

    def not_seen(self, what: str) -> None:
        """Count something that could not be followed."""
        self.unseen[what] = self.unseen.get(what, 0) + 1

    def device_of(self, context: int) -> int | None:
        """Return the device of a context, or `None` if unknown."""
        device = self.devices.get(context)
        return self.primary_devices.get(context) if device is None else device

    def describe(self, lane: Lane) -> tuple[str, int | None]:
        """Return the name of a stream for reports, and its device."""
        device = self.device_of(lane.context)
        if lane.kind == LEGACY:
            name = "the legacy default stream"
        elif lane.kind == "per-thread":
            name = f"the default stream of thread {lane.thread}"
        else:
            known = self.names.get(lane.handle)
            name = f"stream {lane.handle:#x}" if known is None else f"{known} ({lane.handle:#x})"
        if device is not None:
            name += f" of device {device}"
        return name, device


def _surely_writes(access: Access) -> bool:
    return access.write and access.known != ASSUMED


def _guess(access: Access) -> Guess | None:
    guesses: Guesses | None = access.operation.guesses
    return None if access.known != ASSUMED or guesses is None else guesses.at(access.start)


def _kind(old: Access, new: Access) -> str:
    if old.operation.kind == "allocate":
        return "use before allocation"
    if new.operation.kind.startswith("free") or old.operation.kind.startswith("free"):
        return "use after free"
    return ACCESSES


def _access(access: Access) -> str:
    kind: str = access.operation.kind
    if kind:
        return kind.partition(" ")[0]
    return "write" if access.write else "read"
