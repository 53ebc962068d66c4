"""Stream captures, and launches of graphs."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from .clocks import join
from .graphs import Graph, Node, Touch
from .memory import Access, Allocation
from .races import RecordedOperation

if TYPE_CHECKING:
    from .allocations import Allocations
    from .clocks import Lane
    from .functions import Call
    from .world import World


class Capture:
    """A capture in progress: its streams, and the accesses inside of the graph."""

    def __init__(self, *, seen: bool = True) -> None:
        self.node = Node()
        self.node.is_complete = seen
        self.lanes: list[Lane] = []  # streams that leave the capture at its end
        self.inside: list[Lane] = []  # their stand-ins
        self.history = Allocation(0, 1 << 64, 0)  # accesses inside of the graph
        self.into: int | None = None  # the existing graph that the capture adds to

    def touch(self, access: Access, allocation: Allocation | None) -> list[Access]:
        """Record an access; return the accesses of the capture that race with it."""
        self.node.touch(
            Touch(
                *(access.start, access.end, access.write, access.known, access.operation),
                *(allocation, access.reach),
            )
        )
        return self.history.touch(access)


_WORD = struct.Struct("<Q")
_DEFAULT_STREAMS = 2  # handles up to this one


class Captures:
    """Applies calls that capture streams, and make, change or launch graphs."""

    def __init__(self, world: World, allocations: Allocations) -> None:
        self.world = world
        self._allocations = allocations
        self.graphs: dict[int, Graph] = {}  # by the handle of a graph, or of an executable one

    def seen_stream(self, call: Call) -> None:
        handle, flags, part, status, pending, _ = call.words
        # An event of the primary context covers the streams of its green contexts.
        context = self.world.primaries.get(part, part)
        if handle <= _DEFAULT_STREAMS:
            if pending:
                lane = self.world.clocks.lane(handle, context, call.thread)
                self.world.clocks.depend_on_unseen(lane)
            return
        lane = self.world.clocks.seen_stream(
            handle, context, blocking=not flags & 1, pending=bool(pending)
        )
        lane.part = part
        if status:  # a capture that began before the observation
            self.enter_capture(lane, Capture(seen=False))

    def enter_capture(self, lane: Lane, capture: Capture) -> Lane:
        inside = self.world.clocks.new_lane(lane.handle, lane.context, lane.kind)
        inside.capture = capture
        inside.blocking = lane.blocking
        inside.number, inside.created, inside.first = lane.number, lane.created, lane.first
        inside.name = lane.name
        lane.captured = inside
        capture.lanes.append(lane)
        capture.inside.append(inside)
        return inside

    def begin_capture(self, call: Call) -> None:
        lane = self.world.lane(call)
        if lane.capture is not None:
            return
        capture = Capture()
        self.enter_capture(lane, capture)
        if call.name == "cuStreamBeginCaptureToGraph":
            capture.into = call.words[1]

    def capture_dependencies(self, call: Call) -> None:
        """Order what follows in a capture behind all of it: on which nodes is not known."""
        lane = self.world.lane(call)
        if lane.capture is not None:
            for other in lane.capture.inside:
                join(lane.clock, other.clock)

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
        if not capture.into:
            self.graphs[handle] = Graph()
        self.graphs.setdefault(handle, Graph()).capture(capture.node)

    # -- graphs -----------------------------------------------------------------------------------

    def create_graph(self, call: Call) -> None:
        self.graphs[_WORD.unpack(call.fetched[0])[0]] = Graph()

    def instantiate(self, call: Call) -> None:
        graph = self.graphs.get(call.words[1])
        if graph is not None:
            graph.compare(self.world)
        self._copy_graph(_WORD.unpack(call.fetched[0])[0], call.words[1])

    def clone_graph(self, call: Call) -> None:
        self._copy_graph(_WORD.unpack(call.fetched[0])[0], call.words[1])

    def update_graph(self, call: Call) -> None:
        self._copy_graph(call.words[0], call.words[1])

    def _copy_graph(self, to: int, source: int) -> None:
        found = self.graphs.get(source)
        self.graphs[to] = Graph(is_complete=False) if found is None else found.copy()

    def drop_graph(self, call: Call) -> None:
        self.graphs.pop(call.words[0], None)
        self.world.clocks.drop_event(_end_of(call.words[0]))

    # -- launches ---------------------------------------------------------------------------------

    def launch_graph(self, call: Call) -> None:
        lane = self.world.lane(call)
        graph = self.graphs.get(call.words[0])
        node = None if graph is None else graph.as_node()
        if node is None or not node.is_complete:
            self.world.not_seen("launches of graphs that were not captured while watching")
        last = _end_of(call.words[0])
        for event in (last, *(() if node is None else node.waits)):
            recorded = self.world.clocks.recorded(event)
            if recorded is not None:
                join(self.world.clocks.settle(lane), recorded.clock)
        launched, time = self.world.begin(call, lane)
        self.world.clocks.record(last, lane)
        if node is not None:
            self._run(call, lane, time, node, launched)

    def _run(
        self, call: Call, lane: Lane, time: int, node: Node, launched: RecordedOperation
    ) -> None:
        """Do what a graph does, at its launch."""

        def launch(inside: RecordedOperation) -> RecordedOperation:
            # The times of the launch, not of the capture.
            began, ended = launched.began, launched.ended
            operation = RecordedOperation(inside.name, call.stack, call.thread, lane, began, ended)
            operation.kind = inside.kind
            operation.captured = inside.stack
            operation.guesses = inside.guesses
            operation.entry = launched.entry
            return operation

        # Each launch allocates its memory anew, at the addresses of the capture.
        for begin, (size, inside) in node.allocates.items():
            self._allocations.made(lane, time, launch(inside), (begin, begin + size))
        for touch in node.touches.values():
            operation = launch(touch.operation)
            write, known = self.world.declarations.judge(
                operation, touch.start, touch.write, touch.known
            )
            self._check_freed(lane, time, operation, touch, node)
            span = (touch.start, touch.end, write, known)
            self.world.touch_each(
                lane, time, operation, (span,), open_ended=touch.reach > touch.end
            )
        for address, inside in node.frees.items():
            found = self.world.memory.find(address)
            if found is not None:
                self._allocations.freed(lane, time, launch(inside), found)
        for event in node.records:
            self.world.clocks.record(event, lane)
        if node.tells_host:
            join(self.world.clocks.possibly_known, lane.clock)

    def _check_freed(
        self, lane: Lane, time: int, operation: RecordedOperation, touch: Touch, node: Node
    ) -> None:
        """Report memory that was freed since the graph was made, and not only in stream order."""
        old = touch.allocation
        if old is None or old.freed is None or old.start in node.allocates:
            return
        if self.world.memory.find(touch.start) is not old:  # else its use is reported anyway
            access = Access(
                *(touch.start, touch.end, lane, time, operation, touch.write), touch.known
            )
            self.world.report_freed(old, access)


def _end_of(executable: int) -> int:
    """Return the pseudo handle of an event at the end of the last launch of a graph.

    "Each launch is ordered behind both any previous work in hStream and any previous launches of
    hGraphExec."
    """
    return -executable
