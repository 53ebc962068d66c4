"""Order from outside: external semaphores, which the simulated driver lacks, and processes."""

from __future__ import annotations

import struct

import pytest

from records import EVENT, GRAPH, SEMAPHORE, A, B, C, Program, X

WAITED = (
    "waits for external semaphores, for graphics or for values in nodes of graphs, which may order "
    "anything"
)


@pytest.mark.parametrize(
    ("wait", "words"),
    [
        ("cuWaitExternalSemaphoresAsync", (SEMAPHORE, 0, 1, B)),
        ("cuGraphicsMapResources", (1, 0, B)),
    ],
)
def test_a_race_behind_an_external_wait_is_only_possible(wait: str, words: tuple[int, ...]) -> None:
    program = Program()
    program.fill(A)
    program.call(wait, *words)
    program.fill(B)
    assert program.races == [True]
    assert program.judge.races()[0].reason.startswith("one of the two comes behind a wait for an")
    assert program.judge.not_seen() == (f"{WAITED} (1)",)


def test_the_signal_may_be_queued_after_the_work_behind_the_wait() -> None:
    program = Program()
    program.wait(B)
    program.fill(B)
    program.fill(A)
    program.signal(A)
    assert program.races == [True]


@pytest.mark.parametrize("by", ["event", "legacy default stream"])
def test_what_follows_a_stream_behind_an_external_wait_is_behind_it(by: str) -> None:
    program = Program()
    program.fill(A)
    if by == "event":
        program.wait(B)
        program.order(B, C)
        program.fill(C)
    else:
        blocking = 13
        program.see_stream(blocking, blocks=True)
        program.wait(blocking)
        program.fill(blocking, X + 4096)
        program.fill(1)
    assert program.races == [True]


def test_streams_that_are_behind_no_external_wait_race() -> None:
    program = Program()
    program.fill(C, X + 4096)
    program.wait(C)
    program.fill(A)
    program.fill(B)
    assert program.races == [False]


@pytest.mark.parametrize("before", [False, True])
def test_races_are_certain_again_once_the_host_knows_that_the_wait_is_over(before: bool) -> None:
    program = Program()
    if before:  # the wait may have ordered all that was queued until the host knew
        program.fill(A)
    program.wait(B)
    program.call("cuStreamSynchronize", B)
    if not before:
        program.fill(A)
    program.fill(B)
    assert program.races == [before]


def test_whom_a_signal_reaches_may_tell_the_host() -> None:
    program = Program()
    program.fill(A)
    program.signal(A)
    program.fill(B)
    assert program.races == [True]


def test_a_launch_of_a_graph_with_an_external_wait_is_behind_it() -> None:
    program = Program()
    program.fill(A)
    program.graph()
    program.node("ExternalSemaphoresWait", 1)
    program.node("Memset", 2, 1)
    program.launch(B)
    assert program.races == [True]
    assert program.judge.not_seen() == (f"{WAITED} (1)",)


def test_a_launch_of_a_graph_that_signals_may_tell_the_host() -> None:
    program = Program()
    program.graph()
    program.node("Memset", 1)
    program.node("ExternalSemaphoresSignal", 2, 1)
    program.launch(A)
    program.fill(B)
    assert program.races == [True]


@pytest.mark.parametrize("depends", [True, False])
def test_nodes_of_external_semaphores_order_the_nodes_around_them(depends: bool) -> None:
    program = Program()
    program.graph()
    program.node("Memset", 1)
    program.node("ExternalSemaphoresWait", 2, *([1] if depends else []))
    program.node("Memset", 3, 2)
    program.launch(A)
    assert program.races == ([] if depends else [True])


@pytest.mark.parametrize("launched", [False, True])
@pytest.mark.parametrize("what", ["wait", "signal"])
def test_an_external_semaphore_is_used_by_each_launch_of_a_capture(
    what: str, launched: bool
) -> None:
    program = Program()
    program.call("cuStreamBeginCapture_v2", B, 2)
    program.fill(B)
    getattr(program, what)(B)
    program.call("cuStreamEndCapture", B, 0, parts=(struct.pack("<Q", GRAPH),))
    if not launched:
        program.fill(B)
    elif what == "signal":
        program.launch(B)
    program.fill(A)
    if launched and what == "wait":
        program.launch(B)
    assert program.races == [launched]


def test_a_wait_inside_of_a_capture_may_order_what_is_captured() -> None:
    program = Program()
    program.call("cuStreamBeginCapture_v2", A, 2)
    program.order(A, B)
    program.fill(A)
    program.wait(B)
    program.fill(B)
    program.order(B, A)
    program.call("cuStreamEndCapture", A, 0, parts=(struct.pack("<Q", GRAPH),))
    assert program.races == [True]
    assert not program.judge._engine.world.clocks._external  # a program may capture in a loop


@pytest.mark.parametrize("opened", [False, True])
def test_another_process_may_record_an_event_that_is_recorded_here_as_well(opened: bool) -> None:
    program = Program()
    ours, theirs = 40, 41
    for event in (ours, theirs) if opened else ():
        program.call("cuIpcOpenEventHandle", 0, parts=(struct.pack("<Q", event),))
    program.call("cuEventRecord", theirs, B)
    program.fill(A)
    program.call("cuEventRecord", ours, A)
    program.call("cuStreamWaitEvent", B, theirs, 0)
    program.fill(B)
    assert program.races == [opened]
    if opened:
        said = "events of other processes, which may order anything told to these (2)"
        assert program.judge.not_seen() == (said,)


@pytest.mark.parametrize("is_green", [False, True])
@pytest.mark.parametrize("written", ["soon", "late"])
def test_a_context_that_waits_for_an_event_is_behind_the_values_that_its_stream_waits_for(
    written: str, is_green: bool
) -> None:
    program = Program()
    far, green, word, before = 14, 50, 0x20000, struct.pack("<QQ", 0, 0)
    program.see_stream(far, blocks=False, context=2)
    program.call("cuCtxFromGreenCtx", 0, green, parts=(struct.pack("<Q", 1),))
    program.call("cuStreamWaitValue32_v2", B, word, 1, 0, parts=(before,))
    program.call("cuEventRecord", EVENT, B)
    if is_green:
        program.call("cuGreenCtxWaitEvent", green, EVENT)
    else:
        program.call("cuCtxWaitEvent", 1, EVENT)
    if written == "late":
        program.fill(C)
    program.fill(far)
    program.call("cuStreamWriteValue32_v2", far, word, 1, 0, parts=(before,))
    if written == "soon":
        program.fill(C)
    assert program.races == []
    floors = program.judge._engine.world.clocks.floors
    assert not any(floor.held_by for floor in floors.values())  # a program may wait in a loop


def test_a_node_may_have_the_handle_of_one_that_is_gone() -> None:
    program = Program()
    program.graph()
    program.node("Memset", 1)
    program.call("cuGraphDestroy", GRAPH)
    program.graph()  # with the same handle, and without the node
    program.call("cuStreamBeginCapture_v2", B, 2)
    program.fill(B)
    captured, made = 25, 26
    program.call("cuStreamEndCapture", B, 0, parts=(struct.pack("<Q", captured),))
    other = struct.pack("<QQIIQQ", X + 4096, 0, 1, 1, 64, 1)
    program.call("cuGraphMemsetNodeSetParams", 1, 0, parts=(other,))  # the captured one
    parts = (struct.pack("<Q", made),)
    program.call("cuGraphInstantiateWithFlags", 0, captured, 0, parts=parts)
    program.call("cuGraphLaunch", made, B)
    program.fill(A)
    assert program.races == []
