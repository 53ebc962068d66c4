"""Waits and futures whose inner parts are interrupted, replaced or counted."""

from __future__ import annotations

import asyncio
import concurrent.futures
import signal
import threading
import types
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
from cuda.bindings import driver

import userstream as us
from helpers import (
    eventually,
    is_blocked,
    pooled_events,
    running,
    untraced,
)
from userstream import _driver, testing
from userstream._driver import core
from userstream._engine import futures as engine_futures
from userstream._engine import host_wait
from userstream._engine import watcher as watching
from userstream._engine.host_wait import check_arguments
from watching import finish_meanwhile, is_idle


@pytest.fixture(autouse=True)
def _nothing_left() -> object:
    assert eventually(is_idle), "it watches for an earlier test"
    yield
    assert eventually(is_idle), "the watcher still watches"


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


def test_the_event_of_a_wait_given_up_when_it_was_done_is_pooled_once() -> None:
    stream = us.get_stream(0)
    with testing.latch(stream) as latch:
        completion = stream._resolve().completion()
        pool, event = completion._pool, completion._event
        latch.release()
        assert eventually(lambda: _driver.streams.relaxed(completion.is_done))
    completion.abandon()
    assert pool.free.count(event) + pool.abandoned.count(event) == 1


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


def test_when_a_wait_begins_to_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of its own, on which each look takes 50 us."""
    now, sleeps = 0.0, []

    class Clock:
        @staticmethod
        def perf_counter() -> float:
            return now

        @staticmethod
        def sleep(seconds: float) -> None:
            nonlocal now
            sleeps.append((now, seconds))
            now += seconds

    class Work:
        target, ordered = None, False

        def abandon(self) -> None:
            pytest.fail("it was not given up")

        def is_done(self) -> bool:
            nonlocal now
            now += 50e-6
            return now > 1

    monkeypatch.setattr(host_wait, "time", Clock)
    host_wait.wait_until(Work(), None)
    assert 250e-6 < sleeps[0][0] < 310e-6
    for at, seconds in sleeps:
        assert seconds == pytest.approx(min(0.05 * at, 5e-3))
    now, sleeps = 0.0, []
    assert not host_wait._poll([Work()], [], 0.0, None, "spin")
    assert now > 1
    assert not sleeps


def test_policies() -> None:
    for wait in (us.wait, us.wait_all, us.Stream.create(0).sync):
        with pytest.raises(ValueError, match="policy must be"):
            wait(policy="block")
    check_arguments(float("inf"), "spin")


def test_an_interrupted_poll_gives_no_event_back_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = us.get_stream(0), us.get_stream(0, name="second")
    with testing.latch(first) as a, testing.latch(second):
        asked = []

        def interrupted(event: int, target: object) -> bool:
            asked.append(event)
            if len(asked) == 2:
                raise KeyboardInterrupt
            a.release()
            return eventually(lambda: is_complete(event, target))

        is_complete = core.is_complete
        monkeypatch.setattr(core, "is_complete", interrupted)
        with pytest.raises(KeyboardInterrupt):
            us.wait_all()
        monkeypatch.undo()
    pooled = pooled_events()
    assert len(pooled) == len(set(pooled))
    us.wait_all(timeout=10)


@pytest.mark.parametrize("wait", ["result", "exception"])
def test_a_ctrl_c_in_a_wait_for_a_future(wait: str) -> None:
    """`threading.Condition.wait` would make a RuntimeError of it, or keep its lock."""
    stream = us.get_stream(0)
    with testing.latch(stream) as latch:
        future = us.completion(0)
        kind = type(future._condition)
        for function in (kind.__exit__, kind.acquire):  # test_locks_internal.py tries `__enter__`
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
