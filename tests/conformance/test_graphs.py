"""Graphs: from capture to launch."""

from __future__ import annotations

import ctypes

import pytest
from cuda.bindings import driver

from conformance.support import (
    INVALID_CONTEXT,
    INVALID_VALUE,
    NOT_READY,
    SUCCESS,
    Background,
    Capture,
    Word,
    completes,
    finishes,
    no_context,
    node_count,
    node_types,
    ok,
    stays,
)
from userstream.testing import latch


def test_a_graph_is_instantiated_in_a_context(stream, word, graphs):
    graph = graphs.capture(stream, lambda: word.write(stream, 7))
    with no_context():
        assert driver.cuGraphInstantiate(graph, 0)[0] == INVALID_CONTEXT


def test_a_launch_does_the_captured_work(stream, word, graphs):
    executable = graphs.instantiate(graphs.capture(stream, lambda: word.write(stream, 7)))
    assert word.value == 0
    ok(driver.cuGraphLaunch(executable, stream))
    assert finishes(stream)
    assert word.value == 7


def test_a_graph_can_be_launched_again(stream, word, graphs):
    executable = graphs.instantiate(graphs.capture(stream, lambda: word.write(stream, 7)))
    for _ in range(3):
        word.value = 0
        ok(driver.cuGraphLaunch(executable, stream))
        assert finishes(stream)
        assert word.value == 7


def test_a_launch_waits_for_its_turn_in_the_stream(stream, word, graphs):
    executable = graphs.instantiate(graphs.capture(stream, lambda: word.write(stream, 7)))
    with latch(stream) as held:
        ok(driver.cuGraphLaunch(executable, stream))
        assert stays(0, lambda: word.value)
        held.release()
        assert finishes(stream)
    assert word.value == 7


def test_a_graph_can_be_launched_on_another_stream(make_stream, word, graphs):
    origin, other = make_stream(), make_stream()
    executable = graphs.instantiate(graphs.capture(origin, lambda: word.write(origin, 7)))
    ok(driver.cuGraphLaunch(executable, other))
    assert finishes(other)
    assert word.value == 7


def test_launches_of_one_executable_run_one_after_the_other(make_stream, word, graphs):
    first, second = make_stream(), make_stream()
    executable = graphs.instantiate(graphs.capture(first, lambda: word.write(first, 7)))
    with latch(first) as held:
        ok(driver.cuGraphLaunch(executable, first))
        ok(driver.cuGraphLaunch(executable, second))
        assert stays((NOT_READY, 0), lambda: (driver.cuStreamQuery(second)[0], word.value))
        held.release()
        assert finishes(second)


def test_an_executable_outlives_its_graph(stream, word, graphs):
    with Capture(stream) as capture:
        word.write(stream, 7)
        graph = ok(capture.end())
    executable = graphs.instantiate(graph)
    ok(driver.cuGraphDestroy(graph))
    ok(driver.cuGraphLaunch(executable, stream))
    assert finishes(stream)
    assert word.value == 7


def test_a_running_executable_can_be_destroyed(stream, word, graphs):
    graph = graphs.capture(stream, lambda: word.write(stream, 7))
    executable = ok(driver.cuGraphInstantiate(graph, 0))
    with latch(stream) as held:
        ok(driver.cuGraphLaunch(executable, stream))
        destroying = Background(lambda: driver.cuGraphExecDestroy(executable))
        assert destroying.answer == (SUCCESS,)
        held.release()
        assert finishes(stream)
    assert word.value == 7


def test_an_event_after_a_launch_covers_it(stream, word, event, graphs):
    def queue():
        ok(driver.cuStreamWaitValue32(stream, word.address, 1, 0))

    executable = graphs.instantiate(graphs.capture(stream, queue))
    ok(driver.cuGraphLaunch(executable, stream))
    ok(driver.cuEventRecord(event, stream))
    held = stays((NOT_READY,), lambda: driver.cuEventQuery(event))
    word.value = 1
    assert completes(event)
    assert held


def test_an_external_record_is_done_by_the_launch(make_stream, event, graphs):
    stream, waiting = make_stream(), make_stream()
    graph = graphs.capture(stream, lambda: ok(driver.cuEventRecordWithFlags(event, stream, 1)))
    executable = graphs.instantiate(graph)
    ok(driver.cuGraphLaunch(executable, stream))
    assert finishes(stream)
    assert driver.cuEventQuery(event) == (SUCCESS,)
    assert driver.cuStreamWaitEvent(waiting, event, 0) == (SUCCESS,)


def test_an_external_wait_waits_in_the_launch(make_stream, event, word, graphs):
    stream, producer = make_stream(), make_stream()

    def queue():
        ok(driver.cuStreamWaitEvent(stream, event, 1))
        word.write(stream, 7)

    executable = graphs.instantiate(graphs.capture(stream, queue))
    with latch(producer) as held:
        ok(driver.cuEventRecord(event, producer))
        ok(driver.cuGraphLaunch(executable, stream))
        assert stays(0, lambda: word.value)
        held.release()
        assert finishes(stream)
    assert word.value == 7


def test_upload_does_no_work(stream, word, graphs):
    executable = graphs.instantiate(graphs.capture(stream, lambda: word.write(stream, 7)))
    assert driver.cuGraphUpload(executable, stream) == (SUCCESS,)
    assert finishes(stream)
    assert word.value == 0


@pytest.mark.parametrize(
    ("queue", "node_type"),
    [
        pytest.param(
            lambda stream, memory, host: driver.cuMemcpyDtoDAsync(memory, memory + 64, 64, stream),
            driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMCPY,
            id="copy",
        ),
        pytest.param(
            lambda stream, memory, host: driver.cuMemsetD8Async(memory, 1, 64, stream),
            driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMSET,
            id="fill",
        ),
        pytest.param(
            lambda stream, memory, host: driver.cuStreamWriteValue32(stream, memory, 1, 0),
            driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_BATCH_MEM_OP,
            id="write value",
        ),
        pytest.param(
            lambda stream, memory, host: driver.cuLaunchHostFunc(stream, driver.CUhostFn(host), 0),
            driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_HOST,
            id="host function",
        ),
    ],
)
def test_types_of_nodes(stream, memory, graphs, queue, node_type):
    host = ctypes.cast(ctypes.CDLL(None).sem_post, ctypes.c_void_p).value
    graph = graphs.capture(stream, lambda: ok(queue(stream, memory, host)))
    assert node_types(graph) == [node_type]


def test_a_graph_can_be_made_without_a_capture(stream, graphs):
    graph = ok(driver.cuGraphCreate(0))
    first = ok(driver.cuGraphAddEmptyNode(graph, None, 0))
    ok(driver.cuGraphAddEmptyNode(graph, [first], 1))
    assert node_count(graph) == 2
    executable = graphs.instantiate(graph)
    ok(driver.cuGraphLaunch(executable, stream))
    assert finishes(stream)
    ok(driver.cuGraphDestroy(graph))


def test_a_graph_has_no_flags():
    assert driver.cuGraphCreate(1)[0] == INVALID_VALUE


def test_null_is_no_graph():
    assert driver.cuGraphDestroy(driver.CUgraph(0)) == (INVALID_VALUE,)


def test_null_is_no_executable(stream):
    assert driver.cuGraphLaunch(driver.CUgraphExec(0), stream) == (INVALID_VALUE,)


def test_branches_of_a_graph(make_stream, make_event, pinned, graphs):
    """Both branches run, and the join comes after both."""
    origin, branch = make_stream(), make_stream()
    words = [Word(pinned + 4 * i) for i in range(3)]

    def queue():
        fork, join = make_event(), make_event()
        ok(driver.cuEventRecord(fork, origin))
        ok(driver.cuStreamWaitEvent(branch, fork, 0))
        words[0].write(origin, 1)
        words[1].write(branch, 2)
        ok(driver.cuEventRecord(join, branch))
        ok(driver.cuStreamWaitEvent(origin, join, 0))
        words[2].write(origin, 3)

    executable = graphs.instantiate(graphs.capture(origin, queue))
    ok(driver.cuGraphLaunch(executable, origin))
    assert finishes(origin)
    assert [word.value for word in words] == [1, 2, 3]
