"""Captures: contexts and capture modes that cannot be restored, and Ctrl-C at any call."""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

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
    pinned_memory,
)
from internals import is_capture_begun
from interrupts import cut_short
from userstream import _driver, testing
from userstream._stream import capture

pytestmark = pytest.mark.usefixtures("no_garbage")

RELAXED = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED

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


def _interrupted(function: Callable[..., Any], *, after: bool) -> Callable[..., Any]:
    """Return a function into which a Ctrl-C comes once: before or after what it does."""
    hit = False

    def interrupted(*arguments: Any) -> Any:
        nonlocal hit
        result = function(*arguments) if hit or after else None
        if not hit:
            hit = True
            raise KeyboardInterrupt
        return result

    return interrupted


def test_what_a_ctrl_c_has_begun_can_be_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted = _interrupted(_driver.capture.begin_capture, after=True)
    monkeypatch.setattr(_driver.capture, "begin_capture", interrupted)
    with us.Stream.create(0) as stream:
        with pytest.raises(KeyboardInterrupt):
            stream.begin_capture()
        stream.end_capture()


GLOBAL = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL

THREAD_LOCAL = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL

MODES = [GLOBAL, THREAD_LOCAL, RELAXED]


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


def write(stream: us.Stream, address: int, value: int) -> None:
    checked(driver.cuStreamWriteValue32(stream._live(), address, value, 0))


@pytest.mark.simulated
def test_a_graph_that_the_driver_has_destroyed_is_not_destroyed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(capture, "_begun", {})  # where the last of these stays

    def destroyed(use: Callable[[us.Stream], None]) -> int:
        before = testing.calls("cuGraphDestroy")
        with us.Stream.create(0) as stream, contextlib.suppress(us.CaptureError):
            use(stream)
        gc.collect()
        return testing.calls("cuGraphDestroy") - before

    def captured(stream: us.Stream) -> None:
        with stream.capture():
            pass

    def invalidated(stream: us.Stream) -> None:
        with stream.capture():
            driver.cuStreamQuery(stream._live())

    def not_joined_again(stream: us.Stream) -> None:
        with us.Stream.create(0) as branch, pinned_memory() as word, stream.capture():
            branch.wait(stream)
            write(branch, word, 1)

    def collected(stream: us.Stream) -> None:
        del stream
        us.Stream.create(0).begin_capture()
        gc.collect()
        us.Stream.create(0).begin_capture()  # of the same handle

    assert destroyed(captured) == 1
    assert destroyed(invalidated) == 0
    assert destroyed(not_joined_again) == 0
    assert destroyed(us.Stream.begin_capture) == 0, "the stream is closed"
    assert destroyed(collected) == 0


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("function", ["begin_capture", "end_capture"])
def test_a_ctrl_c_leaves_nothing_captured(
    function: str, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with us.Stream.create(0) as stream:
        interrupted = _interrupted(getattr(_driver.capture, function), after=after)
        monkeypatch.setattr(_driver.capture, function, interrupted)
        with pytest.raises(KeyboardInterrupt), stream.capture():
            pass
        assert not stream.is_capturing
        assert not is_capture_begun()
        with stream.capture():
            pass
