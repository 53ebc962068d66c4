"""The state of an analysis: clocks, memory, declarations and findings."""

from __future__ import annotations

import struct
from collections import defaultdict, deque
from typing import TYPE_CHECKING, Any, NamedTuple

from .clocks import (
    EXTERNAL,
    LEGACY,
    LEGACY_NAME,
    NODE,
    NODE_NAME,
    PER_THREAD,
    Clocks,
    join,
)
from .finding_types import FREED_IN_USE
from .functions import FUTURE, PROGRAM
from .log import Stacks, library_of, line_of, owner_of, short
from .memory import (
    ASSUMED,
    DECLARED,
    DEVICE,
    EXACT,
    MANAGED,
    PINNED,
    Access,
    Allocation,
    Arrays,
    Memory,
)
from .races import (
    ACCESSES,
    ORDERED_EXTERNALLY,
    TOLD,
    HeldSuspect,
    RaceCollector,
    RaceMemory,
    RecordedOperation,
    Side,
    StreamFacts,
    Suspect,
)
from .trials import Trials

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

    from .clocks import Clock, Lane
    from .functions import Call
    from .memory import Guess, Guesses, Place, Span

Range = tuple[int, int]

_MANY = 64  # conflicts of one access, from which on those of the same line count as one

# Why a race is only possible.
_LOOSE = "only some of the bytes are used, and which ones is not known"
_ASSUMED = "whether the kernel writes there is not known yet"


class Work(NamedTuple):
    """The operation that a call queues, as far as the call itself tells.

    Programs make the same calls again and again: equal calls share it, until a stream with its
    handle is destroyed or something is learned about a kernel.
    """

    lane: Lane  # the stream, also while it is captured
    name: str
    touches: tuple[Span, ...]
    places: list[Place | None]  # what each access repeats, if it did so the last time
    guesses: Guesses | None = None  # of a kernel
    is_kernel: bool = False
    loose: bool = False

    @property
    def can_repeat(self) -> bool:
        """Return whether an equal call queues the same.

        It does not on a stream that depends on the thread, nor on the stand-in of a capture.
        """
        return self.lane.capture is None and self.lane.kind != PER_THREAD


class World:
    """The state of an analysis, with the operations that all subjects share."""

    def __init__(self, *, strict: bool = False, timeline: int = 0) -> None:
        self.stacks = stacks = Stacks()
        self.clocks = Clocks(strict=strict)
        self._streams = self.clocks.streams
        self.memory = Memory()
        self.arrays = Arrays(self.memory)
        self.declarations = Declarations(self.memory)
        self.trials = Trials(self.clocks)
        self.collector = RaceCollector(stacks, self.describe, self.trials)
        self.timeline = Timeline(timeline)
        # Called with each operation that the program queues, and not while it captures a graph.
        self.queued: Callable[[RecordedOperation, Lane], object] | None = None
        self.devices: dict[int, int] = {}  # of contexts that were made while watching
        self.primary_devices: dict[int, int] = {}  # of primary contexts
        self.primaries: dict[int, int] = {}  # the primary context of each green one
        self._managed_seen: set[int] = set()  # allocations of managed memory that were used
        self._own: dict[int, bool] = {}  # by stack: whether userstream made the call
        self.news: dict[int, Clock] = {}  # what values in device memory tell, by their addresses
        self.unseen: dict[str, int] = {}  # what could not be followed, and how often
        # By the number of a function, and by what its calls have in common.
        self.works: defaultdict[int, dict[bytes, Work]] = defaultdict(dict)
        self._known_before: Clock = {}  # to every thread of the host, when memory was last trimmed

    def seen_context(self, call: Call) -> None:
        """Apply the definition of a context."""
        context, device, primary = call.words
        if device < 1 << 31:  # else unknown
            self.primary_devices[context] = device
        if primary != context:
            self.primaries[context] = primary

    def lane(self, call: Call) -> Lane:
        """Return the stream of a call, or the default stream if the call names none."""
        function = call.function
        if function.stream is None:
            handle = function.roles.get("default", 0)
        else:
            handle = call.words[function.stream]
            lane = self._streams.get(handle)  # no default stream has its handle as the key
            if lane is not None:
                return lane.captured or lane
        return self.clocks.lane(handle, call.context, call.thread)

    def begin(
        self, call: Call, lane: Lane, name: str | None = None
    ) -> tuple[RecordedOperation, int]:
        """Queue the operation of a call; return the operation and its number on the stream."""
        operation = RecordedOperation(
            name or call.name, call.stack, call.thread, lane, call.began, call.ended
        )
        if lane.first < 0:
            lane.first = call.stack
        beside = self.clocks.beside(lane) if lane.is_implicit else ()
        if self.timeline.room:
            self.timeline.queued(operation, lane, beside)
            call.entry = operation.entry
        if self.queued is not None and call.account == PROGRAM and lane.capture is None:
            self.queued(operation, lane)
        return operation, self.clocks.step(lane, operation, beside)

    def perform(self, call: Call, work: Work) -> None:
        """Queue the operation of a call, and report the races with it."""
        lane, name, touches, places, guesses, is_kernel, loose = work
        lane = lane.captured or lane
        operation, time = self.begin(call, lane, name)
        operation.guesses = guesses
        if is_kernel:
            if self.news:
                self.pass_on((start, end) for start, end, *_ in touches)
            if self.declarations.open:
                touches = tuple(
                    (start, end, *self.declarations.judge(operation, start, write, known))
                    for start, end, write, known in touches
                )
                places = [None] * len(touches)
        self.timeline.touched(touches)
        others = Allocation.touch_places(places, lane, time, operation)
        if others:
            self.touch_each(
                *(lane, time, operation, touches, others),
                loose=loose,
                places=places,
                is_kernel=is_kernel,
            )

    def forget_works(self) -> None:
        """Forget which operations calls queue: something has changed that they do not tell."""
        for works in self.works.values():
            works.clear()

    def trim(self) -> int:
        """Forget old accesses whose completion the host knows; return how many are left.

        Those since the last trim stay: programs often repeat them, which needs them.
        """
        known = self._known_before
        self._known_before = self.clocks.known_to_every_thread()
        return self.memory.trim(
            lambda access: known.get(access.lane.id, 0) >= access.time or access.lane.is_finished
        )

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
        self.timeline.touched(touches)
        self.touch_each(lane, time, operation, touches, range(len(touches)), loose=loose)

    def touch_each(
        self,
        lane: Lane,
        time: int,
        operation: RecordedOperation,
        touches: tuple[Span, ...],
        indices: Iterable[int],
        *,
        loose: bool = False,
        places: list[Place | None] | None = None,
        is_kernel: bool = False,
    ) -> None:
        """Record some accesses of an operation, and report the races with them.

        A kernel may use more than what its pointers point to. There may be `places`, one for each
        access: what each repeats is kept there for the next equal call.
        """
        whole: Allocation | None = None  # often the allocation of the previous range
        for index in indices:
            start, end, write, known = touches[index]
            place: Place | None = None
            if lane.capture is not None:
                access = Access(start, end, lane, time, operation, write, known, loose)
                found = self.memory.find(start)
                if is_kernel and found is not None:
                    access.reach = found.end
                for old in lane.capture.touch(access, found):
                    self.report(found or self.memory.elsewhere, old, access)
                continue
            if whole is None or not whole.start <= start < whole.end:
                whole = self.memory.find(start)
                if whole is not None and whole.kind == MANAGED:
                    self._managed(whole)
            if whole is None or end > whole.end:
                for part, begin, after in self.memory.parts(start, end):
                    access = Access(begin, after, lane, time, operation, write, known, loose)
                    self._touch(part, access, part.is_shared(lane))
            elif (
                # Beyond what is known, an access of a kernel may race with any other.
                (shared := whole.last is not lane and whole.is_shared(lane))
                and (is_kernel or whole.is_open)
            ) or not (
                place := whole.touch_again(start, end, lane, time, operation, write, known, loose)
            ):
                access = Access(start, end, lane, time, operation, write, known, loose)
                if is_kernel:
                    access.reach = whole.end
                self._touch(whole, access, shared)
            if places is not None:
                places[index] = place

    def _touch(self, allocation: Allocation, access: Access, shared: bool) -> None:
        if allocation.freed is not None:
            self.report_freed(allocation, access)
        # userstream reuses its pinned memory by queries of its own.
        kept = self.clocks.known_to_any_thread if allocation.kind == PINNED else None
        conflicts = allocation.touch(access, kept)
        if len(conflicts) > _MANY:
            for old, times in self._by_line(conflicts):
                self.report(allocation, old, access, times=times)
        else:
            for old in conflicts:
                self.report(allocation, old, access)
        if shared and allocation.freed is None:
            for old in allocation.reached(access, kept):
                self.report(allocation, old, access, overlaps=False)

    def _by_line(self, accesses: list[Access]) -> Iterable[tuple[Access, int]]:
        """Return the newest access of each line, and how many such accesses there are.

        With thousands of streams in no order, each operation races with one on every other stream.
        """
        found: dict[Hashable, tuple[Access, int]] = {}
        for each in accesses:
            done = each.operation
            line = (done.name, done.stack, done.captured, each.start, each.end)
            told = self.clocks.possibly_known.get(each.lane.id, 0) >= each.time
            # The end of a wait for a value decides on each that is behind it.
            alone = each if each.held_by else None
            like = (*line, each.write, each.known, each.loose, told, alone)
            _, count = found.get(like, (each, 0))
            found[like] = each, count + 1
        return found.values()

    def _managed(self, allocation: Allocation) -> None:
        if allocation.start not in self._managed_seen:
            self._managed_seen.add(allocation.start)
            self.not_seen("accesses of the host to managed memory")

    def report(
        self,
        allocation: Allocation,
        old: Access,
        new: Access,
        *,
        overlaps: bool = True,
        times: int = 1,
    ) -> None:
        """Report a race between two accesses; of bytes beyond them unless they overlap."""
        reason = ""
        waits = old.held_by | new.held_by
        if self.clocks.possibly_known.get(old.lane.id, 0) >= old.time:
            reason = TOLD
        elif EXTERNAL in waits:
            reason = ORDERED_EXTERNALLY
        elif old.loose or new.loose:
            reason = _LOOSE
        elif not overlaps or _is_partial(allocation, old, new):
            reason = _part_of(old, new)
        guesses: tuple[Guess | None, Guess | None] = (None, None)
        # With another reason the race stays possible, whatever is learned.
        if not (reason or _surely_writes(old) or _surely_writes(new)):
            guesses = _guess(old), _guess(new)
            reason = _ASSUMED
        start, end = max(old.start, new.start), min(old.end, new.end)
        if not overlaps:
            end = min(old.reach, new.reach)
        apart = (old.start, new.start) if not overlaps and allocation.is_cut_up else None

        def last_in_order() -> RecordedOperation | None:
            until = new.lane.clock.get(old.lane.id, 0)
            return next((what for time, what in reversed(old.lane.recent) if time <= until), None)

        suspect = Suspect(
            _kind(old, new),
            RaceMemory(start, end, allocation.kind, self.allocated_at(allocation)),
            Side(old.operation, _access(old), old.known, guesses[0]),
            Side(new.operation, _access(new), new.known, guesses[1]),
            reason,
            last_in_order,
            apart=apart,
            times=times,
        )
        waits -= {EXTERNAL}
        if not waits:
            self.collector.race(suspect)
            return
        until = last_in_order()
        sides = tuple((each.lane.id, each.time, each.held_by) for each in (old, new))
        self.collector.hold(HeldSuspect(suspect._replace(until=lambda: until), waits, sides))

    def report_freed(self, allocation: Allocation, new: Access) -> None:
        """Report an access to memory that was freed before."""
        self.collector.race(
            Suspect(
                "use after free",
                RaceMemory(new.start, new.end, allocation.kind, self.allocated_at(allocation)),
                Side(allocation.freed, "free"),
                Side(new.operation, _access(new), new.known),
            )
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

    def tells_host(self, address: int, clock: Clock) -> None:
        """Record that a reader of a word may learn the completion of the work in a clock."""
        found = self.memory.find(address)
        if found is not None and found.kind == DEVICE:
            self.news[address] = clock  # only once a kernel or a copy reads it
        else:
            join(self.clocks.possibly_known, clock)

    def pass_on(self, ranges: Iterable[Range]) -> None:
        """Apply the order that a kernel or a copy may learn from values in device memory."""
        for start, end in ranges:
            for address, clock in self.news.items():
                if start <= address < end:
                    join(self.clocks.possibly_known, clock)

    def not_seen(self, what: str) -> None:
        """Count something that could not be followed."""
        self.unseen[what] = self.unseen.get(what, 0) + 1

    def is_own(self, stack: int) -> bool:
        """Return whether userstream made a call, and not the program."""
        found = self._own.get(stack)
        if found is None:
            found = self._own[stack] = library_of(self.stacks[stack]) == "userstream"
        return found

    def device_of(self, context: int) -> int | None:
        """Return the device of a context, or `None` if unknown."""
        device = self.devices.get(context)
        return self.primary_devices.get(context) if device is None else device

    def describe(self, lane: Lane) -> StreamFacts:
        """Return the text that describes a stream in reports."""
        device = self.device_of(lane.context)
        of_device = "" if device is None else f" of device {device}"
        if lane.kind == LEGACY:
            return StreamFacts(f"{LEGACY_NAME}{of_device}", device)
        if lane.kind == NODE:
            return StreamFacts(NODE_NAME, None)
        if lane.kind == PER_THREAD:
            thread = self.collector.thread_name(lane.thread)
            return StreamFacts(f"the default stream of {thread}{of_device}", device)
        name = lane.name or f"stream {lane.number}"
        return StreamFacts(name + of_device, device, lane.handle, self._origin(lane))

    def _origin(self, lane: Lane) -> str:
        """Return the place where a stream was created, or first used, if known."""
        stack = self.stacks[lane.created]
        library = library_of(stack)
        created, used = line_of(stack), line_of(self.stacks[lane.first])
        # PyTorch creates its whole pool in the call that first needs one of its streams.
        if created is not None and library != "torch":
            return f"created at {short(created)}" + (f" ({library})" if library else "")
        pool = "of torch's pool" if library == "torch" else ""
        use = "" if used is None else f"first used at {short(used)}"
        return ", ".join(filter(None, (pool, use)))


def _is_partial(allocation: Allocation, old: Access, new: Access) -> bool:
    """Return whether an access is of a kernel that may use other bytes than the other access."""
    if allocation.is_cut_up:
        return False
    for one, other in ((old, new), (new, old)):
        if one.reach > one.end and other.reach == other.end:
            # At least half of what lies behind the pointer: a kernel that works on all of it uses
            # some of that.
            return 2 * (other.end - one.start) < one.reach - one.start
    return False


def _part_of(old: Access, new: Access) -> str:
    one = old if old.reach > old.end else new
    return (
        f"the kernel got the begin of {size_of(one.reach - one.start)} of memory, and which part "
        "it uses is not known"
    )


def size_of(nbytes: int) -> str:
    """Return a number of bytes as text with a unit."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.4g} {unit}"
    return f"{nbytes} bytes"


def _surely_writes(access: Access) -> bool:
    return access.write and access.known != ASSUMED


def _guess(access: Access) -> Guess | None:
    guesses: Guesses | None = access.operation.guesses
    return None if access.known != ASSUMED or guesses is None else guesses.at(access.start)


def _kind(old: Access, new: Access) -> str:
    if old.operation.kind == "allocate":
        return "use before allocation"
    if new.operation.kind.startswith("free"):
        return FREED_IN_USE
    if old.operation.kind.startswith("free"):
        return "use after free"
    return ACCESSES


def _access(access: Access) -> str:
    kind: str = access.operation.kind
    if kind:
        return kind.partition(" ")[0]
    return "write" if access.write else "read"


READ, WRITE, EITHER = 0, 1, 2  # kinds of access on the page

_MOST_TOUCHES = 24  # of one operation: a kernel may be given a hundred buffers
_MOST_PENDING = 8  # waits of a stream without an operation after them


class Timeline:
    """The newest operations and waits, up to a given number."""

    def __init__(self, room: int) -> None:
        self.room = room
        self._entries: deque[RecordedOperation] = deque(maxlen=room)
        self._newest: RecordedOperation | None = None
        self._count = 0

    def queued(self, operation: RecordedOperation, lane: Lane, beside: Iterable[Lane]) -> None:
        """Add an operation of a stream, with the streams that it waits for implicitly."""
        if beside or lane.pending:
            after = (each.last for each in beside if each.last > lane.last)
            operation.after = (*lane.pending, *after)
            lane.pending = ()
        # As in `host_waited`: a call for both takes 4 % of the time of a judge of fills.
        operation.entry = lane.last = self._count
        self._count += 1
        self._entries.append(operation)
        self._newest = operation

    def touched(self, touches: tuple[Span, ...]) -> None:
        """Add accesses to the newest operation."""
        newest = self._newest
        if newest is not None and len(newest.touches) < _MOST_TOUCHES:
            newest.touches += touches[:_MOST_TOUCHES]  # a batch has thousands

    def must_wait(self, lane: Lane, after: Iterable[int]) -> None:
        """Add entries that the next operation of a stream waits for."""
        for number in after:
            if number not in lane.pending:
                lane.pending = (*lane.pending, number)[-_MOST_PENDING:]

    def host_waited(self, call: Call, after: Iterable[int] = ()) -> None:
        """Add a call in which the host waited or learned that work has completed."""
        if not self.room:
            return
        entry = self._newest
        if entry is None or entry.entry != call.entry:
            entry = RecordedOperation(
                call.name, call.stack, call.thread, None, call.began, call.ended
            )
            call.entry = entry.entry = self._count
            self._count += 1
            self._entries.append(entry)
            self._newest = entry
        entry.waited = True
        entry.after = (*entry.after, *after)

    def as_dict(
        self,
        most: int,
        stacks: Stacks,
        describe: Callable[[Lane], StreamFacts],
        thread_name: Callable[[int], str],
    ) -> dict[str, Any]:
        """Return JSON data, in which names, frames and stacks are indices into lists."""
        entries = list(self._entries)[-most:] if most else []
        first = entries[0].entry if entries else 0
        origin = min((entry.began for entry in entries), default=0)
        rows, names, told = _Places(), _Places(), _Told(stacks)
        streams: dict[Lane, tuple[Any, ...]] = {}
        made = []
        for entry in entries:
            row = -1
            if entry.lane is not None:
                if entry.lane not in streams:
                    facts = describe(entry.lane)
                    streams[entry.lane] = ("stream", facts.name, facts.handle, facts.origin)
                row = rows[streams[entry.lane]]
            made.append(
                [
                    names[entry.name],
                    row,
                    rows["thread", thread_name(entry.thread), None, ""],
                    told.stack(entry.stack),
                    entry.began - origin,
                    entry.ended - entry.began,
                    entry.waited | _is_captured(entry) << 1,
                    [number - first for number in entry.after if number >= first],
                    [
                        [start, end - start, _how(known, write=write)]
                        for start, end, write, known in entry.touches[:_MOST_TOUCHES]
                    ],
                ]
            )
        return {
            "origin": origin,
            "first": first,
            "dropped": first if entries else self._count,
            "rows": [
                {"kind": kind, "name": name, "handle": handle, "origin": origin}
                for kind, name, handle, origin in rows
            ],
            "names": list(names),
            "frames": list(told.frames),
            "stacks": list(told.stacks),
            "entries": made,
        }


def _how(known: str, *, write: bool) -> int:
    return EITHER if known == ASSUMED else WRITE if write else READ


def _is_captured(entry: RecordedOperation) -> bool:
    return entry.lane is not None and entry.lane.capture is not None


class _Places(dict[Any, int]):
    """A dictionary from values to indices; a new value gets the next index."""

    def __missing__(self, key: Any) -> int:
        place = self[key] = len(self)
        return place


class _Told:
    """The stacks in the JSON data, and their frames."""

    def __init__(self, stacks: Stacks) -> None:
        self._known = stacks
        self._places: dict[int, int] = {}
        self.frames = _Places()
        self.stacks: list[list[int]] = []

    def stack(self, index: int) -> int:
        """Return the index of a stack, adding the stack at its first use."""
        place = self._places.get(index)
        if place is None:
            stack = self._known[index]
            line = line_of(stack)
            shown = next((at for at, frame in enumerate(stack) if frame is line), -1)
            frames = [
                self.frames[frame.filename, frame.lineno, frame.name, owner_of(frame)]
                for frame in stack
            ]
            place = self._places[index] = len(self.stacks)
            self.stacks.append([shown, *frames])
        return place


# -- declarations: `mode="read"` of `borrow` and `acquire` -----------------------------------------

_LEGACY_HANDLE = 1
_MOST_DECLARED = 1024  # by a thread on a stream

_Key = tuple[int, int]  # a thread, and the handle of a stream


class _Declaration:
    """A declaration of a thread: its work on a stream only reads a range, or may write it."""

    __slots__ = ("allocation", "end", "number", "reads", "start")

    def __init__(
        self, number: int, start: int, end: int, allocation: Allocation | None, *, reads: bool
    ) -> None:
        self.number = number  # of the block; 0 if `release` ends the declaration
        self.start = start
        self.end = end  # equal to `start`: up to the end of the allocation
        self.reads = reads
        self.allocation = allocation  # later allocations at the address are not declared

    def covers(self, address: int, memory: Memory) -> bool:
        """Return whether the declaration is about an address."""
        if self.allocation is None:  # the memory was unknown when it was declared
            found = memory.find(self.start)
            if found is not None and found.operation is None:  # and was not allocated since
                self.allocation = found
        if address < self.start or (address >= self.end > self.start):
            return False
        return self.allocation is not None and memory.find(address) is self.allocation


class Declarations:
    """The open declarations. The newest one of a thread for an address on a stream counts."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.open: dict[_Key, list[_Declaration]] = {}  # the oldest first
        self._blocks: dict[int, _Key] = {}  # by their numbers

    def begin(self, call: Call) -> None:
        """Apply the begin of a block, or an `acquire`."""
        number, reads, handle = call.words
        key = (call.thread, handle or _LEGACY_HANDLE)
        found = _declared(call)
        if not found:
            return
        if number:
            self._blocks[number] = key
        else:
            self._release({start for start, _ in found}, [key])
        self.open.setdefault(key, []).extend(
            _Declaration(number, start, end, self._memory.find(start), reads=bool(reads))
            for start, end in found
        )
        del self.open[key][:-_MOST_DECLARED]  # `acquire` may have no `release`

    def end(self, call: Call) -> None:
        """Apply the end of a block, or a `release` of buffers that any thread has acquired."""
        number, handle = call.words
        if not number:
            keys = [key for key in self.open if key[1] == (handle or _LEGACY_HANDLE)]
            self._release({start for start, _ in _declared(call)}, keys)
            return
        key = self._blocks.pop(number, None)
        if key is not None:
            self._keep(key, [each for each in self.open.get(key, ()) if each.number != number])

    def _release(self, starts: set[int], keys: list[_Key]) -> None:
        for key in keys:
            kept = [
                each
                for each in self.open.get(key, ())
                # Without `starts` the released buffers are unknown, and may be any.
                if each.number or (starts and each.start not in starts)
            ]
            self._keep(key, kept)

    def _keep(self, key: _Key, kept: list[_Declaration]) -> None:
        if kept:
            self.open[key] = kept
        else:
            self.open.pop(key, None)

    def forget(self) -> None:
        """Forget all declarations: lost records may include the end of a block."""
        self.open.clear()
        self._blocks.clear()

    def judge(
        self, operation: RecordedOperation, address: int, write: bool, known: str
    ) -> tuple[bool, str]:
        """Return whether an operation writes to an address, and how certain the answer is."""
        if self.open and known != EXACT and self._is_only_read(operation, address):
            return False, DECLARED
        return write, known

    def _is_only_read(self, operation: RecordedOperation, address: int) -> bool:
        handle = 0 if operation.lane is None else operation.lane.handle
        for each in reversed(self.open.get((operation.thread, handle or _LEGACY_HANDLE), ())):
            if each.covers(address, self._memory):
                return each.reads
        return False


def _declared(call: Call) -> list[tuple[int, int]]:
    return list(struct.iter_unpack("<2Q", call.fetched[0]))
