"""Condition: kernels that say what the conditional nodes of a graph do, as cuda.core makes them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver
from cuda.core import LaunchConfig, ObjectCode, launch
from cuda.core.graph import GraphBuilder, GraphDefinition

import userstream as us
from helpers import checked
from testing.programs import check
from userstream import testing
from userstream.testing import Condition, Pointer, kernel, reset

pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("no_garbage")]

ONE = LaunchConfig(grid=1, block=1)
PATIENCE = 20


@kernel("condition_set")
def condition_set(grid, block, condition: Condition, value: np.uint32):
    condition.set(value)


@kernel("condition_add")
def condition_add(grid, block, x: Pointer):
    x.array(1, np.int32)[:] += 1


@kernel("condition_below")
def condition_below(grid, block, condition: Condition, x: Pointer, limit: np.int32):
    condition.set(x.array(1, np.int32)[0] < limit)


def get(name: str) -> Any:
    return ObjectCode.from_ptx(b"any").get_kernel(name)


def numbers(address: int) -> list[int]:
    return np.frombuffer(ctypes.string_at(address, 12), np.int32).tolist()


# ---- as a capture, with a GraphBuilder --------------------------------------


@pytest.fixture
def builder(stream: us.Stream) -> Iterator[GraphBuilder]:
    with us.Stream.create(0) as captured:
        builder = captured.create_graph_builder().begin_building()
        yield builder
        if builder.is_building:
            builder.end_building()
        builder.close()


def built(body: GraphBuilder, address: int, times: int = 1) -> None:
    body.begin_building()
    for _ in range(times):
        launch(body, ONE, get("condition_add"), address)
    body.end_building()


def launched(builder: GraphBuilder, stream: us.Stream) -> None:
    graph = builder.end_building().complete()
    graph.launch(stream)
    stream.sync(timeout=PATIENCE)
    graph.close()


@pytest.mark.parametrize(("value", "expected"), [(0, [0, 1, 0]), (1, [2, 1, 0]), (5, [2, 1, 0])])
def test_if(builder, stream, address, value, expected):
    condition = builder.create_condition()
    launch(builder, ONE, get("condition_set"), condition, np.uint32(value))
    built(builder.if_then(condition), address, 2)
    launch(builder, ONE, get("condition_add"), address + 4)
    launched(builder, stream)
    assert numbers(address) == expected


@pytest.mark.parametrize(("value", "expected"), [(0, [0, 1, 0]), (1, [1, 0, 0])])
def test_if_else(builder, stream, address, value, expected):
    condition = builder.create_condition()
    launch(builder, ONE, get("condition_set"), condition, np.uint32(value))
    for i, body in enumerate(builder.if_else(condition)):
        built(body, address + 4 * i)
    launched(builder, stream)
    assert numbers(address) == expected


@pytest.mark.parametrize("value", [0, 1, 2, 3])
def test_switch(builder, stream, address, value):
    condition = builder.create_condition(default_value=1)
    launch(builder, ONE, get("condition_set"), condition, np.uint32(value))
    for i, body in enumerate(builder.switch(condition, 3)):
        built(body, address + 4 * i)
    launched(builder, stream)
    assert numbers(address) == [int(value == i) for i in range(3)]


@pytest.mark.parametrize(("default", "expected"), [(1, 10), (0, 0)])
def test_while(builder, stream, address, default, expected):
    condition = builder.create_condition(default_value=default)
    body = builder.while_loop(condition).begin_building()
    launch(body, ONE, get("condition_add"), address)
    launch(body, ONE, get("condition_below"), condition, address, np.int32(10))
    body.end_building()
    launched(builder, stream)
    assert numbers(address) == [expected, 0, 0]


def test_a_body_forks_and_joins(builder, stream, address):
    body = builder.if_then(builder.create_condition(default_value=1)).begin_building()
    branches = body.split(2)
    for i, branch in enumerate(branches):
        launch(branch, ONE, get("condition_add"), address + 4 * i)
    body = GraphBuilder.join(*branches)
    launch(body, ONE, get("condition_add"), address + 8)
    body.end_building()
    launched(builder, stream)
    assert numbers(address) == [1, 1, 1]


def test_an_update_of_a_switch(stream, address):
    def build(value):
        builder = captured.create_graph_builder().begin_building()
        condition = builder.create_condition(default_value=0)
        launch(builder, ONE, get("condition_set"), condition, np.uint32(value))
        for i, body in enumerate(builder.switch(condition, 3)):
            built(body, address + 4 * i)
        return builder.end_building()

    with us.Stream.create(0) as captured:
        builders = [build(value) for value in range(3)]
        graph = builders[0].complete()
        for builder in builders:
            graph.update(builder)
            graph.launch(stream)
        stream.sync(timeout=PATIENCE)
        assert numbers(address) == [1, 1, 1]
        graph.close()
        for builder in builders:
            builder.close()


# ---- node by node, with a GraphDefinition -----------------------------------


def test_a_loop_of_a_definition(stream, address):
    graph = GraphDefinition()
    again = graph.create_condition(default_value=1)
    odd = graph.create_condition(default_value=0)
    loop = graph.while_loop(again)
    decided = loop.body.launch(ONE, get("condition_add"), address).launch(
        ONE, get("condition_below"), odd, address, np.int32(3)
    )
    choice = decided.if_else(odd)
    choice.then.launch(ONE, get("condition_add"), address + 4)
    choice.else_.launch(ONE, get("condition_add"), address + 8)
    choice.launch(ONE, get("condition_below"), again, address, np.int32(7))
    executable = graph.instantiate()
    executable.launch(stream)
    stream.sync(timeout=PATIENCE)
    assert numbers(address) == [7, 2, 5]


def test_without_a_default_a_condition_keeps_its_value(stream, address):
    """As on a GPU: the launch begins with what the last one left."""
    graph = GraphDefinition()
    condition = graph.create_condition()
    chosen = graph.if_else(condition)
    chosen.then.launch(ONE, get("condition_add"), address)
    chosen.else_.launch(ONE, get("condition_set"), condition, np.uint32(1))
    executable = graph.instantiate()
    for _ in range(3):
        executable.launch(stream)
    stream.sync(timeout=PATIENCE)
    assert numbers(address)[0] == 2


def test_two_executable_graphs_have_conditions_of_their_own(stream, address):
    graph = GraphDefinition()
    condition = graph.create_condition()
    chosen = graph.if_else(condition)
    chosen.then.launch(ONE, get("condition_add"), address)
    chosen.else_.launch(ONE, get("condition_set"), condition, np.uint32(1))
    for _ in range(2):
        graph.instantiate().launch(stream)
        stream.sync(timeout=PATIENCE)
    assert numbers(address)[0] == 0


def test_a_switch_of_a_definition(stream, address):
    graph = GraphDefinition()
    switch = graph.switch(graph.create_condition(default_value=2), 3)
    for i, branch in enumerate(switch.branches):
        branch.launch(ONE, get("condition_add"), address + 4 * i)
    graph.instantiate().launch(stream)
    stream.sync(timeout=PATIENCE)
    assert numbers(address) == [0, 0, 1]


# ---- what a kernel may set, and when ----------------------------------------


def test_a_kernel_outside_of_the_graph(stream):
    graph = GraphDefinition()
    condition = graph.create_condition(default_value=1)
    graph.if_then(condition)
    launch(stream, ONE, get("condition_set"), condition, np.uint32(1))
    with pytest.raises(us.DriverError, match="must be a node of the graph"):
        stream.sync(timeout=PATIENCE)


def test_a_kernel_of_another_graph(stream):
    graph, other = GraphDefinition(), GraphDefinition()
    condition = graph.create_condition(default_value=1)
    graph.if_then(condition)
    other.launch(ONE, get("condition_set"), condition, np.uint32(1))
    other.instantiate().launch(stream)
    with pytest.raises(us.DriverError, match="must be a node of the graph"):
        stream.sync(timeout=PATIENCE)


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (-1, ValueError, "32-bit"),
        (2**32, ValueError, "32-bit"),
        (1.0, TypeError, "not float"),
        (np.ones(2, bool), TypeError, "not ndarray"),
    ],
)
def test_a_value_that_is_none(stream, value, error, text):
    raised = []

    @kernel("condition_wrong")
    def wrong(grid, block, condition: Condition):
        try:
            condition.set(value)
        except (TypeError, ValueError) as exception:
            raised.append(exception)

    graph = GraphDefinition()
    condition = graph.create_condition(default_value=0)
    graph.launch(ONE, get("condition_wrong"), condition).if_then(condition)
    graph.instantiate().launch(stream)
    stream.sync(timeout=PATIENCE)
    [exception] = raised
    assert type(exception) is error
    assert text in str(exception)


def test_a_condition_that_is_kept(stream):
    kept = []

    @kernel("condition_kept")
    def keep(grid, block, condition: Condition):
        kept.append(condition)

    graph = GraphDefinition()
    condition = graph.create_condition(default_value=0)
    graph.launch(ONE, get("condition_kept"), condition).if_then(condition)
    graph.instantiate().launch(stream)
    stream.sync(timeout=PATIENCE)
    assert kept[0].handle == int(condition.handle)
    assert repr(kept[0]) == (
        f"<userstream.testing.Condition condition: {int(condition.handle):#x}>"
    )
    with pytest.raises(RuntimeError, match="is over"):
        kept[0].set(1)


# ---- loops that do not end --------------------------------------------------


def test_an_endless_loop_lets_others_work_and_ends_with_an_error(stream):
    graph = GraphDefinition()
    graph.while_loop(graph.create_condition(default_value=1))
    graph.instantiate().launch(stream)
    with us.Stream.create(0) as other:
        other.sync(timeout=PATIENCE)
        assert not stream.is_done
        testing.async_error(other, driver.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS)
        with pytest.raises(us.DriverError, match="ILLEGAL_ADDRESS"):
            stream.sync(timeout=PATIENCE)
        reset()
        checked(driver.cuStreamSynchronize(stream.handle))


def test_a_program_ends_in_an_endless_loop():
    program = """if True:
        from cuda.core import Device
        from cuda.core.graph import GraphDefinition
        from userstream import testing
        testing.simulate()
        device = Device(0)
        device.set_current()
        graph = GraphDefinition()
        graph.while_loop(graph.create_condition(default_value=1))
        executable = graph.instantiate()
        executable.launch(device.create_stream())
        print("over")
    """
    assert check(program) == "over\n"
