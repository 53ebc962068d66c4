"""cuGraphAddNode, cuGraphNodeSetParams and cuGraphExecNodeSetParams: one function for all types."""

from __future__ import annotations

import ctypes

import pytest
from cuda.bindings import driver

from conformance.support import CUDA_12, INVALID_VALUE, SUCCESS, completes, finishes, node_count, ok
from userstream.testing import latch

Type = driver.CUgraphNodeType
EDGES = () if CUDA_12 else (None,)


def parameters_of(kind):
    parameters = driver.CUgraphNodeParams()
    parameters.type = kind
    return parameters


def fill(context, address, value, count=1):
    parameters = parameters_of(Type.CU_GRAPH_NODE_TYPE_MEMSET)
    memset = parameters.memset
    memset.dst, memset.value, memset.elementSize = address, value, 1
    memset.width, memset.height, memset.ctx = count, 1, context
    return parameters


def add(graph, parameters, *dependencies):
    return driver.cuGraphAddNode(graph, list(dependencies), *EDGES, len(dependencies), parameters)


def filled(memory, count=4):
    host = ctypes.create_string_buffer(count)
    ok(driver.cuMemcpyDtoH(ctypes.addressof(host), memory, count))
    return tuple(host.raw)


def launch(executable, stream):
    ok(driver.cuGraphLaunch(executable, stream))
    assert finishes(stream)


@pytest.fixture
def zeros(memory):
    """Device memory that is zero."""
    ok(driver.cuMemsetD8(memory, 0, 16))
    return memory


def test_fills_one_after_the_other(graphs, stream, context, zeros):
    graph = graphs.create()
    first = ok(add(graph, fill(context, zeros, 1, 3)))
    second = ok(add(graph, fill(context, zeros, 2, 2), first))
    ok(add(graph, fill(context, zeros, 3, 1), second))
    launch(graphs.instantiate(graph), stream)
    assert filled(zeros) == (3, 2, 1, 0)


def test_a_copy(graphs, stream, context, zeros):
    ok(driver.cuMemsetD8(zeros + 2, 7, 2))
    ok(driver.cuCtxSynchronize())  # a fill does not wait for itself
    parameters = parameters_of(Type.CU_GRAPH_NODE_TYPE_MEMCPY)
    parameters.memcpy.copyCtx = context
    copy = parameters.memcpy.copyParams
    device = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    copy.srcMemoryType, copy.srcDevice = device, zeros + 2
    copy.dstMemoryType, copy.dstDevice = device, zeros
    copy.WidthInBytes, copy.Height, copy.Depth = 2, 1, 1
    parameters.memcpy.copyParams = copy
    graph = graphs.create()
    node = ok(add(graph, parameters))
    assert int(ok(driver.cuGraphNodeGetType(node))) == int(Type.CU_GRAPH_NODE_TYPE_MEMCPY)
    launch(graphs.instantiate(graph), stream)
    assert filled(zeros) == (7, 7, 7, 7)


def test_an_event_and_a_child(graphs, make_stream, context, event, zeros):
    stream = make_stream()
    child, graph = graphs.create(), graphs.create()
    ok(add(child, fill(context, zeros, 5)))
    parameters = parameters_of(Type.CU_GRAPH_NODE_TYPE_GRAPH)
    parameters.graph.graph = child
    node = ok(add(graph, parameters))
    assert node_count(ok(driver.cuGraphChildGraphNodeGetGraph(node))) == 1
    parameters = parameters_of(Type.CU_GRAPH_NODE_TYPE_EVENT_RECORD)
    parameters.eventRecord.event = event
    node = ok(add(graph, parameters, node))
    assert int(ok(driver.cuGraphEventRecordNodeGetEvent(node))) == int(event)
    launch(graphs.instantiate(graph), stream)
    assert completes(event)
    assert filled(zeros) == (5, 0, 0, 0)


def test_an_empty_node_and_a_host_function(graphs):
    function = ctypes.cast(ctypes.CDLL(None).sem_post, ctypes.c_void_p).value
    graph = graphs.create()
    node = ok(add(graph, parameters_of(Type.CU_GRAPH_NODE_TYPE_EMPTY)))
    parameters = parameters_of(Type.CU_GRAPH_NODE_TYPE_HOST)
    parameters.host.fn, parameters.host.userData = driver.CUhostFn(function), 64
    node = ok(add(graph, parameters, node))
    found = ok(driver.cuGraphHostNodeGetParams(node))
    assert (int(found.fn), int(found.userData)) == (function, 64)


def test_memory_of_a_graph(graphs, stream, context):
    graph = graphs.create()
    parameters = parameters_of(Type.CU_GRAPH_NODE_TYPE_MEM_ALLOC)
    properties = parameters.alloc.poolProps
    properties.allocType = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    location = properties.location
    location.type, location.id = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, 0
    properties.location = location
    parameters.alloc.poolProps = properties
    parameters.alloc.bytesize = 64
    allocated = ok(add(graph, parameters))
    address = int(parameters.alloc.dptr)
    assert address
    filling = ok(add(graph, fill(context, address, 1), allocated))
    parameters = parameters_of(Type.CU_GRAPH_NODE_TYPE_MEM_FREE)
    parameters.free.dptr = address
    ok(add(graph, parameters, filling))
    launch(graphs.instantiate(graph), stream)


def test_other_parameters_matter_to_what_is_instantiated_later(graphs, stream, context, zeros):
    graph = graphs.create()
    node = ok(add(graph, fill(context, zeros, 1)))
    before = graphs.instantiate(graph)
    ok(driver.cuGraphNodeSetParams(node, fill(context, zeros, 2)))
    launch(graphs.instantiate(graph), stream)
    assert filled(zeros)[0] == 2
    launch(before, stream)
    assert filled(zeros)[0] == 1


def test_other_parameters_of_an_executable_graph(graphs, stream, context, zeros):
    graph = graphs.create()
    node = ok(add(graph, fill(context, zeros, 1)))
    executable = graphs.instantiate(graph)
    with latch(stream) as held:
        ok(driver.cuGraphLaunch(executable, stream))
        ok(driver.cuGraphExecNodeSetParams(executable, node, fill(context, zeros, 2)))
        held.release()
        assert finishes(stream)
    assert filled(zeros)[0] == 1  # a launch that was queued before
    launch(executable, stream)
    assert filled(zeros)[0] == 2
    launch(graphs.instantiate(graph), stream)
    assert filled(zeros)[0] == 1


def test_parameters_of_another_type(graphs, context, zeros):
    graph = graphs.create()
    node = ok(driver.cuGraphAddEmptyNode(graph, None, 0))
    executable = graphs.instantiate(graph)
    parameters = fill(context, zeros, 1)
    assert driver.cuGraphNodeSetParams(node, parameters)[0] == INVALID_VALUE
    assert driver.cuGraphExecNodeSetParams(executable, node, parameters)[0] == INVALID_VALUE


def test_a_node_that_the_executable_graph_does_not_have(graphs, context, zeros):
    graph = graphs.create()
    executable = graphs.instantiate(graph)
    node = ok(add(graph, fill(context, zeros, 1)))
    assert driver.cuGraphExecNodeSetParams(executable, node, fill(context, zeros, 2))[0] != SUCCESS


# ---- nodes that are switched off --------------------------------------------


def test_a_node_is_disabled_and_enabled(graphs, stream, context, zeros):
    graph = graphs.create()
    node = ok(add(graph, fill(context, zeros, 1)))
    ok(add(graph, fill(context, zeros + 1, 2), node))
    executable = graphs.instantiate(graph)
    assert ok(driver.cuGraphNodeGetEnabled(executable, node)) == 1
    ok(driver.cuGraphNodeSetEnabled(executable, node, 0))
    assert ok(driver.cuGraphNodeGetEnabled(executable, node)) == 0
    launch(executable, stream)
    assert filled(zeros) == (0, 2, 0, 0)
    ok(driver.cuGraphNodeSetEnabled(executable, node, 1))
    launch(executable, stream)
    assert filled(zeros) == (1, 2, 0, 0)


def test_only_some_nodes_can_be_disabled(graphs):
    graph = graphs.create()
    node = ok(driver.cuGraphAddEmptyNode(graph, None, 0))
    executable = graphs.instantiate(graph)
    assert driver.cuGraphNodeSetEnabled(executable, node, 0)[0] == INVALID_VALUE
