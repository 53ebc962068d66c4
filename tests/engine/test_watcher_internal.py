"""The watcher of pending work: requests from its own thread, and failures that it survives."""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from typing import Any

import pytest

import userstream as us
from helpers import (
    eventually,
    on,
)
from userstream import testing
from userstream._engine import futures
from userstream._engine import watcher as watching
from watching import Listener, blocking_point, is_idle, watched


@pytest.fixture(autouse=True)
def _nothing_left() -> object:
    assert eventually(is_idle), "it watches for an earlier test"
    yield
    assert eventually(is_idle), "the watcher still watches"


def test_threads_that_come_in_another_order_than_they_recorded() -> None:
    """Nobody is told early: an event that is done says nothing of those it found there."""
    stream = us.get_stream(0)
    with testing.latch(stream) as first:
        told: list[str] = []
        early = stream._resolve().completion()
        with testing.latch(stream) as second:
            late = stream._resolve().completion()
            watching.watch([watching.Watch(late, Listener(lambda *_: told.append("late")))])
            watching.watch([watching.Watch(early, Listener(lambda *_: told.append("early")))])
            first.release()
            time.sleep(0.05)
            assert "late" not in told
            second.release()
        assert eventually(lambda: told == ["late", "early"])


def test_a_young_wait_is_not_as_late_as_an_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no bell rings, and behind an old one on the same stream."""
    monkeypatch.setattr(watching, "_LONGEST_PAUSE", 20)
    monkeypatch.setattr(watching, "LONGEST_SLEEP", 20)
    stream, other = us.get_stream(0), us.get_stream(0, name="other")
    with testing.latch(other) as held, testing.latch(stream) as latch:
        blocking = blocking_point(other)
        old = watched(0)
        watching._watcher._added -= 1000
        assert eventually(lambda: watching._watcher._pause == 20)
        young = watched(0)
        assert eventually(lambda: 0 < watching._watcher._pause < 1)
        latch.release()
        young.result(timeout=10)
        old.result(timeout=10)
        held.release()
    assert blocking.is_blocking


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


def test_the_watcher_survives_what_should_not_happen(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stream = us.get_stream(0)
    failures = [MemoryError(), SystemExit(), KeyboardInterrupt()]
    with testing.latch(stream) as latch:
        future = watched(0)

        def fail(queue: Any) -> bool:
            if failures:
                raise failures.pop()
            return watching.Watcher._look(watching._watcher, queue)

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
        watching.watch([watching.Watch(stream._resolve().completion(), Listener(drop))])
        with testing.latch(stream) as second:
            late = watched(stream)
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
        watches = [watching.Watch(stream._resolve().completion(), Listener(tell)) for _ in range(4)]
        watching.watch(watches)
        after = watched(stream)
        latch.release()
        after.result(timeout=10)
    assert told == [0, 1, 2, 3]
    assert [record.getMessage() for record in caplog.records] == [
        f"a callback failed when {stream!r} was done"
    ]


def test_what_is_over_on_several_streams_is_reported_in_one_call() -> None:
    """Otherwise the woken event loop keeps the GIL from the watcher between two streams."""
    told: list[list[watching.Watch]] = []
    listener = Listener(lambda *_: None)
    listener._report = lambda over, _: told.append(over)  # type: ignore[method-assign]
    watcher, watches = watching.Watcher(), []
    for name in ("one", "two"):
        stream = us.get_stream(0, name=name)
        with testing.latch(stream):
            watches.append(watching.Watch(stream._resolve().completion(), listener))
        stream.sync(timeout=20)
    watcher._asked.append((True, watches))
    assert not watcher._turn()
    assert told == [watches]
    assert not watcher._queues


def test_tasks_resume_in_the_order_of_their_waits() -> None:
    """Also those of several streams, whose watches are in one queue each."""
    streams = [us.get_stream(0, name=name) for name in ("one", "two")]
    resumed: list[int] = []

    async def main() -> None:
        mailbox, watcher, watches = futures._Mailbox(), watching.Watcher(), []
        for number in range(6):
            point, future = streams[number % 2]._resolve().completion(), asyncio.Future[Any]()
            watches.append(futures._Awaited(point, mailbox, future))
            future.add_done_callback(lambda _, number=number: resumed.append(number))
            streams[number % 2].sync(timeout=20)
        watcher._asked.append((True, watches))
        assert not watcher._turn()
        async with asyncio.timeout(20):
            await asyncio.gather(*(watch.future for watch in watches))

    asyncio.run(main())
    assert resumed == [0, 1, 2, 3, 4, 5]


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
        future = watched(0)
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


@pytest.mark.parametrize("again", [False, True], ids=["once", "again"])
def test_a_watch_that_a_signal_cut_off_is_reported_in_peace(
    again: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stream, watch = us.get_stream(0), watching.watch

    def cut_off(watches: list[watching.Watch]) -> None:
        watch(watches)
        raise KeyboardInterrupt

    with testing.latch(stream) as latch:
        future = us.completion(0)
        with monkeypatch.context() as patch:
            patch.setattr(watching, "watch", cut_off)
            with pytest.raises(KeyboardInterrupt):
                future.add_done_callback(repr)
        if again:
            future.add_done_callback(repr)
        latch.release()
        future.result(timeout=10)
        assert eventually(is_idle)
    assert not caplog.records


def test_a_watch_that_a_signal_cut_off_reports_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    with testing.latch(us.get_stream(0)) as latch:
        future: Any = us.completion(0)
        monkeypatch.setattr(watching, "watch", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            future.add_done_callback(repr)
        watches = [watching.Watch(point, future) for point in future._points]
        future._report(watches, us.DriverError("the GPU failed"))
        with pytest.raises(us.DriverError, match="the GPU failed"):
            future.result(timeout=10)
        latch.release()
