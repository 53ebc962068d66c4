"""What `observe` never holds in order to make a race happen, and what ends a hold."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver

import userstream as us
from confirming import HOLD, a_used_room, fill, kernel_of, read_too_early, run, watched
from helpers import checked, in_threads, run_python
from observed import SIZE, Room, a_room, copy, handle
from userstream import testing

pytestmark = [
    pytest.mark.simulated,
    pytest.mark.no_races(False),  # they watch themselves
]

Grid = tuple[int, int, int]


@pytest.fixture
def room() -> Iterator[Room]:
    with a_used_room() as room:
        yield room


@testing.kernel("ncclDevKernel_confirm")
def reduced(grid: Grid, block: Grid, address: testing.Pointer) -> None:
    address.array(1, np.uint8)[0] += 1


# -- what is never held ---------------------------------------------------------------------------


def holds() -> int:
    return testing.calls("cuStreamWaitValue32")


def test_nothing_is_held_without_a_suspicion(room: Room) -> None:
    def body() -> None:
        fill(room.x, room.a)
        room.b.wait(room.a)
        copy(room.y, room.x, room.b)

    assert not watched(body).races
    assert not holds()


def test_nothing_is_held_unless_that_is_asked_for(room: Room) -> None:
    assert watched(lambda: read_too_early(room), confirm=False).races[0].confirmed is None
    assert not holds()


def test_a_hold_does_not_become_a_part_of_a_graph(room: Room) -> None:
    graphs: list[Any] = []

    def body(is_captured: bool) -> None:
        if is_captured:
            relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
            checked(driver.cuStreamBeginCapture(handle(room.a), relaxed))
        fill(room.x, room.a)
        if is_captured:
            graphs.append(checked(driver.cuStreamEndCapture(handle(room.a))))
        fill(room.x, room.b)

    with us.observe(confirm=True) as seen:
        for is_captured in (False, True, True):
            body(is_captured)
            assert seen.races
    assert not holds()
    for graph in graphs:
        assert checked(driver.cuGraphGetNodes(graph))[1] == 1
        checked(driver.cuGraphDestroy(graph))


def test_a_stream_of_a_collective_is_not_held(room: Room) -> None:
    kernel = kernel_of("ncclDevKernel_confirm")
    run(kernel, room.y, room.a)

    def body() -> None:
        run(kernel, room.y, room.a)
        read_too_early(room)

    race = watched(body).races[0]
    assert race.confirmed is None
    assert race.undecided.endswith("or its stream could not be held")
    assert not holds()


@pytest.mark.parametrize("most", [1, 3])
def test_there_are_no_more_trials_than_wanted(most: int, room: Room) -> None:
    turns = iter(range(100))

    def body() -> None:
        for address in (room.x, room.y):  # two pairs of lines
            fill(address, room.a)
        elsewhere = room.pinned if next(turns) else room.x
        copy(room.pinned, elsewhere, room.b)
        copy(room.pinned, elsewhere, room.b)

    watched(body, 12, confirm=most)
    assert holds() == most


@pytest.mark.parametrize(("confirm", "most"), [(True, 5), ((100, 2), 2), ((1, 2), 1)])
def test_a_pair_is_tried_five_times_or_as_often_as_wanted(
    confirm: Any, most: int, room: Room
) -> None:
    turns = iter(range(100))

    def body() -> None:
        fill(room.x, room.a)
        copy(room.pinned, room.y if next(turns) else room.x, room.b)

    watched(body, 12, confirm=confirm)
    assert holds() == most


def test_a_device_may_be_unable_to_hold_a_stream(room: Room) -> None:
    """No attribute says so: the driver does, when a stream is to be held."""
    with testing.inject("cuStreamWaitValue32", driver.CUresult.CUDA_ERROR_NOT_SUPPORTED, 100):
        (race,) = watched(lambda: read_too_early(room)).races
    assert race.confirmed is None
    assert race.undecided.startswith("the device has no stream memory operations")
    assert holds() == 1


# -- the end of a hold ----------------------------------------------------------------------------


def in_turns(body: Callable[[int], object]) -> us.Observation:
    """Watch two turns of a program, of which the second may be held."""
    turns = iter(range(2))
    return watched(lambda: body(next(turns)), 2)


@pytest.mark.parametrize("call", ["free", "wait", "destroy", "fork"])
def test_a_call_that_would_wait_ends_it(call: str, room: Room) -> None:
    """Nothing is proved then, and nothing is delayed."""
    took: list[float] = []

    def body(turn: int) -> None:
        fill(room.x, first)
        if turn:
            began = time.monotonic()
            end_hold()
            took.append(time.monotonic() - began)
        copy(room.y, room.x, room.b)

    def end_hold() -> None:
        if call == "free":
            checked(driver.cuMemFree(memory))
        elif call == "wait":
            checked(driver.cuCtxSynchronize())
        elif call == "destroy":
            first.close()
        elif not (child := os.fork()):
            os._exit(0)
        else:
            os.waitpid(child, 0)
        checked(driver.cuCtxSynchronize())

    for _ in range(8):
        testing.reset()
        memory = checked(driver.cuMemAlloc(SIZE))
        first = us.Stream.create(0)
        seen = in_turns(body)
        assert holds() == 1
        assert seen.races[0].confirmed is None
        if call != "free":
            checked(driver.cuMemFree(memory))
        if call != "destroy":
            first.close()
        if call == "fork" or took[-1] < HOLD:
            break
    assert call == "fork" or took[-1] < HOLD


def test_it_ends_although_nobody_does_anything(room: Room) -> None:
    """The timer needs no GIL: a call of C has it here until the stream is done."""
    sleep = ctypes.PyDLL(None).usleep
    took: list[float] = []

    def body(turn: int) -> None:
        began = time.monotonic()
        fill(room.x, room.a)
        if turn:
            while not room.a.is_done:
                sleep(1000)
            took.append(time.monotonic() - began)
        copy(room.y, room.x, room.b)

    in_turns(body)
    assert holds() == 1
    assert HOLD < took[0] < 100 * HOLD


def test_it_ends_with_the_observation(room: Room) -> None:
    with us.observe(confirm=True) as seen:
        for turn in range(2):
            fill(room.x, room.a)
            if turn:
                seen.stop()
                assert room.a.sync(timeout=10) is None
            copy(room.y, room.x, room.b)
            assert seen.races
    assert holds() == 1


@pytest.mark.parametrize(
    ("end", "status"), [("os._exit(3)", 3), ("sys.exit(3)", 3), ("raise KeyboardInterrupt", -2)]
)
def test_a_program_ends_while_a_stream_is_held(end: str, status: int) -> None:
    done = run_python(f"""
        import os, sys
        from cuda.bindings import driver
        import userstream as us

        def ok(result):
            assert not result[0], result
            return result[1] if len(result) > 1 else None

        a, b = us.get_stream(0, name="a"), us.get_stream(0, name="b")
        ok(driver.cuCtxSetCurrent(ok(driver.cuDevicePrimaryCtxRetain(0))))
        x = ok(driver.cuMemAlloc(4096))
        with us.observe(confirm=True) as seen:
            for turn in range(2):
                ok(driver.cuMemsetD8Async(x, 1, 4096, a.handle))
                if turn:
                    {end}
                ok(driver.cuMemsetD8Async(x, 2, 4096, b.handle))
                assert seen.races
    """)
    assert done.returncode == status, done.stderr


def test_nothing_is_held_when_the_context_has_ended() -> None:
    """What holds need has ended with it."""
    done = run_python("""
        from cuda.bindings import driver
        import userstream as us
        from userstream import testing

        def ok(result):
            assert not result[0], result
            return result[1] if len(result) > 1 else None

        def turns(count):
            ok(driver.cuCtxSetCurrent(ok(driver.cuDevicePrimaryCtxRetain(0))))
            a, b = (ok(driver.cuStreamCreate(1)) for _ in range(2))
            x = ok(driver.cuMemAlloc(4096))
            for turn in range(count):
                for stream in (a, b):
                    ok(driver.cuMemsetD8Async(x, 1, 4096, stream))
                ok(driver.cuCtxSynchronize())
                assert seen.races
            return testing.calls("cuStreamWaitValue32")

        ok(driver.cuInit(0))
        with us.observe(confirm=True) as seen:
            turns(1)  # from here on the stream of the first would be held
            ok(driver.cuDevicePrimaryCtxReset(0))
            assert turns(4) == 0
    """)
    assert done.returncode == 0, done.stderr


def test_many_threads(room: Room) -> None:
    """One stream is held at a time, and each thread gets on."""

    def work() -> None:
        with a_room() as mine:
            for _ in range(20):
                read_too_early(mine)
                mine.a.sync()

    with us.observe(confirm=True) as seen:
        in_threads(work, 16)
        assert seen.races
