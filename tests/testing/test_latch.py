"""latch(): holding a stream, on the simulated and on a real driver."""

from __future__ import annotations

import threading
import time

import pytest
from cuda.bindings import driver
from cuda.core import LEGACY_DEFAULT_STREAM, Device

from testing.programs import check
from userstream.testing import async_error, inject, latch, reset

Result = driver.CUresult
SUCCESS = Result.CUDA_SUCCESS
NOT_READY = Result.CUDA_ERROR_NOT_READY
Mode = driver.CUstreamCaptureMode


@pytest.fixture(autouse=True)
def device():
    reset()
    device = Device(0)
    before = driver.cuCtxGetCurrent()[1]
    device.set_current()
    yield device
    driver.cuCtxSetCurrent(before)
    reset()


@pytest.fixture
def stream(device):
    stream = device.create_stream()
    yield stream
    stream.close()


def is_held(stream):
    """For a while at least."""
    deadline = time.monotonic() + 0.05
    while time.monotonic() < deadline:
        if driver.cuStreamQuery(stream.handle)[0] != NOT_READY:
            return False
        time.sleep(0.002)
    return True


def goes_on(stream):
    deadline = time.monotonic() + 10
    while driver.cuStreamQuery(stream.handle)[0] == NOT_READY:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return driver.cuStreamQuery(stream.handle)[0] == SUCCESS


def in_thread(function):
    answers = []

    def run():
        try:
            answers.append(function())
        except BaseException as error:
            answers.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    if isinstance(answers[0], BaseException):
        raise answers[0]
    return answers[0]


def test_a_stream_is_held_until_the_release(stream):
    with latch(stream) as held:
        assert is_held(stream)
        held.release()
        assert goes_on(stream)


def test_a_stream_is_held_until_the_end_of_the_block(stream):
    with latch(stream):
        assert is_held(stream)
    assert goes_on(stream)


def test_a_stream_is_released_by_an_exception(stream):
    with pytest.raises(ZeroDivisionError), latch(stream):
        _ = 1 / 0
    assert goes_on(stream)


def test_work_before_the_latch_is_not_held(stream):
    event = stream.record()
    with latch(stream):
        event.sync()


def test_is_released(stream):
    held = latch(stream)
    assert not held.is_released
    with held:
        assert not held.is_released
        held.release()
        assert held.is_released
    assert held.is_released


def test_a_release_more_than_once(stream):
    with latch(stream) as held:
        held.release()
        held.release()
    held.release()
    assert goes_on(stream)


def test_a_release_from_another_thread(stream):
    with latch(stream) as held:
        in_thread(held.release)
        assert goes_on(stream)


def test_a_latch_is_used_once(stream):
    held = latch(stream)
    with held:
        pass
    with pytest.raises(RuntimeError, match="already used"), held:
        pass


def test_nothing_to_release(stream):
    with pytest.raises(RuntimeError, match="not entered"):
        latch(stream).release()


@pytest.mark.parametrize(
    "as_argument",
    [
        pytest.param(lambda stream: stream, id="cuda.core"),
        pytest.param(lambda stream: stream.handle, id="driver"),
        pytest.param(
            lambda stream: type(
                "S", (), {"__cuda_stream__": lambda self: (0, int(stream.handle))}
            )(),
            id="protocol",
        ),
    ],
)
def test_what_is_a_stream(stream, as_argument):
    with latch(as_argument(stream)):
        assert is_held(stream)
    assert goes_on(stream)


@pytest.mark.parametrize("thing", [None, "1", 1, 1.0, True, [], {}], ids=repr)
def test_what_is_no_stream(thing):
    with pytest.raises(TypeError, match="a stream must be an object with __cuda_stream__"):
        latch(thing)


@pytest.mark.parametrize(
    "use",
    [latch, pytest.param(lambda device: async_error(device, 700), marks=pytest.mark.simulated)],
)
def test_a_device_is_no_stream(device, use):
    with pytest.raises(TypeError, match="not Device"):  # and not the handle of its ordinal
        use(device)


def test_what_a_latch_shows_of_itself(stream):
    held = latch(stream)
    name = f"<userstream.testing.latch of stream {int(stream.handle):#x}"
    assert repr(held) == f"{name}: not entered>"
    with held:
        assert repr(held) == f"{name}: held>"
        held.release()
        assert repr(held) == f"{name}: released>"


def test_a_protocol_of_another_version():
    stream = type("S", (), {"__cuda_stream__": lambda self: (1, 5)})()
    with pytest.raises(TypeError, match="version 1"):
        latch(stream)


@pytest.mark.parametrize(
    "default",
    [LEGACY_DEFAULT_STREAM, driver.CUstream(2), driver.CUstream(0)],
    ids=["legacy", "per-thread", "null"],
)
def test_default_streams_can_be_held(device, default):
    other = device.create_stream()
    handle = driver.CUstream(int(getattr(default, "handle", default)))
    with latch(default) as held:
        assert driver.cuStreamQuery(handle)[0] == NOT_READY
        assert goes_on(other)
        held.release()
        assert driver.cuStreamSynchronize(handle)[0] == SUCCESS


def test_two_streams_are_held_apart(device, stream):
    other = device.create_stream()
    with latch(stream) as first, latch(other) as second:
        first.release()
        assert goes_on(stream)
        assert is_held(other)
        second.release()
        assert goes_on(other)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["in order", "in reverse"])
def test_two_latches_of_one_stream(stream, order):
    with latch(stream) as first, latch(stream) as second:
        latches = (first, second)
        latches[order[0]].release()
        assert is_held(stream)
        latches[order[1]].release()
        assert goes_on(stream)


def test_a_word_can_be_used_again_before_its_stream_has_passed(device, stream):
    """Released latches give their words back at once: later values satisfy earlier waits."""
    other = device.create_stream()
    with latch(stream) as outer:
        for _ in range(20):
            with latch(stream):
                pass
        with latch(other):
            assert is_held(other)
        outer.release()
        assert goes_on(stream)
    assert goes_on(other)


@pytest.mark.simulated
def test_many_latches_are_held_at_once(device):
    """More than one page of words; the queue of a real stream may be full before."""
    streams = [device.create_stream() for _ in range(4)]
    held = [latch(streams[i % 4]) for i in range(1100)]
    for one in held:
        one.__enter__()
    assert all(is_held(stream) for stream in streams)
    for one in held:
        one.release()
    assert all(goes_on(stream) for stream in streams)


def test_many_latches_one_after_the_other(stream):
    for _ in range(300):
        with latch(stream):
            pass
    assert goes_on(stream)


# ---- the caller's state -----------------------------------------------------


def current_context():
    return int(driver.cuCtxGetCurrent()[1])


def test_a_latch_needs_no_context(stream):
    def hold():
        with latch(stream) as held:
            answer = is_held(stream)
            held.release()
            return answer, goes_on(stream), current_context()

    assert in_thread(hold) == (True, True, 0)


def test_the_context_stays(stream):
    before = current_context()
    with latch(stream):
        assert current_context() == before
    assert current_context() == before


@pytest.mark.multi_device
def test_a_stream_of_another_device(device):
    other_device = Device(1)
    other_device.set_current()
    stream = other_device.create_stream()
    device.set_current()
    before = current_context()
    with latch(stream) as held:
        assert current_context() == before
        assert is_held(stream)
        held.release()
        assert goes_on(stream)
    stream.close()


def test_a_default_stream_needs_a_context():
    def hold():
        with latch(driver.CUstream(1)):
            pass

    with pytest.raises(RuntimeError, match="INVALID_CONTEXT"):
        in_thread(hold)


@pytest.mark.parametrize("mode", list(Mode), ids=lambda mode: mode.name.rsplit("_", 1)[-1])
def test_the_capture_mode_stays(stream, mode):
    def hold():
        driver.cuThreadExchangeStreamCaptureMode(mode)
        with latch(stream):
            during = driver.cuThreadExchangeStreamCaptureMode(mode)[1]
        return during, driver.cuThreadExchangeStreamCaptureMode(mode)[1]

    assert in_thread(hold) == (mode, mode)


def test_the_capture_of_another_thread_survives(device, stream):
    captured = device.create_stream()
    driver.cuStreamBeginCapture(captured.handle, Mode.CU_STREAM_CAPTURE_MODE_GLOBAL)
    try:

        def hold():
            with latch(stream):
                pass

        in_thread(hold)
        status = driver.cuStreamIsCapturing(captured.handle)[1]
    finally:
        result, graph = driver.cuStreamEndCapture(captured.handle)
    assert status == driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
    assert result == SUCCESS
    driver.cuGraphDestroy(graph)


def test_a_capturing_stream_is_refused(stream):
    driver.cuStreamBeginCapture(stream.handle, Mode.CU_STREAM_CAPTURE_MODE_RELAXED)
    try:
        with pytest.raises(RuntimeError, match="being captured"), latch(stream):
            pass
        status = driver.cuStreamIsCapturing(stream.handle)[1]
    finally:
        _, graph = driver.cuStreamEndCapture(stream.handle)
    assert status == driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
    driver.cuGraphDestroy(graph)


# ---- failing calls ----------------------------------------------------------


@pytest.mark.simulated
@pytest.mark.parametrize(
    "function",
    [
        "cuStreamIsCapturing",
        "cuStreamGetCtx",
        "cuCtxPushCurrent",
        "cuThreadExchangeStreamCaptureMode",
        "cuMemHostGetDevicePointer",
        "cuStreamWaitValue32",
    ],
)
def test_a_call_that_fails(stream, function):
    """The error is named, nothing is changed, and the next latch works."""
    before = current_context()
    with (
        inject(function, Result.CUDA_ERROR_OUT_OF_MEMORY),
        pytest.raises(RuntimeError, match="OUT_OF_MEMORY"),
        latch(stream),
    ):
        pass
    assert current_context() == before
    mode = Mode.CU_STREAM_CAPTURE_MODE_GLOBAL
    assert driver.cuThreadExchangeStreamCaptureMode(mode)[1] == mode
    with latch(stream) as held:
        assert is_held(stream)
        held.release()
        assert goes_on(stream)


@pytest.mark.simulated
def test_the_memory_of_the_words_went_with_its_context():
    """A reset of the primary context frees all memory in it."""
    code = """
from userstream import testing
testing.simulate()
from cuda.bindings import driver
driver.cuInit(0)
for _ in range(3):
    driver.cuCtxSetCurrent(driver.cuDevicePrimaryCtxRetain(0)[1])
    stream = driver.cuStreamCreate(1)[1]
    with testing.latch(stream) as held:
        assert driver.cuStreamQuery(stream)[0] == 600
        held.release()
        assert driver.cuStreamSynchronize(stream)[0] == 0
    assert driver.cuDevicePrimaryCtxRelease(0)[0] == 0
"""
    check(code)
