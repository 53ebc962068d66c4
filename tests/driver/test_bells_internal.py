"""Bells, and the native threads that ring them once the GPU has passed a point."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import sysconfig
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cuda.bindings import driver

import userstream as us
from conftest import SIMULATED
from helpers import eventually, run_python, running
from userstream import testing
from userstream._driver import core
from userstream._engine import events, host_wait
from watching import blocking_point


@pytest.fixture
def stream() -> Iterator[us.Stream]:
    with us.Stream.create(0) as stream:
        yield stream


def test_a_bell_rings_once_for_any_number_of_rings() -> None:
    bell = core.Bell()
    assert not bell.wait(0)
    for _ in range(3):
        bell.ring()
    assert bell.wait(None)
    assert not bell.wait(1e-3)


def test_a_bell_wakes_up_who_waits() -> None:
    bell = core.Bell()
    with running(lambda: bell.wait(None)) as result:
        time.sleep(0.01)
        bell.ring()
        assert result()


def test_a_bell_is_rung_by_a_native_function() -> None:
    """As a stream that reaches a host function does."""
    bell = core.Bell()
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(core.RING)(bell.address)
    assert bell.wait(0)


@pytest.mark.parametrize("seconds", [-1, 0, 1e-9, 0.02])
def test_a_wait_ends_in_time(seconds: float) -> None:
    began = time.monotonic()
    assert not core.Bell().wait(seconds)
    assert time.monotonic() - began >= seconds


def test_a_signal_ends_a_wait() -> None:
    bell, began = core.Bell(), time.monotonic()
    main = threading.main_thread().ident
    timer = threading.Timer(0.05, signal.pthread_kill, (main, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        bell.wait(60)
    assert time.monotonic() - began < 30


def test_what_is_no_bell_or_no_time_is_refused(stream: us.Stream) -> None:
    with pytest.raises(TypeError):
        core.Bell().wait("a second")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="takes a bell"):
        stream._resolve().completion().notify(1)  # type: ignore[arg-type]


def test_a_bell_rings_when_the_stream_has_passed_the_point(stream: us.Stream) -> None:
    bell = core.Bell()
    with testing.latch(stream) as latch:
        point = blocking_point(stream)
        assert point.notify(bell)
        assert not bell.wait(0.01)
        latch.release()
        assert bell.wait(30)
    assert point.is_done()
    assert bell.wait(0) is False


def test_one_event_of_a_context_blocks_at_a_time(stream: us.Stream) -> None:
    """A pending one occupies a hardware queue, also if nobody waits for it any more."""
    bell = core.Bell()
    with us.Stream.create(0) as other, testing.latch(other) as held:
        with testing.latch(stream):
            point = blocking_point(other)
            for each in (stream, other):
                late = each._resolve().completion()
                assert not late.is_blocking
                assert not late.notify(bell)
            del point
            assert not other._resolve().completion().is_blocking, "it is still pending"
        held.release()
        assert eventually(lambda: stream._resolve().completion().is_blocking)


def test_a_bell_rings_for_an_event_that_does_not_block(stream: us.Stream) -> None:
    """The event that blocks is recorded behind it, on a stream of the pool's own."""
    bell, context = core.Bell(), stream.context.handle
    with us.Stream.create(0) as other, testing.latch(other) as held:
        point = host_wait.DeviceWork(0, context).completion()
        with testing.latch(stream):
            blocking = blocking_point(stream)
            assert not point.notify(bell), "one at a time"
            del blocking
        assert eventually(lambda: stream.is_done)
        for function in ("cuStreamWaitEvent", "cuEventRecord"):
            if SIMULATED:
                with testing.inject(function, driver.CUresult.CUDA_ERROR_UNKNOWN):
                    assert not point.notify(bell)
        assert eventually(lambda: point.notify(bell))
        assert not point.notify(bell), "one at a time"
        stream.sync(timeout=10)  # nobody else waits
        assert not bell.wait(0.01)
        held.release()
        assert bell.wait(10)
        assert point.is_done()


@pytest.mark.skipif(
    bool(sysconfig.get_config_var("Py_GIL_DISABLED")), reason="only where a GIL guards the point"
)
def test_a_point_that_is_kept_does_not_keep_the_event(stream: us.Stream) -> None:
    with testing.latch(stream):
        kept = blocking_point(stream)
    with testing.latch(stream) as latch:
        bell, later = core.Bell(), blocking_point(stream)
        assert kept.is_done()
        assert core.passed([kept]) == 1
        assert not kept.notify(bell)
        assert later.notify(bell)
        assert not later.is_done()
        del kept
        assert not stream._resolve().completion().is_blocking
        latch.release()
        assert bell.wait(30)


@pytest.mark.parametrize(("connections", "blocks"), [("1", False), ("7", False), ("8", True)])
def test_no_event_blocks_where_there_are_few_hardware_queues(
    connections: str, blocks: bool
) -> None:
    done = run_python(
        f"""
        import userstream as us
        from userstream import testing
        stream = us.get_stream(0)
        with testing.latch(stream):
            assert stream._resolve().completion().is_blocking is {blocks}
        """,
        CUDA_DEVICE_MAX_CONNECTIONS=connections,
    )
    assert done.returncode == 0, done.stderr


def test_a_variable_that_is_no_number_counts_as_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for value in ("", "many"):
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", value)
        assert events._has_spare_queue()


@pytest.mark.simulated
def test_a_thread_that_cannot_wait_rings_at_once(stream: us.Stream) -> None:
    """Who is woken asks the driver, and looks again after a while."""
    bell = core.Bell()
    with testing.latch(stream) as latch:
        point = blocking_point(stream)
        with testing.inject("cuEventSynchronize", driver.CUresult.CUDA_ERROR_UNKNOWN):
            assert point.notify(bell)
            assert bell.wait(30)
        assert not point.is_done()
        latch.release()
        host_wait.wait_until(point, 10)


@pytest.mark.simulated
def test_an_error_of_the_gpu_rings() -> None:
    stream, bell = us.get_stream(0), core.Bell()
    try:
        with testing.latch(stream):
            point = blocking_point(stream)
            assert point.notify(bell)
            testing.async_error(stream, driver.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS)
        assert bell.wait(30)
        with pytest.raises(us.DriverError, match="ILLEGAL_ADDRESS"):
            point.is_done()
        assert core.passed([point]) == 0, "a wait must not take it for done"
    finally:
        testing.reset()
    us.close()


def test_a_capture_goes_on_while_a_thread_waits(stream: us.Stream) -> None:
    """In the default mode of a thread, a wait would invalidate the captures of all others."""
    bell = core.Bell()
    with us.Stream.create(0) as captured, testing.latch(stream) as latch:
        point = blocking_point(stream)
        captured.begin_capture(mode="global")
        assert point.notify(bell)
        time.sleep(0.01)
        latch.release()
        assert bell.wait(30)
        captured.end_capture()  # raises if the capture is invalid


def test_signals_are_for_the_threads_of_the_program(stream: us.Stream) -> None:
    bell = core.Bell()
    with testing.latch(stream) as latch:
        assert blocking_point(stream).notify(bell)
        found = []
        for path in Path("/proc/self/task").glob("*/status"):
            with contextlib.suppress(OSError):  # the thread has ended meanwhile
                lines = path.read_text().splitlines()
                found.append(dict(line.split(":", 1) for line in lines))
        waiters = [task for task in found if task["Name"].strip() == "userstream-wait"]
        assert waiters
        for task in waiters:
            assert int(task["SigBlk"], 16) >> (signal.SIGINT - 1) & 1
        latch.release()
        assert bell.wait(30)


@pytest.mark.simulated  # counts calls
def test_points_that_are_passed_are_counted(stream: us.Stream) -> None:
    lane = stream._resolve()
    with testing.latch(stream) as first:
        points = [lane.completion() for _ in range(5)]
        with testing.latch(stream) as second:
            points += [lane.completion() for _ in range(3)]
            assert core.passed(points) == 0
            first.release()
            assert eventually(points[4].is_done)
            queries = testing.calls("cuEventQuery")
            assert core.passed(points) == 5
            assert testing.calls("cuEventQuery") - queries <= 4, "not one for each"
            second.release()
    stream.sync(timeout=30)
    assert core.passed(points) == 8
    assert core.passed([]) == 0
    for nothing in ((), [1], None):
        with pytest.raises(TypeError):
            core.passed(nothing)  # type: ignore[arg-type]


def test_the_event_of_a_point_is_used_again(stream: us.Stream) -> None:
    lane = stream._resolve()
    with testing.latch(stream):
        blocking = blocking_point(stream)
        point = lane.completion()
        event = point.event
        assert event not in lane.pool.free
        del point
        assert lane.pool.free.count(event) == 1
        del blocking


def test_a_point_is_made_of_an_event(stream: us.Stream) -> None:
    lane = stream._resolve()
    per_thread = us.Stream.per_thread_default()._resolve()  # another stream in each thread
    for target, in_order in ((lane, True), (per_thread, False), ("a device", False)):
        event = core.record(lane)
        assert event is not None
        point = core.Point(lane.pool, event, target, time.monotonic())
        assert (point.event, point.target, point.in_order) == (event, target, in_order)
        assert eventually(point.is_done)
    for arguments in ((), ("pool", event, lane, 0.0), (lane.pool, None, lane, 0.0)):
        with pytest.raises(TypeError):
            core.Point(*arguments)
