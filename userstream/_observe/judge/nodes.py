"""Nodes that are added to graphs one by one, and changed afterwards."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from .graphs import Graph, Node, Touch
from .races import RecordedOperation

if TYPE_CHECKING:
    from collections.abc import Callable

    from .captures import Captures
    from .copies import Copies
    from .functions import Call
    from .launches import Launches
    from .world import World

_WORD = struct.Struct("<Q")
_PARAMETERS = 16  # the offset of the parameters of a node in CUgraphNodeParams
# CUgraphNodeType
_KERNEL, _MEMCPY, _MEMSET, _HOST, _GRAPH, _EMPTY, _WAIT_EVENT, _RECORD_EVENT = range(8)
_ALLOCATE, _FREE = 10, 11


class Nodes:
    """Applies calls that add nodes to graphs, or change them."""

    def __init__(
        self, world: World, captures: Captures, copies: Copies, launches: Launches
    ) -> None:
        self.world = world
        self._graphs = captures.graphs
        self._copies = copies
        self._launches = launches
        self._graph_of: dict[int, int] = {}  # by node
        self._makers: dict[int, Callable[[Node, bytes], None]] = {
            _MEMCPY: self._copy,
            _MEMSET: self._fill,
            _HOST: self._host,
            _GRAPH: self._child,
            _EMPTY: lambda *_: None,
            _WAIT_EVENT: lambda node, data: node.waits.append(_word(data)),
            _RECORD_EVENT: lambda node, data: node.records.append(_word(data)),
            _ALLOCATE: self._allocate,
            _FREE: self._free,
        }

    # -- adding -----------------------------------------------------------------------------------

    def add_node(self, call: Call) -> None:
        """Apply cuGraphAdd...Node: node, graph, and the nodes that it depends on."""
        parts, (made, before, *more) = self._parts(call)
        node = self._made(call, parts, more[0] if more else b"")
        node.after = frozenset(each for (each,) in struct.iter_unpack("<Q", before))
        (key,) = _WORD.unpack(made)
        graph = self._graphs.setdefault(call.words[1], Graph(is_complete=False))
        graph.set(key, node)
        self._graph_of[key] = call.words[1]

    def drop_node(self, call: Call) -> None:
        key = call.words[0]
        graph = self._graphs.get(self._graph_of.pop(key, 0))
        if graph is not None:
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
            if graph is not None and node is not None:
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
        """Give up a graph one of whose captured nodes is changed, or one that was not seen."""
        if graph is not None:
            graph.give_up()

    # -- what a node does -------------------------------------------------------------------------

    @staticmethod
    def _parts(call: Call) -> tuple[list[bytes], list[bytes]]:
        """Return what the recorder found out of a kernel, and what it has fetched."""
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

    def _child(self, node: Node, data: bytes) -> None:
        graph = self._graphs.get(_word(data))
        if graph is None:
            node.is_complete = False
        else:
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
