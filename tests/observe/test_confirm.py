"""Races that are made to happen, and suspicions that are shown to be none."""

from __future__ import annotations

import ctypes
import json
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

import userstream as us
from confirming import HOLD, a_used_room, fill, kernel_of, read_too_early, run, watched
from helpers import checked, device_current
from observed import LEGACY, SIZE, Room, captured, copy, handle, judge_of, overwrite
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
