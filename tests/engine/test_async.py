"""Waits without a waiting thread: futures, asyncio, and the watcher behind them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import sys
import threading
import time

import pytest
from cuda.bindings import driver

import userstream as us
from conftest import SIMULATED
from helpers import (
    device_current,
    eventually,
    on,
    run_python,
    running,
)
from userstream import testing
from watching import is_idle, sleeps_for_long, watched


@pytest.fixture(autouse=True)
def _nothing_left() -> object:
    assert eventually(is_idle), "it watches for an earlier test"
    yield
    assert eventually(is_idle), "the watcher still watches"


# -- futures ----------------------------------------------------------------------------------


def test_a_future_is_done_with_the_work() -> None:
    stream = us.get_stream(0)
    with testing.latch(stream) as latch:
        future = us.completion(on(0))
        assert isinstance(future, concurrent.futures.Future)
        assert not future.done()
        for ask in (future.result, future.exception):
            with pytest.raises(us.WaitTimeout, match=r"0\.05 s: .*wait again") as caught:
                ask(timeout=0.05)
            assert (caught.value.seconds, caught.value.devices) == (0.05, (0,))
            assert caught.value.streams == (repr(stream),)
        assert concurrent.futures.wait([future], timeout=0.01).not_done == {future}
        latch.release()
        assert future.result(timeout=10) is None
        assert future.exception() is None
    assert us.completion(0).done(), "of an idle stream at once"


def test_it_covers_what_was_queued_and_no_more() -> None:
    stream = us.get_stream(0)
    with testing.latch(stream) as first:
        early = us.completion(stream)
        with testing.latch(stream) as second:
            late = us.completion(stream)
            first.release()
            early.result(timeout=10)
            assert not late.done()
            second.release()
        late.result(timeout=10)


def test_all_that_is_done_is_told_of_and_no_more() -> None:
    """Also where the watcher has looked at an event before, or at many of a stream in one go."""
    stream = us.get_stream(0)
    with testing.latch(stream) as first:
        early = [us.completion(0) for _ in range(250)]
        with testing.latch(stream) as second:
            late = [us.completion(0) for _ in range(250)]
            early[50].cancel()
            first.release()
            done = early[:50] + early[51:]
            assert not concurrent.futures.wait(done, timeout=10).not_done
            time.sleep(0.02)
            assert not any(future.done() for future in late)
            second.release()
        assert not concurrent.futures.wait(late, timeout=10).not_done


def test_callbacks_run_in_the_watcher() -> None:
    stream = us.get_stream(0)
    names = []
    with testing.latch(stream) as latch:
        future = us.completion(0)
        future.add_done_callback(lambda _: names.append(threading.current_thread().name))
        latch.release()
        future.result(timeout=10)
    assert eventually(lambda: names == ["userstream-watcher"])


def test_a_callback_may_cancel_what_is_to_be_told_next(caplog: pytest.LogCaptureFixture) -> None:
    stream = us.get_stream(0)
    with testing.latch(stream) as latch:
        futures = [watched(0) for _ in range(21)]
        for future, following in zip(futures[1::2], futures[2::2], strict=True):
            future.add_done_callback(lambda _, following=following: following.cancel())
        latch.release()
        concurrent.futures.wait(futures, timeout=10)
    assert eventually(is_idle)
    assert [future.cancelled() for future in futures] == [False] + 10 * [False, True]
    assert not caplog.records


def test_a_callback_may_fail(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever it raises: the thread that calls it calls the others as well, and says so."""
    stream = us.get_stream(0)
    called: list[str] = []
    with testing.latch(stream) as latch:
        futures = [us.completion(0) for _ in range(3)]
        futures[0].add_done_callback(lambda _: sys.exit(1))
        futures[0].add_done_callback(lambda _: called.append("next"))
        latch.release()
        for future in futures:
            future.result(timeout=10)
    assert eventually(lambda: called == ["next"])
    (record,) = caplog.records
    assert record.name == "userstream"
    assert repr(futures[0]) in caplog.text
    assert "SystemExit" in caplog.text


def test_a_callback_of_a_future_that_is_over_raises_where_it_was_added() -> None:
    us.get_stream(0)
    future = us.completion(0)
    assert future.done()
    with pytest.raises(SystemExit):
        future.add_done_callback(lambda _: sys.exit(1))


class _Broken(logging.Handler):
    """A handler of the user's that cannot write, and does not say so in logging's way."""

    def emit(self, record: logging.LogRecord) -> None:
        raise OSError("the disk is full")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_logging_handler_that_raises_does_not_end_the_watcher() -> None:
    stream = us.get_stream(0)
    logger, handler = logging.getLogger("userstream"), _Broken()
    logger.addHandler(handler)
    try:
        with testing.latch(stream) as latch:
            futures = [us.completion(0) for _ in range(3)]
            futures[0].add_done_callback(lambda _: sys.exit(1))
            latch.release()
            for future in futures:
                future.result(timeout=10)
        assert eventually(is_idle)
    finally:
        logger.removeHandler(handler)


def test_a_future_that_is_over_may_be_asked_in_the_watcher() -> None:
    stream = us.get_stream(0)
    results: list[object] = []
    with testing.latch(stream) as latch:
        future = us.completion(0)
        future.add_done_callback(lambda it: results.append((it.result(), it.exception())))
        latch.release()
        assert eventually(lambda: results == [(None, None)])


def test_waiting_for_the_watcher_in_the_destructor_of_what_was_held() -> None:
    stream, other = us.get_stream(0), us.get_stream(0, name="other")
    errors: list[BaseException] = []

    class Thing:
        def __del__(self) -> None:
            try:
                pending.result()
            except RuntimeError as error:
                errors.append(error)

    with testing.latch(other) as held:
        pending = us.completion(other)
        with testing.latch(stream):
            # Free-threaded Python leaves a destructor to the thread that made the object, if it
            # is still there.
            maker = threading.Thread(target=lambda: us.hold(Thing(), stream=stream))
            maker.start()
            maker.join()
        assert eventually(lambda: len(errors) == 1)
        held.release()
        pending.result(timeout=10)


def test_a_cancelled_future_leaves_the_others_alone() -> None:
    stream = us.get_stream(0)
    with testing.latch(stream) as latch:
        first, second, third = (us.completion(0) for _ in range(3))
        assert first.cancel()
        assert second.cancel()
        assert second.cancel(), "again"
        assert first.cancelled()
        assert concurrent.futures.wait([first], timeout=1).done == {first}
        with pytest.raises(concurrent.futures.CancelledError):
            first.result()
        latch.release()
        third.result(timeout=10)
        assert not third.cancel()
        assert not third.cancelled()


def test_default_streams_are_watched_each_for_itself() -> None:
    """One object stands for a stream per thread: an older watch of it says nothing of a later.

    The other thread uses its stream before, and ends after, this thread's is held: the driver makes
    and destroys such a stream with the thread, and either may wait for the device.
    """
    default = us.Stream.per_thread_default()
    ready, go, done = threading.Event(), threading.Event(), threading.Event()
    end = threading.Event()

    def elsewhere() -> None:
        with device_current(0):
            default.sync(timeout=10)
            default.record()
            ready.set()
            assert go.wait(10)
            us.completion(default).result(timeout=10)
            with testing.latch(default) as other:
                theirs = us.completion(default)
                other.release()
                theirs.result(timeout=10)
            done.set()
            assert end.wait(20)

    with running(elsewhere) as result:
        try:
            assert ready.wait(10)
            with device_current(0), testing.latch(default) as latch:
                mine = us.completion(default)
                go.set()
                assert done.wait(20)
                assert not mine.done()
                latch.release()
                mine.result(timeout=10)
        finally:
            end.set()
    result()


def test_bad_input() -> None:
    for function in (us.completion, lambda t: asyncio.run(us.wait_async(t))):
        with pytest.raises(us.NoUserStreamError):
            function(0)
        with pytest.raises(us.UnsupportedBufferError):
            function("x")
    stream = us.Stream.create(0)
    stream.close()
    with pytest.raises(us.ClosedError):
        us.completion(stream)
    with pytest.raises(ValueError, match="timeout must be"):
        asyncio.run(us.wait_async(0, timeout=-1))
    with pytest.raises(TypeError, match="timeout must be"):
        asyncio.run(us.wait_all_async(timeout="1"))  # type: ignore[arg-type]


def test_a_captured_stream_is_refused() -> None:
    stream = us.get_stream(0)
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
    assert driver.cuStreamBeginCapture(stream._live(), mode)[0] == 0
    with pytest.raises(us.CaptureError):
        us.completion(0)
    with pytest.raises(us.CaptureError):
        asyncio.run(us.wait_all_async())
    status, graph = driver.cuStreamEndCapture(stream._live())
    assert status == 0, "the capture went on"
    driver.cuGraphDestroy(graph)


def test_the_watcher_harms_no_capture() -> None:
    stream, captured = us.get_stream(0), us.Stream.create(0)
    for mode in (
        driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL,
        driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
        driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED,
    ):
        with testing.latch(stream) as latch:
            future = us.completion(0)
            assert driver.cuStreamBeginCapture(captured._live(), mode)[0] == 0
            time.sleep(0.02)
            latch.release()
            future.result(timeout=10)
            status, graph = driver.cuStreamEndCapture(captured._live())
        assert status == 0
        driver.cuGraphDestroy(graph)
    captured.close()


@pytest.mark.simulated
def test_a_watcher_that_cannot_begin_leaves_nobody_waiting() -> None:
    done = run_python(
        """
        import userstream as us
        from userstream import _driver, testing

        relax = _driver.streams.relax_capture_of_this_thread

        def fail():  # the watcher alone calls it
            raise us.DriverError("not now")

        _driver.streams.relax_capture_of_this_thread = fail
        stream = us.get_stream(0)
        with testing.latch(stream) as latch:
            future = us.completion(0)
            future.add_done_callback(lambda _: None)  # from now on it is watched
            error = future.exception(timeout=10)
            assert isinstance(error, us.DriverError), error
            _driver.streams.relax_capture_of_this_thread = relax
            future = us.completion(0)
            future.add_done_callback(lambda _: None)
            latch.release()
            future.result(timeout=10)
        """
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("how", ["", "raise SystemExit(0)", "future.cancel()"])
def test_exit_with_futures_pending(how: str) -> None:
    done = run_python(
        f"""
        import userstream as us
        from userstream import testing
        stream = us.get_stream(0)
        latch = testing.latch(stream)
        latch.__enter__()
        future = us.completion(0)
        assert not future.done()
        {how}
        """
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_nobody_waits_in_vain_at_the_very_end() -> None:
    """A function that was registered before the import runs when the watcher has ended."""
    done = run_python(
        f"""
        import asyncio, atexit

        def last():
            with testing.latch(us.get_stream(0)):
                for wait in (
                    lambda: us.completion(0).add_done_callback(print),
                    lambda: asyncio.run(us.wait_async(0)),
                    lambda: us.get_stream(0).add_callback(print),
                ):
                    try:
                        wait()
                    except RuntimeError as error:
                        assert "shutting down" in str(error), error
                        print("refused")
                us.hold(1, stream=us.get_stream(0))
            us.wait(0, timeout=10)

        atexit.register(last)
        import userstream as us
        from userstream import testing
        if {SIMULATED}:
            testing.simulate(2)
        us.get_stream(0).sync()
        """,
        simulate=None,
    )
    assert (done.stdout, done.stderr) == ("refused\n" * 3, "")


def test_a_forked_child_is_refused() -> None:
    done = run_python(
        """
        import asyncio, os, sys, warnings
        warnings.simplefilter("ignore", DeprecationWarning)
        import userstream as us
        from userstream import testing
        stream = us.get_stream(0)
        with testing.latch(stream) as latch:
            future = us.completion(0)
            pid = os.fork()
            if pid == 0:
                calls = [
                    us.completion, lambda: us.completion(stream),
                    lambda: asyncio.run(us.wait_async()),
                    lambda: asyncio.run(us.wait_all_async()),
                    future.done, future.cancel, lambda: future.add_done_callback(print),
                ]
                for call in calls:
                    try:
                        call()
                    except us.ForkedError:
                        continue
                    os._exit(1)
                os._exit(7)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            latch.release()
            future.result(timeout=10)
        sys.exit(code)
        """
    )
    assert done.returncode == 7, done.stderr


def test_a_fork_while_the_waits_are_being_loaded() -> None:
    """The thread that loads them keeps the lock of the import, and is not there in the child."""
    done = run_python(
        """
        import asyncio, os, signal, sys, threading, warnings
        from importlib.machinery import SourceFileLoader
        warnings.simplefilter("ignore", DeprecationWarning)
        import userstream as us

        loading, go_on = threading.Event(), threading.Event()

        def execute(loader, module, whole=SourceFileLoader.exec_module):
            # Not where it is found: there it has the lock of all imports, and no thread can fork.
            if module.__name__ == "userstream._engine.futures":
                loading.set()
                assert go_on.wait(20)
            whole(loader, module)

        stream = us.get_stream(0)
        SourceFileLoader.exec_module = execute
        thread = threading.Thread(target=us.completion, args=(0,))
        thread.start()
        assert loading.wait(20)
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)
            for call in (
                us.completion, lambda: us.completion(0), lambda: us.completion(stream),
                lambda: asyncio.run(us.wait_async(0)), lambda: asyncio.run(us.wait_all_async()),
            ):
                try:
                    call()
                except us.ForkedError:
                    continue
                os._exit(1)
            os._exit(7)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        go_on.set()
        thread.join()
        sys.exit(code)
        """
    )
    assert done.returncode == 7, done.stderr


def test_a_future_in_a_forked_child_is_refused_and_not_waited_for() -> None:
    done = run_python(
        """
        import os, signal, sys, warnings
        warnings.simplefilter("ignore", DeprecationWarning)
        import userstream as us
        from userstream import testing
        stream = us.get_stream(0)
        with testing.latch(stream) as latch:
            future = us.completion(0)
            pid = os.fork()
            if pid == 0:
                signal.alarm(20)
                for wait in (future.result, future.exception):
                    try:
                        wait()
                    except us.ForkedError:
                        continue
                    os._exit(1)
                os._exit(7)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        future.result(timeout=10)
        sys.exit(code)
        """
    )
    assert done.returncode == 7, done.stderr


def test_the_watcher_ends_with_the_interpreter() -> None:
    done = run_python(
        """
        import atexit, threading

        @atexit.register  # before the watcher, so called after it was
        def tell():
            print([thread.name for thread in threading.enumerate()])

        import userstream as us
        from userstream import testing
        from conftest import SIMULATED
        if SIMULATED:
            testing.simulate(1)
        stream = us.get_stream(0)
        with testing.latch(stream) as latch:
            future = us.completion(0)
            future.add_done_callback(lambda _: None)
            latch.release()
            future.result(timeout=10)
        assert "userstream-watcher" in [thread.name for thread in threading.enumerate()]
        """,
        simulate=None,
        PYTHONPATH=os.pathsep.join(sys.path),
    )
    assert (done.returncode, done.stdout) == (0, "['MainThread']\n"), done.stderr


def test_the_watcher_sleeps_until_there_is_something() -> None:
    stream = us.get_stream(0)
    with testing.latch(stream):
        future = watched(0)
    future.result(timeout=10)
    assert eventually(sleeps_for_long)


def test_the_watcher_sleeps() -> None:
    """It costs next to nothing while it waits."""
    done = run_python(
        """
        import time
        import userstream as us
        from userstream import testing
        stream = us.get_stream(0)
        with testing.latch(stream) as latch:
            future = us.completion(0)
            cpu, wall = time.process_time(), time.perf_counter()
            time.sleep(1)
            share = (time.process_time() - cpu) / (time.perf_counter() - wall)
            latch.release()
            future.result(timeout=10)
        from conftest import SIMULATED
        # The worker thread of a held stream of the simulated driver polls as well.
        assert share < (0.5 if SIMULATED else 0.1), share
        """,
        PYTHONPATH=os.pathsep.join(sys.path),
    )
    assert done.returncode == 0, done.stderr
