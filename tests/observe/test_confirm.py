"""Races that are made to happen, and suspicions that are shown to be none."""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver
from cuda.core import LaunchConfig, ObjectCode, launch

import userstream as us
from helpers import checked, device_current, run_python
from observed import LEGACY, SIZE, Room, a_room, captured, copy, handle, judge_of, overwrite
from userstream import testing

pytestmark = [
    pytest.mark.simulated,
    pytest.mark.no_races(False),  # they watch themselves
]

HOLD = 0.02  # seconds, at the most
Grid = tuple[int, int, int]


@pytest.fixture
def room() -> Iterator[Room]:
    with a_room() as room:
        for stream in (room.a, room.b):  # what is known of a stream before it is used again
            fill(room.pinned, stream, 1)
        yield room


def fill(address: int, stream: us.Stream | int, size: int = SIZE) -> None:
    checked(driver.cuMemsetD8Async(address, 7, size, handle(stream)))


def watched(
    body: Callable[[], object], times: int = 8, confirm: bool | int = True, **options: Any
) -> us.Observation:
    """Watch turns of a program; each is judged before the next one begins."""
    with us.observe(confirm=confirm, **options) as seen:
        for _ in range(times):
            body()
            checked(driver.cuCtxSynchronize())
            seen.races  # noqa: B018 -- asks
    return seen


def races_of(seen: us.Observation) -> list[us.Race]:
    """Return the races, certain or not."""
    report = seen._report()
    return [found.what for found in (*report.certain, *report.possible)]


def is_decided(race: us.Race) -> bool:
    return race.confirmed is not None


def is_remedied(race: us.Race) -> bool:
    return race.remedied is not None


def tried(
    body: Callable[[], object],
    done: Callable[[us.Race], bool] = is_decided,
    times: int = 8,
    **options: Any,
) -> tuple[us.Observation, us.Race]:
    """Watch a program until a race of it has been tried: on a busy machine few trials count."""
    for _ in range(64 // times):
        seen = watched(body, times, **options)
        found = list(filter(done, races_of(seen)))
        if found:
            break
    return seen, (found or races_of(seen))[0]


# -- races that happen ----------------------------------------------------------------------------


def read_too_early(room: Room) -> None:
    fill(room.x, room.a)
    copy(room.y, room.x, room.b)


def overwritten(room: Room) -> None:
    copy(room.y, room.x, room.a)
    fill(room.x, room.b)


def both_from_one_line(room: Room) -> None:
    for stream in (room.a, room.b):
        fill(room.x, stream)


def beside_the_default_stream(room: Room) -> None:
    fill(room.x, LEGACY)
    copy(room.y, room.x, room.b)


def read_by_the_host(room: Room) -> None:
    out = (ctypes.c_char * SIZE)()
    fill(room.x, room.a)
    checked(driver.cuMemcpyDtoH(ctypes.addressof(out), room.x, SIZE))


@testing.kernel("confirm_add")
def add(grid: Grid, block: Grid, address: testing.Pointer) -> None:
    address.array(1, np.uint8)[0] += 1


@testing.kernel("ncclDevKernel_confirm")
def reduced(grid: Grid, block: Grid, address: testing.Pointer) -> None:
    address.array(1, np.uint8)[0] += 1


def kernel_of(name: str) -> Any:
    return ObjectCode.from_ptx(b"any").get_kernel(name)


def run(kernel: Any, address: int, stream: us.Stream) -> None:
    launch(stream, LaunchConfig(grid=1, block=1), kernel, address)


def on_the_own_streams_of_two_threads(room: Room) -> None:
    """Both have the same handle."""
    context = checked(driver.cuCtxGetCurrent())
    per_thread = int(driver.CU_STREAM_PER_THREAD)

    def produce() -> None:
        checked(driver.cuCtxSetCurrent(context))
        fill(room.x, per_thread)

    thread = threading.Thread(target=produce)
    thread.start()
    thread.join()
    copy(room.y, room.x, per_thread)


def beside_a_thread_that_ends(room: Room) -> None:
    """It gives up its reference to the primary context, as a thread that used cuda.core does."""

    def use() -> None:
        checked(driver.cuCtxSetCurrent(checked(driver.cuDevicePrimaryCtxRetain(0))))
        checked(driver.cuDevicePrimaryCtxRelease(0))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    read_too_early(room)


def freed_too_early(room: Room) -> None:
    memory = int(checked(driver.cuMemAllocAsync(SIZE, handle(room.a))))
    room.b.wait(room.a)
    with testing.latch(room.a):  # else the fill would fail in the turns without a hold
        checked(driver.cuMemFreeAsync(memory, handle(room.a)))
        fill(memory, room.b)
        room.b.sync()


WRONG = [
    read_too_early,
    overwritten,
    both_from_one_line,
    beside_the_default_stream,
    read_by_the_host,
    freed_too_early,
    on_the_own_streams_of_two_threads,
    beside_a_thread_that_ends,
]


@pytest.mark.parametrize("body", WRONG)
def test_a_race_is_made_to_happen(body: Callable[[Room], None], room: Room) -> None:
    is_edge = body is not freed_too_early
    seen, race = tried(lambda: body(room), is_remedied if is_edge else is_decided)
    assert seen.races == (race,)
    assert race.confirmed is True
    assert race.remedied is (True if is_edge else None)
    assert "made to happen: second ran while first was held" in str(seen)


def test_a_graph_is_held_as_a_whole(room: Room) -> None:
    graphs: list[Any] = []

    def body() -> None:
        if not graphs:
            graphs.append(captured(room, lambda: fill(room.x, room.a)))
        checked(driver.cuGraphLaunch(graphs[0], handle(room.a)))
        copy(room.y, room.x, room.b)

    _, race = tried(body, is_remedied)
    assert (race.confirmed, race.remedied) == (True, True)


def test_the_fix_is_tried_on_streams_of_one_turn(room: Room) -> None:
    """The stream of the second is not known when the first is held."""

    def body() -> None:
        with us.Stream.create(0) as a, us.Stream.create(0) as b:
            fill(room.x, a)
            fill(room.x, b)
            b.sync()

    _, race = tried(body, is_remedied)
    assert (race.confirmed, race.remedied) == (True, True)


@pytest.mark.multi_device
def test_a_wait_for_another_device_releases_nothing(room: Room) -> None:
    def body() -> None:
        fill(room.x, room.a)
        with device_current(1):
            checked(driver.cuCtxSynchronize())
            checked(driver.cuStreamSynchronize(LEGACY))
        copy(room.y, room.x, room.b)

    _, race = tried(body)
    assert race.confirmed is True


def test_of_several_operations_of_a_line_any_may_race(room: Room) -> None:
    kernel = kernel_of("confirm_add")

    def body() -> None:
        for address, stream in ((room.x, room.a), (room.y, room.b), (room.x, room.b)):
            run(kernel, address, stream)

    _, race = tried(body)
    assert race.confirmed is True


def test_a_host_that_overwrites_a_source_is_faster_than_the_copy(room: Room) -> None:
    def body() -> None:
        overwrite(room.pinned, 1)
        copy(room.x, room.pinned, room.a)
        overwrite(room.pinned, 2)

    seen, race = tried(body)
    assert (race.confirmed, race.remedied) == (True, None)
    assert "the fix was not tried" in str(seen)


def test_what_may_have_told_the_program_has_not(room: Room) -> None:
    """A future makes the race possible only, until it is made to happen."""

    def body() -> None:
        fill(room.x, room.a)
        us.completion(room.a)
        copy(room.y, room.x, room.b)

    _, race = tried(body)
    assert (race.confirmed, race.possible) == (True, False)


def test_a_log_says_the_same(room: Room, tmp_path: Path) -> None:
    log = tmp_path / "run.uslog"
    seen = watched(lambda: read_too_early(room), log=log)
    (race,) = judge_of(log).races()
    assert race == seen.races[0]


def test_a_hold_is_no_stall_of_the_program(room: Room) -> None:
    stalls = (watched(lambda: read_too_early(room), stall=HOLD / 2).stalls for _ in range(5))
    assert not all(stalls)  # a busy machine has some of its own


# -- races of an earlier report, whose lines run once ---------------------------------------------


def host_overwrites_a_source(room: Room) -> None:
    copy(room.x, room.pinned, room.a)
    overwrite(room.pinned, 1 + ctypes.c_ubyte.from_address(room.pinned).value % 2)


def calls_over_several_lines(room: Room) -> None:
    """Their instructions refer to the first lines again, after those of the arguments."""
    checked(
        driver.cuMemsetD8Async(
            room.x,
            7,
            SIZE,
            handle(room.a),
        )
    )
    checked(
        driver.cuMemsetD8Async(
            room.x,
            7,
            SIZE,
            handle(room.b),
        )
    )


RUN_ONCE = [each for each in WRONG if each is not freed_too_early]


@pytest.mark.parametrize("body", [*RUN_ONCE, host_overwrites_a_source, calls_over_several_lines])
def test_a_race_of_a_report_is_tried_the_first_time(
    body: Callable[[Room], None], room: Room, tmp_path: Path
) -> None:
    report = tmp_path / "seen.json"
    watched(lambda: body(room), 1, confirm=False).save(report)
    _, race = tried(lambda: body(room), times=1, confirm=False, confirm_from=report)
    assert race.confirmed is True
    with us.observe(confirm_from=report) as seen:  # what has the line, and no race
        fill(room.x, room.a)
        room.b.wait(room.a)
        copy(room.y, room.x, room.b)
    assert not seen.races


def test_a_race_of_a_report_gets_the_usual_trials_as_well(room: Room, tmp_path: Path) -> None:
    report = tmp_path / "seen.json"
    watched(lambda: read_too_early(room), 1, confirm=False).save(report)
    _, race = tried(lambda: read_too_early(room), is_remedied, times=4, confirm_from=report)
    assert (race.confirmed, race.remedied) == (True, True)


def test_a_trial_of_a_report_may_show_nothing(room: Room, tmp_path: Path) -> None:
    def body() -> None:
        with testing.latch(room.b):
            read_too_early(room)
            time.sleep(2 * HOLD)

    report = tmp_path / "seen.json"
    watched(body, 1, confirm=False).save(report)
    (race,) = watched(body, 1, confirm_from=report).races
    assert race.confirmed is None
    assert race.undecided.startswith("a trial without a result")


@pytest.mark.parametrize(("loading", "confirmed"), [("LAZY", None), ("EAGER", True)])
def test_a_first_launch_is_held_where_kernels_are_loaded(
    loading: str,
    confirmed: bool | None,
    room: Room,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_MODULE_LOADING", loading)
    kernels: list[Any] = []

    def body() -> None:
        kernels.append(kernel_of("confirm_add"))
        run(kernels[-1], room.x, room.a)
        copy(room.y, room.x, room.b)

    report = tmp_path / "seen.json"
    watched(body, 1, confirm=False).save(report)
    options: dict[str, Any] = {"times": 1, "confirm_from": report}
    seen = tried(body, **options)[0] if confirmed else watched(body, **options)
    assert seen.races[0].confirmed is confirmed


@pytest.mark.parametrize("text", ["", "{}", '{"races": [{}], "possible": []}'])
def test_a_file_that_is_no_report(text: str, tmp_path: Path) -> None:
    (tmp_path / "seen.json").write_text(text)
    with pytest.raises(ValueError, match=r"seen\.json: not a report as JSON"):
        us.observe(confirm_from=tmp_path / "seen.json")


# -- suspicions that are none ---------------------------------------------------------------------


def test_the_host_may_know_what_is_not_seen(room: Room) -> None:
    """It looks at memory that a copy changes, as `observe` cannot see."""
    flag = (ctypes.c_ubyte * SIZE).from_address(room.pinned)

    def body() -> None:
        flag[0] = 0
        fill(room.x, room.a)
        copy(room.pinned, room.x, room.a)
        while flag[0] != 7:
            time.sleep(0)
        copy(room.y, room.x, room.b)

    seen, race = tried(body)
    assert race.confirmed is False
    assert not seen.races
    assert "suspected, but ordered by something not seen (tried 3 times)" in str(seen)
    assert "the second waited for it, in 3 trials" in race.reason


@pytest.fixture
def told() -> Iterator[threading.Event]:
    """By which one kernel waits for another: no mechanism of CUDA."""
    told = threading.Event()

    @testing.kernel("confirm_tell")
    def tell(grid: Grid, block: Grid, address: testing.Pointer) -> None:
        told.set()

    @testing.kernel("confirm_hear")
    def hear(grid: Grid, block: Grid, address: testing.Pointer) -> None:
        told.wait(10)
        told.clear()
        address.array(1, np.uint8)[0] = 1

    return told


def test_a_race_of_a_report_may_be_shown_to_be_ordered(
    room: Room, told: threading.Event, tmp_path: Path
) -> None:
    """The driver may load its kernels at first."""
    tell, hear = kernel_of("confirm_tell"), kernel_of("confirm_hear")

    def body() -> None:
        run(tell, room.x, room.a)
        run(hear, room.x, room.b)

    report = tmp_path / "seen.json"
    watched(body, 1, confirm=False).save(report)
    seen, race = tried(body, confirm=False, confirm_from=report)
    assert race.confirmed is False
    assert "suspected, but ordered by something not seen (tried 3 times)" in str(seen)


@pytest.mark.parametrize("is_busy", [False, True], ids=["", "behind other work"])
def test_a_kernel_may_wait_for_another(is_busy: bool, room: Room, told: threading.Event) -> None:
    """A trial counts only if nothing else held up the second: a small operation got through."""
    tell, hear = kernel_of("confirm_tell"), kernel_of("confirm_hear")

    def body() -> None:
        with ExitStack() as stack:
            if is_busy:
                stack.enter_context(testing.latch(room.b))
            run(tell, room.x, room.a)
            run(hear, room.x, room.b)
            if is_busy:
                time.sleep(2 * HOLD)

    race = races_of(watched(body))[0] if is_busy else tried(body)[1]
    assert race.confirmed is (None if is_busy else False)


@testing.kernel("confirm_slow")
def slow(grid: Grid, block: Grid, address: testing.Pointer) -> None:
    time.sleep(2 * HOLD)


def slow_itself(room: Room, kernel: Any) -> None:
    run(kernel, room.x, room.b)


def behind_slow_work(room: Room, kernel: Any) -> None:
    run(kernel, room.y, room.b)
    fill(room.x, room.b)


def in_a_call_behind_slow_work(room: Room, kernel: Any) -> None:
    out = (ctypes.c_char * SIZE)()
    run(kernel, room.y, room.b)
    copy(ctypes.addressof(out), room.x, room.b)  # pageable: the host waits for the stream


@pytest.mark.parametrize("second", [slow_itself, behind_slow_work, in_a_call_behind_slow_work])
def test_a_second_that_is_slow_anyway_has_not_waited(
    second: Callable[[Room, Any], None], room: Room
) -> None:
    """It takes longer than a hold, so a trial shows nothing. The free turn between them tells."""
    kernel = kernel_of("confirm_slow")

    def body() -> None:
        fill(room.x, room.a)
        second(room, kernel)

    for race in races_of(watched(body, 6)):
        assert race.confirmed is not False


def test_the_second_may_have_got_other_memory(room: Room) -> None:
    """As with `record_stream`: what ran before the first was no race with it."""
    turns = iter(range(100))

    def body() -> None:
        fill(room.x, room.a)
        copy(room.pinned, room.y if next(turns) else room.x, room.b)

    (race,) = races_of(watched(body))
    assert race.confirmed is None
    assert re.match(r"(a trial|\d trials) without a result", race.undecided)


def test_a_report_says_why_nothing_is_shown(room: Room) -> None:
    seen = watched(lambda: read_too_early(room), times=1)
    assert "not made to happen: the line of the first operation did not run again" in str(seen)
    seen = watched(lambda: read_too_early(room), confirm=False)
    assert seen.races[0].undecided == ""
    _, race = tried(lambda: read_too_early(room))
    assert race.undecided == ""


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
        threads = [threading.Thread(target=work) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert seen.races


# -- the command ----------------------------------------------------------------------------------

PROGRAM = """
import ctypes, time
from cuda.bindings import driver
import userstream as us

def ok(result):
    assert not result[0], result
    return result[1] if len(result) > 1 else None

a, b = us.get_stream(0, name="a"), us.get_stream(0, name="b")
ok(driver.cuCtxSetCurrent(ok(driver.cuDevicePrimaryCtxRetain(0))))
x = ok(driver.cuMemAlloc(4096))
flag = us.pinned_empty(4096, "u1")
for _ in range(30):
    flag[0] = 0
    ok(driver.cuMemsetD8Async(x, 7, 4096, a.handle))
    ok(driver.cuMemcpyAsync(flag.ctypes.data, int(x), 4096, a.handle))
    while WAITS and flag[0] != 7:
        time.sleep(0)
    ok(driver.cuMemsetD8Async(x, 0, 4096, b.handle))
    ok(driver.cuCtxSynchronize())
    time.sleep(0.02)
"""


def program_of_lines_that_run_once(tmp_path: Path) -> str:
    """Return a program without a loop; a report of it is in ``seen.json``."""
    head, _, body = PROGRAM.replace("WAITS", "False").partition("for _ in range(30):\n")
    program = head + 5 * textwrap.dedent(body)
    lines = program.splitlines()
    operations = [
        {"line": [str(tmp_path / "program.py"), number, "<module>"], "stream": "a", "handle": 1}
        for number, line in enumerate(lines, 1)
        if "cuMemsetD8Async" in line
    ]
    pairs = zip(operations[::2], operations[1::2], strict=True)
    races = [{"first": first, "second": second} for first, second in pairs]
    (tmp_path / "seen.json").write_text(json.dumps({"races": races, "possible": []}))
    return program


@pytest.mark.parametrize("waits", [False, True])
def test_the_command(waits: bool, tmp_path: Path) -> None:
    if waits:
        program, options = PROGRAM.replace("WAITS", "True"), ["--confirm"]
    else:
        program = program_of_lines_that_run_once(tmp_path)
        options = ["--confirm-from", "seen.json"]
    (tmp_path / "program.py").write_text(program)
    command = [sys.executable, "-m", "userstream", "observe", "--simulate", *options]
    said = "ordered by something not seen" if waits else "made to happen"
    for _ in range(4):  # see `tried`
        done = subprocess.run(
            [*command, "--fail-on", "confirmed", "program.py"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        if said in done.stderr:
            break
    assert said in done.stderr, done.stderr
    assert done.returncode == (0 if waits else 66), done.stderr


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"confirm": "yes"}, TypeError),
        ({"confirm": -1}, ValueError),
        ({"confirm": (100, -1)}, ValueError),
        ({"confirm": (100, 5, 1)}, TypeError),
        ({"confirm": True, "judge": "later", "log": "run.uslog"}, ValueError),
    ],
)
def test_wrong_options(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match="confirm"):
        us.observe(**options)
