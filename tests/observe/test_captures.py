"""`observe` and the captures that had begun before: it ends none of them."""

from __future__ import annotations

import pytest
from cuda.bindings import driver

import userstream as us
from helpers import checked
from observed import LEGACY, a_room, captured, copy, fill, handle

pytestmark = [
    pytest.mark.no_races(False),  # they watch themselves
    pytest.mark.usefixtures("can_be_watched"),
]

Mode = driver.CUstreamCaptureMode


@pytest.mark.parametrize("mode", list(Mode), ids=lambda mode: mode.name.rpartition("_")[2].lower())
def test_a_capture_goes_on_when_its_stream_is_seen(mode: driver.CUstreamCaptureMode) -> None:
    with a_room() as room:
        checked(driver.cuStreamBeginCapture(handle(room.a), mode))
        with us.observe() as seen:
            fill(room.x, room.a)
            copy(room.y, room.x, room.a)
        graph = checked(driver.cuStreamEndCapture(handle(room.a)))
        _, nodes = checked(driver.cuGraphGetNodes(graph, 0))
        checked(driver.cuGraphDestroy(graph))
    assert nodes == 2
    assert seen.races == ()


def test_what_a_stream_is_can_be_asked_after_its_capture() -> None:
    """It blocks: the legacy default stream waits for it, and it for that."""
    with a_room() as room:
        blocking = room.stream(nonblocking=False)
        relaxed = Mode.CU_STREAM_CAPTURE_MODE_RELAXED
        checked(driver.cuStreamBeginCapture(handle(blocking), relaxed))
        with us.observe() as seen:
            fill(room.y, blocking)
            fill(room.y, blocking)
            checked(driver.cuGraphDestroy(checked(driver.cuStreamEndCapture(handle(blocking)))))
            for stream in (blocking, LEGACY, blocking):
                fill(room.x, stream)
            assert seen.races == ()
            captured(room, lambda: fill(room.y, room.a))
            fill(room.x, room.b)
            assert seen.races != ()


def test_what_is_captured_to_a_graph_runs_with_the_graph() -> None:
    with a_room() as room, us.observe() as seen:
        graph = checked(driver.cuGraphCreate(0))
        relaxed = Mode.CU_STREAM_CAPTURE_MODE_RELAXED
        checked(driver.cuStreamBeginCaptureToGraph(handle(room.a), graph, None, None, 0, relaxed))
        fill(room.x, room.a)
        checked(driver.cuStreamEndCapture(handle(room.a)))
        executable = checked(driver.cuGraphInstantiate(graph, 0))
        checked(driver.cuGraphLaunch(executable, handle(room.a)))
        fill(room.x, room.b)
        assert len(seen.races) == 1
        checked(driver.cuGraphExecDestroy(executable))
        checked(driver.cuGraphDestroy(graph))
