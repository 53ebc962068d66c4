"""Waits and futures whose inner parts are interrupted, replaced or counted."""

from __future__ import annotations

import asyncio
import concurrent.futures
import signal
import threading
import types
import weakref
from collections.abc import Callable, Iterator
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
from userstream import testing
from userstream._engine import futures as engine_futures
from userstream._engine import host_wait
from userstream._engine import watcher as watching
from userstream._engine.host_wait import check_arguments
from watching import blocking_point, finish_meanwhile, is_idle, watched


@pytest.fixture(autouse=True)
def _nothing_left() -> object:
    assert eventually(is_idle), "it watches for an earlier test"
    yield
    assert eventually(is_idle), "the watcher still watches"


@pytest.mark.schedules(0)  # counts what the watcher does, which no schedule chooses
def test_many_of_a_stream_are_told_of_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = us.get_stream(0)
    told: list[int] = []
    tell = watching._tell

    def count(over: list[Any], error: Exception | None) -> None:
        told.append(len(over))
        tell(over, error)

    monkeypatch.setattr(watching, "_tell", count)
    with testing.latch(stream) as latch:
        futures = [watched(0) for _ in range(500)]
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
        futures = [watched(0) for _ in range(4)]

        class Queue(dict[Any, None]):
            """A queue that simulates a garbage collection during an inspection of the queue."""

            def __iter__(self) -> Iterator[Any]:
                for count, each in enumerate(super().__iter__()):
                    if count == 1 and not made:
                        made.append(watched(0))
                        futures[3].cancel()
                    yield each

        assert eventually(lambda: not watcher._asked)
        ((key, queue),) = watcher._queues.items()
        watcher._queues[key] = Queue(queue)
        latch.release()
        assert eventually(lambda: bool(made))  # before `result`, which would look by itself
        for future in (*futures[:3], made[0]):
            future.result(timeout=10)
    assert futures[3].done()


def test_a_future_that_a_thread_keeps_locked_holds_up_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A Ctrl-C in the middle of `concurrent.futures.wait` leaves such a future."""
    monkeypatch.setattr(engine_futures, "_LONGEST_LOCK", 0.01)
    stream = us.get_stream(0)
    with testing.latch(stream) as latch:
        futures = [watched(0) for _ in range(3)]
        with futures[0]._condition:
            latch.release()
            for future in futures[1:]:
                future.result(timeout=10)
            assert eventually(lambda: bool(caplog.records))
    assert "keeps it locked" in caplog.text


def test_several_threads_wait_for_a_future(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are called when it is over, and do not just look now and then."""
    monkeypatch.setattr(engine_futures, "LONGEST_SLEEP", 1000)
    stream = us.get_stream(0)
    with testing.latch(stream) as latch:
        future = watched(0)
        with running(future.result) as a, running(future.exception) as b:
            assert is_blocked(a)
            assert is_blocked(b)
            latch.release()
        assert (a(), b()) == (None, None)
        future = us.completion(0)


def test_cancelling_wakes_up_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_futures, "LONGEST_SLEEP", 1000)
    stream = us.get_stream(0)
    with testing.latch(stream):
        future = watched(0)
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
    def interrupted(watches: object) -> None:
        raise KeyboardInterrupt

    stream = us.get_stream(0)
    with testing.latch(stream) as latch:
        future = us.completion(0)
        with monkeypatch.context() as patch:
            patch.setattr(watching, "unwatch", interrupted)
            with pytest.raises(KeyboardInterrupt):
                future.cancel()
        assert future.done()
        latch.release()
        assert eventually(is_idle)
        assert future.cancelled()


def test_without_a_thread_the_next_wait_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    stream = us.get_stream(0)
    monkeypatch.setattr(watching, "_watcher", watching.Watcher())
    with testing.latch(stream) as latch:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            future = us.completion(0)
            for _ in range(2):
                with pytest.raises(RuntimeError, match="new thread"):
                    future.add_done_callback(lambda _: None)
        future.add_done_callback(lambda _: None)
        latch.release()
        future.result(timeout=10)
    assert eventually(is_idle)
    watching._watcher.end()


def test_a_loop_that_lost_its_calls_is_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_futures, "LONGEST_SLEEP", 0)
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
    # The watcher may hold some for a moment longer.
    assert eventually(lambda: len(pooled_events()) >= 999)  # and the blocking one
    before = len(pooled_events())
    once()
    assert eventually(lambda: len(pooled_events()) >= before)
    assert eventually(is_idle)
    assert len(pooled_events()) == before


class Work:
    """A point that is passed after a second, by a clock on which each look takes 1 us."""

    target, in_order, now = None, False, 0.0

    def __init__(self, bell: Any) -> None:
        self.bell = bell

    def perf_counter(self) -> float:
        return self.now

    def is_done(self) -> bool:
        self.now += 1e-6
        return self.now > 1

    def notify(self, bell: Any) -> bool:
        assert bell is self.bell
        return bool(bell.rings)


@pytest.mark.parametrize("rings", [False, True])
def test_when_a_wait_begins_to_sleep(rings: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Bell:
        def __init__(self) -> None:
            self.rings, self.pauses = rings, list[tuple[float, float]]()

        def wait(self, seconds: float) -> None:
            self.pauses.append((work.now, seconds))
            work.now += seconds

    bell = Bell()
    work = Work(bell)
    monkeypatch.setattr(host_wait, "time", work)
    monkeypatch.setattr(host_wait, "Bell", lambda: bell)
    host_wait.wait_until(work, None)
    assert bell.pauses[0][0] == pytest.approx(20e-6)
    for at, seconds in bell.pauses:
        assert seconds == pytest.approx(0.04 if rings else min(0.05 * at, 5e-3))
    bell.pauses.clear()
    work.now = 0.0
    assert not host_wait.poll([work], [], 0.0, None, "spin")
    assert work.now > 1
    assert not bell.pauses


@pytest.mark.simulated
@pytest.mark.parametrize(
    ("wait", "rings"), [(us.wait_for_device, [1, 1]), (us.wait_all, [1, 2])], ids=["device", "all"]
)
def test_a_bell_ends_each_wait(wait: Callable[[], None], rings: list[int]) -> None:
    """A pause would end it late, at a time that has nothing to do with the work."""
    streams = [us.get_stream(0), us.get_stream(0, name="io")]
    with testing.latch(streams[0]):
        blocking_point(streams[0])
    assert eventually(lambda: streams[0].is_done), "the blocking event is not free"
    before = testing.calls("cuEventSynchronize")
    with testing.latch(streams[0]) as first, testing.latch(streams[1]) as second:
        with running(wait) as result:
            for latch, count in zip((first, second), rings, strict=True):
                goal = before + count
                assert eventually(lambda goal=goal: testing.calls("cuEventSynchronize") == goal)
                latch.release()
            result()


def test_policies() -> None:
    for wait in (us.wait, us.wait_all, us.Stream.create(0).sync):
        with pytest.raises(ValueError, match="policy must be"):
            wait(policy="block")
    check_arguments(float("inf"), "spin")


def test_an_interrupted_poll_gives_no_event_back_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = us.get_stream(0), us.get_stream(0, name="second")
    with testing.latch(first) as a, testing.latch(second):

        def interrupted(points: list[Any], failed: list[Any]) -> list[Any]:
            a.release()
            assert eventually(points[0].is_done)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(host_wait, "still_pending", interrupted)
            with pytest.raises(KeyboardInterrupt):
                us.wait_all()
    pooled = pooled_events()
    assert len(pooled) == len(set(pooled))
    us.wait_all(timeout=10)


@pytest.mark.parametrize("wait", ["result", "exception"])
def test_a_ctrl_c_in_a_wait_for_a_future(wait: str) -> None:
    """`threading.Condition.wait` would make a RuntimeError of it, or keep its lock."""
    stream = us.get_stream(0)
    with testing.latch(stream) as latch:
        future = watched(0)
        kind = type(future._condition)
        for function in (kind.__exit__, kind.acquire):  # test_process_internal.py tries `__enter__`
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


@pytest.mark.schedules(0)  # counts what the watcher has to do
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
            futures = [watched(stream), us.completion(other), watched(stream)]
            with running(lambda: asyncio.run(awaits())) as errors:
                queues = watching._watcher._queues
                assert eventually(lambda: sum(map(len, list(queues.values()))) == 6)
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
    """An exception of a signal handler."""


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

    class Future(asyncio.Future[Any]):
        def set_result(self, result: Any) -> None:
            hit("future")
            super().set_result(result)

    class Loop(asyncio.SelectorEventLoop):
        def create_future(self) -> Future:
            return Future(loop=self)

    deliver = engine_futures._Mailbox._deliver

    def delivery(mailbox: engine_futures._Mailbox, loop: asyncio.AbstractEventLoop) -> None:
        hit("delivery")
        deliver(mailbox, loop)

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


@pytest.mark.usefixtures("no_garbage")
def test_a_future_that_is_over_is_freed_without_a_collection() -> None:
    stream = us.get_stream(0)
    with testing.latch(stream) as latch:
        futures = [us.completion(0), watched(0), watched(0)]
        alive = [weakref.ref(future) for future in futures]
        futures[2].cancel()
        latch.release()
        for future in futures[:2]:
            future.result(timeout=10)
    assert eventually(is_idle)
    del future, futures
    assert eventually(lambda: not any(each() for each in alive))
