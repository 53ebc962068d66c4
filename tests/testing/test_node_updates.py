"""Nodes of graphs that change, as cuda.core changes them."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from cuda.core import LaunchConfig, ObjectCode
from cuda.core.graph import Graph, GraphDefinition, GraphNode

import userstream as us
from testing.programs import check
from userstream.testing import Pointer, kernel

pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("no_garbage")]

ONE = LaunchConfig(grid=1, block=1)
PATIENCE = 20


@kernel("update_add")
def update_add(grid, block, x: Pointer, value: np.int32):
    x.array(1, np.int32)[:] += value


@pytest.fixture
def add() -> Any:
    return ObjectCode.from_ptx(b"any").get_kernel("update_add")


Chain = tuple[GraphDefinition, list[GraphNode]]


@pytest.fixture
def chain(add: Any, address: int) -> Chain:
    """A graph: a kernel adds 1 to the first number, the second is 5, the third a copy of it."""
    graph = GraphDefinition()
    nodes = [graph.launch(ONE, add, address, np.int32(1))]
    nodes.append(nodes[-1].memset(address + 4, np.int32(5), 1))
    nodes.append(nodes[-1].memcpy(address + 8, address + 4, 4))
    return graph, nodes


def launched(graph: Graph, stream: us.Stream, address: int) -> list[int]:
    graph.launch(stream)
    stream.sync(timeout=PATIENCE)
    return np.frombuffer(ctypes.string_at(address, 16), np.int32).tolist()


def test_nodes_of_a_definition(chain, stream, add, address):
    graph, (launching, fill, copy) = chain
    before = graph.instantiate()
    launching.update(config=ONE, kernel=add, args=(address, np.int32(10)))
    fill.update(value=np.int32(6))
    copy.update(dst=address + 12)
    assert launched(graph.instantiate(), stream, address) == [10, 6, 0, 6]
    assert launched(before, stream, address) == [11, 5, 5, 6]


def test_nodes_of_an_executable_graph(chain, stream, add, address):
    graph, (launching, fill, copy) = chain
    executable = graph.instantiate()
    executable[launching].update(config=ONE, kernel=add, args=(address, np.int32(10)))
    executable[fill].update(dst=address + 4, value=np.int32(6), width=1)
    executable[copy].disable()
    assert [executable[node].is_enabled for node in (launching, copy)] == [True, False]
    assert launched(executable, stream, address) == [10, 6, 0, 0]
    executable[copy].enable()
    assert launched(executable, stream, address) == [20, 6, 6, 0]
    assert launched(graph.instantiate(), stream, address) == [21, 5, 5, 0]


def test_what_a_newer_driver_tells_of_a_conditional_node():
    """Since 13.2 it says which kind it is, and what its bodies are."""
    program = """if True:
        from cuda.core import Device
        from userstream import testing
        testing.simulate(driver_version=13020)
        device = Device(0)
        device.set_current()
        builder = device.create_graph_builder().begin_building()
        builder.switch(builder.create_condition(default_value=1), 3)
        builder.end_building()
        [node] = builder.graph_definition.nodes()
        print(type(node).__name__, len(node.branches))
    """
    from cuda.bindings import driver

    told = hasattr(driver, "cuGraphNodeGetParams")  # by cuda-bindings of 13.2 and newer
    assert check(program) == ("SwitchNode 3\n" if told else "ConditionalNode 0\n")
