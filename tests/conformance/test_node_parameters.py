"""New parameters for nodes, in graphs and in executable ones; what graphs with memory refuse."""

from __future__ import annotations

import pytest
from cuda.bindings import driver

from conformance.support import INVALID_VALUE, SUCCESS, Result, finishes, ok
from helpers import content

NOT_SUPPORTED = Result.CUDA_ERROR_NOT_SUPPORTED


def fill(address, value, size=256):
    parameters = driver.CUDA_MEMSET_NODE_PARAMS()
    parameters.dst, parameters.value = address, value
    parameters.elementSize, parameters.width, parameters.height = 1, size, 1
    return parameters


def copy(destination, source, size=256):
    parameters = driver.CUDA_MEMCPY3D()
    device = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    parameters.srcMemoryType = parameters.dstMemoryType = device
    parameters.srcDevice, parameters.dstDevice = source, destination
    parameters.WidthInBytes, parameters.Height, parameters.Depth = size, 1, 1
    return parameters


def write(context, address, value):
    operation = driver.CUstreamBatchMemOpParams()
    operation.operation = driver.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WRITE_VALUE_32
    operation.writeValue.operation = operation.operation
    operation.writeValue.address = address
    operation.writeValue.value = value
    parameters = driver.CUDA_BATCH_MEM_OP_NODE_PARAMS()
    parameters.ctx, parameters.count, parameters.paramArray = context, 1, [operation]
    return parameters


@pytest.fixture
def launch(graphs, stream):
    def run(executable):
        ok(driver.cuGraphLaunch(executable, stream))
        assert finishes(stream)

    return run


# ---- fills and copies ---------------------------------------------------------


def test_a_fill_of_a_graph_changes(graphs, context, memory, launch):
    graph = graphs.create()
    node = ok(driver.cuGraphAddMemsetNode(graph, [], 0, fill(memory, 1), context))
    before = graphs.instantiate(graph)
    ok(driver.cuGraphMemsetNodeSetParams(node, fill(memory, 2)))
    launch(before)
    assert content(memory) == {1}
    launch(graphs.instantiate(graph))
    assert content(memory) == {2}


def test_a_fill_of_an_executable_graph_changes(graphs, context, memory, launch):
    graph = graphs.create()
    node = ok(driver.cuGraphAddMemsetNode(graph, [], 0, fill(memory, 1), context))
    executable = graphs.instantiate(graph)
    ok(driver.cuGraphExecMemsetNodeSetParams(executable, node, fill(memory, 3), context))
    launch(executable)
    assert content(memory) == {3}
    assert ok(driver.cuGraphMemsetNodeGetParams(node)).value == 1


def test_a_copy_of_a_graph_changes(graphs, context, make_memory, launch):
    first, second, target = make_memory(), make_memory(), make_memory()
    for address, value in ((first, 1), (second, 2), (target, 0)):
        ok(driver.cuMemsetD8(address, value, 256))
    ok(driver.cuCtxSynchronize())  # a fill does not wait for itself
    graph = graphs.create()
    node = ok(driver.cuGraphAddMemcpyNode(graph, [], 0, copy(target, first), context))
    ok(driver.cuGraphMemcpyNodeSetParams(node, copy(target, second)))
    launch(graphs.instantiate(graph))
    assert content(target) == {2}


def test_a_copy_of_an_executable_graph_changes(graphs, context, make_memory, launch):
    first, second, target = make_memory(), make_memory(), make_memory()
    for address, value in ((first, 1), (second, 2), (target, 0)):
        ok(driver.cuMemsetD8(address, value, 256))
    ok(driver.cuCtxSynchronize())  # a fill does not wait for itself
    graph = graphs.create()
    node = ok(driver.cuGraphAddMemcpyNode(graph, [], 0, copy(target, first), context))
    executable = graphs.instantiate(graph)
    new = copy(target, second)
    ok(driver.cuGraphExecMemcpyNodeSetParams(executable, node, new, context))
    launch(executable)
    assert content(target) == {2}


def test_parameters_of_another_type_are_refused(graphs, context, memory):
    graph = graphs.create()
    node = ok(driver.cuGraphAddEmptyNode(graph, [], 0))
    assert driver.cuGraphMemsetNodeSetParams(node, fill(memory, 1)) == (INVALID_VALUE,)


def test_a_node_of_another_graph_is_refused(graphs, context, memory):
    graph, other = graphs.create(), graphs.create()
    ok(driver.cuGraphAddMemsetNode(graph, [], 0, fill(memory, 1), context))
    foreign = ok(driver.cuGraphAddMemsetNode(other, [], 0, fill(memory, 1), context))
    executable = graphs.instantiate(graph)
    result = driver.cuGraphExecMemsetNodeSetParams(executable, foreign, fill(memory, 2), context)
    assert result == (INVALID_VALUE,)


# ---- memory operations, events, children ---------------------------------------


def test_a_node_of_memory_operations(graphs, context, word, launch):
    graph = graphs.create()
    node = ok(driver.cuGraphAddBatchMemOpNode(graph, [], 0, write(context, word.address, 5)))
    executable = graphs.instantiate(graph)
    launch(executable)
    assert word.value == 5
    new = write(context, word.address, 6)
    ok(driver.cuGraphExecBatchMemOpNodeSetParams(executable, node, new))
    launch(executable)
    assert word.value == 6
    ok(driver.cuGraphBatchMemOpNodeSetParams(node, write(context, word.address, 7)))
    launch(graphs.instantiate(graph))
    assert word.value == 7


def test_the_operations_of_a_node_are_told(graphs, context, word):
    graph = graphs.create()
    node = ok(driver.cuGraphAddBatchMemOpNode(graph, [], 0, write(context, word.address, 5)))
    assert ok(driver.cuGraphBatchMemOpNodeGetParams(node)).count == 1


@pytest.mark.parametrize(
    ("add", "ask", "change"),
    [
        (
            driver.cuGraphAddEventRecordNode,
            driver.cuGraphEventRecordNodeGetEvent,
            driver.cuGraphEventRecordNodeSetEvent,
        ),
        (
            driver.cuGraphAddEventWaitNode,
            driver.cuGraphEventWaitNodeGetEvent,
            driver.cuGraphEventWaitNodeSetEvent,
        ),
    ],
    ids=["record", "wait"],
)
def test_the_event_of_a_node_changes(graphs, make_event, add, ask, change):
    first, second = make_event(), make_event()
    node = ok(add(graphs.create(), [], 0, first))
    assert int(ok(ask(node))) == int(first)
    ok(change(node, second))
    assert int(ok(ask(node))) == int(second)


def test_the_event_of_an_executable_graph_changes(graphs, make_event, launch, stream):
    first, second = make_event(), make_event()
    graph = graphs.create()
    node = ok(driver.cuGraphAddEventRecordNode(graph, [], 0, first))
    executable = graphs.instantiate(graph)
    ok(driver.cuGraphExecEventRecordNodeSetEvent(executable, node, second))
    launch(executable)
    assert driver.cuEventQuery(second) == (SUCCESS,)


def test_a_child_of_an_executable_graph_changes(graphs, context, memory, launch):
    children = []
    for value in (1, 2):
        child = graphs.create()
        ok(driver.cuGraphAddMemsetNode(child, [], 0, fill(memory, value), context))
        children.append(child)
    graph = graphs.create()
    node = ok(driver.cuGraphAddChildGraphNode(graph, [], 0, children[0]))
    executable = graphs.instantiate(graph)
    ok(driver.cuGraphExecChildGraphNodeSetParams(executable, node, children[1]))
    launch(executable)
    assert content(memory) == {2}


def test_a_child_of_another_shape_is_refused(graphs, context, memory):
    child, other, graph = graphs.create(), graphs.create(), graphs.create()
    ok(driver.cuGraphAddMemsetNode(child, [], 0, fill(memory, 1), context))
    node = ok(driver.cuGraphAddChildGraphNode(graph, [], 0, child))
    executable = graphs.instantiate(graph)
    assert driver.cuGraphExecChildGraphNodeSetParams(executable, node, other)[0] != SUCCESS


# ---- graphs that allocate memory -------------------------------------------------


@pytest.fixture
def allocating(graphs):
    """A graph that allocates memory, its allocation and an empty node behind that."""
    graph = graphs.create()
    wanted = driver.CUDA_MEM_ALLOC_NODE_PARAMS()
    wanted.poolProps.allocType = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.poolProps.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    wanted.bytesize = 256
    node = ok(driver.cuGraphAddMemAllocNode(graph, [], 0, wanted))
    node = node[0] if isinstance(node, tuple) else node
    after = ok(driver.cuGraphAddEmptyNode(graph, [node], 1))
    return graph, node, after


@pytest.mark.parametrize("which", [1, 2], ids=["the allocation", "another node"])
def test_no_node_of_it_is_destroyed(allocating, which):
    assert driver.cuGraphDestroyNode(allocating[which]) == (NOT_SUPPORTED,)


def test_no_edge_of_it_is_removed(allocating):
    graph, node, after = allocating
    edges = ([node], [after], 1)
    if driver.CUDA_VERSION >= 13000:
        edges = ([node], [after], None, 1)
    assert driver.cuGraphRemoveDependencies(graph, *edges) == (NOT_SUPPORTED,)


def test_it_is_not_cloned(allocating):
    assert driver.cuGraphClone(allocating[0])[0] == NOT_SUPPORTED


def test_it_is_no_child(graphs, allocating):
    result = driver.cuGraphAddChildGraphNode(graphs.create(), [], 0, allocating[0])
    assert result[0] == NOT_SUPPORTED


def test_it_is_instantiated_once_at_a_time(allocating):
    executable = ok(driver.cuGraphInstantiate(allocating[0], 0))
    assert driver.cuGraphInstantiate(allocating[0], 0)[0] == NOT_SUPPORTED
    ok(driver.cuGraphExecDestroy(executable))
    ok(driver.cuGraphExecDestroy(ok(driver.cuGraphInstantiate(allocating[0], 0))))
