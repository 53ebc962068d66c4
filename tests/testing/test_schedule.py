"""`testing.schedule`: the order that a seed gives, and gives again."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from cuda.bindings import driver

import scheduled
import userstream as us
from helpers import UNTRACED, checked, run_python
from scheduled import PROGRAMS, SIZE, Room, a_room, a_sleeper, ordered, traces, unordered
from testing.programs import PATIENCE, ROOT, check
from userstream import testing

pytestmark = [
    pytest.mark.simulated,
    pytest.mark.no_races(False),  # some have to race
    pytest.mark.usefixtures("no_garbage"),
]

SEEDS = int(os.environ.get("USERSTREAM_SCHEDULES", "12"))
TIMES = int(os.environ.get("USERSTREAM_SCHEDULES_AGAIN", "3"))


@pytest.fixture
def room() -> Iterator[Room]:
    with a_room() as room:
        yield room


# -- the same order again -------------------------------------------------------------------------


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_seed_gives_the_same_order_again(room: Room, program: Callable[[Room], None]) -> None:
    first = traces(program, room, SEEDS)
    assert len(set(first)) > 3
    for _ in range(TIMES - 1):
        for before, again in zip(first, traces(program, room, SEEDS), strict=True):
            assert again.splitlines() == before.splitlines()


@contextlib.contextmanager
def busy_thread() -> Iterator[None]:
    """A thread that holds the GIL most of the time, and that no schedule knows of."""
    end = threading.Event()

    def work() -> None:
        while not end.is_set():
            sum(range(1000))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def test_a_thread_that_is_not_of_the_program_changes_no_order(room: Room) -> None:
    """The threads of the library have to wait for the GIL before they go on."""
    program = scheduled.host_functions
    before = [trace.splitlines() for trace in traces(program, room, 3)]
    with busy_thread():
        beside = [trace.splitlines() for trace in traces(program, room, 3)]
    for one, other in zip(before, beside, strict=True):
        assert one == other


def test_a_program_that_sleeps_ends_with_every_seed(room: Room) -> None:
    """How often it looks depends on the clock, and so does its order on a busy machine."""
    assert all("fill" in trace for trace in traces(a_sleeper, room, SEEDS))


def test_a_seed_gives_the_same_order_in_other_processes_on_a_busy_machine() -> None:
    """Each process is busy beside the other ones, and so are their interpreters' threads."""
    command = [sys.executable, scheduled.__file__, str(SEEDS)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    running = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    digests = [process.communicate(timeout=4 * PATIENCE)[0] for process in running]
    assert [process.returncode for process in running] == [0] * len(running)
    assert len(digests[0].splitlines()) == len(PROGRAMS)
    assert set(digests) == {digests[0]}


# -- which orders there are -----------------------------------------------------------------------


def outcomes(program: Callable[[Room], None], room: Room, seeds: Any) -> list[bool]:
    """Return, for each seed, whether the copy found what the fill had written."""
    found = []
    for seed in seeds:
        checked(driver.cuMemsetD8(room.place(0), 0, 2 * SIZE))
        with testing.schedule(seed, length=10):
            program(room)
        found.append(room.bytes(1) == b"\1" * SIZE)
    return found


def test_lazy_runs_a_stream_when_somebody_waits_for_it(room: Room) -> None:
    with testing.schedule("lazy") as run:
        unordered(room)
        room.fill(2, 2)
        room.sync()
    assert run.trace.splitlines() == [
        "thread 1  queues fill on stream 1",
        "thread 1  queues copy on stream 2",
        "thread 1  queries stream 2",
        "stream 2  runs copy",
        "thread 1  queues fill on stream 3",
        "thread 1  queries stream 1",
        "stream 1  runs fill",
        "thread 1  queries stream 3",
        "stream 3  runs fill",
    ]


def test_lazy_runs_what_a_stream_waits_for(room: Room) -> None:
    room.streams[0].sync()
    with testing.schedule("lazy") as run:
        room.fill(3, 3)
        ordered(room)
    assert [line for line in run.trace.splitlines() if "runs" in line] == [
        "stream 2  runs fill",
        "stream 3  runs copy",
        "stream 1  runs fill",  # at the end of the block
    ]


def test_eager_runs_everything_at_once(room: Room) -> None:
    with testing.schedule("eager") as run:
        unordered(room)
    assert run.trace.splitlines() == [
        "thread 1  queues fill on stream 1",
        "stream 1  runs fill",
        "thread 1  queues copy on stream 2",
        "stream 2  runs copy",
    ]


def test_a_missing_edge_goes_wrong_under_some_seeds_and_an_edge_under_none(room: Room) -> None:
    seeds = ("lazy", "eager", *range(50))
    wrong, right = outcomes(unordered, room, seeds), outcomes(ordered, room, seeds)
    assert wrong[:2] == [False, True]
    assert 5 < sum(wrong) < 47
    assert all(right)


def test_without_change_points_one_priority_decides(room: Room) -> None:
    """A depth of 1 gives each stream and thread one priority, from the beginning to the end."""

    def program(room: Room) -> None:
        for _ in range(3):
            room.fill(0, 0)
            room.fill(1, 1)
        room.sync()

    for seed in range(20):
        with testing.schedule(seed, depth=1) as run:
            program(room)
        runs = [line.split()[1] for line in run.trace.splitlines() if "runs" in line]
        queued = [line.split()[-1] for line in run.trace.splitlines() if "queues" in line]
        assert sorted(runs) == sorted(queued)
        once = [each for each, before in zip(runs, ["", *runs], strict=False) if each != before]
        assert len(once) in (2, 6)  # one stream after the other, or each operation at once


def test_what_was_queued_before_is_not_part_of_it(room: Room) -> None:
    room.fill(0, 0)
    with testing.schedule("lazy") as run:
        room.copy(1, 0, 1)
        room.streams[1].sync()
    assert "fill" not in run.trace
    assert room.bytes(1) == b"\1" * SIZE


def test_what_is_left_at_the_end_runs_in_the_block(room: Room) -> None:
    with testing.schedule("lazy") as run:
        room.fill(0, 0)
        assert not room.streams[0].is_done
    assert run.trace.splitlines()[-1] == "stream 1  runs fill"
    assert room.streams[0].is_done


def test_after_the_block_streams_run_by_themselves(room: Room) -> None:
    with testing.schedule("lazy"):
        room.fill(0, 0)
    room.fill(1, 1)
    room.streams[1].sync(timeout=PATIENCE)
    with testing.latch(room.streams[2]) as held:
        with testing.schedule("lazy"):
            room.fill(2, 2)
        assert not room.streams[2].is_done
        held.release()
        room.streams[2].sync(timeout=PATIENCE)


# -- with the other tools -------------------------------------------------------------------------


@pytest.mark.parametrize("seed", ["lazy", "eager", 1])
def test_a_latch_holds_a_stream(room: Room, seed: int | str) -> None:
    with testing.schedule(seed) as run:
        with testing.latch(room.streams[0]) as held:
            room.fill(0, 0)
            room.fill(1, 1)
            room.streams[1].sync()
            with pytest.raises(us.WaitTimeout):
                room.streams[0].sync(timeout=0.01)
            held.release()
            room.streams[0].sync()
    lines = run.trace.splitlines()
    assert lines.index("stream 2  runs fill") < lines.index("stream 1  runs fill")


@pytest.mark.parametrize("seed", ["lazy", "eager", 1])
def test_errors_are_met_in_the_order_of_the_schedule(room: Room, seed: int | str) -> None:
    with testing.schedule(seed):
        testing.async_error(room.streams[0], driver.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS)
        with pytest.raises(us.DriverError, match="ILLEGAL_ADDRESS"):
            room.streams[0].sync()
        with pytest.raises(us.DriverError, match="ILLEGAL_ADDRESS"):
            room.streams[1].sync()
    testing.reset()
    with testing.schedule(seed):
        with (
            testing.inject(fill=driver.CUresult.CUDA_ERROR_INVALID_VALUE),
            pytest.raises(AssertionError),
        ):
            room.fill(0, 0)
        room.fill(0, 0)
        room.sync()


def test_an_exception_leaves_no_schedule_behind(room: Room) -> None:
    run = testing.schedule("lazy")

    def program() -> None:
        with run:
            room.fill(0, 0)
            raise KeyError

    with pytest.raises(KeyError):
        program()
    assert "runs fill" in run.trace
    with testing.schedule("eager"):
        room.sync()


def test_a_thread_that_blocks_in_an_unknown_function_gives_way(room: Room) -> None:
    """No schedule knows of a pipe: the thread is seen to sleep, like all others."""
    reading, writing = os.pipe()

    def work() -> None:
        room.fill(0, 0)
        room.streams[0].sync()
        os.write(writing, b"x")

    with testing.schedule("lazy") as run:
        thread = threading.Thread(target=work)
        thread.start()
        assert os.read(reading, 1) == b"x"
        thread.join()
    os.close(reading)
    os.close(writing)
    assert "thread 2  queues fill on stream 1" in run.trace


def test_a_thread_may_wait_for_something_outside_of_cuda_by_sleeps(room: Room) -> None:
    """For a process, say: for longer than threads may ask the driver in vain."""

    def work() -> None:
        room.fill(0, 0)
        process = subprocess.Popen(["sleep", "3.5"])
        while process.poll() is None:
            time.sleep(0.01)
        room.fill(0, 1)

    with testing.schedule("lazy") as run:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        room.sync()
    assert run.trace.count("thread 2  queues fill on stream") == 2, run.trace


def test_threads_that_exist_already_take_part_once_they_call_the_driver(room: Room) -> None:
    begin, ready = threading.Event(), threading.Event()

    def work() -> None:
        ready.set()
        begin.wait()
        room.fill(0, 0)
        room.streams[0].sync()

    thread = threading.Thread(target=work)
    thread.start()
    ready.wait()
    with testing.schedule(3) as run:
        begin.set()
        room.fill(1, 1)
        thread.join()
        room.sync()
    assert "thread 2  queues fill" in run.trace


def test_a_thread_that_is_not_over_continues_after_the_block(room: Room) -> None:
    end = threading.Event()

    def work() -> None:
        while not end.is_set():
            room.fill(0, 0)
            room.streams[0].sync()

    thread = threading.Thread(target=work)
    with testing.schedule(1):
        thread.start()
        room.fill(1, 1)
        room.streams[1].sync()
    end.set()
    thread.join(PATIENCE)
    assert not thread.is_alive()


INTERRUPTED = """
import signal, sys, threading

from cuda.bindings import driver

from userstream import Stream, testing

testing.simulate(1)
stream = Stream.create(0)
end = threading.Event()


def work():
    while not end.is_set():  # always could go on, and no schedule has begun it
        driver.cuStreamQuery(stream.handle)
        stream.sync()


thread = threading.Thread(target=work)
if sys.argv[1] == "beside work":
    thread.start()
me = threading.get_ident()
timer = threading.Timer(0.05, lambda: signal.pthread_kill(me, signal.SIGINT))
try:
    with testing.schedule("lazy"):
        timer.start()
        threading.Event().wait(100)
except KeyboardInterrupt:
    print("interrupted")
end.set()
timer.join()
"""


# Untraced: with a tracer, Python 3.11 runs a thread without end while a signal waits for the main
# thread, and so that thread never gives its turn up.
@pytest.mark.parametrize("where", ["alone", "beside work"])
def test_ctrl_c_interrupts_a_thread_that_has_given_its_turn_up(where: str) -> None:
    done = run_python(INTERRUPTED, where, simulate=None, **UNTRACED)
    assert done.stdout == "interrupted\n", done.stderr


@pytest.mark.parametrize("seed", ["lazy", "eager", 1, 2])
def test_a_thread_that_works_until_it_is_told_does_not_keep_others_from_telling(
    room: Room, seed: int | str
) -> None:
    told: list[int] = []

    def work() -> None:
        while not told:
            room.fill(0, 0)
            room.streams[0].sync()
            driver.cuCtxGetCurrent()

    thread = threading.Thread(target=work)
    with testing.schedule(seed):
        thread.start()
        room.fill(1, 1)
        room.streams[1].sync()
        told.append(1)
        thread.join()


@pytest.mark.parametrize("seed", ["lazy", "eager", 0])
def test_a_wait_ends_while_a_thread_keeps_feeding_the_stream(room: Room, seed: int | str) -> None:
    """Neither the thread that waits nor the stream is behind the other thread for long."""
    begun, told, fed = threading.Event(), threading.Event(), 0

    def feed() -> None:
        nonlocal fed
        while not told.is_set() and fed < 20_000:
            room.fill(0, 0)
            fed += 1
            begun.set()

    thread = threading.Thread(target=feed)
    with testing.schedule(seed, depth=1):
        thread.start()
        begun.wait()
        for _ in range(20):
            room.streams[0].sync()
        told.set()
        thread.join()
    assert fed < 10_000


def test_calls_by_threads_of_the_library_delay_no_decision(room: Room) -> None:
    """Such a thread learns of no other stream before the end of its call, which others precede."""
    began = time.monotonic()
    for seed in ("lazy", "eager", 1, 2):
        for program in (scheduled.called_back_and_called, scheduled.freed_by_the_library):
            with testing.schedule(seed, length=30):
                program(room)
    assert time.monotonic() - began < 60, "some decisions waited for 10 s"


def test_the_clock_does_not_call_a_host_function_before_the_stream_does(room: Room) -> None:
    called: list[int] = []
    with testing.schedule("lazy"):
        room.fill(0, 0)
        event = room.streams[0].record()
        room.streams[0].launch_host_func(called.append, 1, blocking=False)
        checked(driver.cuEventSynchronize(event.handle))
        end = time.monotonic() + 0.2
        while time.monotonic() < end:  # the thread of host functions looks, and keeps waiting
            assert not called
        room.streams[0].sync()
    assert called == [1]


def test_a_thread_that_waits_for_a_free_keeps_no_stream_from_going_on(room: Room) -> None:
    """What it asked for earlier has nothing to do with the wait."""
    begun, memory = threading.Event(), int(checked(driver.cuMemAlloc(SIZE)))

    def free() -> None:
        begun.set()
        checked(driver.cuMemFree(memory))

    thread = threading.Thread(target=free)
    with testing.schedule("lazy") as run:
        for number in range(3):
            room.fill(number, number)
        assert not room.streams[0].is_done
        thread.start()
        begun.wait()
        room.fill(3, 3)
        thread.join()
    assert run.choices < 100


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "options", "error", "text"),
    [
        (("late",), {}, ValueError, "seed must be an int, 'lazy', 'eager' or turns such as"),
        ((1.5,), {}, TypeError, "seed must be an int, not float"),
        ((True,), {}, TypeError, "seed must be an int, not bool"),
        ((1,), {"depth": 0}, ValueError, "depth must be 1 to 64, not 0"),
        ((1,), {"depth": 65}, ValueError, "depth must be 1 to 64, not 65"),
        ((1,), {"length": 0}, ValueError, "length must be at least 1"),
        ((1,), {"length": "9"}, TypeError, "length must be an int, not str"),
    ],
)
def test_arguments_are_checked(
    arguments: Any, options: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        testing.schedule(*arguments, **options)


def test_one_schedule_at_a_time_and_each_once() -> None:
    run = testing.schedule(1)
    with run:
        with pytest.raises(RuntimeError, match="already used"):
            run.__enter__()
        with pytest.raises(RuntimeError, match="another schedule is active"):
            testing.schedule(2).__enter__()
    with pytest.raises(RuntimeError, match="already used"):
        run.__enter__()


def test_it_needs_the_simulated_driver() -> None:
    check("""if True:
        from userstream import testing
        try:
            testing.schedule(1).__enter__()
        except RuntimeError as error:
            assert "needs the simulated driver" in str(error)
        else:
            raise AssertionError
    """)


def test_a_forked_child_has_no_schedule(room: Room) -> None:
    with testing.schedule(1):
        room.fill(0, 0)
        child = os.fork()
        if child == 0:
            lock = threading.Lock()
            with lock:
                os._exit(lock.acquire(timeout=0.01))
        assert os.waitpid(child, 0)[1] == 0
        room.sync()


# -- deadlocks ------------------------------------------------------------------------------------


def deadlock(program: Callable[[], object], seed: int | str = 1) -> list[str]:
    """Return the report of a program that cannot go on."""
    with pytest.raises(testing.Deadlock) as raised, testing.schedule(seed):
        program()
    first, *lines = str(raised.value).splitlines()
    assert first == "deadlock: no stream and no thread can go on"
    return lines


def test_a_stream_that_nobody_releases(room: Room) -> None:
    one, other = room.streams[:2]
    word = room.pinned
    ctypes.c_uint32.from_address(word).value = 0

    def program() -> None:
        one.wait_value_32(word, 1)
        other.wait(one)
        room.fill(1, 1)
        checked(driver.cuStreamSynchronize(other.handle))

    assert deadlock(program) == [
        "thread 1  waits for stream 2",
        "stream 1  waits for a value in memory",
        "stream 2  waits for stream 1",
    ]
    room.fill(0, 0)  # the error is over, and so is the work that could not go on
    room.sync()


def test_threads_that_poll_and_that_sleep_for_ever(room: Room) -> None:
    """The report ends the loop of queries; the loop of sleeps, which nobody ends now, fails."""
    word = room.pinned
    ctypes.c_uint32.from_address(word).value = 0

    def work() -> None:
        with pytest.raises(us.DriverError):
            room.streams[0].sync()

    def sleep_on() -> None:
        for _ in range(3000):
            time.sleep(0.01)

    def program() -> None:
        room.streams[0].wait_value_32(word, 1)
        thread = threading.Thread(target=work)
        thread.start()
        with pytest.raises(OSError, match="deadlock"):
            sleep_on()
        thread.join()

    assert deadlock(program) == [
        "thread 1  sleeps in a loop",
        "stream 1  waits for a value in memory",
        "thread 2  waits for stream 1",
    ]


def test_threads_and_streams_that_wait_for_each_other(room: Room) -> None:
    told = threading.Event()
    word = room.pinned
    ctypes.c_uint32.from_address(word).value = 0

    def work() -> None:
        told.wait()
        with contextlib.suppress(us.DriverError):  # the deadlock is not over yet
            room.streams[0].write_value_32(word, 1)

    def program() -> None:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        room.streams[1].wait_value_32(word, 1)
        try:
            checked(driver.cuStreamSynchronize(room.streams[1].handle))
        finally:
            told.set()
            thread.join()

    assert deadlock(program, "lazy") == [
        "thread 1  waits for stream 1",
        "thread 2  waits for a lock, a queue or a thread",
        "stream 1  waits for a value in memory",
    ]


def test_a_main_thread_that_waits_for_what_nobody_does(room: Room) -> None:
    def program() -> None:
        room.fill(0, 0)
        threading.Event().wait()

    assert deadlock(program) == ["thread 1  waits for a lock, a queue or a thread"]


def test_a_wait_with_a_limit_is_no_deadlock(room: Room) -> None:
    with testing.schedule(1), testing.latch(room.streams[0]), pytest.raises(us.WaitTimeout):
        room.streams[0].sync(timeout=0.1)
    with testing.schedule(1):
        assert not threading.Event().wait(3.2)  # queries in vain are a deadlock after 3 seconds
