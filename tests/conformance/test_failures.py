"""Sticky errors. A real context would be lost, so these rules are the simulated driver's alone."""

from __future__ import annotations

import ctypes

import pytest
from cuda.bindings import driver

from conformance.support import SUCCESS, Background, Result, becomes, current, finishes, ok
from userstream.testing import async_error, latch, reset

pytestmark = pytest.mark.simulated

ILLEGAL = Result.CUDA_ERROR_ILLEGAL_ADDRESS


@pytest.fixture
def failed(stream):
    """A stream whose context has failed."""
    async_error(stream, ILLEGAL)
    assert becomes((ILLEGAL,), lambda: driver.cuStreamQuery(stream))
    yield stream
    reset()


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(driver.cuStreamSynchronize, id="synchronize"),
        pytest.param(lambda s: driver.cuStreamCreate(1), id="stream creation"),
        pytest.param(lambda s: driver.cuEventCreate(2), id="event creation"),
        pytest.param(lambda s: driver.cuMemAlloc(64), id="memory"),
        pytest.param(lambda s: driver.cuMemHostAlloc(64, 0), id="pinned memory"),
        pytest.param(lambda s: driver.cuMemAllocAsync(64, s), id="pool memory"),
        pytest.param(lambda s: driver.cuCtxSynchronize(), id="context synchronize"),
        pytest.param(lambda s: driver.cuStreamBeginCapture(s, 0), id="capture"),
        pytest.param(lambda s: driver.cuLaunchHostFunc(s, driver.CUhostFn(1), 0), id="host"),
    ],
)
def test_the_error_is_the_answer_to_all_use(failed, call):
    assert call(failed)[0] == ILLEGAL


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda s: driver.cuCtxGetCurrent(), id="current context"),
        pytest.param(driver.cuStreamGetCtx, id="context of the stream"),
        pytest.param(driver.cuStreamGetFlags, id="flags"),
        pytest.param(lambda s: driver.cuDeviceGetCount(), id="devices"),
    ],
)
def test_questions_are_still_answered(failed, call):
    assert call(failed)[0] == SUCCESS


def test_every_stream_of_the_context_fails(make_stream):
    failing, idle = make_stream(), make_stream()
    async_error(failing, ILLEGAL)
    assert becomes((ILLEGAL,), lambda: driver.cuStreamQuery(idle))
    assert driver.cuStreamSynchronize(idle) == (ILLEGAL,)


def test_the_first_error_stays(make_stream, stream):
    other = make_stream()
    with latch(stream):
        async_error(other, ILLEGAL)
        assert becomes((ILLEGAL,), lambda: driver.cuStreamQuery(other))
        with pytest.raises(RuntimeError, match="accepts no work"):
            async_error(stream, Result.CUDA_ERROR_LAUNCH_FAILED)
        assert driver.cuStreamQuery(stream) == (ILLEGAL,)


def test_an_error_comes_in_the_order_of_the_stream(stream, event, word):
    with latch(stream) as held:
        word.write(stream, 1)
        async_error(stream, ILLEGAL)
        word.write(stream, 2)
        ok(driver.cuEventRecord(event, stream))
        held.release()
        assert becomes((ILLEGAL,), lambda: driver.cuEventQuery(event))
    assert word.value == 1


def test_an_error_ends_a_wait(stream):
    with latch(stream) as held:
        async_error(stream, ILLEGAL)
        waiting = Background(lambda: driver.cuStreamSynchronize(stream))
        assert waiting.is_blocked
        held.release()
        assert waiting.answer == (ILLEGAL,)


def test_an_error_ends_waits_in_other_streams(make_stream, event):
    failing, held_stream = make_stream(), make_stream()
    with latch(held_stream):
        ok(driver.cuEventRecord(event, held_stream))
        waiting = Background(lambda: driver.cuEventSynchronize(event))
        assert waiting.is_blocked
        async_error(failing, ILLEGAL)
        assert waiting.answer == (ILLEGAL,)


def test_a_wait_reports_its_error_though_it_was_reset_meanwhile(make_stream):
    """The reset may come before the waiting thread goes on."""
    failing, held_stream = make_stream(), make_stream()
    for _ in range(10):
        with latch(held_stream):
            waiting = [
                Background(lambda: driver.cuStreamSynchronize(held_stream)) for _ in range(4)
            ]
            assert all(one.is_blocked for one in waiting[-1:])
            async_error(failing, ILLEGAL)
            driver.cuStreamSynchronize(failing)
            reset()
            assert [one.answer for one in waiting] == [(ILLEGAL,)] * 4


def test_host_functions_are_not_called_after_an_error(stream):
    called = []
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: called.append(1))
    address = ctypes.cast(function, ctypes.c_void_p).value
    with latch(stream) as held:
        async_error(stream, ILLEGAL)
        ok(driver.cuLaunchHostFunc(stream, driver.CUhostFn(address), 0))
        held.release()
        assert becomes((ILLEGAL,), lambda: driver.cuStreamQuery(stream))
    reset()
    assert finishes(stream)
    assert called == []


def test_callbacks_are_called_with_the_error(stream):
    called = []
    signature = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
    function = signature(lambda _stream, result, _argument: called.append(result))
    address = ctypes.cast(function, ctypes.c_void_p).value
    with latch(stream) as held:
        async_error(stream, ILLEGAL)
        ok(driver.cuStreamAddCallback(stream, driver.CUstreamCallback(address), 0, 0))
        held.release()
        assert becomes([int(ILLEGAL)], lambda: called)


def test_after_a_reset_the_context_works(word, failed):
    reset()
    word.write(failed, 1)
    assert finishes(failed)
    assert word.value == 1


@pytest.mark.multi_device
def test_other_devices_go_on(failed, make_stream, other_context):
    there = make_stream(context=other_context)
    assert driver.cuStreamQuery(failed) == (ILLEGAL,)
    with current(other_context):
        assert finishes(there)
        assert driver.cuCtxSynchronize() == (SUCCESS,)
