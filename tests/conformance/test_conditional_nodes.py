"""Conditional nodes of graphs. The default value of the condition decides, as in programs without
a kernel that sets it; those are in ``tests/testing/test_conditions.py``.

Fills of device memory tell what has run: other nodes of a body may be kernels, copies, empty nodes,
child graphs and conditional nodes.
"""

from __future__ import annotations

import ctypes

import pytest
from cuda.bindings import driver

from conformance.support import (
    CUDA_12,
    INVALID_VALUE,
    RELAXED,
    SUCCESS,
    finishes,
    node_count,
    node_types,
    ok,
)

Kind = driver.CUgraphConditionalNodeType
IF, WHILE, SWITCH = (
    Kind.CU_GRAPH_COND_TYPE_IF,
    Kind.CU_GRAPH_COND_TYPE_WHILE,
    Kind.CU_GRAPH_COND_TYPE_SWITCH,
)
CONDITIONAL = int(driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL)
ASSIGN_DEFAULT = driver.CU_GRAPH_COND_ASSIGN_DEFAULT
UPDATE_FAILURE = driver.CUresult.CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE
EDGES = () if CUDA_12 else (None,)


def create(graph, context, default=0, flags=ASSIGN_DEFAULT):
    """A condition, which has the default value at the beginning of each launch."""
    return ok(driver.cuGraphConditionalHandleCreate(graph, context, default, flags))


def try_to_add(graph, context, condition, kind, size=1, dependencies=()):
    parameters = driver.CUgraphNodeParams()
    parameters.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
    parameters.conditional.handle = condition
    parameters.conditional.type = kind
    parameters.conditional.size = size
    parameters.conditional.ctx = context
    answer = driver.cuGraphAddNode(graph, list(dependencies), *EDGES, len(dependencies), parameters)
    return answer, parameters


def add(graph, context, condition, kind, size=1, dependencies=()):
    """A conditional node and its bodies."""
    answer, parameters = try_to_add(graph, context, condition, kind, size, dependencies)
    node = ok(answer)
    bodies = parameters.conditional.phGraph_out
    return node, [driver.CUgraph(int(bodies[i])) for i in range(size)]


def fill(graph, context, address, value, dependencies=()):
    parameters = driver.CUDA_MEMSET_NODE_PARAMS()
    parameters.dst, parameters.value = address, value
    parameters.elementSize, parameters.width, parameters.height = 1, 1, 1
    return ok(
        driver.cuGraphAddMemsetNode(
            graph, list(dependencies), len(dependencies), parameters, context
        )
    )


def filled(memory, count):
    host = ctypes.create_string_buffer(count)
    ok(driver.cuMemcpyDtoH(ctypes.addressof(host), memory, count))
    return tuple(host.raw)


@pytest.fixture
def zeros(memory):
    """Device memory that is zero."""
    ok(driver.cuMemsetD8(memory, 0, 16))
    return memory


def launch(executable, stream):
    ok(driver.cuGraphLaunch(executable, stream))
    assert finishes(stream)


def branching(graphs, context, memory, kind, size, default):
    """A graph with one conditional node: its bodies fill one byte each, and another follows it."""
    graph = graphs.create()
    node, bodies = add(graph, context, create(graph, context, default), kind, size)
    for i, body in enumerate(bodies):
        fill(body, context, memory + i, 1)
    fill(graph, context, memory + size, 9, [node])
    return graph


# ---- which body runs --------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "size", "default", "expected"),
    [
        (IF, 1, 0, (0,)),
        (IF, 1, 1, (1,)),
        (IF, 1, 7, (1,)),
        (IF, 2, 0, (0, 1)),
        (IF, 2, 1, (1, 0)),
        (WHILE, 1, 0, (0,)),
        (SWITCH, 3, 0, (1, 0, 0)),
        (SWITCH, 3, 2, (0, 0, 1)),
        (SWITCH, 3, 3, (0, 0, 0)),
        (SWITCH, 1, 0, (1,)),
        (SWITCH, 2, 2**32 - 1, (0, 0)),
    ],
)
def test_the_default_value_decides(graphs, stream, context, zeros, kind, size, default, expected):
    graph = branching(graphs, context, zeros, kind, size, default)
    launch(graphs.instantiate(graph), stream)
    assert filled(zeros, size + 1) == (*expected, 9)


def test_every_launch_begins_with_the_default(graphs, stream, context, zeros):
    executable = graphs.instantiate(branching(graphs, context, zeros, IF, 2, 1))
    for _ in range(2):
        ok(driver.cuMemsetD8(zeros, 0, 3))
        ok(driver.cuCtxSynchronize())  # a fill does not wait for itself
        launch(executable, stream)
        assert filled(zeros, 3) == (1, 0, 9)


def test_a_body_comes_after_what_its_node_depends_on(graphs, stream, context, zeros):
    graph = graphs.create()
    before = fill(graph, context, zeros, 1)
    node, [body] = add(graph, context, create(graph, context, 1), IF, 1, [before])
    fill(body, context, zeros, 2)
    fill(graph, context, zeros + 1, 3, [node])
    launch(graphs.instantiate(graph), stream)
    assert filled(zeros, 2) == (2, 3)


def test_an_empty_body(graphs, stream, context, zeros):
    graph = graphs.create()
    node, _ = add(graph, context, create(graph, context, 1), IF)
    fill(graph, context, zeros, 1, [node])
    launch(graphs.instantiate(graph), stream)
    assert filled(zeros, 1) == (1,)


@pytest.mark.parametrize(("outer", "inner", "expected"), [(1, 1, 5), (1, 0, 0), (0, 1, 0)])
def test_conditional_nodes_are_nested(graphs, stream, context, zeros, outer, inner, expected):
    graph = graphs.create()
    conditions = [create(graph, context, value) for value in (outer, inner)]
    _, [body] = add(graph, context, conditions[0], IF)
    _, [innermost] = add(body, context, conditions[1], IF)
    fill(innermost, context, zeros, 5)
    launch(graphs.instantiate(graph), stream)
    assert filled(zeros, 1) == (expected,)


def test_a_child_graph_in_a_body(graphs, stream, context, zeros):
    child, graph = graphs.create(), graphs.create()
    fill(child, context, zeros, 4)
    _, [body] = add(graph, context, create(graph, context, 1), IF)
    ok(driver.cuGraphAddChildGraphNode(body, None, 0, child))
    launch(graphs.instantiate(graph), stream)
    assert filled(zeros, 1) == (4,)


# ---- captures ---------------------------------------------------------------


def test_a_body_is_captured(graphs, stream, context, zeros):
    graph = graphs.create()
    _, [body] = add(graph, context, create(graph, context, 1), IF)
    ok(driver.cuStreamBeginCaptureToGraph(stream, body, None, None, 0, RELAXED))
    ok(driver.cuMemsetD8Async(zeros, 6, 1, stream))
    assert int(ok(driver.cuStreamEndCapture(stream))) == int(body)
    assert node_count(body) == 1
    launch(graphs.instantiate(graph), stream)
    assert filled(zeros, 1) == (6,)


def test_a_conditional_node_in_a_capture(graphs, make_stream, context, zeros):
    """As a `GraphBuilder` of cuda.core adds one: it comes after what was captured before."""
    stream = make_stream()
    ok(driver.cuStreamBeginCapture(stream, RELAXED))
    ok(driver.cuMemsetD8Async(zeros, 1, 2, stream))
    _, _, graph, dependencies, *_ = ok(driver.cuStreamGetCaptureInfo(stream))
    condition = create(graph, context, 1)
    node, [body] = add(graph, context, condition, IF, 1, dependencies)
    ok(
        driver.cuStreamUpdateCaptureDependencies(
            stream,
            [node],
            *EDGES,
            1,
            driver.CUstreamUpdateCaptureDependencies_flags.CU_STREAM_SET_CAPTURE_DEPENDENCIES,
        )
    )
    fill(body, context, zeros, 2)
    ok(driver.cuMemsetD8Async(zeros + 1, 3, 1, stream))
    graphs.keep(ok(driver.cuStreamEndCapture(stream)))
    launch(graphs.instantiate(graph), stream)
    assert filled(zeros, 2) == (2, 3)


# ---- updates ----------------------------------------------------------------


def test_an_update_changes_the_default_value(graphs, stream, context, zeros):
    """The condition of the new graph has another handle."""
    executable = graphs.instantiate(branching(graphs, context, zeros, SWITCH, 3, 0))
    ok(driver.cuGraphExecUpdate(executable, branching(graphs, context, zeros, SWITCH, 3, 2)))
    launch(executable, stream)
    assert filled(zeros, 4) == (0, 0, 1, 9)


def test_an_update_changes_what_a_body_does(graphs, stream, context, zeros):
    executable = graphs.instantiate(branching(graphs, context, zeros, IF, 1, 1))
    ok(driver.cuGraphExecUpdate(executable, branching(graphs, context, zeros + 4, IF, 1, 1)))
    launch(executable, stream)
    assert filled(zeros, 6) == (0, 0, 0, 0, 1, 9)


def test_an_update_keeps_the_kind_of_the_node(graphs, context, zeros):
    executable = graphs.instantiate(branching(graphs, context, zeros, IF, 1, 1))
    for kind, size in ((SWITCH, 1), (IF, 2)):
        graph = branching(graphs, context, zeros, kind, size, 1)
        assert driver.cuGraphExecUpdate(executable, graph)[0] == UPDATE_FAILURE


def test_an_update_looks_into_bodies(graphs, context, zeros):
    executable = graphs.instantiate(branching(graphs, context, zeros, IF, 1, 1))
    graph = graphs.create()
    node, [body] = add(graph, context, create(graph, context, 1), IF)
    fill(body, context, zeros, 1, [fill(body, context, zeros, 1)])
    fill(graph, context, zeros, 1, [node])
    assert driver.cuGraphExecUpdate(executable, graph)[0] == UPDATE_FAILURE


# ---- what is asked, and what is refused -------------------------------------


def test_what_a_graph_has(graphs, context):
    graph = graphs.create()
    node, bodies = add(graph, context, create(graph, context), IF, 2)
    assert int(ok(driver.cuGraphNodeGetType(node))) == CONDITIONAL
    assert node_types(graph) == [CONDITIONAL]
    assert len({int(body) for body in bodies}) == 2
    assert [node_count(body) for body in bodies] == [0, 0]


def test_a_body_is_its_nodes(graphs, context):
    graph = graphs.create()
    _, [body] = add(graph, context, create(graph, context), IF)
    assert driver.cuGraphDestroy(body)[0] != SUCCESS


@pytest.mark.parametrize(("kind", "size"), [(IF, 0), (IF, 3), (WHILE, 0), (WHILE, 2), (SWITCH, 0)])
def test_a_number_of_bodies_that_the_kind_does_not_have(graphs, context, kind, size):
    graph = graphs.create()
    answer, _ = try_to_add(graph, context, create(graph, context), kind, size)
    assert answer[0] == INVALID_VALUE


def test_a_condition_of_another_graph(graphs, context):
    condition = create(graphs.create(), context)
    answer, _ = try_to_add(graphs.create(), context, condition, IF)
    assert answer[0] != SUCCESS


@pytest.mark.simulated
def test_a_condition_is_of_one_node(graphs, context):
    """CUDA's programming guide demands it."""
    graph = graphs.create()
    condition = create(graph, context)
    add(graph, context, condition, IF)
    answer, _ = try_to_add(graph, context, condition, IF)
    assert answer[0] == INVALID_VALUE


def test_flags_that_do_not_exist(graphs, context):
    graph = graphs.create()
    assert driver.cuGraphConditionalHandleCreate(graph, context, 0, 2)[0] == INVALID_VALUE


def test_a_condition_that_no_node_has(graphs, context):
    """It "may cause graph instantiation to fail"."""
    graph = graphs.create()
    create(graph, context)
    parameters = driver.CUDA_GRAPH_INSTANTIATE_PARAMS()
    result, executable = driver.cuGraphInstantiateWithParams(graph, parameters)
    if result == SUCCESS:
        ok(driver.cuGraphExecDestroy(executable))
    else:
        assert parameters.result_out == (
            driver.CUgraphInstantiateResult.CUDA_GRAPH_INSTANTIATE_CONDITIONAL_HANDLE_UNUSED
        )


def test_a_body_with_a_node_that_it_must_not_have(graphs, context, event):
    """Refused at once, or when the graph is instantiated."""
    graph = graphs.create()
    _, [body] = add(graph, context, create(graph, context), IF)
    result, _ = driver.cuGraphAddEventRecordNode(body, None, 0, event)
    if result == SUCCESS:
        assert driver.cuGraphInstantiate(graph, 0)[0] != SUCCESS


def test_a_graph_with_a_conditional_node_is_no_child_and_is_not_copied(graphs, context):
    graph = graphs.create()
    add(graph, context, create(graph, context), IF)
    assert driver.cuGraphAddChildGraphNode(graphs.create(), None, 0, graph)[0] != SUCCESS
    assert driver.cuGraphClone(graph)[0] != SUCCESS


def test_it_is_drawn(graphs, context, tmp_path):
    graph = graphs.create()
    add(graph, context, create(graph, context), IF)
    path = tmp_path / "graph.dot"
    ok(driver.cuGraphDebugDotPrint(graph, str(path).encode(), 0))
    assert "CONDITIONAL" in path.read_text().upper()


def test_the_end_of_a_conditional_node(graphs, context):
    graph = graphs.create()
    kept = ok(driver.cuGraphAddEmptyNode(graph, None, 0))
    node, _ = add(graph, context, create(graph, context), IF, 2, [kept])
    ok(driver.cuGraphDestroyNode(node))
    assert node_count(graph) == 1
