"""The contents of graphs: captured work, and nodes that were added one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from .clocks import NODE, join
from .memory import Access, Allocation

if TYPE_CHECKING:
    from .clocks import Lane
    from .world import World

CAPTURED = 0  # the key of the captured work among the nodes of a graph
_MOST_NODES = 4096  # of which the order is looked at


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
        self.allocates: dict[int, tuple[int, Any]] = {}  # by address: the size, and the operation
        self.frees: dict[int, Any] = {}  # by address: the operation
        self.tells_host = False  # it calls a function of the host
        self.is_enabled = True
        self.is_complete = True  # False: it does something that is not followed
        self.after: frozenset[int] = frozenset()  # keys of the nodes that it depends on

    def touch(self, touch: Touch) -> None:
        """Add an access; of equal ones the first is named in reports."""
        self.touches.setdefault((touch.start, touch.end, touch.write, touch.known), touch)

    def add(self, other: Node) -> None:
        """Add what another node does."""
        for touch in other.touches.values():
            self.touch(touch)
        self.waits += other.waits
        self.records += other.records
        self.allocates.update(other.allocates)
        self.frees.update(other.frees)
        self.tells_host = self.tells_host or other.tells_host
        self.is_complete = self.is_complete and other.is_complete

    def replaced_by(self, new: Node) -> Node:
        """Return the node with new parameters, in the place of this one."""
        new.after, new.is_enabled = self.after, self.is_enabled
        return new


class Graph:
    """A graph, or an executable one. Nodes are not changed, but replaced."""

    def __init__(self, *, is_complete: bool = True) -> None:
        self.nodes: dict[int, Node] = {}  # by their handles; change them by `set` and `drop`
        self._is_complete = is_complete  # False: it has nodes that were not seen
        self._merged: Node | None = None

    def set(self, key: int, node: Node) -> None:
        """Add a node, or replace it."""
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

    def give_up(self) -> None:
        """Do not follow the graph any more: a node has changed, and which one is not known."""
        self._is_complete = False
        self._merged = None

    def copy(self) -> Graph:
        """Return a graph with the same nodes."""
        made = Graph(is_complete=self._is_complete)
        made.nodes = dict(self.nodes)
        return made

    def as_node(self) -> Node:
        """Return one node that does what the graph does."""
        if self._merged is None:
            self._merged = node = Node()
            for each in self.nodes.values():
                if each.is_enabled:
                    node.add(each)
            node.is_complete = node.is_complete and self._is_complete
        return self._merged

    def compare(self, world: World) -> None:
        """Report the races between nodes that are not ordered by their dependencies."""
        if len(self.nodes) > _MOST_NODES:
            world.not_seen("the order inside of a graph of so many nodes")
            return
        history = Allocation(0, 1 << 64, 0)
        lanes: dict[int, Lane] = {}
        for key in self._in_order():
            node = self.nodes[key]
            lane = lanes[key] = node.operation.lane = world.clocks.new_lane(0, 0, NODE)
            for each in node.after:
                if each in lanes:
                    join(lane.clock, lanes[each].clock)
            time = world.clocks.step(lane, node.operation, ())
            for touch in node.touches.values():
                access = Access(
                    *(touch.start, touch.end, lane, time, touch.operation, touch.write),
                    touch.known,
                )
                for old in history.touch(access):
                    if old.operation is not touch.operation:
                        found = world.memory.find(touch.start) or world.memory.elsewhere
                        world.report(found, old, access)

    def _in_order(self) -> list[int]:
        """Return the keys of the nodes, each behind those that it depends on."""
        ordered: dict[int, None] = {}
        pending = [key for key, node in self.nodes.items() if key != CAPTURED and node.is_enabled]
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
