"""Graphs: captures, nodes that were added one by one, and launches."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, NamedTuple

from .clocks import EXTERNAL, NODE, join
from .memory import Access, Allocation
from .races import RecordedOperation

if TYPE_CHECKING:
    from collections.abc import Callable

    from .allocations import Allocations
    from .clocks import Lane, Recorded
    from .copies import Copies
    from .functions import Call
    from .launches import Launches
    from .world import World

CAPTURED = 0  # the key of the captured work among the nodes of a graph
_MOST_NODES = 4096  # of which the order is looked at
WAITS_EXTERNAL = (
    "waits for external semaphores, for graphics or for values in nodes of graphs, which may order "
    "anything"
)


class Touch(NamedTuple):
    """Bytes that each launch of a graph reads or writes."""

    start: int
    end: int
    write: bool
    known: str
    operation: Any
    allocation: Allocation | None = None  # in which they were when the graph was made
    reach: int = 0  # up to where a kernel may use bytes as well


class Node:
    """A node of a graph, or all that was captured into it."""

    def __init__(self, operation: Any = None) -> None:
        self.operation = operation
        self.touches: dict[tuple[int, int, bool, str], Touch] = {}
        self.waits: list[int] = []  # external events that each launch waits for
        self.records: list[int] = []
        self.awaits: list[Any] = []  # values that streams wait for before they go on
        self.allocates: dict[int, tuple[int, Any]] = {}  # by address: the size, and the operation
        self.frees: dict[int, Any] = {}  # by address: the operation
        self.tells_host = False  # it calls a function of the host, or signals a semaphore
        self.waits_external = False  # for an external semaphore, or for graphics
        self.is_enabled = True
        self.is_child = False  # a graph, whose nodes the program may change
        self.is_complete = True  # False: it does something that is not followed
        self.after: frozenset[int] = frozenset()  # keys of the nodes that it depends on

    def touch(self, touch: Touch) -> None:
        """Add an access; of equal ones the first is named in reports."""
        self.touches.setdefault((touch.start, touch.end, touch.write, touch.known), touch)

    def add(self, other: Node) -> None:
        """Add the accesses of another node."""
        for touch in other.touches.values():
            self.touch(touch)
        self.waits += other.waits
        self.records += other.records
        self.awaits += other.awaits
        self.allocates.update(other.allocates)
        self.frees.update(other.frees)
        self.tells_host = self.tells_host or other.tells_host
        self.waits_external = self.waits_external or other.waits_external
        self.is_complete = self.is_complete and other.is_complete

    def replaced_by(self, new: Node) -> Node:
        """Return the node with new parameters, in the place of this one."""
        new.after, new.is_enabled = self.after, self.is_enabled
        return new

    def races_as(self, other: Node) -> bool:
        """Return whether a node with other parameters has the same races inside of a graph."""
        return (
            self.touches.keys() == other.touches.keys()
            and self.after == other.after
            and self.is_enabled is other.is_enabled
        )

    def unknown(self) -> Node:
        """Return a node that stands for this one after an unknown change of what it does."""
        node = Node(self.operation)
        node.is_complete = False
        # An event or a value may be another one: the order is only possible.
        node.waits_external = bool(self.waits or self.awaits or self.waits_external)
        node.tells_host = bool(self.records or self.tells_host)
        return self.replaced_by(node)


class Graph:
    """A graph, or an executable one. Nodes are not changed, but replaced."""

    def __init__(self, *, is_complete: bool = True) -> None:
        self.nodes: dict[int, Node] = {}  # by their handles; change them by `set` and `drop`
        # Keys of the nodes that the program may change by other handles, which were not seen: nodes
        # that were captured or cloned, and child graphs.
        self.unhandled: set[int] = set()
        self.is_executable = False
        self._uncompared: set[int] = set()  # keys of the nodes that were added or changed
        self._is_complete = is_complete  # False: it has nodes that were not seen
        self._merged: Node | None = None

    def set(self, key: int, node: Node) -> None:
        """Add a node, or replace it."""
        old = self.nodes.get(key)
        if old is None or not old.races_as(node):
            self._uncompared.add(key)
        self.nodes[key] = node
        self._merged = None

    def drop(self, key: int) -> None:
        """Remove a node."""
        self.nodes.pop(key, None)
        self._merged = None

    def capture(self, captured: Node) -> None:
        """Add captured work."""
        node = Node()
        if CAPTURED in self.nodes:
            node.add(self.nodes[CAPTURED])
        node.add(captured)
        self.set(CAPTURED, node)
        self.unhandled.add(CAPTURED)

    def forget_unhandled(self) -> None:
        """Forget what the nodes do that may have been changed by a handle that was not seen."""
        for key in self.unhandled & self.nodes.keys():
            self.set(key, self.nodes[key].unknown())

    def copy(self, *, is_executable: bool = True) -> Graph:
        """Return a graph with the same nodes, of which only an executable one keeps the handles."""
        made = Graph(is_complete=self._is_complete)
        made.nodes = dict(self.nodes)
        made.is_executable = is_executable
        made.unhandled = set(self.unhandled if is_executable else self.nodes)
        made._uncompared = set(self._uncompared)
        return made

    def as_node(self) -> Node:
        """Return one node with the accesses of the whole graph."""
        if self._merged is None:
            self._merged = node = Node()
            for each in self.nodes.values():
                if each.is_enabled:
                    node.add(each)
            node.is_complete = node.is_complete and self._is_complete
        return self._merged

    def compare(self, world: World) -> None:
        """Report the races of new and changed nodes with those that they are not ordered with."""
        new, self._uncompared = self._uncompared, set()
        if not new:
            return
        if len(self.nodes) > _MOST_NODES:
            world.not_seen("the order inside of a graph of so many nodes")
            return
        if CAPTURED in self.nodes and len(self.nodes) > 1:
            world.not_seen("the order between captured and added nodes of a graph")
        history = Allocation(0, 1 << 64, 0)
        lanes: dict[int, Lane] = {}
        new_lanes = set()
        for key in self._in_order():
            node = self.nodes[key]
            lane = lanes[key] = node.operation.lane = world.clocks.new_lane(0, 0, NODE)
            for each in node.after:
                if each in lanes:
                    join(lane.clock, lanes[each].clock)
            if key in new:
                new_lanes.add(lane)
            if not node.is_enabled:
                continue
            time = world.clocks.step(lane, node.operation, ())
            before = [lanes[each].held_by for each in node.after if each in lanes]
            lane.held_by = frozenset({EXTERNAL} if node.waits_external else ()).union(*before)
            for touch in node.touches.values():
                access = Access(
                    *(touch.start, touch.end, lane, time, touch.operation, touch.write),
                    touch.known,
                )
                for old in history.touch(access):
                    is_new = lane in new_lanes or old.lane in new_lanes
                    if is_new and old.operation is not touch.operation:
                        found = world.memory.find(touch.start) or world.memory.elsewhere
                        world.report(found, old, access)

    def _in_order(self) -> list[int]:
        """Return the keys of the nodes, each behind its dependencies."""
        ordered: dict[int, None] = {}
        pending = [key for key in self.nodes if key != CAPTURED]
        while pending:
            left = []
            for key in pending:
                if all(each in ordered or each not in self.nodes for each in self.nodes[key].after):
                    ordered[key] = None
                else:
                    left.append(key)
            if len(left) == len(pending):  # a circle, which the driver refuses
                break
            pending = left
        return list(ordered)


_WORD = struct.Struct("<Q")


# -- Nodes that are added to graphs one by one, and changed afterwards -----------------------------

_PARAMETERS = 16  # the offset of the parameters of a node in CUgraphNodeParams
# CUgraphNodeType
_KERNEL, _MEMCPY, _MEMSET, _HOST, _GRAPH, _EMPTY, _WAIT_EVENT, _RECORD_EVENT = range(8)
_SIGNAL, _WAIT, _ALLOCATE, _FREE, _VALUES = range(8, 13)


class Nodes:
    """Applies calls that add nodes to graphs, or change them."""

    def __init__(
        self, world: World, captures: Captures, copies: Copies, launches: Launches
    ) -> None:
        self.world = world
        self._graphs = captures.graphs
        self._copies = copies
        self._launches = launches
        self._graph_of = captures.graph_of
        self._makers: dict[int, Callable[[Node, bytes], None]] = {
            _MEMCPY: self._copy,
            _MEMSET: self._fill,
            _HOST: self._host,
            _GRAPH: self._child,
            _EMPTY: lambda *_: None,
            _WAIT_EVENT: lambda node, data: node.waits.append(_word(data)),
            _RECORD_EVENT: lambda node, data: node.records.append(_word(data)),
            _SIGNAL: self._host,
            _WAIT: self._wait_external,
            _ALLOCATE: self._allocate,
            _FREE: self._free,
            _VALUES: self._values,
        }

    # -- adding -----------------------------------------------------------------------------------

    def add_node(self, call: Call) -> None:
        """Apply cuGraphAdd...Node: node, graph, and the nodes that it depends on."""
        parts, (made, before, *more) = self._parts(call)
        node = self._made(call, parts, more[0] if more else b"")
        node.after = frozenset(each for (each,) in struct.iter_unpack("<Q", before))
        (key,) = _WORD.unpack(made)
        graph = self._graphs.get(call.words[1])
        if graph is None:  # the body of a conditional node, or a child graph inside of its parent
            self.world.not_seen("nodes that are added to parts of graphs")
            graph = self._graphs[call.words[1]] = Graph(is_complete=False)
        graph.set(key, node)
        if node.is_child:
            graph.unhandled.add(key)
        self._graph_of[key] = call.words[1]

    def drop_node(self, call: Call) -> None:
        key = call.words[0]
        graph = self._graphs.get(self._graph_of.pop(key, 0))
        if graph is None:
            self._unknown(graph)
        else:
            graph.drop(key)

    def add_dependencies(self, call: Call) -> None:
        self._depend(call, lambda after, each: after | {each})

    def remove_dependencies(self, call: Call) -> None:
        self._depend(call, lambda after, each: after - {each})

    def _depend(self, call: Call, change: Callable[[frozenset[int], int], frozenset[int]]) -> None:
        graph = self._graphs.get(call.words[0])
        pairs = zip(*(struct.iter_unpack("<Q", each) for each in call.fetched[:2]), strict=True)
        for (before,), (after,) in pairs:
            node = None if graph is None else graph.nodes.get(after)
            if graph is None or node is None:
                self.world.not_seen("dependencies of nodes that were captured or cloned")
            else:
                same = Node(node.operation)
                same.add(node)
                same.after = change(node.after, before)
                graph.set(after, same)

    # -- changing ---------------------------------------------------------------------------------

    def set_node(self, call: Call) -> None:
        """Apply cuGraph...NodeSetParams: the node, and its parameters."""
        self._replace(call, self._graph_of.get(call.words[0], 0), call.words[0])

    def set_executable_node(self, call: Call) -> None:
        """Apply cuGraphExec...NodeSetParams: the executable graph, the node, its parameters."""
        self._replace(call, call.words[0], call.words[1])

    def enable_node(self, call: Call) -> None:
        graph = self._graphs.get(call.words[0])
        old = None if graph is None else graph.nodes.get(call.words[1])
        if graph is None or old is None:
            self._unknown(graph)
            return
        node = Node(old.operation)
        node.add(old)
        node.after, node.is_enabled = old.after, bool(call.words[2])
        graph.set(call.words[1], node)

    def _replace(self, call: Call, handle: int, key: int) -> None:
        graph = self._graphs.get(handle)
        old = None if graph is None else graph.nodes.get(key)
        if graph is None or old is None:
            self._unknown(graph)
            return
        parts, more = self._parts(call)
        graph.set(key, old.replaced_by(self._made(call, parts, more[0] if more else b"")))

    def _unknown(self, graph: Graph | None) -> None:
        """Forget what the nodes of a graph do that a change by an unseen handle may be of.

        Of a node whose handle was never seen it is not known which graph has it.
        """
        if graph is not None:
            graph.forget_unhandled()
            return
        self.world.not_seen("changes of nodes of graphs that were captured or cloned")
        for each in self._graphs.values():
            if not each.is_executable:
                each.forget_unhandled()

    # -- what a node does -------------------------------------------------------------------------

    @staticmethod
    def _parts(call: Call) -> tuple[list[bytes], list[bytes]]:
        """Return the facts about a kernel that the recorder has found, and the fetched bytes."""
        count = len(call.function.fetches)
        return call.fetched[: len(call.fetched) - count], call.fetched[len(call.fetched) - count :]

    def _made(self, call: Call, parts: list[bytes], data: bytes) -> Node:
        """Return the node that a call describes."""
        operation = RecordedOperation(call.name, call.stack, call.thread, None)
        node = Node(operation)
        kind = call.function.roles.get("type")
        if kind is None:  # any: the structure says which
            kind = struct.unpack_from("<i", data)[0] if data else -1
            data = data[_PARAMETERS + 16 * (kind == _MEMCPY) :]
        if kind == _KERNEL:
            self._kernel(node, parts)
            return node
        maker = self._makers.get(kind)
        if maker is None:
            node.is_complete = False
            return node
        word = call.function.roles.get("value")
        maker(node, _WORD.pack(call.words[word]) if word is not None else data)
        return node

    def _kernel(self, node: Node, parts: list[bytes]) -> None:
        if len(parts) < 2 or not parts[1]:
            node.is_complete = False
            return
        (handle,) = _WORD.unpack(parts[1])
        name, touches, guesses = self._launches.described(handle, parts[0])
        node.operation.name = name or node.operation.name
        node.operation.guesses = guesses
        for start, end, write, known in touches:
            found = self.world.memory.find(start)
            reach = end if found is None else found.end
            node.touch(Touch(start, end, write, known, node.operation, found, reach))

    def _copy(self, node: Node, data: bytes) -> None:
        if len(data) < 200:
            node.is_complete = False
            return
        for ranges, write, of_host in self._copies.sides_of_3d(data):
            for start, end in ranges:
                found = self.world.memory.find(start)
                if found is not None or not of_host:  # else it is pageable
                    node.touch(Touch(start, end, write, "exact", node.operation, found))

    def _fill(self, node: Node, data: bytes) -> None:
        if len(data) < 40:
            node.is_complete = False
            return
        begin, pitch, _, size, width, height = struct.unpack_from("<QQIIQQ", data)
        for start, end in self._copies.rows(begin, width * size, height, pitch):
            found = self.world.memory.find(start)
            node.touch(Touch(start, end, True, "exact", node.operation, found))

    @staticmethod
    def _host(node: Node, _: bytes) -> None:
        node.tells_host = True

    @staticmethod
    def _wait_external(node: Node, _: bytes) -> None:
        node.waits_external = True

    @staticmethod
    def _values(node: Node, _: bytes) -> None:
        """Apply writes of values and waits for values, of which the addresses are not known."""
        node.waits_external = node.tells_host = True
        node.is_complete = False

    def _child(self, node: Node, data: bytes) -> None:
        graph = self._graphs.get(_word(data))
        if graph is None:
            node.is_complete = False
        else:
            node.is_child = True
            graph.compare(self.world)
            node.add(graph.as_node())

    @staticmethod
    def _allocate(node: Node, data: bytes) -> None:
        if len(data) < 120:
            node.is_complete = False
            return
        size, address = struct.unpack_from("<QQ", data, 104)
        node.operation.kind = "allocate"
        node.allocates[address] = (size, node.operation)

    @staticmethod
    def _free(node: Node, data: bytes) -> None:
        node.operation.kind = "free async"
        node.frees[_word(data)] = node.operation


def _word(data: bytes) -> int:
    """Return the first word of a structure, which is a handle or an address."""
    found: int = _WORD.unpack_from(data)[0]
    return found


# -- Captures of streams, and launches of graphs ---------------------------------------------------


class Capture:
    """A capture in progress: its streams, and the accesses inside of the graph."""

    def __init__(self, *, seen: bool = True, stack: int = -1) -> None:
        self.stack = stack  # of the call that began it
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


_DEFAULT_STREAMS = 2  # handles up to this one


class Captures:
    """Applies calls that capture streams, and make, change or launch graphs."""

    def __init__(
        self,
        world: World,
        allocations: Allocations,
        await_value: Callable[..., None],
        follow: Callable[[Lane, Recorded], None],
    ) -> None:
        self.world = world
        self._allocations = allocations
        self._await_value, self._follow = await_value, follow  # of `Words`
        self.graphs: dict[int, Graph] = {}  # by the handle of a graph, or of an executable one
        self.graph_of: dict[int, int] = {}  # by the handle of a node that was added

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
        capture = Capture(stack=call.stack)
        self.enter_capture(lane, capture)
        if call.name == "cuStreamBeginCaptureToGraph":
            capture.into = call.words[1]

    def capture_dependencies(self, call: Call) -> None:
        """Order later work of a capture after the whole capture: its dependencies are unknown."""
        lane = self.world.lane(call)
        if lane.capture is not None:
            self.world.not_seen("dependencies of captures that the program has set")
            for other in lane.capture.inside:
                join(lane.clock, other.clock)

    def end_capture(self, call: Call) -> None:
        capture = self.world.lane(call).capture
        if capture is None:
            return
        for lane in capture.lanes:
            lane.captured = None
        self.world.clocks.forget_external_waits(capture.inside)
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
        self._copy_graph(_WORD.unpack(call.fetched[0])[0], call.words[1])

    def clone_graph(self, call: Call) -> None:
        clone = _WORD.unpack(call.fetched[0])[0]
        self._copy_graph(clone, call.words[1], is_executable=False)

    def update_graph(self, call: Call) -> None:
        self._copy_graph(call.words[0], call.words[1])

    def _copy_graph(self, to: int, source: int, *, is_executable: bool = True) -> None:
        found = self.graphs.get(source)
        if found is None:
            self.graphs[to] = Graph(is_complete=False)
            return
        if is_executable:
            found.compare(self.world)
        self.graphs[to] = found.copy(is_executable=is_executable)

    def drop_graph(self, call: Call) -> None:
        graph = self.graphs.pop(call.words[0], None)
        for key in () if graph is None else graph.nodes:
            if self.graph_of.get(key) == call.words[0]:
                del self.graph_of[key]  # a node of another graph may get the handle
        self.world.clocks.drop_event(_end_of(call.words[0]))

    # -- launches ---------------------------------------------------------------------------------

    def launch_graph(self, call: Call) -> None:
        lane = self.world.lane(call)
        graph = self.graphs.get(call.words[0])
        if graph is not None:
            graph.compare(self.world)
        node = None if graph is None else graph.as_node()
        if node is None or not node.is_complete:
            self.world.not_seen("launches of graphs that were not captured while watching")
        last = _end_of(call.words[0])
        for event in (last, *(() if node is None else node.waits)):
            recorded = self.world.clocks.recorded(event)
            if recorded is not None:
                self.world.clocks.settle(lane)
                self._follow(lane, recorded)
        for wait in () if node is None else node.awaits:  # all of the graph is taken to be behind
            self._await_value(lane, (call.number, wait.address), wait, None)
        if node is not None and node.waits_external:
            self.world.clocks.wait_external(lane)
            self.world.not_seen(WAITS_EXTERNAL)
        if node is not None and node.touches and (node.waits or node.records):
            self.world.not_seen("what of a graph comes before or behind the events inside of it")
        launched, time = self.world.begin(call, lane)
        self.world.clocks.record(last, lane)
        if node is not None:
            self._run(call, lane, time, node, launched)

    def _run(
        self, call: Call, lane: Lane, time: int, node: Node, launched: RecordedOperation
    ) -> None:
        """Apply the accesses of a graph at its launch."""

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
            self.world.timeline.touched((span,))
            self.world.touch_each(
                lane, time, operation, (span,), (0,), is_kernel=touch.reach > touch.end
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
