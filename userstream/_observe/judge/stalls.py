"""Findings that are no races: waits of the host, hangs, and operations on streams to be avoided."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from . import log
from .clocks import LEGACY, Recorded, is_news
from .finding_types import Stall, WrongStream, shown_path
from .functions import PROGRAM
from .lines import printable
from .log import PROGRAM as PROGRAM_CODE
from .log import line_of, owner_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .clocks import Clock, Lane, QueuedWait
    from .functions import Call
    from .order import Words
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

    __slots__ = ("began", "depth", "has_learned", "stack")

    def __init__(self, began: int, stack: int) -> None:
        self.began = began
        self.stack = stack
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
        self.waits: dict[int, _Wait] = {}  # that go on, by thread

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
        """Apply a query of the program, or of a wait of userstream."""
        wait = self.waits.get(call.thread)
        if wait is not None and self._has_learned(call, knew):
            wait.has_learned = True

    def _has_learned(self, call: Call, knew: Clock) -> bool:
        return call.account == PROGRAM and is_news(self._world.clocks.host_clock(), knew)

    def host_waits(self, call: Call) -> None:
        """Apply the begin or the end of a wait of userstream."""
        (begins,) = call.words
        if begins:
            self.waits.setdefault(call.thread, _Wait(call.began, call.stack)).depth += 1
            return
        wait = self.waits.get(call.thread)
        if wait is None:
            return
        wait.depth -= 1
        if not wait.depth:
            del self.waits[call.thread]
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
        """Forget the waits in progress: the missing records may include their ends."""
        self.waits.clear()
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
            thread = self._world.collector.thread_name(each.thread)
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
        """Apply an operation that the program has queued outside of a capture."""
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
            thread = world.collector.thread_name(first.thread)
            found[key] = WrongStream(
                *(first.name, stream.name, stream.device),
                count if before is None else before.count + count,
                *(thread, line, stack),
            )
        return tuple(found.values())


_MOST_HANGS = 8  # that are kept
_HOST_FUNCTIONS = ("cuLaunchHostFunc", "cuLaunchHostFunc_v2", "cuStreamAddCallback")


class Hangs:
    """Reports of streams with pending work, and of the operations that hold these streams up.

    Completion is known from what the host has asked for: a stream may be further than that.
    """

    def __init__(self, world: World, words: Words, stalls: Stalls) -> None:
        self._world = world
        self._words = words
        self._stalls = stalls
        self._found: dict[str, str] = {}
        self.told: Callable[[str], object] = lambda _: None  # with a report

    def timed_out(self, call: Call) -> None:
        """Apply the timeout of a wait of userstream."""
        self.report(f"a wait timed out{self._at(call.stack)}")

    def report(self, cause: str, *, is_asked: bool = False) -> None:
        """Keep a report in place of an earlier report of the same cause.

        One that somebody has asked for is told each time.
        """
        text, is_first = self._text(cause), cause not in self._found
        if text and (len(self._found) < _MOST_HANGS or not is_first):
            self._found[cause] = text
        if is_asked or (text and is_first):
            self.told(text or f"{cause}: all work is known to be over")

    def found(self) -> tuple[str, ...]:
        """Return the reports."""
        return tuple(self._found.values())

    def progress(self) -> int:
        """Return a number that changes when work is queued, and when work is known to be over."""
        clocks = self._world.clocks
        queued = sum(lane.time for lane in clocks.lanes())
        return queued + sum(clocks.known_to_any_thread.values())

    # -- the text ---------------------------------------------------------------------------------

    def _text(self, cause: str) -> str:
        """Return a report, or an empty text if all work is known to be over."""
        lanes = self.pending()
        if not lanes:
            return ""
        lines, waits_for = [f"{cause}; work that the host does not know to be done:"], {}
        for number, lane in sorted(lanes.items()):
            told, waits_for[number] = self._state(lane, lanes)
            lines += told
        for cycle in _cycles(waits_for):
            names = " waits for ".join(self._name(lanes[number]) for number in (*cycle, cycle[0]))
            lines.append(f"  a cycle: {names}")
        for thread, wait in self._stalls.waits.copy().items():
            name = self._world.collector.thread_name(thread)
            lines.append(f"  {name} waits for the GPU{self._at(wait.stack)}")
        return "\n".join(map(printable, lines))

    def pending(self) -> dict[int, Lane]:
        """Return the streams with work that is not known to be over, by their numbers."""
        return {lane.id: lane for lane in self._world.clocks.lanes() if self._is_pending(lane)}

    def _is_pending(self, lane: Lane) -> bool:
        if lane.is_finished:
            return False
        is_known = self._known(lane.id) >= lane.time
        return not is_known or lane.captured is not None or self._stuck_behind(lane) is not None

    def _known(self, stream: int) -> int:
        return self._world.clocks.known_to_any_thread.get(stream, 0)

    def _state(self, lane: Lane, lanes: dict[int, Lane]) -> tuple[list[str], set[int]]:
        """Return the text about a stream, and the streams that this stream waits for."""
        known, stuck = self._known(lane.id), self._stuck_behind(lane)
        pending = [each for each in lane.recent if each[0] > known]
        time, head = pending[0] if pending else (0, None)
        earlier = "at or before " if head is not None and time > known + 1 else ""
        said = self._head(lane, head, lane.time - time)
        lines = [f"  {self._name(lane)}: {earlier}{said}"]
        if stuck is not None and (head is None or stuck[0].time <= time):
            wait, streams, what = stuck
            is_head = head is not None and head.stack == wait.stack
            queued = "" if is_head else f"; the wait is queued{self._at(wait.stack)}"
            lines.append(f"    waits for {what}{queued}")
            return lines, streams
        if head is not None and head.name in _HOST_FUNCTIONS:
            lines.append("    runs on the host, until its function returns")
        beside = {
            other.id
            for other in self._world.clocks.beside(lane)
            if other.id in lanes and self._began(other) < (0 if head is None else head.began)
        }
        if beside:
            names = " and ".join(self._name(lanes[each]) for each in sorted(beside))
            lines.append(
                f"    waits for {names}, as the legacy default stream and blocking ones do"
            )
        return lines, beside

    def _head(self, lane: Lane, head: RecordedOperation | None, behind: int) -> str:
        """Return the text about the oldest operation that is not known to be over."""
        if lane.captured is not None:
            return f"is being captured{self._at(lane.captured.capture.stack)}: nothing runs"
        if head is None:
            is_known = self._known(lane.id) >= lane.time
            return "nothing is queued" if is_known else "work from before the observation"
        more = f", and {behind} more behind it" if behind else ""
        return f"{head.name}{self._at(head.stack)}{more}"

    def _began(self, lane: Lane) -> int:
        known = self._known(lane.id)
        return next((operation.began for time, operation in lane.recent if time > known), 0)

    def _stuck_behind(self, lane: Lane) -> tuple[QueuedWait, set[int], str] | None:
        """Return the oldest wait of a stream that is not known to be over.

        With it the streams that have to go on before, and what is said of them.
        """
        known = self._known(lane.id)
        for wait in lane.waits.copy():
            if wait.time > known:
                found = self._unmet(lane, wait)
                if found is not None:
                    return wait, *found
        return None

    def _unmet(self, lane: Lane, wait: QueuedWait) -> tuple[set[int], str] | None:
        names = {each.id: self._name(each) for each in self._world.clocks.lanes()}
        if isinstance(wait.until, Recorded):
            recorded = wait.until
            clock = recorded.clock.items()
            unmet = {each for each, time in clock if time > self._known(each)} - {lane.id}
            unmet = {recorded.stream} if recorded.stream in unmet else unmet & names.keys()
            if not unmet:
                return None
            at = self._at(recorded.stack)
            on = " and ".join(names[each] for each in sorted(unmet))
            return unmet, f"an event of {on}{at and f', recorded{at}'}"
        writers = self._words.writers_for(wait)
        if writers is None or writers.get(lane.id, wait.time) < wait.time:  # written before it
            return None
        if not writers:
            return set(), f"{wait.until}, which no stream writes"
        told = [
            f"{names.get(each, 'a stream')}{self._at_operation(each, time)}"
            for each, time in sorted(writers.items())
        ]
        # With several writers the wait may end by another one than that which is stuck.
        streams = {*writers} & names.keys() if len(writers) == 1 else set()
        return streams, f"{wait.until}, which is written by {' or '.join(told)}"

    def _at_operation(self, stream: int, time: int) -> str:
        for lane in self._world.clocks.lanes():
            if lane.id == stream:
                return next((self._at(done.stack) for at, done in lane.recent if at == time), "")
        return ""

    def _name(self, lane: Lane) -> str:
        return self._world.describe(lane).name

    def _at(self, stack: int) -> str:
        line = line_of(self._world.stacks[stack])
        return (
            "" if line is None else f" at {shown_path(line.filename)}:{line.lineno} in {line.name}"
        )


def _cycles(edges: dict[int, set[int]]) -> list[list[int]]:
    """Return cycles of a graph that have no node in common, each from its least node on."""
    left, found = dict(edges), list[list[int]]()
    while True:
        while ends := [each for each, after in left.items() if not after & left.keys()]:
            for each in ends:
                del left[each]
        if not left:
            return found
        path = [min(left)]
        while (after := min(left[path[-1]] & left.keys())) not in path:
            path.append(after)
        cycle = path[path.index(after) :]
        least = cycle.index(min(cycle))
        found.append([*cycle[least:], *cycle[:least]])
        for each in cycle:
            del left[each]
