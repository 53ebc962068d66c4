"""Waits without a waiting thread: futures, asyncio, and the watcher behind them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import logging
import os
import signal
import sys
import threading
import time
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from cuda.bindings import driver

import userstream as us
from conftest import SIMULATED
from helpers import (
    device_current,
    eventually,
    is_blocked,
    on,
    pooled_events,
    run_python,
    running,
    untraced,
)
from userstream import _driver, testing
from userstream._engine import futures as engine_futures
from userstream._engine import watcher as watching


def is_idle() -> bool:
    """Tell whether the watcher has nothing left to watch or to give up."""
    watcher = watching._watcher
    return not watcher._queues and not watcher._asked


def finish_meanwhile(latch: testing.latch) -> None:
    """Release a stream, and block the event loop until the watcher has told of it all."""
    latch.release()
    assert eventually(lambda: is_idle() and sleeps_for_long())


def sleeps_for_long() -> bool:
    """Tell whether the watcher sleeps until there is something to watch."""
    return watching._watcher._pause == threading.TIMEOUT_MAX


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


def test_many_of_a_stream_are_told_of_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = us.get_stream(0)
    told: list[int] = []
    tell = watching._tell

    def count(over: list[Any]) -> None:
        told.append(len(over))
        tell(over)

    monkeypatch.setattr(watching, "_tell", count)
    with testing.latch(stream) as latch:
        futures = [us.completion(0) for _ in range(500)]
        latch.release()
        assert not concurrent.futures.wait(futures, timeout=10).not_done
    assert sum(told) == 500
    assert len(told) < 100


def test_threads_that_come_in_another_order_than_they_recorded() -> None:
    """Nobody is told early: an event that is done says nothing of those it found there."""
    stream = us.get_stream(0)
    with testing.latch(stream) as first:
        told: list[str] = []
        early = stream._resolve().completion()
        with testing.latch(stream) as second:
            late = stream._resolve().completion()
            watching.watch([watching.Watch(late, lambda *_: told.append("late"))])
            watching.watch([watching.Watch(early, lambda *_: told.append("early"))])
            first.release()
            time.sleep(0.05)
            assert "late" not in told
            second.release()
        assert eventually(lambda: told == ["late", "early"])


def test_a_young_wait_is_not_as_late_as_an_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also behind an old one on the same stream."""
    monkeypatch.setattr(watching, "_LONGEST_SLEEP", 20)
    stream = us.get_stream(0)
    with testing.latch(stream) as latch:
        old = us.completion(0)
        watching._watcher._added -= 1000
        assert eventually(lambda: watching._watcher._pause == 20)
        young = us.completion(0)
        assert eventually(lambda: 0 < watching._watcher._pause < 1)
        latch.release()
        young.result(timeout=10)
        old.result(timeout=10)


@pytest.mark.multi_device
def test_a_future_of_several_streams_is_done_with_the_last() -> None:
    streams = us.get_stream(0), us.get_stream(1)
    with testing.latch(streams[0]) as a, testing.latch(streams[1]) as b:
        future = us.completion([on(0), on(1)])
        single = us.completion(on(1))
        b.release()
        single.result(timeout=10)
        assert not future.done()
        a.release()
        future.result(timeout=10)


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
        futures = [us.completion(0) for _ in range(21)]
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


def test_what_destructors_ask_of_the_watcher_in_its_thread() -> None:
    """The garbage collector runs anybody's there, in the middle of anything."""
    stream = us.get_stream(0)
    watcher = watching._watcher
    made: list[concurrent.futures.Future[None]] = []
    with testing.latch(stream) as latch:
        futures = [us.completion(0) for _ in range(4)]

        class Queue(OrderedDict[Any, None]):
            """As if a collection came in the middle of a look at the queue."""

            def __iter__(self) -> Iterator[Any]:
                for count, each in enumerate(super().__iter__()):
                    if count == 1 and not made:
                        made.append(us.completion(0))
                        futures[3].cancel()
                    yield each

        assert eventually(lambda: not watcher._asked)
        ((key, queue),) = watcher._queues.items()
        watcher._queues[key] = Queue(queue)
        latch.release()
        for future in futures[:3]:
            future.result(timeout=10)
        assert eventually(lambda: bool(made))
        made[0].result(timeout=10)
    assert futures[3].done()


def test_the_watcher_survives_what_should_not_happen(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stream = us.get_stream(0)
    failures = [MemoryError(), SystemExit(), KeyboardInterrupt()]
    with testing.latch(stream) as latch:
        future = us.completion(0)

        def fail(watches: list[Any]) -> bool:
            if failures:
                raise failures.pop()
            return watching.Watcher._look(watching._watcher, watches)

        monkeypatch.setattr(watching._watcher, "_look", fail)
        latch.release()
        future.result(timeout=10)
    assert not failures
    assert [record.name for record in caplog.records] == ["userstream"] * 3


def test_a_watch_that_is_dropped_after_its_report() -> None:
    """Another one waits on the same stream: an error there would come back in every turn."""
    stream = us.get_stream(0)
    told: list[str] = []

    def drop(watch: watching.Watch, _: Exception | None) -> None:
        told.append("early")
        watching.unwatch([watch])

    with testing.latch(stream) as first:
        watching.watch([watching.Watch(stream._resolve().completion(), drop)])
        with testing.latch(stream) as second:
            late = us.completion(stream)
            first.release()
            assert eventually(lambda: told == ["early"])
            assert eventually(lambda: not watching._watcher._asked)
            assert not late.done()
            second.release()
        late.result(timeout=10)
    assert told == ["early"]


def test_a_report_that_fails_does_not_stop_the_others(caplog: pytest.LogCaptureFixture) -> None:
    stream = us.get_stream(0)
    told: list[int] = []

    def tell(watch: watching.Watch, error: Exception | None) -> None:
        assert error is None
        told.append(watches.index(watch))
        if len(told) == 2:
            raise SystemExit("the report")

    with testing.latch(stream) as latch:
        watches = [watching.Watch(stream._resolve().completion(), tell) for _ in range(4)]
        watching.watch(watches)
        after = us.completion(stream)
        latch.release()
        after.result(timeout=10)
    assert told == [0, 1, 2, 3]
    assert [record.getMessage() for record in caplog.records] == [
        f"a callback failed when {stream!r} was done"
    ]


def test_a_watcher_that_is_gone_is_begun_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of our doing: a debugger ends threads, say."""
    stream = us.get_stream(0)
    watcher = watching.Watcher()
    monkeypatch.setattr(watching, "_watcher", watcher)
    watcher._ended = True
    watcher._daemon.start()
    watcher._daemon.join()
    watcher._ended = False
    with testing.latch(stream) as latch:
        future = us.completion(0)
        latch.release()
        future.result(timeout=10)
    assert eventually(is_idle)
    watcher.end()


def test_waiting_for_the_watcher_in_the_watcher_is_refused() -> None:
    """It would wait for itself, and whoever waits for it as well."""
    stream, other = us.get_stream(0), us.get_stream(0, name="other")
    errors: list[BaseException] = []

    def wait_for(pending: concurrent.futures.Future[None]) -> None:
        for wait in (
            pending.result,
            pending.exception,
            lambda: pending.result(timeout=5),
            lambda: asyncio.run(us.wait_async(other)),
        ):
            try:
                wait()
            except BaseException as error:
                errors.append(error)

    with testing.latch(other) as held:
        pending = us.completion(other)
        with testing.latch(stream) as latch:
            first = us.completion(stream)
            first.add_done_callback(lambda _: wait_for(pending))
            latch.release()
            assert eventually(lambda: len(errors) == 4)
        held.release()
        pending.result(timeout=10)
    assert [type(error) for error in errors] == [RuntimeError] * 4
    assert all("on another thread" in str(error) for error in errors)


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


def test_a_future_that_a_thread_keeps_locked_holds_up_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a Ctrl-C in the middle of `concurrent.futures.wait` leaves it."""
    monkeypatch.setattr(engine_futures, "_LONGEST_LOCK", 0.01)
    stream = us.get_stream(0)
    with testing.latch(stream) as latch:
        futures = [us.completion(0) for _ in range(3)]
        with futures[0]._condition:
            latch.release()
            for future in futures[1:]:
                future.result(timeout=10)
            assert eventually(lambda: bool(caplog.records))
    assert "keeps it locked" in caplog.text


@pytest.mark.parametrize("wait", ["result", "exception"])
def test_a_ctrl_c_in_a_wait_for_a_future(wait: str) -> None:
    """`threading.Condition.wait` would make a RuntimeError of it, or keep its lock."""
    stream = us.get_stream(0)
    with testing.latch(stream) as latch:
        future = us.completion(0)
        kind = type(future._condition)
        for function in (kind.__exit__, kind.acquire):  # test_locks.py tries `__enter__`
            assert not isinstance(function, types.FunctionType), "it may come in the middle"

        def interrupted(*_: object) -> None:
            assert not future._condition._is_owned(), "the watcher needs it"
            signal.raise_signal(signal.SIGINT)

        with pytest.MonkeyPatch.context() as patch, untraced():
            patch.setattr(engine_futures._Condition, "wait_outside", interrupted)
            with pytest.raises(KeyboardInterrupt):
                getattr(future, wait)()
        assert not future.done()
        latch.release()
        assert future.result(timeout=10) is None


def test_several_threads_wait_for_a_future(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are called when it is over, and do not just look now and then."""
    monkeypatch.setattr(engine_futures, "_LONGEST_WAIT", 1000)
    stream = us.get_stream(0)
    with testing.latch(stream) as latch:
        future = us.completion(0)
        with running(future.result) as a, running(future.exception) as b:
            assert is_blocked(a)
            assert is_blocked(b)
            latch.release()
        assert (a(), b()) == (None, None)
        future = us.completion(0)


def test_cancelling_wakes_up_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_futures, "_LONGEST_WAIT", 1000)
    stream = us.get_stream(0)
    with testing.latch(stream):
        future = us.completion(0)
        with running(lambda: concurrent.futures.wait([future]).done) as waiting:
            with running(future.result) as asking:
                assert is_blocked(asking)
                future.cancel()
            with pytest.raises(concurrent.futures.CancelledError):
                asking()
        assert waiting() == {future}


def test_a_cancel_that_is_interrupted_leaves_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(points: object) -> None:
        raise KeyboardInterrupt

    stream = us.get_stream(0)
    with testing.latch(stream) as latch:
        future = us.completion(0)
        with monkeypatch.context() as patch:
            patch.setattr(engine_futures.Points, "stop", interrupted)
            with pytest.raises(KeyboardInterrupt):
                future.cancel()
        assert future.done()
        latch.release()
        assert eventually(is_idle)
        assert future.cancelled()


def test_the_event_of_a_cancelled_future_is_not_used_before_it_completed() -> None:
    stream = us.get_stream(0)
    with testing.latch(stream) as latch:
        future = us.completion(0)
        (watch,) = future._points._pending  # type: ignore[attr-defined]
        pool, event = watch.completion._pool, watch.completion._event
        others = [us.completion(0) for _ in range(2)]
        assert future.cancel()
        assert eventually(lambda: event in pool.abandoned)
        others += [us.completion(0) for _ in range(2)]
        assert event not in pool.free
        latch.release()
        for other in others:
            other.result(timeout=10)
    assert pool.free.count(event) + pool.abandoned.count(event) == 1


def test_the_event_of_a_wait_given_up_when_it_was_done_is_pooled_once() -> None:
    stream = us.get_stream(0)
    with testing.latch(stream) as latch:
        completion = stream._resolve().completion()
        pool, event = completion._pool, completion._event
        latch.release()
        assert eventually(lambda: _driver.streams.relaxed(completion.is_done))
    completion.abandon()
    assert pool.free.count(event) + pool.abandoned.count(event) == 1


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


# -- asyncio ----------------------------------------------------------------------------------


def test_the_event_loop_goes_on() -> None:
    stream = us.get_stream(0)

    async def main(latch: testing.latch) -> int:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                if ticks == 20:
                    latch.release()
                await asyncio.sleep(0.001)

        ticking = asyncio.create_task(tick())
        await us.wait_async(on(0), timeout=10)
        ticking.cancel()
        return ticks

    with testing.latch(stream) as latch:
        assert asyncio.run(main(latch)) >= 20


def test_shield_and_gather_take_completions() -> None:
    stream = us.get_stream(0)

    async def main() -> None:
        with testing.latch(stream) as latch:
            completion = us.completion(stream)
            shielded = asyncio.shield(completion)
            asyncio.get_running_loop().call_later(0.02, latch.release)
            await asyncio.gather(shielded, completion, asyncio.wait_for(completion, 10))
            assert completion.done()
            done, _ = await asyncio.wait([asyncio.ensure_future(completion)], timeout=10)
            assert len(done) == 1
            with testing.latch(stream):
                inner = us.completion(stream)
                outer = asyncio.shield(inner)
                outer.cancel()
                await asyncio.sleep(0)
                assert not inner.cancelled()

    asyncio.run(asyncio.wait_for(main(), 20))


@pytest.mark.parametrize("is_done", [False, True])
def test_asyncio_wait_of_a_completion_is_refused(is_done: bool) -> None:
    """Its callback has to run on the thread of the loop, or the wait never ends."""
    stream = us.get_stream(0)

    async def main() -> None:
        with testing.latch(stream) as latch:
            completion = us.completion(stream)
            if is_done:
                latch.release()
                await completion
            with pytest.raises(TypeError, match=r"pass asyncio\.ensure_future\(completion\)"):
                await asyncio.wait([completion], timeout=5)  # type: ignore[type-var]

    asyncio.run(asyncio.wait_for(main(), 20))


@pytest.mark.parametrize(
    "wait", [lambda: us.wait_async(0, timeout=0.02), lambda: us.wait_all_async(timeout=0.02)]
)
def test_timeouts(wait: Callable[[], object]) -> None:
    stream = us.get_stream(0)

    async def main() -> None:
        with pytest.raises(us.WaitTimeout) as caught:
            await wait()  # type: ignore[misc]
        assert caught.value.streams == (repr(stream),)
        assert caught.value.seconds == 0.02
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await us.wait_async(0)

    with testing.latch(stream):
        asyncio.run(main())
        assert eventually(is_idle), "nothing is left of what is late"
    asyncio.run(us.wait_async(0, timeout=10))


def test_a_wait_that_is_done_when_its_time_is_over_is_not_late() -> None:
    stream = us.get_stream(0)

    async def main(latch: testing.latch) -> None:
        task = asyncio.create_task(us.wait_async(0, timeout=0.02))
        await asyncio.sleep(0)
        finish_meanwhile(latch)
        time.sleep(0.03)
        await task

    with testing.latch(stream) as latch:
        asyncio.run(main(latch))


@pytest.mark.simulated
def test_a_wait_that_failed_when_its_time_is_over_has_failed() -> None:
    stream = us.get_stream(0)

    async def main(latch: testing.latch) -> None:
        testing.async_error(stream, driver.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS)
        task = asyncio.create_task(us.wait_async(0, timeout=0.02))
        await asyncio.sleep(0)
        finish_meanwhile(latch)
        time.sleep(0.03)
        with pytest.raises(us.DriverError):
            await task

    try:
        with testing.latch(stream) as latch:
            asyncio.run(main(latch))
    finally:
        testing.reset()
    us.close()


def test_a_loop_is_woken_up_once_for_all_that_is_done() -> None:
    stream = us.get_stream(0)
    wakes = 0

    class Loop(asyncio.SelectorEventLoop):
        def call_soon_threadsafe(self, *args: Any, **kwargs: Any) -> asyncio.Handle:
            nonlocal wakes
            wakes += threading.current_thread().name == "userstream-watcher"
            return super().call_soon_threadsafe(*args, **kwargs)

    async def main(latch: testing.latch) -> None:
        tasks = [asyncio.create_task(us.wait_async(0)) for _ in range(300)]
        await asyncio.sleep(0)
        finish_meanwhile(latch)
        await asyncio.gather(*tasks)
        assert wakes == 2, "the second is for a signal that hits the first"

    with testing.latch(stream) as latch, asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(main(latch))


def test_a_task_that_is_cancelled_when_it_is_to_be_woken_up() -> None:
    stream = us.get_stream(0)

    async def main(latch: testing.latch) -> None:
        tasks = [asyncio.create_task(us.wait_async(0)) for _ in range(3)]
        await asyncio.sleep(0)
        finish_meanwhile(latch)
        tasks[0].cancel()
        async with asyncio.timeout(10):
            await asyncio.gather(*tasks[1:])
        assert tasks[0].cancelled()

    with testing.latch(stream) as latch:
        asyncio.run(main(latch))


def test_a_loop_that_is_closed_meanwhile(caplog: pytest.LogCaptureFixture) -> None:
    stream = us.get_stream(0)
    with testing.latch(stream) as latch:
        loops = [asyncio.new_event_loop(), asyncio.new_event_loop()]
        tasks = [loop.create_task(us.wait_async(0)) for loop in loops]
        for loop in loops:
            loop.run_until_complete(asyncio.sleep(0))
        loops[0].close()
        latch.release()
        loops[1].run_until_complete(asyncio.wait_for(tasks[1], 10))
        loops[1].close()
        tasks[0]._log_destroy_pending = False  # type: ignore[attr-defined]
        tasks[0].get_coro().close()  # type: ignore[union-attr]
    assert not caplog.records


def test_a_ctrl_c_leaves_the_other_waits_of_the_loop_alone() -> None:
    """Where it hits hardest: while the loop is called."""
    stream, idle = us.get_stream(0), us.Stream.create(0)

    class Loop(asyncio.SelectorEventLoop):
        hit = True

        def call_soon_threadsafe(self, *args: Any, **kwargs: Any) -> asyncio.Handle:
            if self.hit:
                self.hit = False
                raise KeyboardInterrupt
            return super().call_soon_threadsafe(*args, **kwargs)

    with testing.latch(stream) as latch, contextlib.closing(Loop()) as loop:
        other = loop.create_task(us.wait_async(0))
        loop.call_soon(loop.stop)
        loop.run_forever()
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(us.wait_async(idle))
        latch.release()
        loop.run_until_complete(asyncio.wait_for(other, 10))


class _Interrupted(Exception):
    """What a signal handler raises."""


@pytest.mark.parametrize("which", ["delivery", "future"])
def test_an_exception_of_a_signal_handler_in_the_delivery_loses_nobody(
    which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it begins, or between two of the futures: asyncio drops the callback."""
    stream = us.get_stream(0)
    hits = 1

    def hit(expected: str) -> None:
        nonlocal hits
        if which == expected and hits:
            hits -= 1
            raise _Interrupted

    class Future(asyncio.Future[None]):
        def set_result(self, result: None) -> None:
            hit("future")
            super().set_result(result)

    class Loop(asyncio.SelectorEventLoop):
        def create_future(self) -> Future:
            return Future(loop=self)

    deliver = engine_futures._Mailbox._deliver

    def delivery(mailbox: engine_futures._Mailbox) -> None:
        hit("delivery")
        deliver(mailbox)

    monkeypatch.setattr(engine_futures._Mailbox, "_deliver", delivery)
    seen: list[type | None] = []

    async def main(latch: testing.latch) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: seen.append(type(context["exception"])))
        tasks = [asyncio.create_task(us.wait_async(0)) for _ in range(20)]
        await asyncio.sleep(0)
        finish_meanwhile(latch)
        async with asyncio.timeout(10):
            await asyncio.gather(*tasks)

    with testing.latch(stream) as latch, asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(main(latch))
    assert seen == [_Interrupted]


def test_a_loop_that_lost_its_calls_is_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_futures, "_LONGEST_WAIT", 0)
    stream = us.get_stream(0)
    lost = 2

    class Loop(asyncio.SelectorEventLoop):
        def call_soon_threadsafe(self, callback: Any, *args: Any, **more: Any) -> asyncio.Handle:
            nonlocal lost
            if lost and threading.current_thread().name == "userstream-watcher":
                lost -= 1
                callback, args = (lambda: None), ()
            return super().call_soon_threadsafe(callback, *args, **more)

    async def main(first: testing.latch) -> None:
        task = asyncio.create_task(us.wait_async(0))
        await asyncio.sleep(0)
        finish_meanwhile(first)
        async with asyncio.timeout(10):
            with testing.latch(stream) as second:
                other = asyncio.create_task(us.wait_async(0))
                await asyncio.sleep(0)
                finish_meanwhile(second)
                await asyncio.gather(task, other)

    with testing.latch(stream) as latch, asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(main(latch))
    assert not lost


def test_a_ctrl_c_in_the_delivery_leaves_the_others_to_the_next_run() -> None:
    stream = us.get_stream(0)
    hits = 1

    class Future(asyncio.Future[None]):
        def set_result(self, result: None) -> None:
            nonlocal hits
            if hits:
                hits -= 1
                raise KeyboardInterrupt
            super().set_result(result)

    class Loop(asyncio.SelectorEventLoop):
        def create_future(self) -> Future:
            return Future(loop=self)

    with testing.latch(stream) as latch, contextlib.closing(Loop()) as loop:
        tasks = [loop.create_task(us.wait_async(0)) for _ in range(5)]
        loop.call_soon(loop.stop)
        loop.run_forever()
        finish_meanwhile(latch)
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(tasks[0])
        loop.run_until_complete(asyncio.wait_for(asyncio.gather(*tasks), 10))


def test_no_loop_is_kept_alive() -> None:
    us.get_stream(0)
    loops: list[weakref.ref[asyncio.AbstractEventLoop]] = []

    async def main() -> None:
        loops.append(weakref.ref(asyncio.get_running_loop()))
        await us.wait_async(0)

    asyncio.run(main())
    gc.collect()
    assert loops[0]() is None


def test_cancelling_a_task_ends_its_wait_alone() -> None:
    stream = us.get_stream(0)

    async def main(latch: testing.latch) -> None:
        tasks = [asyncio.create_task(us.wait_async(0, timeout=10)) for _ in range(5)]
        await asyncio.sleep(0.01)
        tasks[2].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[2]
        assert not any(task.done() for task in (*tasks[:2], *tasks[3:]))
        queues = watching._watcher._queues
        assert eventually(lambda: sum(map(len, list(queues.values()))) == 4)
        latch.release()
        await asyncio.gather(*tasks[:2], *tasks[3:])

    with testing.latch(stream) as latch:
        asyncio.run(main(latch))


def test_a_task_group_on_loops_of_several_threads() -> None:
    streams = [us.get_stream(0, name=str(number)) for number in range(4)]

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for stream in streams:
                group.create_task(us.wait_async(stream, timeout=20))
            group.create_task(us.wait_all_async(timeout=20))

    latches = [testing.latch(stream) for stream in streams]
    for latch in latches:
        latch.__enter__()
    threads = [threading.Thread(target=lambda: asyncio.run(main())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for latch in latches:
        time.sleep(0.005)
        latch.release()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


def test_many_waits_leave_no_more_events_than_there_were_at_once() -> None:
    streams = [us.get_stream(0, name=str(number)) for number in range(8)]

    async def main() -> None:
        await asyncio.gather(*(us.wait_async(streams[n % 8], timeout=60) for n in range(1000)))

    def once() -> None:
        latches = [testing.latch(stream) for stream in streams]
        for latch in latches:
            latch.__enter__()

        def release() -> None:
            queues = watching._watcher._queues
            assert eventually(lambda: sum(map(len, list(queues.values()))) == 1000)
            for latch in latches:
                latch.release()

        with running(release):
            asyncio.run(main())

    once()
    before = len(pooled_events())
    assert before >= 1000
    once()
    assert len(pooled_events()) == before


def test_a_future_that_is_done_is_no_garbage() -> None:
    """It goes with its last reference: thousands of them would be a load for the collector."""
    stream = us.Stream.create(0)
    gc.collect()
    gc.disable()
    try:
        with testing.latch(stream._live()) as latch:
            future, dropped = us.completion(stream), us.completion(stream)
            gone = [weakref.ref(future), weakref.ref(dropped), weakref.ref(stream)]
            dropped.cancel()
            latch.release()
            future.result(timeout=10)
        del future, dropped, stream
        assert eventually(lambda: [each() for each in gone] == [None, None, None])
    finally:
        gc.enable()


def test_without_an_event_loop() -> None:
    us.get_stream(0)
    coroutine = us.wait_async(0)
    with pytest.raises(RuntimeError, match=r"event loop: await it in a coroutine.*trio"):
        coroutine.send(None)


# -- errors of the GPU, and the end -----------------------------------------------------------


@pytest.mark.simulated
def test_an_error_of_the_gpu_ends_all_waits_of_its_context() -> None:
    illegal = driver.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    stream, other = us.get_stream(0), us.get_stream(0, name="other")

    async def awaits() -> list[object]:
        calls = (us.wait_async(stream), us.wait_async(other, timeout=20), us.wait_all_async())
        return await asyncio.gather(*calls, return_exceptions=True)

    try:
        with testing.latch(stream) as a, testing.latch(other):
            testing.async_error(stream, illegal)
            futures = [us.completion(stream), us.completion(other), us.completion(stream)]
            with running(lambda: asyncio.run(awaits())) as errors:
                queues = watching._watcher._queues
                assert eventually(lambda: sum(map(len, list(queues.values()))) == 7)
                a.release()
            assert [type(error) for error in errors()] == [
                us.DriverError,
                us.DriverError,
                us.WaitErrors,
            ]
            for future in futures:
                error = future.exception(timeout=10)
                assert isinstance(error, us.DriverError)
                assert error.code == 700
        with pytest.raises(us.DriverError):
            us.completion(stream).result(timeout=10)
        with pytest.raises(us.WaitErrors):
            asyncio.run(us.wait_all_async(timeout=10))
        with pytest.raises(us.DriverError):
            asyncio.run(us.wait_async(stream, timeout=10))
    finally:
        testing.reset()
    us.close()


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
            error = us.completion(0).exception(timeout=10)
            assert isinstance(error, us.DriverError), error
            _driver.streams.relax_capture_of_this_thread = relax
            future = us.completion(0)
            latch.release()
            future.result(timeout=10)
        """
    )
    assert done.returncode == 0, done.stderr


def test_without_a_thread_the_next_wait_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    stream = us.get_stream(0)
    monkeypatch.setattr(watching, "_watcher", watching.Watcher())
    with testing.latch(stream) as latch:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RuntimeError, match="new thread"):
                us.completion(0)
        future = us.completion(0)
        latch.release()
        future.result(timeout=10)
    assert eventually(is_idle)
    watching._watcher.end()


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
                    lambda: us.completion(0).result(),
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
                ]
                for call in calls:
                    try:
                        call()
                    except us.ForkedError:
                        continue
                    os._exit(1)
                future.cancel()
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
        future = us.completion(0)
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
