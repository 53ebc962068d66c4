"""Captures, and what the graphs touch that they become."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from userstream._observe.memory import Access, Allocation

if TYPE_CHECKING:
    from userstream._observe.clocks import Lane


class Touch(NamedTuple):
    """Bytes that each launch of a graph reads or writes."""

    start: int
    end: int
    write: bool
    known: str
    operation: Any


class Graph:
    """What is known of a graph, or of what it was made executable to."""

    def __init__(self) -> None:
        self.touches: dict[tuple[int, int, bool, str], Touch] = {}
        self.waits: list[int] = []  # events outside of it
        self.records: list[int] = []
        self.allocates: dict[int, tuple[int, Any]] = {}  # by address: the size, and the operation
        self.frees: dict[int, Any] = {}  # by address: the operation
        self.complete = True  # False: it has nodes that were not seen

    def add(self, other: Graph) -> None:
        """Take in what another one has."""
        self.touches.update(other.touches)
        self.waits += other.waits
        self.records += other.records
        self.allocates.update(other.allocates)
        self.frees.update(other.frees)
        self.complete = self.complete and other.complete


class Capture:
    """A capture in progress: the streams in it, and its own happens-before."""

    def __init__(self, *, seen: bool = True) -> None:
        self.graph = Graph()
        self.graph.complete = seen
        self.lanes: list[Lane] = []  # which to drop at the end
        self.history = Allocation(0, 1 << 64, 0)  # for races inside of the graph
        self.into: int | None = None  # a graph that there was before

    def touch(self, access: Access) -> list[Access]:
        """Note an access; return those inside of the capture that it races with."""
        key = (access.start, access.end, access.write, access.known)
        if key not in self.graph.touches:
            self.graph.touches[key] = Touch(*key, access.operation)
        return self.history.touch(access)
