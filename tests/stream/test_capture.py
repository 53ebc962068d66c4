"""Graph captures survive whatever this library does, and are never waited for."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
from cuda.bindings import driver

import standins
import userstream as us
from helpers import (
    checked,
    current_context,
    device_current,
    eventually,
    in_thread,
    is_blocked,
    on,
    reclaim,
    running,
)
from interrupts import cut_short
from userstream import _driver, testing

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


@pytest.mark.multi_device
def test_edges_in_a_capture_of_a_default_stream_of_another_device(memory: int) -> None:
    per_thread = us.Stream.per_thread_default()
    array = standins.NumbaArray(0, memory, stream=2)
    first, second = _driver.contexts.primary_context(0), _driver.contexts.primary_context(1)
    with (
        us.Stream.create(1) as mine,
        _driver.contexts.entered(first),
        per_thread.capture("relaxed"),
    ):
        mine.wait(per_thread)
        with _driver.contexts.entered(second):  # where no capture of a default stream is to be seen
            us.acquire(array, stream=mine)
            us.release(array, stream=mine)


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


@pytest.mark.simulated
def test_a_capture_that_begins_before_the_event_of_what_is_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody can tell when the work before it is done; the next event on that stream does."""
    stream, held = us.Stream.create(0), {1}
    alive = weakref.ref(held)
    stream.begin_capture()
    with monkeypatch.context() as patch:
        patch.setattr(_driver.streams, "capture_status", lambda *_: _driver.streams.NOT_CAPTURING)
        us.hold(held, stream=stream)
    del held
    with contextlib.suppress(us.CaptureError):  # to ask that event has invalidated it
        stream.end_capture()
    us.get_stream(0).sync(timeout=10)
    us.wait_all(timeout=10)
    assert alive() is not None
    us.hold(1, stream=stream)
    assert eventually(lambda: alive() is None)
    stream.close()


@pytest.mark.simulated
def test_a_capture_mode_that_cannot_be_set_stays_as_it_was() -> None:
    """The watcher has to stay relaxed for good, or it would break the captures of others."""
    before = checked(driver.cuThreadExchangeStreamCaptureMode(RELAXED))
    with testing.inject("cuThreadExchangeStreamCaptureMode", 999, this_thread=True):
        with pytest.raises(us.DriverError):
            _driver.streams.relaxed(pytest.fail, "called all the same")
    assert checked(driver.cuThreadExchangeStreamCaptureMode(before)) == RELAXED


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_context_and_capture_mode_come_back_whatever_happens(error: type[BaseException]) -> None:
    exchange = driver.cuThreadExchangeStreamCaptureMode

    def fail() -> None:
        raise error

    before = int(checked(driver.cuCtxGetCurrent()))
    with pytest.raises(error):
        _driver.contexts.within(_driver.contexts.primary_context(0), _driver.streams.relaxed, fail)
    assert int(checked(driver.cuCtxGetCurrent())) == before
    mode = checked(exchange(RELAXED))
    checked(exchange(mode))
    assert mode == GLOBAL


# What changes something for a moment, and the driver function that does and undoes that.
CHANGES: dict[str, tuple[str, Callable[[Callable[[], object]], object]]] = {
    "within": (
        "cuCtxSetCurrent",
        lambda function: _driver.contexts.within(_driver.contexts.primary_context(0), function),
    ),
    "entered": ("cuCtxSetCurrent", lambda function: _inside(_entered_0(), function)),
    "relaxed": ("cuThreadExchangeStreamCaptureMode", _driver.streams.relaxed),
    "in_capture_mode": (
        "cuThreadExchangeStreamCaptureMode",
        lambda function: _inside(_driver.capture.in_capture_mode(RELAXED), function),
    ),
}


def _entered_0() -> AbstractContextManager[None]:
    return _driver.contexts.entered(_driver.contexts.primary_context(0))


def _inside(block: AbstractContextManager[object], function: Callable[[], object]) -> object:
    with block:
        return function()


def _state() -> tuple[int, driver.CUstreamCaptureMode]:
    mode = checked(driver.cuThreadExchangeStreamCaptureMode(RELAXED))
    checked(driver.cuThreadExchangeStreamCaptureMode(mode))
    return current_context(), mode


@pytest.mark.simulated
@pytest.mark.parametrize("code", [1, 201, 700, 999, 12345])
@pytest.mark.parametrize("change", CHANGES)
def test_what_cannot_be_restored_at_once_is_tried_again(change: str, code: int) -> None:
    function, call = CHANGES[change]
    for mode in MODES:
        before = checked(driver.cuThreadExchangeStreamCaptureMode(mode))
        try:
            state = _state()
            same = mode == RELAXED and function != "cuCtxSetCurrent"  # nothing is to be restored
            with testing.inject(function, code, skip=1, count=3, this_thread=True, strict=not same):
                assert call(lambda: "fine") == "fine"
            assert _state() == state
        finally:
            checked(driver.cuThreadExchangeStreamCaptureMode(before))


@pytest.mark.simulated
@pytest.mark.parametrize("code", [1, 999, 12345])
@pytest.mark.parametrize("change", CHANGES)
def test_what_cannot_be_restored_is_said(change: str, code: int) -> None:
    """Once, and never in the place of the user's own error."""
    function, call = CHANGES[change]

    def fail() -> None:
        raise KeyboardInterrupt

    try:
        with testing.inject(function, code, skip=1, count=1000, this_thread=True):
            with pytest.raises(us.DriverError, match=str(code)) as caught:
                call(lambda: None)
            assert caught.value.function == function
            assert "could not be made current again" in caught.value.__notes__[0]
    finally:
        checked(driver.cuCtxSetCurrent(driver.CUcontext(0)))
        checked(driver.cuThreadExchangeStreamCaptureMode(GLOBAL))
    try:
        with testing.inject(function, code, skip=1, count=1000, this_thread=True):
            with pytest.raises(KeyboardInterrupt) as interrupted:
                call(fail)
        assert str(code) in interrupted.value.__notes__[0]
    finally:
        checked(driver.cuCtxSetCurrent(driver.CUcontext(0)))
        checked(driver.cuThreadExchangeStreamCaptureMode(GLOBAL))


@pytest.mark.parametrize("change", ["within", "relaxed"])
def test_whatever_signal_comes_context_and_mode_come_back(change: str) -> None:
    """Also between the change and the call, and between the call and the restoration."""
    _, call = CHANGES[change]

    def inside() -> int:
        return len(str(threading.get_ident()))

    before = _state()
    for at in itertools.count():
        came = cut_short(lambda: call(inside), at, anywhere=True)
        assert _state() == before, f"signal {at}"
        if not came:
            break
    assert at > 3


def test_a_failure_of_cuda_core_without_a_code_is_told_and_breaks_no_capture() -> None:
    error = RuntimeError("Failed to create CUDA event")

    def check(asked: us.Stream | None) -> None:
        failure = _driver.streams.cuda_core_failure("cuEventRecord", error, asked)
        assert isinstance(failure, us.DriverError)
        assert (str(failure), failure.code) == (f"cuEventRecord failed: {error}", None)

    in_thread(lambda: check(None))  # without a context, in which to ask would be an error
    with us.Stream.create(0, nonblocking=False) as stream:
        stream.begin_capture()
        with device_current(0):
            check(stream)
            check(us.Stream.legacy_default())
        assert stream.end_capture() is not None
