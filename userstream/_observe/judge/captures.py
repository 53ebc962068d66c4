"""Stream captures, and launches of the captured graphs."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, NamedTuple

from .clocks import join
from .memory import Access, Allocation
from .races import RecordedOperation
from .stacks import line_of

if TYPE_CHECKING:
    from .allocations import Allocations
    from .clocks import Lane
    from .functions import Call
    from .world import World


class Touch(NamedTuple):
    """Bytes that each launch of a graph reads or writes."""

    start: int
    end: int
    write: bool
    known: str
    operation: Any


class Graph:
    """The accesses and events of a graph or an executable graph."""

    def __init__(self) -> None:
        self.touches: dict[tuple[int, int, bool, str], Touch] = {}
        self.waits: list[int] = []  # external events that each launch waits for
        self.records: list[int] = []
        self.allocates: dict[int, tuple[int, Any]] = {}  # by address: the size, and the operation
        self.frees: dict[int, Any] = {}  # by address: the operation
        self.complete = True  # False: it has nodes that were not seen

    def add(self, other: Graph) -> None:
        """Add the contents of another graph."""
        self.touches.update(other.touches)
        self.waits += other.waits
        self.records += other.records
        self.allocates.update(other.allocates)
        self.frees.update(other.frees)
        self.complete = self.complete and other.complete


class Capture:
    """A capture in progress: its streams, and the accesses inside of the graph."""

    def __init__(self, *, seen: bool = True) -> None:
        self.graph = Graph()
        self.graph.complete = seen
        self.lanes: list[Lane] = []  # streams that leave the capture at its end
        self.history = Allocation(0, 1 << 64, 0)  # accesses inside of the graph
        self.into: int | None = None  # the existing graph that the capture adds to

    def touch(self, access: Access) -> list[Access]:
        """Record an access; return the accesses of the capture that race with it."""
        key = (access.start, access.end, access.write, access.known)
        if key not in self.graph.touches:
            self.graph.touches[key] = Touch(*key, access.operation)
        return self.history.touch(access)


_WORD = struct.Struct("<Q")
_DEFAULT_STREAMS = 2  # handles up to this one


class Captures:
    """Applies calls that capture, create or launch graphs."""

    def __init__(self, world: World, allocations: Allocations) -> None:
        self.world = world
        self._allocations = allocations
        self._graphs: dict[int, Graph] = {}  # by the handle of a graph, or of an executable one

    def seen_stream(self, call: Call) -> None:
        handle, flags, context, status, pending = (*call.words, 0)[:5]
        # An event of the primary context covers the streams of its green contexts.
        context = self.world.primaries.get(context, context)
        if handle <= _DEFAULT_STREAMS:
            if pending:
                lane = self.world.clocks.lane(handle, context, call.thread)
                self.world.clocks.depend_on_unseen(lane)
            return
        lane = self.world.clocks.seen_stream(
            handle, context, blocking=not flags & 1, pending=bool(pending)
        )
        if status:  # a capture that began before the observation
            capture = Capture(seen=False)
            self.enter_capture(lane, capture)

    def enter_capture(self, lane: Lane, capture: Capture) -> Lane:
        inside = self.world.clocks.new_lane(lane.handle, lane.context, lane.kind)
        inside.capture = capture
        inside.blocking = lane.blocking
        lane.captured = inside
        capture.lanes.append(lane)
        return inside

    def begin_capture(self, call: Call) -> None:
        lane = self.world.lane(call)
        if lane.capture is not None:
            return
        capture = Capture()
        self.enter_capture(lane, capture)
        if call.name == "cuStreamBeginCaptureToGraph":
            capture.into = call.words[1]

    def end_capture(self, call: Call) -> None:
        capture = self.world.lane(call).capture
        if capture is None:
            return
        for lane in capture.lanes:
            lane.captured = None
        capture.lanes.clear()
        if call.result:
            return
        handle = capture.into or _WORD.unpack(call.fetched[0])[0]
        graph = self._graphs.setdefault(handle, Graph()) if capture.into else Graph()
        graph.add(capture.graph)
        self._graphs[handle] = graph

    def instantiate(self, call: Call) -> None:
        self._copy_graph(_WORD.unpack(call.fetched[0])[0], call.words[1])

    def clone_graph(self, call: Call) -> None:
        self._copy_graph(_WORD.unpack(call.fetched[0])[0], call.words[1])

    def update_graph(self, call: Call) -> None:
        self._copy_graph(call.words[0], call.words[1])

    def _copy_graph(self, to: int, source: int) -> None:
        graph = self._graphs[to] = Graph()
        found = self._graphs.get(source)
        if found is None:
            graph.complete = False
        else:
            graph.add(found)

    def unseen_node(self, call: Call) -> None:
        graph = self._graphs.setdefault(call.words[1], Graph())
        graph.complete = False

    def drop_graph(self, call: Call) -> None:
        self._graphs.pop(call.words[0], None)
        self.world.clocks.drop_event(_end_of(call.words[0]))

    def launch_graph(self, call: Call) -> None:
        lane = self.world.lane(call)
        graph = self._graphs.get(call.words[0])
        if graph is None or not graph.complete:
            self.world.not_seen("launches of graphs that were not captured while watching")
        last = _end_of(call.words[0])
        for event in (last, *(() if graph is None else graph.waits)):
            recorded = self.world.clocks.recorded(event)
            if recorded is not None:
                join(self.world.clocks.settle(lane), recorded.clock)
        launched, time = self.world.begin(call, lane)
        self.world.clocks.record(last, lane)
        if graph is None:
            return
        where = f"a graph launched at {self._line(call.stack)}"

        def launch(inside: RecordedOperation) -> RecordedOperation:
            # The times of the launch, not of the capture.
            began, ended = launched.began, launched.ended
            operation = RecordedOperation(
                inside.name, inside.stack, call.thread, lane, began, ended
            )
            operation.kind = inside.kind
            operation.launched = where
            operation.guesses = inside.guesses
            operation.entry = launched.entry
            return operation

        # Each launch allocates its memory anew, at the addresses of the capture.
        for begin, (size, inside) in graph.allocates.items():
            self._allocations.made(lane, time, launch(inside), (begin, begin + size))
        for touch in graph.touches.values():
            operation = launch(touch.operation)
            write, known = self.world.declarations.judge(
                operation, touch.start, touch.write, touch.known
            )
            ranges = [(touch.start, touch.end)]
            self.world.touch(lane, time, operation, ranges, write=write, known=known)
        for address, inside in graph.frees.items():
            found = self.world.memory.find(address)
            if found is not None:
                self._allocations.freed(lane, time, launch(inside), found)
        for event in graph.records:
            self.world.clocks.record(event, lane)

    def _line(self, stack: int) -> str:
        line = line_of(self.world.stacks[stack])
        return "no line of Python" if line is None else f"{line.filename}:{line.lineno}"


def _end_of(executable: int) -> int:
    """Return the pseudo handle of an event at the end of the last launch of a graph.

    "Each launch is ordered behind both any previous work in hStream and any previous launches of
    hGraphExec."
    """
    return -executable
