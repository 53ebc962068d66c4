"""Host waits: what they cover, and what they leave alone."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from cuda.bindings import driver

import userstream as us
from helpers import (
    another_context,
    checked,
    eventually,
    in_thread,
    is_blocked,
    on,
    pooled_events,
    running,
)
from userstream import testing

POLICIES = ["auto", "spin"]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_wait_waits(policy: str) -> None:
    stream = us.get_stream(0)
    with testing.latch(stream) as latch:
        with running(lambda: us.wait(on(0), policy=policy)) as result:  # type: ignore[arg-type]
            assert is_blocked(result)
            latch.release()
            result()
    assert stream.is_done


def test_every_way_to_wait_waits() -> None:
    stream = us.get_stream(0)
    ways = [
        us.wait,
        lambda: us.wait(0),
        lambda: us.wait([on(0)]),
        lambda: us.wait(stream),
        us.wait_all,
        stream.sync,
        us.wait_for_device,
        lambda: us.wait_for_device(on(0)),
        lambda: us.wait_for_device(stream),
        us.close,
    ]
    for wait in ways:
        stream = us.get_stream(0)
        with testing.latch(stream) as latch, running(wait) as result:
            assert is_blocked(result, 0.02)
            latch.release()
            result()


def test_only_that_stream_is_waited_for() -> None:
    us.get_stream(0)
    other = us.Stream.create(0)
    with testing.latch(other):
        us.wait(on(0), timeout=10)
        us.wait_all(timeout=10)
        with pytest.raises(us.WaitTimeout) as caught:
            us.wait_for_device(on(0), timeout=0.02)
    assert caught.value.devices == (0,)
    assert "device 0" in str(caught.value)
    us.wait_for_device(0, timeout=10)
    other.close()


def test_a_wait_ends_while_others_keep_feeding_the_stream() -> None:
    stream = us.get_stream(0)
    stop = threading.Event()
    latches = [testing.latch(stream), testing.latch(stream)]
    latches[0].__enter__()

    def feed() -> None:  # the next latch is queued before the last one opens: never idle
        turn = 0
        while not stop.is_set():
            latches[1 - turn] = testing.latch(stream)
            latches[1 - turn].__enter__()
            time.sleep(0.001)
            latches[turn].release()
            turn = 1 - turn
        latches[turn].release()

    with running(feed):
        assert not stream.is_done
        for _ in range(5):
            us.wait(on(0), timeout=10)
            us.wait_all(timeout=10)
            stream.sync(timeout=10, policy="spin")
            us.completion(stream).result(timeout=10)
            asyncio.run(us.wait_async(stream, timeout=10))
            asyncio.run(us.wait_all_async(timeout=10))
        stop.set()
    us.wait(0, timeout=10)


@pytest.mark.multi_device
def test_several_devices_have_one_deadline() -> None:
    first, second = us.get_stream(0), us.get_stream(1)
    with testing.latch(first) as a, testing.latch(second) as b:
        started = time.perf_counter()
        with pytest.raises(us.WaitTimeout) as caught:
            us.wait([on(0), on(1)], timeout=2)
        assert time.perf_counter() - started < 3.9, "not one after the other"
        assert caught.value.devices == (0, 1)
        assert caught.value.streams == (repr(first), repr(second))
        assert caught.value.seconds == 2
        a.release()
        with pytest.raises(us.WaitTimeout) as caught:
            us.wait_all(timeout=0.1)
        assert caught.value.devices == (1,)
        assert caught.value.stream == repr(second)
        with pytest.raises(us.WaitTimeout) as caught:
            us.wait_for_device([on(0), on(1)], timeout=0.05)
        assert caught.value.devices == (1,)
        b.release()
    us.wait([on(0), on(1)], timeout=10)


def test_several_streams_have_one_deadline() -> None:
    with us.Stream.create(0) as first, us.Stream.create(0) as second:
        both = {"one": first, "more": [second, first]}
        with testing.latch(second) as latch:
            with pytest.raises(us.WaitTimeout) as caught:
                us.wait(both, timeout=0.1)
            assert caught.value.streams == (repr(second),)
            with pytest.raises(us.WaitTimeout):
                asyncio.run(us.wait_async(both, timeout=0.1))
            future = us.completion(both)
            assert not future.done()
            latch.release()
            future.result(timeout=10)
        us.wait(both, timeout=10)
        with pytest.raises(us.UnsupportedBufferError, match="streams and other things"):
            us.wait([first, on(0)])
        with pytest.raises(ValueError, match="is a stream already: pass no name"):
            us.wait([first, second], name="io")
        with pytest.raises(us.UnsupportedBufferError, match="hold buffers only"):
            us.get_stream([first])
    with pytest.raises(us.ClosedError):
        us.wait([first, second])


@pytest.mark.multi_device
def test_a_device_is_waited_for_from_a_thread_without_a_context() -> None:
    stream = us.get_stream(1)
    with testing.latch(stream) as latch:

        def wait() -> int:
            us.wait(on(1))
            return int(checked(driver.cuCtxGetCurrent()))

        with running(wait) as result:
            assert is_blocked(result)
            latch.release()
            assert result() == 0, "it still has no context"


def test_a_timeout_cancels_nothing() -> None:
    stream = us.get_stream(0)
    with testing.latch(stream) as latch:
        for seconds in (0, 0.0, 0.01):
            with pytest.raises(us.WaitTimeout, match="nothing was cancelled") as caught:
                us.wait(0, timeout=seconds)
            assert caught.value.seconds == seconds
            assert (caught.value.device, caught.value.stream) == (0, repr(stream))
        latch.release()
        us.wait(0, timeout=10)
    us.wait(0, timeout=0)


def test_nothing_to_wait_for() -> None:
    us.wait_all(timeout=0)
    with pytest.raises(us.NoUserStreamError, match="can only wait on user streams") as caught:
        us.wait(on(0))
    assert caught.value.device == 0
    advice = "; wait(acquire(buffer)) waits for the work of a buffer's producer"
    assert str(caught.value).endswith(advice)
    with pytest.raises(us.NoUserStreamError, match=r"makes one$"):
        us.wait(0)
    us.get_stream(0)
    with pytest.raises(us.NoUserStreamError, match="named 'io'"):
        us.wait(0, name="io")


def waits() -> list[Callable[..., object]]:
    """Return every wait that takes a timeout."""
    stream = us.get_stream(0)
    done, pending = us.completion(stream), us.completion(stream)
    return [
        us.wait,
        us.wait_all,
        us.wait_for_device,
        us.close,
        us.Stream.create(0).sync,
        done.result,
        pending.exception,
        lambda timeout: asyncio.run(us.wait_async(0, timeout=timeout)),
        lambda timeout: asyncio.run(us.wait_all_async(timeout=timeout)),
    ]


@pytest.mark.parametrize("timeout", [-1, -0.1, float("nan")])
def test_a_timeout_is_at_least_0(timeout: float) -> None:
    for wait in waits():
        with pytest.raises(ValueError, match=f"timeout must be at least 0 seconds, not {timeout}"):
            wait(timeout=timeout)


@pytest.mark.parametrize(
    "timeout", [10**400, -(10**400), 10**5000], ids=["positive", "negative", "no repr"]
)
def test_a_timeout_that_no_float_can_hold(timeout: int) -> None:
    for wait in waits():
        with pytest.raises(ValueError, match=r"timeout is an int of [0-9]+ bits, which no float"):
            wait(timeout=timeout)


@pytest.mark.parametrize("timeout", ["1", True, [1], 1j, np.int64(1)])
def test_a_timeout_is_a_number(timeout: object) -> None:
    for wait in waits():
        with pytest.raises(TypeError, match="timeout must be seconds, an int or a float, or None"):
            wait(timeout=timeout)


def test_bad_arguments_touch_no_cuda() -> None:
    from conftest import SIMULATED

    if not SIMULATED:
        pytest.skip("counts driver calls")
    us.get_stream(0)
    testing.reset()
    with pytest.raises(ValueError, match="timeout"):
        us.wait(0, timeout=-1)
    with pytest.raises(ValueError, match="policy"):
        us.wait_all(policy="x")  # type: ignore[arg-type]
    for function in ("cuStreamQuery", "cuCtxGetDevice", "cuEventRecord"):
        assert testing.calls(function) == 0


def test_auto_sleeps_and_spin_does_not() -> None:
    stream = us.get_stream(0)
    shares = {}
    for policy in POLICIES:
        with testing.latch(stream):
            cpu, wall = time.thread_time(), time.perf_counter()
            with pytest.raises(us.WaitTimeout):
                stream.sync(timeout=0.2, policy=policy)  # type: ignore[arg-type]
            shares[policy] = (time.thread_time() - cpu) / (time.perf_counter() - wall)
    assert shares["auto"] < 0.5 * shares["spin"], shares


def test_events_are_used_again() -> None:
    stream = us.get_stream(0)

    def wait_once() -> None:
        with testing.latch(stream) as latch, running(stream.sync) as result:
            is_blocked(result, 0.002)
            latch.release()
            result()

    wait_once()
    before = len(pooled_events())
    for _ in range(20):
        wait_once()
    assert len(pooled_events()) == before
    with testing.latch(stream):
        for _ in range(5):
            with pytest.raises(us.WaitTimeout):
                stream.sync(timeout=0)
    stream.sync(timeout=10)
    for _ in range(40):
        wait_once()
    assert len(pooled_events()) <= before + 1  # the first had the blocking event


@pytest.mark.simulated
def test_an_error_of_the_gpu_is_itself() -> None:
    illegal = driver.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    stream, named = us.get_stream(0), us.get_stream(0, name="io")
    try:
        testing.async_error(stream, illegal)
        assert eventually(lambda: driver.cuStreamQuery(stream._live())[0] == illegal)
        for wait in (us.wait, stream.sync, lambda: us.wait(named), lambda: stream.is_done):
            with pytest.raises(us.DriverError, match="CUDA_ERROR_ILLEGAL_ADDRESS") as caught:
                wait()
            assert caught.value.code == 700
            assert caught.value.function in ("cuStreamQuery", "cuStreamIsCapturing")
            assert caught.value.device == 0
            assert str(caught.value).endswith("the context does not recover: start a new process")
        with pytest.raises(
            us.WaitErrors, match=r"^2 of the waits failed, first .*ADDRESS"
        ) as group:
            us.wait_all()
        assert len(group.value.exceptions) == 2
        with pytest.raises(us.DriverError):
            us.wait_for_device(0)
        with pytest.raises(us.WaitErrors):
            us.close()
        assert us.streams() == {}, "emptied nevertheless"
    finally:
        testing.reset()


@pytest.mark.simulated
def test_an_error_of_the_gpu_is_itself_where_no_event_can_be_made() -> None:
    illegal = driver.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    stream = us.Stream.create(0)
    pooled_events().clear()
    try:
        testing.async_error(stream, illegal)
        assert eventually(lambda: driver.cuStreamQuery(stream._live())[0] == illegal)
        for use in (stream.record, lambda: stream.add_callback(print)):
            with pytest.raises(us.DriverError, match="ILLEGAL_ADDRESS") as caught:
                use()
            assert (caught.value.code, caught.value.device) == (700, 0)
    finally:
        testing.reset()


@pytest.mark.simulated
def test_an_error_in_the_middle_of_a_wait() -> None:
    illegal = driver.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    broken, fine = us.get_stream(0), us.get_stream(1)
    try:
        with testing.latch(fine) as a, testing.latch(broken) as b:
            testing.async_error(broken, illegal)
            with running(us.wait_all) as result:
                assert is_blocked(result, 0.02)
                b.release()
                assert is_blocked(result, 0.05), "the other stream is still waited for"
                a.release()
                with pytest.raises(us.WaitErrors) as caught:
                    result()
        assert [e.code for e in caught.value.exceptions] == [700]  # type: ignore[attr-defined]
        with testing.latch(fine), pytest.raises(us.WaitErrors) as caught:
            us.wait_all(timeout=0.02)
        kinds = {type(each) for each in caught.value.exceptions}
        assert kinds == {us.DriverError, us.WaitTimeout}
    finally:
        testing.reset()
    us.wait(1, timeout=10)


def test_waiting_for_a_device_that_nobody_used_wakes_nothing_up() -> None:
    from conftest import SIMULATED
    from helpers import run_python

    if not SIMULATED:
        pytest.skip("asks the simulated driver")
    done = run_python(
        """
        import userstream as us
        from cuda.bindings import driver
        us.wait_for_device(1)
        assert driver.cuDevicePrimaryCtxGetState(1)[2] == 0
        us.get_stream(1); us.wait_for_device(1)
        assert driver.cuDevicePrimaryCtxGetState(1)[2] == 1
        """
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.simulated
def test_waiting_for_a_device_with_an_older_driver() -> None:
    from helpers import run_python

    done = run_python(
        """
        import threading, time
        from userstream import testing
        testing.simulate(2, driver_version=12040)
        import userstream as us
        from cuda.bindings import driver
        stream = us.get_stream(1)
        us.wait_for_device(1, timeout=10)
        with testing.latch(stream):
            try:
                us.wait_for_device(1, timeout=0.05)
            except us.WaitTimeout as error:
                assert error.devices == (1,)
            else:
                raise AssertionError
        us.wait_for_device(1, timeout=10)
        testing.async_error(stream, driver.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS)
        while driver.cuStreamQuery(stream.handle)[0] != 700:
            time.sleep(0.001)
        try:
            us.wait_for_device(1, timeout=10)
        except us.DriverError as error:
            assert error.code == 700, error.code
        else:
            raise AssertionError
        print(testing.calls("cuCtxSynchronize"))
        """,
        simulate=None,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 3


def test_in_a_thread() -> None:
    stream = us.get_stream(0)
    assert in_thread(lambda: (us.wait(0), us.wait_all(), stream.sync())) == (None, None, None)


def test_a_context_of_ones_own() -> None:
    """Its events are not kept, and `wait_for_device` covers it when it is asked for its stream."""
    with another_context():
        handle = checked(driver.cuStreamCreate(1))
        stream = us.Stream.from_handle(handle)
        assert stream.device.device_id == 0
        with testing.latch(stream):
            for wait in (stream.sync, lambda **t: us.wait_for_device(stream, **t)):
                with pytest.raises(us.WaitTimeout):
                    wait(timeout=0.02)
            with pytest.raises(us.WaitTimeout):
                us.wait_for_device(timeout=0.02)
        us.wait_for_device(stream, timeout=10)
        us.get_stream(0).wait(stream)
        stream.wait(us.get_stream(0))
        us.wait(timeout=10)
        assert not stream._resolve().pool.free
        checked(driver.cuStreamDestroy(handle))
