"""`observe` on graphs that are made node by node, and changed afterwards."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from cuda.bindings import driver
from cuda.core import ObjectCode

import userstream as us
from helpers import checked, current_context
from observed import SIZE, Room, a_room, captured, copy, fill, handle
from userstream.testing import Pointer, kernel, latch

pytestmark = [
    pytest.mark.simulated,
    pytest.mark.no_races(False),  # these tests observe themselves
]


class Made:
    """A graph in the making."""

    def __init__(self) -> None:
        self.graph = checked(driver.cuGraphCreate(0))
        self.executables: list[Any] = []

    def fill(self, address: int, *after: Any, size: int = SIZE) -> Any:
        given = list(after), len(after), fill_of(address, size), current_context()
        return checked(driver.cuGraphAddMemsetNode(self.graph, *given))

    def copy(self, to: int, source: int, *after: Any) -> Any:
        given = list(after), len(after), copy_of(to, source), current_context()
        return checked(driver.cuGraphAddMemcpyNode(self.graph, *given))

    def instantiate(self) -> Any:
        self.executables.append(checked(driver.cuGraphInstantiate(self.graph, 0)))
        return self.executables[-1]


def fill_of(address: int, size: int = SIZE) -> Any:
    fill = driver.CUDA_MEMSET_NODE_PARAMS()
    fill.dst, fill.elementSize, fill.width, fill.height = address, 1, size, 1
    return fill


@kernel("node_use")
def _use(grid: Any, block: Any, to: Pointer) -> None:
    """Change nothing."""


def launch_of(address: int, node: Any = None) -> Any:
    """Return the parameters of a node that launches a kernel, of which some may be there."""
    node = driver.CUDA_KERNEL_NODE_PARAMS() if node is None else node
    node.kern = driver.CUkernel(int(ObjectCode.from_ptx(b"any").get_kernel("node_use").handle))
    node.gridDimX = node.gridDimY = node.gridDimZ = 1
    node.blockDimX = node.blockDimY = node.blockDimZ = 1
    node.kernelParams = ((address,), (ctypes.c_void_p,))
    return node


def any_launch_of(address: int) -> Any:
    parameters = driver.CUgraphNodeParams()
    parameters.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
    launch_of(address, parameters.kernel)
    return parameters


def copy_of(to: int, source: int) -> Any:
    shape = driver.CUDA_MEMCPY3D()
    shape.srcMemoryType = shape.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    shape.srcDevice, shape.dstDevice = source, to
    shape.WidthInBytes, shape.Height, shape.Depth = SIZE, 1, 1
    return shape


@contextmanager
def observed_room() -> Iterator[tuple[Room, Made, us.Observation]]:
    with a_room() as room, us.observe() as seen:
        made = Made()
        yield room, made, seen
        checked(driver.cuCtxSynchronize())
        for executable in made.executables:
            checked(driver.cuGraphExecDestroy(executable))
        checked(driver.cuGraphDestroy(made.graph))


def launch(executable: Any, room: Room) -> None:
    checked(driver.cuGraphLaunch(executable, handle(room.a)))


def kinds(seen: us.Observation) -> list[str]:
    return [race.kind for race in seen.races]


@pytest.mark.parametrize("what", ["fill", "copy"])
def test_what_a_node_uses_races_with_other_streams(what: str) -> None:
    with observed_room() as (room, made, seen):
        node = made.fill(room.x) if what == "fill" else made.copy(room.y, room.x)
        executable = made.instantiate()
        fill(room.x, room.b)
        room.a.wait(room.b)
        launch(executable, room)
        room.b.wait(room.a)
        fill(room.x, room.b)
        assert kinds(seen) == []
        launch(executable, room)
        assert node
        (race,) = seen.races
    assert race.second.captured is not None
    assert race.second.captured.name == f"Made.{what}"
    assert race.second.line is not None
    assert race.second.line.name == "launch"
    assert seen.not_seen == ()


@pytest.mark.parametrize(
    "of_any_type", [False, True], ids=["cuGraphAddKernelNode", "cuGraphAddNode"]
)
def test_a_kernel_node_uses_what_its_parameters_point_to(of_any_type: bool) -> None:
    data = [] if driver.CUDA_VERSION < 13000 else [None]
    with observed_room() as (room, made, seen):
        if of_any_type:
            node = checked(driver.cuGraphAddNode(made.graph, [], *data, 0, any_launch_of(room.x)))
        else:
            node = checked(driver.cuGraphAddKernelNode(made.graph, [], 0, launch_of(room.x)))
        executable = made.instantiate()
        launch(executable, room)
        fill(room.y, room.b)
        assert kinds(seen) == []
        fill(room.x, room.b)
        (race,) = seen.races
        assert (race.first.name, race.address) == ("node_use", room.x)
        us.wait_for_device(0)
        if of_any_type:
            changed = driver.cuGraphExecNodeSetParams(executable, node, any_launch_of(room.y))
        else:
            changed = driver.cuGraphExecKernelNodeSetParams(executable, node, launch_of(room.y))
        checked(changed)
        launch(executable, room)
        fill(room.x, room.b)
        assert len(seen.races) == 1
        fill(room.y, room.b)
        assert {race.address for race in seen.races} == {room.x, room.y}
    assert seen.not_seen == ()


def test_a_child_graph_is_part_of_its_parent() -> None:
    with observed_room() as (room, made, seen):
        child = Made()
        child.fill(room.x)
        checked(driver.cuGraphAddChildGraphNode(made.graph, [], 0, child.graph))
        checked(driver.cuGraphDestroy(child.graph))
        fill(room.x, room.b)
        launch(made.instantiate(), room)
        assert kinds(seen) == ["write after write"]


def test_event_nodes_order_work_outside_of_the_graph() -> None:
    with observed_room() as (room, made, seen):
        begin, end = (checked(driver.cuEventCreate(0)) for _ in range(2))
        waits = checked(driver.cuGraphAddEventWaitNode(made.graph, [], 0, begin))
        node = made.fill(room.x, waits)
        checked(driver.cuGraphAddEventRecordNode(made.graph, [node], 1, end))
        executable = made.instantiate()
        fill(room.x, room.b)
        checked(driver.cuEventRecord(begin, handle(room.b)))
        launch(executable, room)
        checked(driver.cuStreamWaitEvent(handle(room.b), end, 0))
        fill(room.x, room.b)
        assert kinds(seen) == []
        other = checked(driver.cuEventCreate(0))
        checked(driver.cuGraphExecEventWaitNodeSetEvent(executable, waits, other))
        launch(executable, room)
        assert kinds(seen) == ["write after write"]
        said = "what of a graph comes before or behind the events inside of it (2)"
        assert seen.not_seen == (said,)


def test_nodes_that_allocate_and_free() -> None:
    with observed_room() as (room, made, seen):
        parameters = driver.CUDA_MEM_ALLOC_NODE_PARAMS()
        properties = parameters.poolProps
        properties.allocType = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        parameters.poolProps, parameters.bytesize = properties, SIZE
        node = checked(driver.cuGraphAddMemAllocNode(made.graph, [], 0, parameters))
        address = int(parameters.dptr)
        made.fill(address, node)
        executable = made.instantiate()
        launch(executable, room)
        copy(room.y, address, room.a)
        assert kinds(seen) == []
        room.a.sync()
        launch_again = Made()
        checked(driver.cuGraphAddMemFreeNode(launch_again.graph, [], 0, address))
        with latch(room.a):  # it goes well this time
            copy(room.y, address, room.b)
            launch(launch_again.instantiate(), room)
            room.b.sync()
        assert kinds(seen) == ["freed while in use"]
        room.a.sync()
        made.executables += launch_again.executables
        checked(driver.cuGraphDestroy(launch_again.graph))


def test_a_host_node_may_tell_the_program() -> None:
    from ctypes import CFUNCTYPE, c_void_p, cast

    nothing = CFUNCTYPE(None, c_void_p)(lambda _: None)
    with observed_room() as (room, made, seen):
        parameters = driver.CUDA_HOST_NODE_PARAMS()
        parameters.fn = driver.CUhostFn(cast(nothing, c_void_p).value)
        node = made.fill(room.x)
        checked(driver.cuGraphAddHostNode(made.graph, [node], 1, parameters))
        launch(made.instantiate(), room)
        fill(room.x, room.b)
        assert kinds(seen) == []
        assert [race["kind"] for race in seen.as_dict()["possible"]] == ["write after write"]


# -- order inside of a graph ----------------------------------------------------------------------


@pytest.mark.parametrize("depends", [False, True, "later", "not any more"])
def test_nodes_are_ordered_by_their_dependencies(depends: bool | str) -> None:
    with observed_room() as (room, made, seen):
        one = made.fill(room.x)
        between = made.fill(room.y, one)
        other = made.copy(
            room.pinned, room.x, *([between] if depends in (True, "not any more") else [])
        )
        data = [] if driver.CUDA_VERSION < 13000 else [None]
        if depends == "later":
            checked(driver.cuGraphAddDependencies(made.graph, [one], [other], *data, 1))
        elif depends == "not any more":
            checked(driver.cuGraphRemoveDependencies(made.graph, [between], [other], *data, 1))
        launch(made.instantiate(), room)
        found = seen.races
        assert [race.kind for race in found] == (
            [] if depends in (True, "later") else ["read after write"]
        )
        for race in found:
            assert race.first.stream == "a node of a graph"
            assert "depend on the one that is added at" in race.advice


# -- changes --------------------------------------------------------------------------------------


def test_an_executable_graph_does_what_its_node_was_changed_to() -> None:
    with observed_room() as (room, made, seen):
        node = made.fill(room.x)
        executable = made.instantiate()
        checked(
            driver.cuGraphExecMemsetNodeSetParams(
                executable, node, fill_of(room.y), current_context()
            )
        )
        launch(executable, room)
        fill(room.x, room.b)
        assert kinds(seen) == []
        fill(room.y, room.b)
        assert kinds(seen) == ["write after write"]
        us.wait_for_device(0)
        launch(made.instantiate(), room)  # the graph itself is as it was
        fill(room.x, room.b)
        assert len(seen.races) == 2


def test_a_graph_does_what_its_node_was_changed_to() -> None:
    with observed_room() as (room, made, seen):
        node = made.copy(room.y, room.x)
        checked(driver.cuGraphMemcpyNodeSetParams(node, copy_of(room.pinned, room.y)))
        launch(made.instantiate(), room)
        fill(room.x, room.b)
        assert kinds(seen) == []
        fill(room.y, room.b)
        assert kinds(seen) == ["write after read"]


def test_a_node_that_is_disabled_or_gone_does_nothing() -> None:
    with observed_room() as (room, made, seen):
        node, other = made.fill(room.x), made.fill(room.y)
        checked(driver.cuGraphDestroyNode(other))
        executable = made.instantiate()
        checked(driver.cuGraphNodeSetEnabled(executable, node, 0))
        launch(executable, room)
        fill(room.x, room.b)
        fill(room.y, room.b)
        assert kinds(seen) == []
        us.wait_for_device(0)
        checked(driver.cuGraphNodeSetEnabled(executable, node, 1))
        launch(executable, room)
        fill(room.x, room.b)
        assert kinds(seen) == ["write after write"]


def test_a_captured_node_that_is_changed_is_counted_as_not_seen() -> None:
    with a_room() as room, us.observe() as seen:
        relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        checked(driver.cuStreamBeginCapture(handle(room.a), relaxed))
        fill(room.x, room.a)
        graph = checked(driver.cuStreamEndCapture(handle(room.a)))
        executable = checked(driver.cuGraphInstantiate(graph, 0))
        (node,) = checked(driver.cuGraphGetNodes(graph, 1))[0]
        launch(executable, room)
        assert seen.not_seen == ()
        given = executable, node, fill_of(room.y), current_context()
        checked(driver.cuGraphExecMemsetNodeSetParams(*given))
        us.wait_for_device(0)
        launch(executable, room)
        assert any("graphs that were not captured" in each for each in seen.not_seen)
        fill(room.x, room.b)  # the launch does not fill it any more
        assert kinds(seen) == []
        us.wait_for_device(0)
        checked(driver.cuGraphExecDestroy(executable))
        checked(driver.cuGraphDestroy(graph))


@pytest.mark.parametrize("change", ["parameters", "destroyed"])
@pytest.mark.parametrize("is_clone", [False, True])
def test_a_node_that_is_changed_by_an_unseen_handle_is_counted_as_not_seen(
    change: str, is_clone: bool
) -> None:
    """As a capture makes it, or a clone: the driver tells the handle when it is asked."""
    with observed_room() as (room, made, seen):
        if is_clone:
            made.fill(room.x)
            graph = checked(driver.cuGraphClone(made.graph))
        else:
            relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
            checked(driver.cuStreamBeginCapture(handle(room.a), relaxed))
            fill(room.x, room.a)
            graph = checked(driver.cuStreamEndCapture(handle(room.a)))
        (node,) = checked(driver.cuGraphGetNodes(graph, 1))[0]
        if change == "parameters":
            checked(driver.cuGraphMemsetNodeSetParams(node, fill_of(room.y)))
        else:
            checked(driver.cuGraphDestroyNode(node))
        executable = checked(driver.cuGraphInstantiate(graph, 0))
        launch(executable, room)
        fill(room.x, room.b)
        us.wait_for_device(0)
        assert kinds(seen) == []
        assert "changes of nodes of graphs that were captured or cloned (1)" in seen.not_seen
        checked(driver.cuGraphExecDestroy(executable))
        checked(driver.cuGraphDestroy(graph))


def test_what_is_added_to_a_part_of_a_graph_or_to_a_capture_is_counted_as_not_seen() -> None:
    with observed_room() as (room, made, seen):
        made.fill(room.x)
        outer = Made()
        child = checked(driver.cuGraphAddChildGraphNode(outer.graph, [], 0, made.graph))
        inner = checked(driver.cuGraphChildGraphNodeGetGraph(child))
        checked(driver.cuGraphAddMemsetNode(inner, [], 0, fill_of(room.y), current_context()))
        relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        begin = handle(room.a), made.graph, [], None, 0, relaxed
        checked(driver.cuStreamBeginCaptureToGraph(*begin))
        fill(room.x, room.a)  # beside the node that is there
        checked(driver.cuStreamEndCapture(handle(room.a)))
        made.instantiate()
        nodes = checked(driver.cuGraphGetNodes(made.graph, 2))[0]
        data = [] if driver.CUDA_VERSION < 13000 else [None]
        checked(driver.cuGraphAddDependencies(made.graph, nodes[:1], nodes[1:], *data, 1))
        assert seen.not_seen == (
            "nodes that are added to parts of graphs (1)",
            "the order between captured and added nodes of a graph (1)",
            "dependencies of nodes that were captured or cloned (1)",
        )
        checked(driver.cuGraphDestroy(outer.graph))


def test_only_a_child_graph_is_forgotten_when_a_node_of_it_may_have_changed() -> None:
    """The handles of its nodes in the parent are those of a clone, which were not seen."""
    with observed_room() as (room, made, seen):
        child, third = Made(), int(checked(driver.cuMemAlloc(SIZE)))
        child.fill(room.x)
        node = checked(driver.cuGraphAddChildGraphNode(made.graph, [], 0, child.graph))
        made.fill(third, node)
        inner = checked(driver.cuGraphChildGraphNodeGetGraph(node))
        (changed,) = checked(driver.cuGraphGetNodes(inner, 1))[0]
        checked(driver.cuGraphMemsetNodeSetParams(changed, fill_of(room.y)))
        launch(made.instantiate(), room)
        fill(room.x, room.b)  # the graph does not fill it any more
        assert kinds(seen) == []
        assert any("graphs that were not captured" in each for each in seen.not_seen)
        fill(third, room.b)
        assert kinds(seen) == ["write after write"]
        us.wait_for_device(0)
        checked(driver.cuMemFree(third))
        checked(driver.cuGraphDestroy(child.graph))


@pytest.mark.parametrize("how", ["parameters", "enabled", "update", "child"])
def test_nodes_of_a_graph_race_after_a_change_as_well(how: str) -> None:
    with observed_room() as (room, made, seen):
        made.fill(room.x)
        node = made.fill(room.y)
        executable = made.instantiate()
        other = Made()
        given = executable, node, fill_of(room.x), current_context()
        if how == "parameters":
            checked(driver.cuGraphExecMemsetNodeSetParams(*given))
        elif how == "enabled":
            checked(driver.cuGraphNodeSetEnabled(executable, node, 0))
            checked(driver.cuGraphExecMemsetNodeSetParams(*given))
            launch(executable, room)
            assert kinds(seen) == []
            checked(driver.cuGraphNodeSetEnabled(executable, node, 1))
        else:
            other.fill(room.x)
            other.fill(room.x)
        if how == "update":
            checked(driver.cuGraphExecUpdate(executable, other.graph))
        elif how == "child":
            checked(driver.cuGraphAddChildGraphNode(made.graph, [], 0, other.graph))
        launch(executable, room)
        assert kinds(seen) == ["write after write"]
        (race,) = seen.races
        assert (race.count, race.possible) == (1, False)
        launch(executable, room)
        assert len(seen.races) == 1
        checked(driver.cuGraphDestroy(other.graph))


def test_a_disabled_node_orders_the_nodes_around_it() -> None:
    with observed_room() as (room, made, seen):
        between = made.fill(room.y, made.fill(room.x))
        last = made.fill(room.y, between)
        executable = made.instantiate()
        checked(driver.cuGraphNodeSetEnabled(executable, between, 0))
        given = executable, last, fill_of(room.x), current_context()
        checked(driver.cuGraphExecMemsetNodeSetParams(*given))
        launch(executable, room)
        assert kinds(seen) == []


def may_tell_the_host(room: Room, what: str) -> Any:
    """Make a graph that fills `room.x` and then may tell the host of it."""
    word = room.pinned + 64
    ctypes.c_uint32.from_address(word).value = 0
    nothing = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None)
    function = driver.CUhostFn(ctypes.cast(nothing, ctypes.c_void_p).value)

    def work() -> None:
        fill(room.x, room.a)
        if what == "a value":
            checked(driver.cuStreamWriteValue32(handle(room.a), word, 1, 0))
        else:
            checked(driver.cuLaunchHostFunc(handle(room.a), function, 0))

    return captured(room, work), nothing


@pytest.mark.parametrize("what", ["a value", "a host function"])
def test_captured_work_may_tell_the_host(what: str) -> None:
    with a_room() as room, us.observe(possible=True) as seen:
        executable, kept = may_tell_the_host(room, what)
        launch(executable, room)
        fill(room.x, room.b)
        assert [race.possible for race in seen.races] == [True]
        us.wait_for_device(0)
        del kept


def test_a_change_reports_no_race_of_other_nodes_once_more() -> None:
    with observed_room() as (room, made, seen):
        for _ in range(2):
            made.fill(room.x)
        node = made.fill(room.y)
        executable = made.instantiate()
        given = executable, node, fill_of(room.pinned), current_context()
        checked(driver.cuGraphExecMemsetNodeSetParams(*given))
        launch(executable, room)
        (race,) = seen.races
        assert race.count == 1


@pytest.mark.parametrize("what", ["wait", "record", "values"])
def test_a_node_of_which_little_is_known_may_order_the_others(what: str) -> None:
    """Of a child graph with a changed node, or of a node that waits for values."""
    with a_room() as room, us.observe(possible=True) as seen:
        made, child = Made(), Made()
        event = checked(driver.cuEventCreate(0))
        if what == "values":
            values = driver.CUDA_BATCH_MEM_OP_NODE_PARAMS()
            wait = driver.CUstreamBatchMemOpParams()
            wait.operation = driver.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WAIT_VALUE_32
            wait.waitValue.operation, wait.waitValue.address = wait.operation, room.y
            wait.waitValue.value = 1
            values.ctx, values.count, values.paramArray = current_context(), 1, [wait]
            node = checked(driver.cuGraphAddBatchMemOpNode(made.graph, [], 0, values))
        else:
            named = "EventWait" if what == "wait" else "EventRecord"
            checked(getattr(driver, f"cuGraphAdd{named}Node")(child.graph, [], 0, event))
            node = checked(driver.cuGraphAddChildGraphNode(made.graph, [], 0, child.graph))
            inner = checked(driver.cuGraphChildGraphNodeGetGraph(node))
            (changed,) = checked(driver.cuGraphGetNodes(inner, 1))[0]
            other = checked(driver.cuEventCreate(0))
            checked(getattr(driver, f"cuGraph{named}NodeSetEvent")(changed, other))
        made.fill(room.x, node)
        executable = made.instantiate()
        if what == "record":
            launch(executable, room)
            checked(driver.cuStreamWaitEvent(handle(room.b), other, 0))
        fill(room.x, room.b)
        if what == "wait":
            checked(driver.cuEventRecord(other, handle(room.b)))
        elif what == "values":
            checked(driver.cuStreamWriteValue32(handle(room.b), room.y, 1, 0))
        if what != "record":
            launch(executable, room)
        assert [race.possible for race in seen.races] == [True]
        us.wait_for_device(0)
        checked(driver.cuGraphExecDestroy(executable))
        for graph in (made.graph, child.graph):
            checked(driver.cuGraphDestroy(graph))
