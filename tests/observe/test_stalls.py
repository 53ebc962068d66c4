"""Waits of the host: `no_stalls`, `stall_allowed`, and the stalls of a report."""

from __future__ import annotations

import ctypes
import pickle
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from cuda.bindings import driver
from cuda.core import Device

import userstream as us
from helpers import checked
from internals import call_once_userstream_waits, looks_of_hang_after
from observed import (
    LEGACY,
    SIZE,
    Room,
    a_room,
    copy,
    engine_of,
    fill,
    findings_of,
    handle,
    needs_frames,
)
from userstream.testing import latch

pytestmark = [
    pytest.mark.simulated,
    pytest.mark.no_races(False),  # these tests observe themselves
]


def _wait(room: Room) -> None:
    us.wait(room.a)


def _sync(room: Room) -> None:
    room.a.sync()


def _asnumpy(room: Room) -> None:
    buffer = Device(0).allocate(SIZE, stream=room.a)
    us.asnumpy(buffer, producer=room.a)


def _result(room: Room) -> None:
    us.completion(room.a).result()


def _synchronize(room: Room) -> None:
    checked(driver.cuStreamSynchronize(handle(room.a)))


def _synchronize_all(_: Room) -> None:
    checked(driver.cuCtxSynchronize())


def _event(room: Room) -> None:
    event = checked(driver.cuEventCreate(0))
    checked(driver.cuEventRecord(event, handle(room.a)))
    checked(driver.cuEventSynchronize(event))
    checked(driver.cuEventDestroy(event))


def _copy(room: Room) -> None:
    checked(driver.cuMemcpyDtoH(_HERE, room.x, SIZE))


def _pageable_copy(room: Room) -> None:
    copy(_HERE, room.x, room.a)


def _free(_: Room) -> None:
    checked(driver.cuMemFree(checked(driver.cuMemAlloc(SIZE))))


_MEMORY = ctypes.create_string_buffer(SIZE)
_HERE = ctypes.addressof(_MEMORY)
WAITS = [
    *(_wait, _sync, _asnumpy, _synchronize, _synchronize_all, _event, _copy, _pageable_copy),
    _free,
]


def stalls_in(room: Room, wait: Callable[[Room], object]) -> list[str]:
    """Queue work and wait for it in a block of `no_stalls`; return what its error says."""
    try:
        with us.no_stalls():
            fill(room.x, room.a)
            wait(room)
    except us.StallError as error:
        lines = [line.strip() for line in str(error).splitlines()]
        return [stall for stall in error.stalls if stall in lines]
    return []


@pytest.mark.parametrize("wait", WAITS)
def test_a_wait_for_pending_work_is_an_error_however_short(wait: Callable[[Room], None]) -> None:
    with a_room() as room:
        (stall,) = stalls_in(room, wait)
    assert " ms in " in stall


@needs_frames
@pytest.mark.parametrize("wait", [_wait, _asnumpy, _synchronize, _pageable_copy])
def test_the_error_names_the_line(wait: Callable[[Room], None]) -> None:
    with a_room() as room:
        (stall,) = stalls_in(room, wait)
    assert f" in {'copy' if wait is _pageable_copy else wait.__name__})" in stall


@pytest.mark.parametrize("wait", [_wait, _sync, _synchronize, _synchronize_all, _event])
def test_a_wait_for_what_is_over_is_none(wait: Callable[[Room], None]) -> None:
    with a_room() as room, us.no_stalls():
        with us.stall_allowed("before"):
            fill(room.x, room.a)
            _synchronize(room)
        wait(room)


def test_edges_queries_and_copies_of_the_gpu_are_no_waits() -> None:
    with a_room() as room, us.no_stalls():
        fill(room.x, room.a)
        room.b.wait(room.a)
        copy(room.y, room.x, room.b)
        copy(room.pinned, room.y, room.b)
        while not room.b.is_done:
            pass


def test_what_the_block_raises_goes_first() -> None:
    def fail(room: Room) -> None:
        _synchronize(room)
        raise LookupError

    with a_room() as room, pytest.raises(LookupError):
        stalls_in(room, fail)


def test_only_what_is_inside_counts() -> None:
    with a_room() as room:
        fill(room.x, room.a)
        _synchronize(room)
        with us.no_stalls():
            fill(room.x, room.a)
        _synchronize(room)
        with us.no_stalls():
            pass


@pytest.mark.parametrize("threads", ["all", "this"])
def test_waits_of_other_threads_count_unless_only_those_of_this_one_do(threads: str) -> None:
    def work() -> None:
        checked(driver.cuCtxSetCurrent(context))
        _synchronize(room)

    with a_room() as room:
        context = checked(driver.cuCtxGetCurrent())
        gate = us.no_stalls(threads=threads)  # type: ignore[arg-type]
        other = threading.Thread(target=work)
        try:
            with gate:
                fill(room.x, room.a)
                other.start()
                other.join()
        except us.StallError:
            assert threads == "all"
        else:
            assert threads == "this"


def test_blocks_within_each_other_and_within_an_observation() -> None:
    def inner(room: Room) -> None:
        with us.no_stalls():
            fill(room.x, room.a)
        found.extend(stalls_in(room, _synchronize))
        _sync_with_work(room)

    found: list[str] = []
    with a_room() as room, us.observe() as seen:
        outer = stalls_in(room, inner)
        fill(room.x, room.b)
    assert "times" not in " ".join(found)
    assert len(found) == 1
    assert "2 times" in " ".join(outer)
    assert [race.kind for race in seen.races] == []


def test_a_function_can_be_decorated() -> None:
    @us.no_stalls()
    def step(room: Room) -> int:
        fill(room.x, room.a)
        _synchronize(room)
        return 1

    with a_room() as room:
        with pytest.raises(us.StallError):
            step(room)


def test_what_is_allowed_is_no_stall_and_is_counted() -> None:
    with a_room() as room, us.observe(stall=0) as seen:
        for _ in range(3):
            with us.no_stalls(), us.stall_allowed("logging"):
                fill(room.x, room.a)
                _synchronize(room)
        with us.stall_allowed("outer"):
            with us.stall_allowed("inner"):
                pass
            _sync_with_work(room)
    document = seen.as_dict()
    assert document["allowed_stalls"]["logging"] == 3
    assert document["allowed_stalls"]["outer"] >= 1
    assert document["forbidden_stalls"] == []
    assert "cuStreamSynchronize" not in [stall.name for stall in seen.stalls]
    assert "stalls that are allowed:\n  logging (3)\n  outer (" in str(seen)


def _sync_with_work(room: Room) -> None:
    fill(room.x, room.a)
    _synchronize(room)


def test_a_thread_allows_its_own_waits_alone() -> None:
    def work(room: Room, context: driver.CUcontext) -> None:
        checked(driver.cuCtxSetCurrent(context))
        _sync_with_work(room)

    def wait(room: Room) -> None:
        with us.stall_allowed("here"):
            other = threading.Thread(target=work, args=(room, checked(driver.cuCtxGetCurrent())))
            other.start()
            other.join()

    with a_room() as room:
        assert len(stalls_in(room, wait)) == 1


@pytest.mark.parametrize("wait", [_wait, _sync, _asnumpy, _result])
def test_waits_of_userstream_are_stalls_of_an_observation(wait: Callable[[Room], None]) -> None:
    with a_room() as room, us.observe() as seen:
        with latch(room.a) as held:
            fill(room.x, room.a)
            call_once_userstream_waits(held.release)
            wait(room)
    (stall,) = [stall for stall in seen.stalls if stall.name == "a wait of userstream"]
    assert stall.seconds >= 0.001


def test_a_log_tells_a_judge_of_another_time(tmp_path: Path) -> None:
    log = tmp_path / "seen.uslog"
    with a_room() as room, us.observe(log=log, judge="later"), us.no_stalls():
        _sync_with_work(room)  # nobody judges it now
    (stall,) = findings_of(log)["forbidden_stalls"]
    assert stall["name"] == "cuStreamSynchronize"


def test_an_observation_that_ends_before_the_block_is_an_error() -> None:
    with a_room() as room, us.observe() as seen:
        with pytest.raises(RuntimeError, match="has ended before the block"):
            stalls_in(room, lambda _: seen.stop())


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="threads must be"), us.no_stalls(threads="some"):  # type: ignore[arg-type]
        pass
    with pytest.raises(TypeError, match="must be a str, not 100"), us.stall_allowed(100):  # type: ignore[arg-type]
        pass
    with pytest.raises(ValueError, match="must not be empty"), us.stall_allowed(" "):
        pass


def test_the_error_survives_a_pickle() -> None:
    error = us.StallError("why", stalls=["1 ms in it"])
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.stalls) == ("why", ["1 ms in it"])


# -- hangs ----------------------------------------------------------------------------------------


_TIMED_OUT = threading.Event()


def report_of_hang(queue: Callable[[Room], object]) -> list[str]:
    """Return the report of a wait for stream `b` that times out, without addresses and places."""
    with a_room() as room:
        with us.observe() as seen, latch(room.a) as held:
            queue(room)
            with pytest.raises(us.WaitTimeout):
                us.wait(room.b, timeout=0)
            held.release()
            _TIMED_OUT.set()
        checked(driver.cuMemsetD8(room.y, 1, SIZE))  # ends waits for values
    (report,) = seen.hangs
    assert f"\n{report}\n" in f"{seen}\n"
    assert seen.as_dict()["hangs"] == [report]
    plain = re.sub(r"0x\w+", "(address)", re.sub(r" at \S+:\d+ in (\w+)", r" in \1", report))
    first, *lines = plain.splitlines()
    assert first.startswith("a wait timed out in report_of_hang; ")
    return [line.strip().replace(" of device 0", "") for line in lines]


def _edge(room: Room) -> None:
    fill(room.x, room.a)
    room.b.wait(room.a)
    fill(room.x, room.b)
    fill(room.x, room.b)


@needs_frames
def test_a_hang_names_what_each_stream_is_stuck_behind() -> None:
    held, why, behind, event, *others = report_of_hang(_edge)
    assert held == "stream 1: cuStreamWaitValue32_v2 in report_of_hang, and 1 more behind it"
    assert re.fullmatch(r"waits for a value of .* at \(address\), which no stream writes", why)
    assert behind == "stream 2: cuMemsetD8Async in fill, and 1 more behind it"
    wait = "recorded in _edge; the wait is queued in _edge"
    assert event == f"waits for an event of stream 1, {wait}"
    assert others == ["MainThread waits for the GPU in report_of_hang"]


def _cycle(room: Room) -> None:
    checked(driver.cuMemsetD8(room.y, 0, SIZE))
    c = room.stream()
    for stream, word in ((room.b, 0), (c, 4)):
        checked(driver.cuStreamWaitValue32(handle(stream), room.y + word, 1, 0))
    for stream, word in ((room.b, 4), (c, 0)):
        checked(driver.cuStreamWriteValue32(handle(stream), room.y + word, 1, 0))


@needs_frames
def test_streams_that_wait_for_each_other_are_named_as_a_cycle() -> None:
    report = report_of_hang(_cycle)
    at = report.index("stream 2: cuStreamWaitValue32_v2 in _cycle, and 1 more behind it")
    wait = "waits for a value of at least 1 at (address), which is written by"
    assert report[at + 1 : at + 5] == [
        f"{wait} stream 3 in _cycle",
        "stream 3: cuStreamWaitValue32_v2 in _cycle, and 1 more behind it",
        f"{wait} stream 2 in _cycle",
        "a cycle: stream 2 waits for stream 3 waits for stream 2",
    ]


def _host_function_and_capture(room: Room) -> None:
    _TIMED_OUT.clear()
    room.b.launch_host_func(_TIMED_OUT.wait, 60)
    c = room.stream()
    c.begin_capture("relaxed")
    room._stack.callback(c.end_capture)


@needs_frames
def test_a_hang_names_host_functions_and_captures() -> None:
    report = report_of_hang(_host_function_and_capture)
    at = report.index("runs on the host, until its function returns")
    assert report[at - 1].startswith("stream 2: cuLaunchHostFunc in _host_function_and_capture")
    capture = "stream 3: is being captured in _host_function_and_capture: nothing runs"
    assert report[at + 1] == capture


def _default_streams(room: Room) -> None:
    room.b.wait(room.a)
    fill(room.x, room.b)
    blocking = room.stream(nonblocking=False)
    blocking.wait(room.a)
    fill(room.x, blocking)
    fill(room.y, LEGACY)


@needs_frames
def test_a_hang_names_the_blocking_stream_that_the_legacy_stream_waits_for() -> None:
    report = report_of_hang(_default_streams)
    at = report.index("the legacy default stream: at or before cuMemsetD8Async in fill")
    assert report[at + 1] == "waits for stream 3, as the legacy default stream and blocking ones do"


def _two_writers(room: Room) -> None:
    checked(driver.cuMemsetD8(room.y, 0, SIZE))
    checked(driver.cuStreamWaitValue32(handle(room.b), room.y, 1, 0))
    fill(room.x, room.b)
    for before in (room.a, room.b):  # the second alone would never write
        writer = room.stream()
        writer.wait(before)
        checked(driver.cuStreamWriteValue32(handle(writer), room.y, 1, 0))


@pytest.mark.parametrize(
    ("how", "text"), [("GEQ", "at least 1"), ("EQ", "16843009"), ("AND", "a bit of (address)")]
)
def test_a_hang_says_which_value_is_awaited(how: str, text: str) -> None:
    flags = getattr(driver.CUstreamWaitValue_flags, f"CU_STREAM_WAIT_VALUE_{how}")
    value = 0x01010101 if how == "EQ" else 1  # as `report_of_hang` writes at its end

    def queue(room: Room) -> None:
        checked(driver.cuMemsetD8(room.y, 0, SIZE))  # else it may have what is awaited
        checked(driver.cuStreamWaitValue32(handle(room.b), room.y, value, flags))

    assert any(
        line.startswith(f"waits for a value of {text} at (address)")
        for line in report_of_hang(queue)
    )


@needs_frames
def test_a_hang_names_every_stream_that_writes_the_value() -> None:
    report = report_of_hang(_two_writers)
    at = report.index("stream 2: cuStreamWaitValue32_v2 in _two_writers, and 1 more behind it")
    writers = "stream 3 in _two_writers or stream 4 in _two_writers"
    value = "waits for a value of at least 1 at (address)"
    assert report[at + 1] == f"{value}, which is written by {writers}"
    assert not any("a cycle" in line for line in report)


def _many(room: Room) -> None:
    room.b.wait(room.a)
    for _ in range(600):  # 512 are remembered
        fill(room.x, room.b)


@needs_frames
def test_a_hang_names_the_oldest_operation_that_is_remembered() -> None:
    head = "stream 2: at or before cuMemsetD8Async in fill, and 511 more behind it"
    assert head in report_of_hang(_many)


def test_a_hang_of_work_that_was_queued_before_the_observation() -> None:
    with a_room() as room, latch(room.a) as held:
        with us.observe() as seen:
            with pytest.raises(us.WaitTimeout):
                us.wait(room.a, timeout=0)
            held.release()
    (report,) = seen.hangs
    assert report.splitlines()[1] == "  stream 1 of device 0: work from before the observation"


@needs_frames
def test_a_name_cannot_add_lines_to_the_report_of_a_hang() -> None:
    wait = compile("us.wait(room.a, timeout=0)", "a\x1b[2J\n.py", "exec")
    with a_room() as room, us.observe() as seen, latch(room.a) as held:
        with pytest.raises(us.WaitTimeout):
            exec(wait, {"us": us, "room": room})
        held.release()
    (report,) = seen.hangs
    assert report.startswith(r"a wait timed out at a\x1b[2J\n.py:1 in <module>; ")


def test_a_report_that_was_asked_for_says_that_nothing_is_pending() -> None:
    told: list[str] = []
    with a_room() as room, us.observe() as seen:
        us.wait(room.a)
        hangs = engine_of(seen).hangs
        hangs.told = told.append
        hangs.report("after some time")
        hangs.report("SIGUSR1", is_asked=True)
    assert told == ["SIGUSR1: all work is known to be over"]
    assert seen.hangs == ()


def test_the_first_reports_of_hangs_are_kept_in_their_latest_state() -> None:
    with a_room() as room, us.observe() as seen, latch(room.a) as held:
        hangs = engine_of(seen).hangs
        hangs.report("cause 0")
        fill(room.x, room.b)
        engine_of(seen)
        for number in (*range(1, 10), 0):
            hangs.report(f"cause {number}")
        held.release()
    causes = [report.split(";")[0] for report in seen.hangs]
    assert causes == [f"cause {number}" for number in range(8)]
    assert "stream 2 of device 0: cuMemsetD8Async" in seen.hangs[0]


def test_a_second_hang_is_reported_once_work_has_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    with a_room() as room, us.observe() as seen:
        engine_of(seen).hangs.told = told.append
        look = looks_of_hang_after(seen, monkeypatch)
        for expected in (1, 2):
            with latch(room.a) as held:
                engine_of(seen)
                for _ in range(3):
                    look()
                held.release()
            assert len(told) == expected
            us.wait(room.a)
    assert len(seen.hangs) == 1  # of one cause the latest
