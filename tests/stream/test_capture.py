"""Graph captures survive whatever this library does, and are never waited for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from cuda.bindings import driver

import userstream as us
from helpers import (
    checked,
    device_current,
    in_thread,
    is_blocked,
    on,
    reclaim,
    running,
)
from userstream import testing

pytestmark = pytest.mark.usefixtures("no_garbage")

GLOBAL = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
THREAD_LOCAL = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
RELAXED = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
ACTIVE = driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
MODES = [GLOBAL, THREAD_LOCAL, RELAXED]


@contextmanager
def capturing(stream: us.Stream, mode: driver.CUstreamCaptureMode = GLOBAL) -> Iterator[None]:
    """Capture on a stream, and insist that the capture survived the block."""
    handle = stream._live()
    checked(driver.cuStreamBeginCapture(handle, mode))
    try:
        yield
        assert checked(driver.cuStreamIsCapturing(handle)) == ACTIVE
    finally:
        status, graph = driver.cuStreamEndCapture(handle)
    assert status == driver.CUresult.CUDA_SUCCESS
    checked(driver.cuGraphDestroy(graph))


def everything(device: int = 0) -> None:
    """Use all of the library but `wait_for_device`."""
    stream = us.get_stream(device)
    with testing.latch(stream) as latch, running(lambda: us.wait(on(device))) as result:
        assert is_blocked(result, 0.01)
        assert not stream.is_done
        with pytest.raises(us.WaitTimeout):
            us.wait_all(timeout=0.01)
        with pytest.raises(us.WaitTimeout):
            stream.sync(timeout=0)
        latch.release()
        result()
    us.wait_all(timeout=10)
    with us.UserStream() as registry:
        other = registry.get_stream(device, name="x", priority=-1)
        stream.wait(other)
        other.wait(stream)
        other.record()
        assert other.priority == -1
        assert other.flags == 1
        registry.wait(device, name="x", timeout=10)
    us.Stream.create(device).close()


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name[-12:])
def test_a_capture_on_another_thread_survives(mode: driver.CUstreamCaptureMode) -> None:
    with us.Stream.create(0) as captured, capturing(captured, mode):
        in_thread(everything)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name[-12:])
def test_a_capture_of_the_same_thread_survives(mode: driver.CUstreamCaptureMode) -> None:
    with us.Stream.create(0) as captured, capturing(captured, mode):
        everything()


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name[-12:])
def test_waiting_for_a_captured_stream_is_refused(mode: driver.CUstreamCaptureMode) -> None:
    stream = us.get_stream(0)
    uses: list[Callable[[], object]] = [
        stream.sync,
        lambda: stream.is_done,
        lambda: us.wait(0),
        lambda: us.wait(on(0), timeout=0),
        us.wait_all,
        us.close,
        lambda: us.wait_for_device(0),
    ]
    with capturing(stream, mode):
        for use in uses:
            with pytest.raises(us.CaptureError, match="captured"):
                use()
            with pytest.raises(us.CaptureError, match="captured"):
                in_thread(use)
    stream.sync(timeout=10)


def test_what_cannot_be_asked_during_a_capture() -> None:
    """The driver invalidates a capture when the flags, priority or id of its stream are asked."""
    with us.Stream.create(0) as mine, capturing(mine):
        assert mine.stream_id > 0, "known from its making"
    with device_current(0):
        handle = checked(driver.cuStreamCreateWithPriority(1, 0))
        theirs = us.Stream.from_handle(handle)
        with capturing(theirs):
            for ask in (
                lambda: theirs.stream_id,
                lambda: theirs.flags,
                lambda: theirs.is_nonblocking,
                lambda: theirs.priority,
            ):
                with pytest.raises(us.CaptureError, match="; ask before or after the capture"):
                    ask()
            assert us.Stream.from_handle(handle).device.device_id == 0
            repr(theirs)
        assert theirs.flags == 1
        theirs.close()
        checked(driver.cuStreamDestroy(handle))


def test_the_legacy_stream_beside_a_capture_on_a_blocking_stream() -> None:
    legacy = us.Stream.legacy_default()
    with (
        us.Stream.create(0, nonblocking=False) as captured,
        device_current(0),
        capturing(captured),
    ):
        for use in (
            legacy.sync,
            lambda: legacy.is_done,
            lambda: us.wait(legacy),
            lambda: us.wait_for_device(0),
        ):
            with pytest.raises(us.CaptureError, match="blocking stream of its context"):
                use()
        in_thread(everything)


def test_wait_for_device_refuses_captures_that_it_sees() -> None:
    foreign = us.Stream.create(0)
    advice = "wait for the whole device would invalidate: wait.. for streams, or .* after the"
    with capturing(foreign), pytest.raises(us.CaptureError, match=advice):
        us.wait_for_device(foreign)
    named = us.get_stream(0, name="io")
    with capturing(named), pytest.raises(us.CaptureError, match=advice):
        us.wait_for_device(on(0))
    us.wait_for_device(0, timeout=10)
    foreign.close()


def test_the_capture_mode_of_the_thread_is_left_alone() -> None:
    stream = us.get_stream(0)
    exchange = driver.cuThreadExchangeStreamCaptureMode
    for mode in MODES:
        before = checked(exchange(mode))
        try:
            us.wait(0)
            with testing.latch(stream), pytest.raises(us.WaitTimeout):
                us.wait(0, timeout=0.01)
            stream.sync(timeout=10)
            now = checked(exchange(mode))
        finally:
            checked(exchange(before))
        assert now == mode


def test_edges_with_the_legacy_stream_beside_a_capture_on_a_blocking_stream() -> None:
    legacy, stream, other = us.Stream.legacy_default(), us.get_stream(0), us.Stream.create(0)
    with device_current(0):
        event = other.record()
        with us.Stream.create(0, nonblocking=False) as captured, capturing(captured):
            for use in (
                lambda: stream.wait(legacy),
                lambda: stream.wait(driver.CUstream(1)),
                lambda: legacy.wait(stream),
                lambda: legacy.wait(event),
                legacy.record,
            ):
                with pytest.raises((us.CaptureError, TypeError)):
                    use()
            stream.wait(other)
        stream.wait(legacy)
        legacy.wait(stream)
        legacy.sync(timeout=10)
    other.close()


def test_wait_for_device_sees_the_captures_of_any_stream_of_ours() -> None:
    with us.Stream.create(0) as captured, capturing(captured):
        with pytest.raises(us.CaptureError):
            us.UserStream().wait_for_device(0)


@pytest.mark.simulated
def test_a_capture_that_begins_in_between() -> None:
    """After the question and before the record: an error of its own, and no event is spoilt."""
    stream, other = us.get_stream(0), us.get_stream(0, name="other")
    invalidated = driver.CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
    reclaim(stream)
    with testing.latch(stream):
        with (
            testing.inject("cuEventQuery", invalidated, this_thread=True),
            pytest.raises(us.CaptureError),
        ):
            stream.sync(timeout=10)
    other.wait(stream)
    us.wait_all(timeout=10)
