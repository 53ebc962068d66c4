"""`Stream`: Python functions that it calls."""

from __future__ import annotations

import asyncio
import functools
import gc
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any
from unittest.mock import Mock

import pytest

import userstream as us
from conftest import SIMULATED
from helpers import (
    current_context,
    device_current,
    eventually,
    in_thread,
    pinned_memory,
    run_python,
)
from userstream import testing

pytestmark = pytest.mark.usefixtures("no_garbage")


@pytest.fixture
def unraisable(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """The exceptions that `sys.unraisablehook` received."""
    caught: list[BaseException] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: caught.append(args.exc_value))
    return caught


class Gate:
    """A function that does not return until it is told to."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()

    def __call__(self) -> None:
        self.entered.set()
        assert self.opened.wait(20)


# -- launch_host_func -------------------------------------------------------------------------


@pytest.mark.parametrize("blocking", [True, False])
def test_it_is_called_when_the_stream_gets_there(stream: us.Stream, blocking: bool) -> None:
    called: list[object] = []
    before = current_context()
    with testing.latch(stream) as latch:
        stream.launch_host_func(called.append, 7, blocking=blocking)
        stream.launch_host_func(
            lambda *args: called.append((args, threading.current_thread().name)),
            1,
            "two",
            blocking=blocking,
        )
        time.sleep(0.1)
        assert called == []
        latch.release()
        assert eventually(lambda: len(called) == 2)
    assert called == [7, ((1, "two"), "userstream-dispatcher")]
    assert current_context() == before


def test_later_work_waits_for_it(stream: us.Stream) -> None:
    gate = Gate()
    with us.Stream.create(0) as other:
        stream.launch_host_func(gate)
        event = stream.record()
        assert gate.entered.wait(10)
        assert not event.is_done
        with pytest.raises(us.WaitTimeout):
            stream.sync(timeout=0.02)
        other.sync(timeout=10)
        gate.opened.set()
        stream.sync(timeout=10)


def test_later_work_does_not_wait_if_it_need_not(stream: us.Stream) -> None:
    gate = Gate()
    stream.launch_host_func(gate, blocking=False)
    assert gate.entered.wait(10)
    stream.sync(timeout=10)
    gate.opened.set()


def test_the_functions_of_a_stream_run_in_its_order(stream: us.Stream) -> None:
    called: list[int] = []
    for number in range(200):
        stream.launch_host_func(called.append, number, blocking=number % 3 == 0)
    stream.launch_host_func(called.append, 200)
    stream.sync(timeout=20)
    assert called == list(range(201))


def test_two_objects_for_one_stream_share_its_order(stream: us.Stream) -> None:
    called: list[int] = []
    other = us.Stream.from_handle(int(stream.handle))
    with testing.latch(stream) as latch:
        for number in range(10):
            (stream, other)[number % 2].launch_host_func(called.append, number)
        latch.release()
    stream.sync(timeout=10)
    assert called == list(range(10))


def test_from_a_thread_without_a_context(stream: us.Stream) -> None:
    called: list[int] = []
    in_thread(lambda: stream.launch_host_func(called.append, 1))
    stream.sync(timeout=10)
    assert called == [1]


@pytest.mark.multi_device
def test_on_another_device() -> None:
    called: list[int] = []
    with (
        us.Stream.create(1) as stream,
        device_current(0),
    ):
        stream.launch_host_func(called.append, 1)
        stream.sync(timeout=10)
    assert called == [1]


def test_on_the_default_streams() -> None:
    called: list[int] = []
    for stream in (us.Stream.legacy_default(), us.Stream.per_thread_default()):

        def use(stream: us.Stream = stream) -> None:
            stream.launch_host_func(called.append, 1)
            stream.sync(timeout=10)

        use()
        in_thread(use)
    assert called == [1] * 4


def test_a_closed_stream_still_calls() -> None:
    gate, stream = Gate(), us.Stream.create(0)
    with testing.latch(stream) as latch:
        stream.launch_host_func(gate)
        stream.close()
        gate.opened.set()
        latch.release()
    assert gate.entered.wait(10)
    with pytest.raises(us.ClosedError):
        stream.launch_host_func(gate)
    with pytest.raises(us.ClosedError):
        stream.add_callback(lambda stream, error: None)


def test_nothing_is_kept_alive_afterwards(stream: us.Stream) -> None:
    class Thing:
        def __call__(self, other: object) -> object:
            return self

    fn, argument = Thing(), Thing()
    alive = [weakref.ref(fn), weakref.ref(argument)]
    with testing.latch(stream) as latch:
        stream.launch_host_func(fn, argument)
        del fn, argument
        gc.collect()
        assert None not in [each() for each in alive]
        latch.release()
        assert eventually(lambda: gc.collect() >= 0 and [each() for each in alive] == [None] * 2)


@pytest.mark.parametrize("thing", [None, 7, "print"])
def test_what_cannot_be_called(stream: us.Stream, thing: Any) -> None:
    for use in (stream.launch_host_func, stream.add_callback):
        with pytest.raises(TypeError, match=f"not {type(thing).__name__}"):
            use(thing)


class CatchAll:
    """It has every attribute, and none of them is a name."""

    def __init__(self) -> None:
        self.called = threading.Event()

    def __getattr__(self, name: str) -> object:
        return self

    def __call__(self, *args: object) -> None:
        self.called.set()


@pytest.mark.parametrize("use", [us.Stream.launch_host_func, us.Stream.add_callback])
def test_a_function_whose_name_is_no_text(stream: us.Stream, use: Callable[..., None]) -> None:
    fn, called = CatchAll(), threading.Event()
    use(stream, fn)
    use(stream, Mock(spec=print, side_effect=lambda *_: called.set()))
    assert fn.called.wait(10)
    assert called.wait(10)


async def asynchronous_generator(*args: object) -> AsyncIterator[None]:
    yield


async def coroutine_function(*args: object) -> None:
    raise AssertionError("it was run")


class AsyncCallable:
    __call__ = coroutine_function


@pytest.mark.parametrize(
    "fn",
    [
        coroutine_function,
        asynchronous_generator,
        functools.partial(coroutine_function, 1),
        AsyncCallable(),
        AsyncCallable().__call__,
    ],
    ids=["function", "generator", "partial", "object", "method"],
)
def test_coroutine_functions_are_refused(
    stream: us.Stream, unraisable: list[BaseException], fn: Callable[..., object]
) -> None:
    for use in (stream.launch_host_func, stream.add_callback):
        with pytest.raises(TypeError, match=r"coroutine function .*run_coroutine_threadsafe\("):
            use(fn)


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
def test_what_it_raises_is_reported(
    stream: us.Stream, unraisable: list[BaseException], error: type[BaseException]
) -> None:
    def fail() -> None:
        raise error("mine")

    called: list[int] = []
    stream.launch_host_func(fail)
    stream.launch_host_func(lambda: None, "one argument too many")
    stream.launch_host_func(called.append, 1)
    stream.sync(timeout=10)
    assert called == [1]
    assert [type(each) for each in unraisable] == [error, TypeError]
    unraisable.clear()
    stream.add_callback(lambda stream, error: fail())
    assert eventually(lambda: bool(unraisable))


def test_the_report_names_the_function() -> None:
    done = run_python(
        """
        import userstream as us

        class Tensor:
            def __repr__(self):
                raise AssertionError("it may have to wait for the GPU")

            def work(self, other):
                raise ValueError("mine")

        stream = us.Stream.create(0)
        stream.launch_host_func(Tensor().work, Tensor())
        stream.sync(timeout=10)
        """
    )
    assert done.returncode == 0, done.stderr
    assert "ValueError: mine" in done.stderr
    assert "Tensor.work" in done.stderr
    assert "AssertionError" not in done.stderr


# -- what a function may not do ---------------------------------------------------------------


def test_it_may_not_wait(stream: us.Stream) -> None:
    refused: list[object] = []
    us.get_stream(0)
    with us.Stream.create(0) as other, testing.latch(other) as latch:
        future = us.completion(other)

        def attempt() -> None:
            for use in (
                stream.sync,
                other.sync,
                lambda: us.wait(0),
                lambda: us.wait(other, timeout=0),
                us.wait_all,
                lambda: us.wait_for_device(0),
                lambda: us.wait_for_device(0, timeout=0.001),
                future.result,
                lambda: future.exception(timeout=1),
                lambda: stream.launch_host_func(attempt),
                lambda: asyncio.run(us.wait_async(0, timeout=1)),
                lambda: asyncio.run(us.wait_all_async(timeout=1)),
            ):
                try:
                    use()
                except RuntimeError as error:
                    refused.append("may not wait" in str(error) and "sync()" not in str(error))
                else:
                    refused.append(use)

        stream.launch_host_func(attempt)
        stream.sync(timeout=10)
        latch.release()
        assert refused == [True] * 12
        refused.clear()
        future.result(timeout=10)
        stream.add_callback(lambda stream, error: attempt())
        # Waiting for what is done already is no waiting.
        assert eventually(lambda: len(refused) == 12)
        assert [each for each in refused if each is not True] == [
            future.result,
            refused[8],
        ]


def test_a_function_may_queue_work(stream: us.Stream) -> None:
    event = threading.Event()
    with us.Stream.create(0) as other, pinned_memory() as word:

        def work() -> None:
            other.write_value_32(word, 5)
            other.add_callback(lambda stream, error: event.set())

        stream.launch_host_func(work)
        assert event.wait(10)
        assert not other.is_capturing


def test_captured_streams_refuse(stream: us.Stream) -> None:
    legacy = us.Stream.legacy_default()
    with stream.capture() as graph:
        for use in (
            lambda: stream.launch_host_func(print),
            lambda: stream.add_callback(lambda stream, error: None),
        ):
            with pytest.raises(us.CaptureError, match="being captured"):
                use()
    assert graph.nodes() == set()
    with (
        us.Stream.create(0, nonblocking=False) as captured,
        device_current(0),
        captured.capture(),
    ):
        for use in (
            lambda: legacy.launch_host_func(print),
            lambda: legacy.add_callback(lambda stream, error: None),
        ):
            with pytest.raises(us.CaptureError, match="blocking stream of its context"):
                use()


def test_captures_of_others_survive(stream: us.Stream) -> None:
    done = threading.Event()
    with us.Stream.create(0) as captured, captured.capture():
        gate = Gate()
        stream.launch_host_func(gate)
        stream.add_callback(lambda stream, error: done.set())
        assert gate.entered.wait(10)
        time.sleep(0.12)  # it looks at the events meanwhile
        gate.opened.set()
        assert done.wait(10)


# -- errors of the GPU ------------------------------------------------------------------------


@pytest.mark.simulated
def test_after_an_error_of_the_gpu_nobody_waits_for_ever() -> None:
    called: list[object] = []
    told: list[tuple[us.Stream, us.DriverError | None]] = []
    stream, other = us.Stream.create(0), us.Stream.create(0)
    thing = functools.partial(called.append, 1)
    alive = weakref.ref(thing)
    with testing.latch(stream) as latch:
        testing.async_error(stream, 700)
        for each in (stream, other):
            each.launch_host_func(thing)
            each.launch_host_func(thing, blocking=False)
        stream.add_callback(lambda *args: told.append(args))
        del thing
        assert eventually(lambda: len(called) == 2), "those of the other stream"
        latch.release()
        assert eventually(lambda: len(told) == 1)
        with pytest.raises(us.DriverError):
            stream.sync(timeout=10)
    assert told[0][0] is stream
    assert told[0][1].code == 700  # type: ignore[union-attr]
    assert called == [1, 1]
    assert eventually(lambda: alive() is None), "they are dropped"
    testing.reset()
    other.launch_host_func(called.append, 2)
    other.sync(timeout=10)
    assert called == [1, 1, 2]


@pytest.mark.simulated
def test_an_error_is_noticed_though_the_driver_calls_nobody() -> None:
    function = functools.partial(print, "it ran")
    alive = weakref.ref(function)
    stream = us.Stream.create(0)
    with testing.latch(stream) as latch:
        testing.async_error(stream, 700)
        stream.launch_host_func(function)
        del function
        time.sleep(0.1)
        assert alive() is not None
        latch.release()
        assert eventually(lambda: alive() is None)


@pytest.mark.simulated
@pytest.mark.parametrize(
    "function",
    ["cuMemHostGetDevicePointer", "cuEventRecord", "cuLaunchHostFunc", "cuStreamWaitValue32"],
)
def test_a_driver_that_refuses(stream: us.Stream, function: str) -> None:
    called: list[int] = []
    with testing.inject(function, 2, this_thread=True), pytest.raises(us.DriverError) as error:
        stream.launch_host_func(called.append, 1)
    assert error.value.function == function
    stream.launch_host_func(called.append, 2)
    stream.sync(timeout=10)
    assert called == [2]


# -- add_callback -----------------------------------------------------------------------------


def test_callbacks(stream: us.Stream) -> None:
    told: list[tuple[object, ...]] = []
    with testing.latch(stream) as latch:
        for number in range(3):
            stream.add_callback(lambda *args, number=number: told.append((number, *args)))
        time.sleep(0.05)
        assert told == []
        event = stream.record()
        latch.release()
        event.sync()
    assert eventually(lambda: len(told) == 3)
    assert told == [(number, stream, None) for number in range(3)]


def test_a_callback_holds_nothing_back(stream: us.Stream) -> None:
    gate = Gate()
    stream.add_callback(lambda stream, error: gate())
    assert gate.entered.wait(10)
    stream.sync(timeout=10)
    assert us.completion(stream).result(timeout=10) is None, "nor the futures"
    gate.opened.set()


def test_a_callback_adds_another(stream: us.Stream) -> None:
    turns: list[int] = []

    def again(stream: us.Stream, error: object) -> None:
        turns.append(1)
        if len(turns) < 5:
            stream.add_callback(again)

    stream.add_callback(again)
    assert eventually(lambda: len(turns) == 5)


def test_callbacks_of_the_default_streams() -> None:
    told: list[object] = []
    for stream in (us.Stream.legacy_default(), us.Stream.per_thread_default()):
        stream.add_callback(lambda stream, error: told.append((stream, error)))
        in_thread(functools.partial(stream.add_callback, lambda *args: told.append(args)))
        assert eventually(lambda: len(told) == 2)
        assert told == [(stream, None)] * 2
        told.clear()


# -- deadlocks, fork and exit: each in a process of its own -----------------------------------


def passes(code: str) -> str:
    """Run a program; return what it printed."""
    done = run_python(code)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "Traceback" not in done.stderr
    return done.stdout


def test_the_gil_is_held_inside_a_driver_call() -> None:
    """No thread of the driver needs the GIL, so a call that keeps it comes back."""
    passes(
        """
        import ctypes, threading
        import userstream as us

        keeping = ctypes.PyDLL("libcuda.so.1").cuStreamSynchronize
        stream, other = us.Stream.create(0), us.Stream.create(0)
        addresses = [ctypes.c_void_p(int(each.handle)) for each in (stream, other)]
        stream.launch_host_func(int)
        other.launch_host_func(int)
        us.wait(stream); us.wait(other)
        for _ in range(50):
            ran = [threading.Event() for _ in range(3)]
            stream.launch_host_func(ran[0].set, blocking=False)
            assert keeping(addresses[0]) == 0
            stream.launch_host_func(ran[1].set)  # holds its stream until it has the GIL
            other.launch_host_func(ran[2].set, blocking=False)
            assert keeping(addresses[1]) == 0
            assert all(each.wait(10) for each in ran)
        """
    )


def test_an_exit_with_functions_pending() -> None:
    printed = passes(
        """
        import threading, time
        import userstream as us

        begun = threading.Event()

        def endless():
            begun.set()
            time.sleep(1000)

        stream, other = us.Stream.create(0), us.Stream.create(0)
        stream.launch_host_func(endless)
        assert begun.wait(10)
        stream.launch_host_func(print, "it ran")
        other.launch_host_func(print, "it ran")
        other.add_callback(lambda stream, error: print("it ran"))
        time.sleep(0.1)
        """
    )
    assert not printed, "they are dropped"


def test_nothing_runs_after_the_exit_has_begun() -> None:
    simulate = "from userstream import testing; testing.simulate(2)" if SIMULATED else ""
    done = run_python(
        f"""
        import atexit, threading, time

        def last():  # registered first, so called after the handlers of userstream
            gate.set()
            time.sleep(0.2)

        atexit.register(last)
        {simulate}
        import userstream as us

        gate = threading.Event()
        for each in (us.Stream.create(0), us.Stream.create(0)):
            each.launch_host_func(gate.wait, 20)
            each.launch_host_func(print, "it ran")
        time.sleep(0.1)
        """,
        simulate=None,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_the_first_one_beside_a_held_stream() -> None:
    passes(
        """
        import userstream as us
        from userstream import testing

        held, stream = us.Stream.create(0), us.Stream.create(0)
        with testing.latch(held):
            stream.launch_host_func(int)
            stream.sync(timeout=10)
        """
    )


def test_an_exit_with_a_held_stream() -> None:
    passes(
        """
        import userstream as us
        from userstream import testing

        stream = us.Stream.create(0)
        latch = testing.latch(stream)
        latch.__enter__()
        for _ in range(10):
            stream.launch_host_func(print, "it ran")
        """
    )


def test_a_fork_with_functions_pending() -> None:
    passes(
        """
        import os, threading, time, warnings
        warnings.simplefilter("ignore", DeprecationWarning)
        import userstream as us
        from userstream import testing

        stream = us.Stream.create(0)
        called = []
        with testing.latch(stream) as latch:
            stream.launch_host_func(called.append, 1)
            child = os.fork()
            if child == 0:
                for use in (stream.launch_host_func, stream.add_callback):
                    try:
                        use(print)
                    except us.ForkedError:
                        continue
                    os._exit(1)
                os._exit(0 if len(threading.enumerate()) == 1 else 2)
            assert os.waitpid(child, 0)[1] == 0
            assert called == []
            latch.release()
        stream.sync(timeout=10)
        assert called == [1]
        """
    )
