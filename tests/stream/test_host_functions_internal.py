"""Host functions after failures, signals and destructors in the middle of a call."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest

import userstream as us
from helpers import (
    eventually,
    pinned_memory,
    run_python,
)
from interrupts import cut_short
from userstream import _driver, _process, testing
from userstream._engine import dispatcher, watcher
from userstream._stream import memory_operations

pytestmark = pytest.mark.usefixtures("no_garbage")


def test_the_thread_survives_what_should_not_happen(
    stream: us.Stream, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each function is called once all the same, and streams go on."""
    called: list[str] = []
    failures = [MemoryError(), SystemExit(), KeyboardInterrupt()]

    def fail() -> None:
        if failures:
            raise failures.pop()
        release()

    with testing.latch(stream) as latch, monkeypatch.context() as patch:
        stream.launch_host_func(called.append, "first")
        stream.launch_host_func(called.append, "second")
        patch.setattr(dispatcher._dispatcher, "_turn", _failing_once(dispatcher._dispatcher))
        call = next(iter(dispatcher._dispatcher._queues.values())).calls[0]
        release = call.finished
        patch.setattr(call, "finished", fail)
        latch.release()
        stream.sync(timeout=20)
    assert called == ["first", "second"]
    assert not failures
    assert {record.name for record in caplog.records} == {"userstream"}
    assert len(caplog.records) == 4


def _failing_once(dispatcher: dispatcher.Dispatcher) -> Callable[[bool], bool]:
    turn, failures = dispatcher._turn, [MemoryError()]

    def fail(is_posted: bool) -> bool:
        if failures:
            raise failures.pop()
        return turn(is_posted)

    return fail


@pytest.mark.simulated
@pytest.mark.parametrize("code", [2, 201, 304, 800, 999, 12345])
@pytest.mark.parametrize("blocking", [True, False])
def test_a_failure_to_ask_drops_no_function(stream: us.Stream, code: int, blocking: bool) -> None:
    """The GPU did not fail: the stream comes by, and waits for the function if it is blocking."""
    called = threading.Event()
    with testing.latch(stream) as latch:
        before = testing.calls("cuEventQuery")
        with testing.inject("cuEventQuery", code, count=1 << 30):
            stream.launch_host_func(called.set, blocking=blocking)
            assert eventually(lambda: testing.calls("cuEventQuery") > before + 1)
            assert not called.is_set()
        latch.release()
        assert called.wait(20)
    stream.sync(timeout=10)


def test_a_launch_that_fails_half_way_lets_the_stream_go(
    stream: us.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **more: object) -> None:
        raise MemoryError("mine")

    free = len(memory_operations._free_words[0])
    with monkeypatch.context() as patch:
        patch.setattr(_driver.values, "wait_value", fail)
        with pytest.raises(MemoryError, match="mine"):
            stream.launch_host_func(print)
    stream.sync(timeout=10)
    assert eventually(lambda: len(memory_operations._free_words[0]) == free)


def a_turn() -> None:
    """Wait until the dispatcher has inspected all queues."""
    for _ in range(2):
        done = threading.Event()
        dispatcher.started().post(done.set)
        assert done.wait(10)


@pytest.mark.parametrize("blocking", [True, False])
def test_a_signal_leaves_a_whole_call_or_none(stream: us.Stream, blocking: bool) -> None:
    called: list[int] = []
    stream.launch_host_func(int)
    stream.sync(timeout=10)
    for at in itertools.count():
        launch = functools.partial(stream.launch_host_func, called.append, at, blocking=blocking)
        with testing.latch(stream) as latch:
            cut = cut_short(launch, at)
            a_turn()
            assert at not in called, "the stream has not come by"
            latch.release()
        stream.launch_host_func(called.append, -1)
        stream.sync(timeout=10)
        assert called.pop() == -1
        assert called.count(at) <= 1
        if not cut:
            break
    assert called == sorted(called)
    assert called[-1] == at


def taken() -> memory_operations.Gate:
    gate = memory_operations.Gate(0)
    gate.take()
    return gate


def test_gates_of_more_than_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_operations, "_free_words", {})
    held = [taken() for _ in range(1100)]
    values = {gate.address: gate.value for gate in held}
    assert len(values) == 1100
    for gate in held:
        gate.release()
        gate.release()  # has no effect
    assert len(memory_operations._free_words[0]) == 2048
    again = taken()
    assert again.value == (values[again.address] + 1) & 0xFFFFFFFF
    again.release()


def test_a_signal_leaves_no_queue(stream: us.Stream) -> None:
    """Else the thread of host functions looks after it for good, 20 times a second."""
    running = dispatcher.started()
    for at in itertools.count():
        cut = cut_short(lambda: stream.launch_host_func(int, blocking=False), at)
        stream.sync(timeout=10)
        a_turn()  # which forgets those without calls
        assert eventually(lambda: not running._queues), f"after a signal at {at}"
        if not cut:
            break


def test_a_queue_that_is_forgotten_just_before_it_is_used(
    stream: us.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next call would be in another one, and the two in no order."""
    running = dispatcher.started()
    forgotten, make = [], dispatcher._Queue

    class Order:
        def __init__(self, queue: Any) -> None:
            self.queue, self.lock = queue, threading.Lock()

        def __enter__(self) -> None:
            if len(forgotten) < 3:
                forgotten.append(self.queue)
                running._forget(stream._lane.identity(), self.queue)
                assert not running._queues
            self.lock.acquire()

        def __exit__(self, *_: object) -> None:
            self.lock.release()

    def made() -> Any:
        queue = make()
        queue.order = Order(queue)
        return queue

    assert eventually(lambda: not running._queues)
    monkeypatch.setattr(dispatcher, "_Queue", made)
    called: list[int] = []
    with testing.latch(stream) as latch:
        for number in range(3):
            stream.launch_host_func(called.append, number)
        assert len(running._queues) == 1
        latch.release()
    stream.sync(timeout=10)
    assert called == [0, 1, 2]
    assert len(forgotten) == 3


def test_a_destructor_in_the_middle_of_a_call(
    stream: us.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The garbage collector may run it at any moment, as a signal may come."""
    called: list[str] = []
    call_native = _driver.streams.call_native

    def in_the_middle(*args: Any) -> None:
        monkeypatch.setattr(_driver.streams, "call_native", call_native)
        with pytest.raises(RuntimeError, match="in the middle"):
            stream.launch_host_func(called.append, "function")
        stream.add_callback(lambda *_: called.append("callback"))
        with us.Stream.create(0) as another:
            another.launch_host_func(called.append, "of another stream")
        call_native(*args)

    monkeypatch.setattr(_driver.streams, "call_native", in_the_middle)
    stream.launch_host_func(called.append, "first")
    stream.launch_host_func(called.append, "last")
    stream.sync(timeout=10)
    assert eventually(lambda: len(called) == 4)
    assert sorted(called) == ["callback", "first", "last", "of another stream"]
    assert called.index("first") < called.index("last")


def test_the_lock_of_the_queues_is_reentrant(stream: us.Stream) -> None:
    done = threading.Event()
    with dispatcher.started()._lock:
        stream.add_callback(lambda *_: done.set())
        stream.launch_host_func(int)
    assert done.wait(10)
    stream.sync(timeout=10)


def test_a_callback_that_was_refused_is_never_called(
    stream: us.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: object) -> None:
        raise RuntimeError("can't start new thread")

    called: list[str] = []
    stream.launch_host_func(int)  # so that the other thread is there
    monkeypatch.setattr(watcher, "_watcher", watcher.Watcher())
    with testing.latch(stream):
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RuntimeError, match="new thread"):
                stream.add_callback(lambda *_: called.append("refused"))
        stream.add_callback(lambda *_: called.append("taken"))
    assert eventually(lambda: bool(called))
    assert eventually(lambda: not watcher._watcher._queues)
    assert called == ["taken"]
    watcher._watcher.end()


@pytest.mark.simulated
def test_no_thread(stream: us.Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(dispatcher, "_dispatcher", dispatcher.Dispatcher())
        patch.setattr(threading.Thread, "start", refuse)
        for use in (stream.launch_host_func, stream.add_callback):
            with pytest.raises(RuntimeError, match="new thread"):
                use(print)
    stream.sync(timeout=10)


@pytest.mark.simulated
def test_the_driver_fails_as_the_thread_begins() -> None:
    done = run_python(
        """
        import userstream as us
        from userstream import testing

        stream = us.Stream.create(0)
        called = []
        with testing.inject("cuThreadExchangeStreamCaptureMode", 999, count=2, skip=1):
            try:
                stream.launch_host_func(called.append, 1)
            except us.DriverError:
                pass
        stream.launch_host_func(called.append, 2)
        stream.sync(timeout=10)
        assert 2 in called
        """
    )
    assert done.returncode == 0, done.stderr


def test_later_work_sees_what_it_has_written(
    stream: us.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On ARM as well, where the word that lets the stream go on may be there before the rest."""
    fenced: list[bool] = []

    def fence() -> None:
        fenced.append(stream.is_done)

    monkeypatch.setattr(_process, "fence", fence)
    stream.launch_host_func(lambda: None)
    stream.sync(timeout=20)
    assert fenced == [False]


def test_a_thousand_on_many_streams() -> None:
    streams = [us.Stream.create(0) for _ in range(20)]
    called: dict[us.Stream, list[int]] = {stream: [] for stream in streams}
    with pinned_memory() as word:

        def launch(number: int) -> None:
            for turn in range(50):
                stream = streams[(number + turn) % 20]
                stream.launch_host_func(called[stream].append, turn, blocking=turn % 2 == 0)
                stream.write_value_32(word, turn)

        threads = [threading.Thread(target=launch, args=(number,)) for number in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert eventually(lambda: sum(map(len, called.values())) == 1000)
        for stream in streams:
            stream.sync(timeout=10)
            stream.close()
    assert eventually(lambda: not dispatcher._dispatcher._queues)
