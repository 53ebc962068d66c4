"""The structure of graphs: nodes, edges, children, copies; and updates of what was instantiated."""

from __future__ import annotations

import ctypes

import pytest
from cuda.bindings import driver

from conformance.support import (
    CUDA_12,
    INVALID_VALUE,
    SUCCESS,
    Capture,
    completes,
    finishes,
    node_count,
    nodes_of,
    ok,
    stays,
)
from userstream.testing import latch

UPDATE_FAILURE = driver.CUresult.CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE
Update = driver.CUgraphExecUpdateResult
Type = driver.CUgraphNodeType


def empty(graph, *dependencies):
    return ok(driver.cuGraphAddEmptyNode(graph, list(dependencies), len(dependencies)))


def numbers(nodes):
    return [int(node) for node in nodes]


def edges(graph):
    """Pairs of handles, sorted."""
    count = int(ok(driver.cuGraphGetEdges(graph))[-1])
    sources, targets, *_ = ok(driver.cuGraphGetEdges(graph, count))
    return sorted(zip(numbers(sources), numbers(targets), strict=True))


def neighbours(ask, node):
    count = int(ok(ask(node))[-1])
    return sorted(numbers(ok(ask(node, count))[0])) if count else []


def change(call, graph, source, target):
    data = () if CUDA_12 else (None,)
    return call(graph, [source], [target], *data, 1)


# ---- edges ------------------------------------------------------------------


def test_edges(graphs):
    graph = graphs.create()
    top = empty(graph)
    left, right = empty(graph, top), empty(graph, top)
    bottom = empty(graph, left, right)
    expected = [(top, left), (top, right), (left, bottom), (right, bottom)]
    assert edges(graph) == sorted((int(source), int(target)) for source, target in expected)
    assert neighbours(driver.cuGraphNodeGetDependencies, bottom) == sorted(numbers([left, right]))
    assert neighbours(driver.cuGraphNodeGetDependentNodes, top) == sorted(numbers([left, right]))
    assert neighbours(driver.cuGraphNodeGetDependencies, top) == []
    assert neighbours(driver.cuGraphGetRootNodes, graph) == [int(top)]


def test_a_capture_has_edges(graphs, stream, word):
    def queue():
        word.write(stream, 1)
        word.write(stream, 2)

    graph = graphs.capture(stream, queue)
    assert len(edges(graph)) == 1


def test_an_edge_is_added_and_removed(graphs):
    graph = graphs.create()
    first, second = empty(graph), empty(graph)
    ok(change(driver.cuGraphAddDependencies, graph, first, second))
    assert edges(graph) == [(int(first), int(second))]
    assert change(driver.cuGraphAddDependencies, graph, first, second) == (INVALID_VALUE,)
    ok(change(driver.cuGraphRemoveDependencies, graph, first, second))
    assert edges(graph) == []
    assert change(driver.cuGraphRemoveDependencies, graph, first, second) == (INVALID_VALUE,)


def test_an_edge_decides_the_order(graphs, stream, word):
    """The node that was added first runs last."""
    graph = graphs.create()
    last = write_node(graph, graphs, stream, word, 1)
    first = write_node(graph, graphs, stream, word, 2)
    ok(change(driver.cuGraphAddDependencies, graph, first, last))
    ok(driver.cuGraphLaunch(graphs.instantiate(graph), stream))
    assert finishes(stream)
    assert word.value == 1


def write_node(graph, graphs, stream, word, value):
    """A child that writes a word: memory operations are captured only."""
    child = graphs.capture(stream, lambda: word.write(stream, value))
    return ok(driver.cuGraphAddChildGraphNode(graph, None, 0, child))


def test_a_cycle_cannot_be_instantiated(graphs):
    graph = graphs.create()
    first = empty(graph)
    second = empty(graph, first)
    result = change(driver.cuGraphAddDependencies, graph, second, first)
    if result == (SUCCESS,):  # it may be refused at once
        assert driver.cuGraphInstantiate(graph, 0)[0] == INVALID_VALUE


def test_nodes_of_another_graph_are_no_dependencies(graphs):
    graph, other = graphs.create(), graphs.create()
    assert driver.cuGraphAddEmptyNode(graph, [empty(other)], 1)[0] == INVALID_VALUE
    assert change(driver.cuGraphAddDependencies, graph, empty(graph), empty(other)) == (
        INVALID_VALUE,
    )


def test_a_node_can_be_destroyed(graphs):
    graph = graphs.create()
    first = empty(graph)
    second = empty(graph, first)
    third = empty(graph, second)
    ok(driver.cuGraphDestroyNode(second))
    assert sorted(numbers(nodes_of(graph))) == sorted(numbers([first, third]))
    assert edges(graph) == []


def test_a_graph_of_many_nodes_is_instantiated(graphs, stream, word):
    graph = graphs.create()
    node = empty(graph)
    for _ in range(5000):
        node = empty(graph, node)
    ok(driver.cuGraphLaunch(graphs.instantiate(graph), stream))
    assert finishes(stream)


# ---- events, host functions -------------------------------------------------


def test_nodes_that_record_and_wait(graphs, make_stream, event, make_event, word):
    stream, producer, awaited = make_stream(), make_stream(), make_event()
    graph = graphs.create()
    waiting = ok(driver.cuGraphAddEventWaitNode(graph, None, 0, awaited))
    recording = ok(driver.cuGraphAddEventRecordNode(graph, [waiting], 1, event))
    assert int(ok(driver.cuGraphEventWaitNodeGetEvent(waiting))) == int(awaited)
    assert int(ok(driver.cuGraphEventRecordNodeGetEvent(recording))) == int(event)
    executable = graphs.instantiate(graph)
    with latch(producer) as held:
        ok(driver.cuEventRecord(awaited, producer))
        ok(driver.cuGraphLaunch(executable, stream))
        word.write(stream, 1)
        assert stays(0, lambda: word.value)
        held.release()
        assert finishes(stream)
    assert completes(event)


@pytest.mark.simulated
def test_a_node_of_an_event_that_is_gone_records_no_other(graphs, stream, make_stream, make_event):
    """The new event has the handle of the old one. A real driver may do anything."""
    old = ok(driver.cuEventCreate(2))
    graph = graphs.create()
    ok(driver.cuGraphAddEventRecordNode(graph, None, 0, old))
    executable = graphs.instantiate(graph)
    ok(driver.cuEventDestroy(old))
    new, busy = make_event(), make_stream()
    assert int(new) == int(old)
    with latch(busy):
        ok(driver.cuEventRecord(new, busy))
        ok(driver.cuGraphLaunch(executable, stream))
        assert finishes(stream)
        assert driver.cuEventQuery(new)[0] == driver.CUresult.CUDA_ERROR_NOT_READY


def test_the_parameters_of_a_host_function(graphs):
    function = ctypes.cast(ctypes.CDLL(None).sem_post, ctypes.c_void_p).value
    parameters = driver.CUDA_HOST_NODE_PARAMS()
    parameters.fn, parameters.userData = driver.CUhostFn(function), 64
    node = ok(driver.cuGraphAddHostNode(graphs.create(), None, 0, parameters))
    found = ok(driver.cuGraphHostNodeGetParams(node))
    assert (int(found.fn), int(found.userData)) == (function, 64)


# ---- children and copies ----------------------------------------------------


def test_a_child_runs_in_its_place(graphs, stream, word):
    child = graphs.capture(stream, lambda: word.write(stream, 7))
    graph = graphs.create()
    node = ok(driver.cuGraphAddChildGraphNode(graph, [empty(graph)], 1, child))
    assert int(ok(driver.cuGraphNodeGetType(node))) == int(Type.CU_GRAPH_NODE_TYPE_GRAPH)
    assert node_count(ok(driver.cuGraphChildGraphNodeGetGraph(node))) == 1
    ok(driver.cuGraphLaunch(graphs.instantiate(graph), stream))
    assert finishes(stream)
    assert word.value == 7


def test_a_child_is_a_copy(graphs):
    child, graph = graphs.create(), graphs.create()
    empty(child)
    node = ok(driver.cuGraphAddChildGraphNode(graph, None, 0, child))
    empty(child)
    inside = ok(driver.cuGraphChildGraphNodeGetGraph(node))
    assert int(inside) != int(child)
    assert node_count(inside) == 1


def test_a_launch_cannot_be_captured(graphs, stream, word):
    executable = graphs.instantiate(graphs.capture(stream, lambda: word.write(stream, 7)))
    with Capture(stream):
        assert driver.cuGraphLaunch(executable, stream) == (
            driver.CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
        )


def test_a_copy_of_a_graph(graphs, stream, word):
    graph = graphs.create()
    write_node(graph, graphs, stream, word, 7)
    first = empty(graph)
    second = empty(graph, first)
    copy = graphs.keep(ok(driver.cuGraphClone(graph)))
    found = [ok(driver.cuGraphNodeFindInClone(node, copy)) for node in (first, second)]
    assert edges(copy) == [(int(found[0]), int(found[1]))]
    assert driver.cuGraphNodeFindInClone(first, graph)[0] == INVALID_VALUE
    ok(driver.cuGraphLaunch(graphs.instantiate(copy), stream))
    assert finishes(stream)
    assert word.value == 7


# ---- updates ----------------------------------------------------------------


def writing(graphs, stream, memory, *values):
    """A graph of fills: one for each value, one after the other."""

    def queue():
        for i, value in enumerate(values):
            ok(driver.cuMemsetD8Async(memory + i, value, 1, stream))

    return graphs.capture(stream, queue)


def filled(memory):
    host = ctypes.create_string_buffer(2)
    ok(driver.cuMemcpyDtoH(ctypes.addressof(host), memory, 2))
    return tuple(host.raw)


def test_an_update_changes_what_later_launches_do(graphs, stream, memory):
    executable = graphs.instantiate(writing(graphs, stream, memory, 1, 2))
    with latch(stream) as held:
        ok(driver.cuGraphLaunch(executable, stream))
        info = ok(driver.cuGraphExecUpdate(executable, writing(graphs, stream, memory, 3, 4)))
        assert info.result == Update.CU_GRAPH_EXEC_UPDATE_SUCCESS
        held.release()
        assert finishes(stream)
    assert filled(memory) == (1, 2)
    ok(driver.cuGraphLaunch(executable, stream))
    assert finishes(stream)
    assert filled(memory) == (3, 4)


def test_a_failed_update_changes_nothing(graphs, stream, memory):
    executable = graphs.instantiate(writing(graphs, stream, memory, 1, 2))
    assert (
        driver.cuGraphExecUpdate(executable, writing(graphs, stream, memory, 3, 4, 5))[0]
        == UPDATE_FAILURE
    )
    ok(driver.cuGraphLaunch(executable, stream))
    assert finishes(stream)
    assert filled(memory) == (1, 2)


def test_an_update_keeps_the_types_of_nodes(graphs, stream, memory, word):
    executable = graphs.instantiate(writing(graphs, stream, memory, 1))
    graph = graphs.create()
    empty(graph)
    assert driver.cuGraphExecUpdate(executable, graph)[0] == UPDATE_FAILURE


def test_an_update_keeps_the_edges(graphs):
    chain, apart = graphs.create(), graphs.create()
    empty(chain, empty(chain))
    for _ in range(2):
        empty(apart)
    assert driver.cuGraphExecUpdate(graphs.instantiate(chain), apart)[0] == UPDATE_FAILURE


def test_an_update_looks_into_children(graphs, stream, memory):
    def parent(*values):
        graph = graphs.create()
        child = writing(graphs, stream, memory, *values)
        ok(driver.cuGraphAddChildGraphNode(graph, None, 0, child))
        return graph

    executable = graphs.instantiate(parent(1, 2))
    assert driver.cuGraphExecUpdate(executable, parent(3))[0] == UPDATE_FAILURE
    ok(driver.cuGraphExecUpdate(executable, parent(3, 4)))
    ok(driver.cuGraphLaunch(executable, stream))
    assert finishes(stream)
    assert filled(memory) == (3, 4)
