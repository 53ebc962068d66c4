"""Capture: what streams, events and graphs do in it."""

from __future__ import annotations

import pytest
from cuda.bindings import driver

from conformance.support import (
    ACTIVE,
    BLOCKING,
    CAPTURE_INVALIDATED,
    CUDA_12,
    GLOBAL,
    IMPLICIT,
    INVALID_VALUE,
    INVALIDATED,
    LEGACY,
    MODES,
    NOT_CAPTURING,
    NULL,
    PER_THREAD,
    RELAXED,
    SUCCESS,
    THREAD_LOCAL,
    UNSUPPORTED,
    Capture,
    Result,
    elsewhere,
    finishes,
    node_count,
    ok,
)

modes = pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())

UNJOINED = Result.CUDA_ERROR_STREAM_CAPTURE_UNJOINED
UNMATCHED = Result.CUDA_ERROR_STREAM_CAPTURE_UNMATCHED
MERGE = Result.CUDA_ERROR_STREAM_CAPTURE_MERGE
ISOLATION = Result.CUDA_ERROR_STREAM_CAPTURE_ISOLATION
WRONG_THREAD = Result.CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD
CAPTURED_EVENT = Result.CUDA_ERROR_CAPTURED_EVENT
ILLEGAL_STATE = Result.CUDA_ERROR_ILLEGAL_STATE


def fork(source, event, destination):
    ok(driver.cuEventRecord(event, source))
    return driver.cuStreamWaitEvent(destination, event, 0)


def capturing(stream):
    """The graph that the stream is captured into, and what its next node comes after."""
    _, _, graph, dependencies, *_ = ok(driver.cuStreamGetCaptureInfo(stream))
    return graph, dependencies


def set_dependencies(stream, nodes):
    flags = driver.CUstreamUpdateCaptureDependencies_flags.CU_STREAM_SET_CAPTURE_DEPENDENCIES
    edges = () if CUDA_12 else (None,)
    update = driver.cuStreamUpdateCaptureDependencies
    return update(stream, nodes, *edges, len(nodes), flags)


# ---- beginning and ending ---------------------------------------------------


@modes
def test_a_capture_begins_and_ends(stream, mode):
    assert ok(driver.cuStreamIsCapturing(stream)) == NOT_CAPTURING
    with Capture(stream, mode) as capture:
        assert capture.status == ACTIVE
        assert capture.end_result() == SUCCESS
        assert capture.status == NOT_CAPTURING


def test_an_empty_capture_gives_an_empty_graph(stream):
    with Capture(stream) as capture:
        graph = ok(capture.end())
    assert node_count(graph) == 0
    ok(driver.cuGraphDestroy(graph))


def test_captured_work_does_not_run(stream, word):
    with Capture(stream) as capture:
        word.write(stream, 1)
        assert capture.end_result() == SUCCESS
    assert finishes(stream)
    assert word.value == 0


def test_a_stream_captures_once(stream):
    with Capture(stream) as capture:
        assert driver.cuStreamBeginCapture(stream, GLOBAL) == (ILLEGAL_STATE,)
        assert capture.status == ACTIVE


def test_only_a_capturing_stream_can_end(stream):
    assert driver.cuStreamEndCapture(stream)[0] == ILLEGAL_STATE


def test_a_blocking_stream_can_capture(make_stream):
    with Capture(make_stream(BLOCKING)) as capture:
        assert capture.status == ACTIVE
        assert capture.end_result() == SUCCESS


def test_the_per_thread_stream_can_capture():
    with Capture(PER_THREAD) as capture:
        assert capture.status == ACTIVE
        assert capture.end_result() == SUCCESS


@pytest.mark.parametrize("token", [NULL, LEGACY], ids=["null", "legacy"])
def test_the_legacy_stream_cannot_capture(token):
    assert driver.cuStreamBeginCapture(token, GLOBAL) == (UNSUPPORTED,)


@modes
def test_only_a_relaxed_capture_ends_on_another_thread(context, stream, mode):
    expected = SUCCESS if mode == RELAXED else WRONG_THREAD
    with Capture(stream, mode) as capture:
        result, graph = elsewhere(lambda: driver.cuStreamEndCapture(stream), context)
        if result == SUCCESS:
            ok(driver.cuGraphDestroy(graph))
        capture._ended = True
        assert result == expected
        assert ok(driver.cuStreamIsCapturing(stream)) == NOT_CAPTURING, "it is over all the same"


def test_a_joined_stream_cannot_end_the_capture(event, make_stream):
    origin, joined = make_stream(), make_stream()
    with Capture(origin):
        ok(fork(origin, event, joined))
        assert driver.cuStreamEndCapture(joined)[0] == UNMATCHED


def test_the_end_of_an_invalidated_capture_says_so(stream):
    with Capture(stream) as capture:
        driver.cuStreamSynchronize(stream)
        assert capture.end_result() == CAPTURE_INVALIDATED
        assert capture.status == NOT_CAPTURING


def test_after_an_invalidated_capture_the_stream_works(stream, word):
    with Capture(stream) as capture:
        driver.cuStreamSynchronize(stream)
        capture.end()
    word.write(stream, 1)
    assert finishes(stream)
    assert word.value == 1


def test_two_streams_capture_apart(make_stream, word):
    first, second = make_stream(), make_stream()
    with Capture(first, RELAXED) as one, Capture(second, RELAXED) as two:
        word.write(first, 1)
        graph = ok(one.end())
        assert node_count(graph) == 1
        assert two.status == ACTIVE
        ok(driver.cuGraphDestroy(graph))


# ---- the capturing stream itself --------------------------------------------


@modes
@pytest.mark.parametrize(
    "call", [driver.cuStreamQuery, driver.cuStreamSynchronize], ids=lambda call: call.__name__
)
def test_a_capturing_stream_cannot_be_asked(stream, mode, call):
    with Capture(stream, mode) as capture:
        assert call(stream) == (UNSUPPORTED,)
        assert capture.status == INVALIDATED


@pytest.mark.parametrize(
    "call",
    [driver.cuStreamGetId, driver.cuStreamGetFlags, driver.cuStreamGetDevice],
    ids=lambda call: call.__name__,
)
def test_properties_that_a_capturing_stream_does_not_tell(stream, call):
    with Capture(stream) as capture:
        assert call(stream)[0] == UNSUPPORTED
        assert capture.status == INVALIDATED


@pytest.mark.parametrize(
    "call",
    [driver.cuStreamGetPriority, driver.cuStreamGetCtx],
    ids=lambda call: call.__name__,
)
def test_other_properties_of_a_capturing_stream(stream, call):
    with Capture(stream) as capture:
        assert call(stream)[0] == SUCCESS
        assert capture.status == ACTIVE


def test_capture_info_names_the_capture(stream):
    with Capture(stream):
        status, capture_id, *_ = ok(driver.cuStreamGetCaptureInfo(stream))
        assert status == ACTIVE
        assert int(capture_id) > 0


def test_capture_info_of_an_idle_stream(stream):
    assert ok(driver.cuStreamGetCaptureInfo(stream))[0] == NOT_CAPTURING


def test_capture_ids_differ(stream):
    ids = []
    for _ in range(3):
        with Capture(stream):
            ids.append(int(ok(driver.cuStreamGetCaptureInfo(stream))[1]))
    assert len(set(ids)) == 3


def test_work_after_the_invalidation_is_refused(stream, word):
    with Capture(stream):
        driver.cuStreamSynchronize(stream)
        answer = driver.cuStreamWriteValue32(stream, word.address, 1, 0)
        assert answer == (CAPTURE_INVALIDATED,)


def test_a_record_after_the_invalidation_is_refused(stream, event):
    with Capture(stream):
        driver.cuStreamSynchronize(stream)
        assert driver.cuEventRecord(event, stream) == (CAPTURE_INVALIDATED,)


# ---- events in a capture ----------------------------------------------------


def test_a_captured_record_is_no_node(stream, event):
    with Capture(stream) as capture:
        assert driver.cuEventRecord(event, stream) == (SUCCESS,)
        graph = ok(capture.end())
    assert node_count(graph) == 0
    ok(driver.cuGraphDestroy(graph))


@pytest.mark.parametrize(
    "call", [driver.cuEventQuery, driver.cuEventSynchronize], ids=lambda call: call.__name__
)
def test_a_captured_event_cannot_be_asked(stream, event, call):
    with Capture(stream, RELAXED):
        ok(driver.cuEventRecord(event, stream))
        assert call(event) == (CAPTURED_EVENT,)


def test_asking_a_captured_event_invalidates_its_capture(stream, event):
    with Capture(stream, RELAXED) as capture:
        ok(driver.cuEventRecord(event, stream))
        driver.cuEventQuery(event)
        assert capture.status == INVALIDATED


def test_a_record_outside_makes_the_event_ordinary_again(make_stream, event):
    captured, free = make_stream(), make_stream()
    with Capture(captured, RELAXED) as capture:
        ok(driver.cuEventRecord(event, captured))
        ok(driver.cuEventRecord(event, free))
        assert finishes(free)
        assert driver.cuEventQuery(event) == (SUCCESS,)
        assert capture.status == ACTIVE


def test_a_captured_event_pulls_a_stream_into_the_capture(make_stream, event):
    origin, joined = make_stream(), make_stream()
    with Capture(origin):
        assert fork(origin, event, joined) == (SUCCESS,)
        assert ok(driver.cuStreamIsCapturing(joined)) == ACTIVE


def test_a_joined_stream_has_the_id_of_the_capture(make_stream, event):
    origin, joined = make_stream(), make_stream()
    with Capture(origin):
        ok(fork(origin, event, joined))
        info = [int(ok(driver.cuStreamGetCaptureInfo(one))[1]) for one in (origin, joined)]
        assert info[0] == info[1]


def test_a_blocking_stream_can_be_pulled_in(make_stream, event):
    origin, joined = make_stream(), make_stream(BLOCKING)
    with Capture(origin):
        assert fork(origin, event, joined) == (SUCCESS,)
        assert ok(driver.cuStreamIsCapturing(joined)) == ACTIVE


def test_fork_and_join(make_stream, make_event, word):
    origin, joined = make_stream(), make_stream()
    with Capture(origin) as capture:
        word.write(origin, 1)
        ok(fork(origin, make_event(), joined))
        word.write(joined, 2)
        ok(fork(joined, make_event(), origin))
        graph = ok(capture.end())
    assert node_count(graph) == 2
    assert ok(driver.cuStreamIsCapturing(joined)) == NOT_CAPTURING
    ok(driver.cuGraphDestroy(graph))


def test_work_that_was_not_joined(make_stream, event, word):
    origin, joined = make_stream(), make_stream()
    with Capture(origin) as capture:
        word.write(origin, 1)
        ok(fork(origin, event, joined))
        word.write(joined, 2)
        assert capture.end_result() == UNJOINED
    assert ok(driver.cuStreamIsCapturing(joined)) == NOT_CAPTURING
    assert finishes(joined)


def test_a_fork_without_work_needs_no_join(make_stream, event, word):
    origin, joined = make_stream(), make_stream()
    with Capture(origin) as capture:
        word.write(origin, 1)
        ok(fork(origin, event, joined))
        assert capture.end_result() == SUCCESS


@pytest.mark.parametrize("joined_first", [True, False], ids=["joined", "not joined"])
def test_a_stream_that_was_pulled_in_can_be_destroyed(make_stream, make_event, word, joined_first):
    """The capture goes on without it, but what it did has to be joined."""
    origin, pulled_in = make_stream(), ok(driver.cuStreamCreate(1))
    with Capture(origin) as capture:
        word.write(origin, 1)
        ok(fork(origin, make_event(), pulled_in))
        word.write(pulled_in, 2)
        if joined_first:
            ok(fork(pulled_in, make_event(), origin))
        ok(driver.cuStreamDestroy(pulled_in))
        assert capture.status == ACTIVE
        word.write(origin, 3)
        answer = capture.end()
    if joined_first:
        graph = ok(answer)
        assert node_count(graph) == 3
        ok(driver.cuGraphDestroy(graph))
    else:
        assert answer[0] == UNJOINED


def test_many_forks_and_joins_end_at_once(make_stream, make_event, word):
    """The paths through the graph double with each of them."""
    origin, other = make_stream(), make_stream()
    there, back = make_event(), make_event()
    with Capture(origin) as capture:
        for _ in range(100):
            ok(fork(origin, there, other))
            word.write(origin, 1)
            word.write(other, 2)
            ok(fork(other, back, origin))
        graph = ok(capture.end())
    assert node_count(graph) == 200
    ok(driver.cuGraphDestroy(graph))


@pytest.mark.simulated
def test_a_long_capture(make_stream, make_event, word):
    """Whether all is joined is asked of every node that came before the end."""
    origin, other = make_stream(), make_stream()
    with Capture(origin) as capture:
        ok(fork(origin, make_event(), other))
        word.write(other, 1)
        ok(fork(other, make_event(), origin))
        for _ in range(200_000):
            word.write(origin, 1)
        graph = ok(capture.end())
    assert node_count(graph) == 200_001
    ok(driver.cuGraphDestroy(graph))


def test_more_dependencies_than_most_captures_have(stream):
    with Capture(stream, RELAXED) as capture:
        graph, _ = capturing(stream)
        nodes = [ok(driver.cuGraphAddEmptyNode(graph, None, 0)) for _ in range(5000)]
        ok(set_dependencies(stream, nodes))
        _, dependencies = capturing(stream)
        assert [int(node) for node in dependencies] == [int(node) for node in nodes]
        assert capture.end_result() == SUCCESS


@pytest.mark.parametrize("foreign", ["of another graph", "null"])
def test_a_capture_depends_on_nodes_of_its_own_graph(stream, foreign):
    other = ok(driver.cuGraphCreate(0))
    node = driver.CUgraphNode(0)
    if foreign == "of another graph":
        node = ok(driver.cuGraphAddEmptyNode(other, None, 0))
    with Capture(stream, RELAXED):
        assert set_dependencies(stream, [node])[0] == INVALID_VALUE
    ok(driver.cuGraphDestroy(other))


@pytest.mark.parametrize("foreign", ["of another graph", "null"])
def test_a_capture_into_a_graph_begins_after_nodes_of_that_graph(stream, foreign):
    graph, other = ok(driver.cuGraphCreate(0)), ok(driver.cuGraphCreate(0))
    node = driver.CUgraphNode(0)
    if foreign == "of another graph":
        node = ok(driver.cuGraphAddEmptyNode(other, None, 0))
    answer = driver.cuStreamBeginCaptureToGraph(stream, graph, [node], None, 1, RELAXED)
    assert answer == (INVALID_VALUE,)
    assert ok(driver.cuStreamIsCapturing(stream)) == NOT_CAPTURING
    ok(driver.cuGraphDestroy(other))
    ok(driver.cuGraphDestroy(graph))


@pytest.mark.simulated
@pytest.mark.parametrize("handle", [0xDEAD0, (1 << 64) - 8], ids=hex)
def test_nodes_that_are_none(stream, handle):
    """A real driver may follow them."""
    graph, node = ok(driver.cuGraphCreate(0)), driver.CUgraphNode(handle)
    answer = driver.cuStreamBeginCaptureToGraph(stream, graph, [node], None, 1, RELAXED)
    assert answer == (INVALID_VALUE,)
    with Capture(stream, RELAXED):
        assert set_dependencies(stream, [node])[0] == INVALID_VALUE
    assert driver.cuGraphAddEmptyNode(graph, [node], 1)[0] == INVALID_VALUE
    ok(driver.cuGraphDestroy(graph))


@pytest.mark.simulated
def test_a_graph_outlives_the_capture_into_it(stream, word):
    """A real driver may add nodes to what is gone."""
    graph = ok(driver.cuGraphCreate(0))
    ok(driver.cuStreamBeginCaptureToGraph(stream, graph, None, None, 0, RELAXED))
    assert driver.cuGraphDestroy(graph) == (INVALID_VALUE,)
    word.write(stream, 1)
    assert int(ok(driver.cuStreamEndCapture(stream))) == int(graph)
    ok(driver.cuGraphDestroy(graph))


def test_waiting_for_work_outside_is_refused(make_stream, event):
    captured, free = make_stream(), make_stream()
    ok(driver.cuEventRecord(event, free))
    with Capture(captured) as capture:
        assert driver.cuStreamWaitEvent(captured, event, 0) == (ISOLATION,)
        assert capture.status == INVALIDATED


def test_two_captures_cannot_merge(make_stream, event):
    first, second = make_stream(), make_stream()
    with Capture(first, RELAXED) as one, Capture(second, RELAXED) as two:
        assert fork(first, event, second) == (MERGE,)
        assert one.status == INVALIDATED
        assert two.status == INVALIDATED


def test_the_legacy_stream_cannot_be_pulled_in(stream, event):
    with Capture(stream) as capture:
        ok(driver.cuEventRecord(event, stream))
        assert driver.cuStreamWaitEvent(LEGACY, event, 0) == (IMPLICIT,)
        assert capture.status == INVALIDATED


def test_an_external_record_is_a_node(stream, event):
    with Capture(stream) as capture:
        assert driver.cuEventRecordWithFlags(event, stream, 1) == (SUCCESS,)
        graph = ok(capture.end())
    assert node_count(graph) == 1
    ok(driver.cuGraphDestroy(graph))


def test_an_external_wait_is_a_node(make_stream, event):
    free, captured = make_stream(), make_stream()
    ok(driver.cuEventRecord(event, free))
    with Capture(captured) as capture:
        assert driver.cuStreamWaitEvent(captured, event, 1) == (SUCCESS,)
        graph = ok(capture.end())
    assert node_count(graph) == 1
    ok(driver.cuGraphDestroy(graph))


# ---- the legacy stream beside a capture -------------------------------------


def test_legacy_and_a_captured_non_blocking_stream_do_not_mind(stream, event):
    with Capture(stream, RELAXED) as capture:
        assert ok(driver.cuStreamIsCapturing(LEGACY)) == NOT_CAPTURING
        assert driver.cuEventRecord(event, LEGACY) == (SUCCESS,)
        assert capture.status == ACTIVE


@modes
def test_asking_legacy_beside_a_captured_blocking_stream(make_stream, mode):
    with Capture(make_stream(BLOCKING), mode) as capture:
        assert driver.cuStreamIsCapturing(LEGACY)[0] == IMPLICIT
        assert driver.cuStreamGetCaptureInfo(LEGACY)[0] == IMPLICIT
        assert capture.status == ACTIVE


@modes
def test_using_legacy_beside_a_captured_blocking_stream(make_stream, event, mode):
    with Capture(make_stream(BLOCKING), mode) as capture:
        assert driver.cuEventRecord(event, LEGACY) == (IMPLICIT,)
        assert capture.status == INVALIDATED


def test_work_on_legacy_beside_a_captured_blocking_stream(make_stream, word):
    with Capture(make_stream(BLOCKING), RELAXED) as capture:
        assert driver.cuStreamWriteValue32(LEGACY, word.address, 1, 0) == (IMPLICIT,)
        assert capture.status == INVALIDATED


def test_a_captured_per_thread_stream_is_a_blocking_one(event):
    with Capture(PER_THREAD, RELAXED) as capture:
        assert driver.cuEventRecord(event, LEGACY) == (IMPLICIT,)
        assert capture.status == INVALIDATED


def test_another_blocking_stream_beside_a_captured_one(make_stream, word):
    free = make_stream(BLOCKING)
    with Capture(make_stream(BLOCKING), RELAXED) as capture:
        word.write(free, 1)
        assert finishes(free)
        assert capture.status == ACTIVE
    assert word.value == 1


# ---- the mode of a thread ---------------------------------------------------


def test_the_mode_of_a_thread_starts_as_global():
    before = elsewhere(lambda: ok(driver.cuThreadExchangeStreamCaptureMode(RELAXED)))
    assert before == GLOBAL


def test_exchange_gives_the_mode_before():
    def modes_seen():
        return [
            ok(driver.cuThreadExchangeStreamCaptureMode(mode))
            for mode in (THREAD_LOCAL, RELAXED, GLOBAL, GLOBAL)
        ]

    assert elsewhere(modes_seen) == [GLOBAL, THREAD_LOCAL, RELAXED, GLOBAL]


def test_the_mode_belongs_to_the_thread():
    ok(driver.cuThreadExchangeStreamCaptureMode(RELAXED))
    there = elsewhere(lambda: ok(driver.cuThreadExchangeStreamCaptureMode(GLOBAL)))
    assert ok(driver.cuThreadExchangeStreamCaptureMode(GLOBAL)) == RELAXED
    assert there == GLOBAL


def test_the_mode_needs_no_context():
    assert elsewhere(lambda: driver.cuThreadExchangeStreamCaptureMode(GLOBAL))[0] == SUCCESS


# ---- waits for values -------------------------------------------------------


def test_a_wait_for_a_value_is_a_node(stream, word):
    with Capture(stream) as capture:
        assert driver.cuStreamWaitValue32(stream, word.address, 1, 0) == (SUCCESS,)
        graph = ok(capture.end())
    assert node_count(graph) == 1
    ok(driver.cuGraphDestroy(graph))
    assert finishes(stream)
