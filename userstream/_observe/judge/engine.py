"""Apply the recorded calls, one after the other, to the state of the analysis."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .allocations import Allocations, Contexts
from .captures import Captures
from .copies import Copies, Pinned
from .functions import (
    DECLARED,
    DECLARED_NO_MORE,
    LEARNED,
    LOST,
    NOT_COMPARED,
    SEEN_KERNEL,
    SEEN_MEMORY,
    SEEN_STREAM,
    SOURCE_CHANGED,
)
from .launches import Launches
from .order import Order, Words
from .verdicts import NotFollowed
from .world import World

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from .functions import Call, Function


_TRIM = 4096  # calls between two looks for what can be forgotten


class Engine:
    """The analysis of a log: dispatches each record to the subject that applies the call."""

    def __init__(
        self,
        functions: Mapping[int, tuple[str, Function]],
        *,
        stall: float,
        strict: bool = False,
        timeline: int = 0,
    ) -> None:
        self.world = world = World(strict=strict, timeline=timeline)
        self.counts: dict[str, int] = {}
        self.time = 0  # of the last record
        self._stall = stall
        self._untrimmed = 0
        self._pinned = Pinned(world)
        allocations, launches = Allocations(world), Launches(world)
        captures = Captures(world, allocations)
        self._notes: dict[int, Callable[[Call], None]] = {
            SEEN_STREAM: captures.seen_stream,
            SEEN_MEMORY: allocations.seen_memory,
            SEEN_KERNEL: launches.seen_kernel,
            SOURCE_CHANGED: self._pinned.source_changed,
            LEARNED: launches.learned,
            LOST: self._lost,
            NOT_COMPARED: self._pinned.not_compared,
            DECLARED: world.declarations.begin,
            DECLARED_NO_MORE: world.declarations.end,
        }
        subjects = (
            allocations,
            captures,
            launches,
            Contexts(world),
            Copies(world, self._pinned),
            NotFollowed(world),
            Order(world, captures),
            Words(world),
        )
        self._table = {
            number: (name, function, _method(subjects, function.means))
            for number, (name, function) in functions.items()
        }
        self._called_by = world.clocks.called_by if strict else None

    def take(self, log: Iterable[Call]) -> None:
        """Apply records in the order of the log."""
        table, called_by, counts = self._table, self._called_by, self.counts
        freeing = self.world.memory.freeing
        for call in log:
            found = table.get(call.what)
            if found is None:
                self._notes[call.what](call)
                continue
            name, function, apply = found
            call.name, call.function = name, function
            if called_by is not None:
                called_by(call.thread)
            if call.leaving:
                counts[name] = counts.get(name, 0) + 1
                if function.waits:
                    self._note_stall(call)
            apply(call)
            if freeing and function.orders_host:
                self.world.memory.drop_freed(self.world.clocks.known_to_any_thread)
            if call.leaving and function.waits and not call.result:
                self._note_wait(call)
            self._untrimmed += 1
            self.time = call.ended
        if self._untrimmed >= _TRIM:
            self._untrimmed = 0
            self.world.memory.trim(self.world.is_known)

    def _note_stall(self, call: Call) -> None:
        seconds = (call.ended - call.began) * 1e-9
        if seconds >= self._stall:
            lane = None if call.function.stream is None else self.world.lane(call)
            self.world.finds.stall(call.name, call.stack, call.thread, lane, seconds)

    def _note_wait(self, call: Call) -> None:
        if call.function.orders_host or (call.ended - call.began) * 1e-9 >= self._stall:
            self.world.timeline.host_waited(call)

    def _lost(self, _: Call) -> None:
        """Treat all earlier work as ordered: records were lost, and they may include an edge."""
        self.world.clocks.forget_all()
        self.world.memory.trim(lambda _: True)
        self.world.declarations.forget()
        self._pinned.forget()

    def finish(self) -> None:
        """Report results of copies that the host was never seen to wait for."""
        self._pinned.finish()


def _method(subjects: Iterable[object], means: str) -> Callable[[Call], None]:
    """Return the method of that name, which exactly one of the subjects has."""
    (method,) = (getattr(each, means) for each in subjects if hasattr(type(each), means))
    found: Callable[[Call], None] = method
    return found
