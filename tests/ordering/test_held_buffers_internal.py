"""Buffers that a stream still uses are held, whatever fails or interrupts."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from cuda.bindings import driver

import userstream as us
from helpers import (
    array,
    checked,
    device_current,
    device_memory,
    eventually,
    held_while,
    in_thread,
)
from interrupts import cut_short
from userstream import testing
from userstream._driver import core
from userstream._engine import held_objects, watcher

pytestmark = pytest.mark.usefixtures("no_garbage")


# -- memory -------------------------------------------------------------------------------------


def borrowing(**more: Any) -> Callable[[Any], None]:
    def use(buffer: Any) -> None:
        with us.borrow(buffer, **more):
            pass

    return use


def end(stream: us.Stream) -> int:
    """End a capture, which must have survived; return how many nodes its graph has."""
    graph = checked(driver.cuStreamEndCapture(stream._live()))
    _, count = checked(driver.cuGraphGetNodes(graph))
    checked(driver.cuGraphDestroy(graph))
    return int(count)


# -- what is held, under pressure -----------------------------------------------------------------


class Thing:
    pass


@pytest.mark.parametrize("kind", ["user", "per-thread"])
def test_threads_hold_on_one_stream(kind: str) -> None:
    """Nothing is let go of before its time, though the events of threads come in no order."""
    stream = us.get_stream(0) if kind == "user" else us.Stream.per_thread_default()
    early: list[int] = []
    end = time.monotonic() + 0.5

    def work() -> None:
        with device_current(0):
            while time.monotonic() < end:
                thing = Thing()
                alive = weakref.ref(thing)
                with testing.latch(stream):
                    us.hold(thing, stream=stream)
                    del thing
                    for _ in range(3):
                        us.hold(1, stream=stream)
                    if alive() is None:
                        early.append(1)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not early
    assert eventually(lambda: not held_objects.queues)


def test_what_is_held_while_the_last_is_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody lets go of it without a further call on that stream."""
    stream, latch = us.get_stream(0), testing.latch(us.get_stream(0))
    late = [Thing()]
    alive = weakref.ref(late[0])

    sweep = core.sweep

    def swept(queue: Any) -> None:
        sweep(queue)
        if late and not queue and queue is stream._resolve().held:
            latch.__enter__()
            us.hold(late.pop(), stream=stream)

    monkeypatch.setattr(core, "sweep", swept)
    us.hold(1, stream=stream)
    assert eventually(lambda: not late)
    assert alive() is not None
    latch.release()
    assert eventually(lambda: alive() is None)
    assert eventually(lambda: not held_objects.queues)


def test_what_is_held_while_the_watch_ends_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """In another thread, just after the watcher has looked whether there is anything."""
    stream = us.get_stream(0)
    us.hold(1, stream=stream)
    assert eventually(lambda: not held_objects._watched)
    late = [Thing()]
    alive = weakref.ref(late[0])
    thread = threading.Thread(target=lambda: us.hold(late.pop(), stream=stream))
    has_work = held_objects._has_work

    def has_work_meanwhile() -> bool:
        found = has_work()
        if thread.ident is None:
            thread.start()
            thread.join(0.2)  # it may wait until this has ended
        return found

    monkeypatch.setattr(held_objects, "_has_work", has_work_meanwhile)
    monkeypatch.setattr(held_objects, "_watched", True)
    held_objects._end_watch()
    thread.join(10)
    assert eventually(lambda: alive() is None)
    assert eventually(lambda: not held_objects._watched)


def test_two_threads_that_hold_at_first_share_a_queue(
    stream: us.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is replaced is looked after by nobody who holds something."""
    thread = threading.Thread(target=lambda: us.hold(1, stream=stream))

    new_queue = held_objects.HeldQueue

    def new_queue_meanwhile() -> Any:
        queue = new_queue()
        if thread.ident is None:
            thread.start()
            thread.join(0.2)  # it may wait until this is there
        return queue

    monkeypatch.setattr(held_objects, "HeldQueue", new_queue_meanwhile)
    with testing.latch(stream):
        us.hold(2, stream=stream)
        thread.join(10)
        assert len(stream._resolve().held) == 2


def test_what_is_held_is_the_buffers_and_not_their_list(memory: int) -> None:
    stream = us.get_stream(0)

    def use(buffer: Any) -> None:
        batch = [buffer, {"a": buffer}]
        with us.borrow(batch):
            pass
        batch.clear()

    assert held_while(stream, use, memory) == [True, False]

    def within(buffer: Any) -> None:
        batch = [buffer]
        with us.borrow(batch):
            batch[0] = array(memory, None)
            del buffer

    assert held_while(stream, within, memory) == [True, False]


@pytest.mark.simulated
@pytest.mark.parametrize("function", ["cuEventRecord", "cuStreamIsCapturing"])
def test_a_release_that_fails_frees_nothing(function: str, memory: int) -> None:
    stream = us.get_stream(0)

    def use(buffer: Any) -> None:
        borrow = us.borrow(buffer)
        borrow.__enter__()
        with (
            testing.inject(function, 999, count=3, this_thread=True),
            pytest.raises(us.DriverError),
        ):
            borrow.__exit__(None, None, None)

    assert held_while(stream, use, memory) == [True, False]


@pytest.mark.simulated
def test_an_end_that_fails_replaces_no_error_of_the_block(memory: int, producer: us.Stream) -> None:
    """Nor does it leave what is held to a further call: the watcher lets go of it."""
    stream = us.get_stream(0)
    assert held_while(stream, borrowing(), memory) == [True, False]  # all is made that it needs
    assert eventually(lambda: not held_objects._watched)

    def use(buffer: Any) -> None:
        borrow, error = us.borrow(buffer), KeyError()
        borrow.__enter__()
        with testing.inject("cuEventRecord", 999, this_thread=True):
            borrow.__exit__(KeyError, error, None)
        assert ["cuEventRecord" in note for note in error.__notes__] == [True]

    assert held_while(stream, use, memory, producer) == [True, False]


@pytest.mark.parametrize("held", [True, False])
def test_an_end_that_is_interrupted_leaves_nothing_to_a_further_call(
    held: bool, memory: int, producer: us.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Just before the buffers are held, or after that."""
    stream, release = us.get_stream(0), core.release
    assert held_while(stream, borrowing(), memory) == [True, False]  # all is made that it needs
    assert eventually(lambda: not held_objects._watched)

    def interrupted(*arguments: Any) -> int:
        assert not held or release(*arguments) in (0, core.DUE)
        raise KeyboardInterrupt

    def use(buffer: Any) -> None:
        borrow = us.borrow(buffer)
        borrow.__enter__()
        with monkeypatch.context() as patched, contextlib.suppress(KeyboardInterrupt):
            patched.setattr(core, "release", interrupted)
            borrow.__exit__(None, None, None)
        assert eventually(lambda: not (core.in_use or core.orphans))
        assert not producer.record().is_done

    assert held_while(stream, use, memory, producer) == [True, False]


@pytest.mark.simulated
def test_a_release_whose_record_fails_holds_all_the_same(memory: int) -> None:
    stream = us.get_stream(0)
    assert held_while(stream, borrowing(), memory) == [True, False]  # all is made that it needs

    def use(buffer: Any) -> None:
        with (
            testing.inject("cuEventRecord", 999, this_thread=True),
            pytest.raises(us.DriverError, match="cuEventRecord"),
        ):
            us.release(buffer)

    assert held_while(stream, use, memory) == [True, False]


CLOSINGS = {
    "a stream of mine": lambda: us.Stream.create(0),
    "a user stream": lambda: us.UserStream().get_stream(0, name="closed"),
    "somebody else's": lambda: us.Stream.from_handle(us.Stream.create(0)),
}


@pytest.mark.parametrize("kind", CLOSINGS)
def test_a_stream_that_is_closed_in_the_block_frees_nothing_before_it_is_done(
    kind: str, memory: int
) -> None:
    stream = CLOSINGS[kind]()

    def use(buffer: Any) -> None:
        with pytest.raises(us.ClosedError), us.borrow(buffer, stream=stream):
            stream.close()

    buffer = array(memory, None)
    alive = weakref.ref(buffer)
    with us.Stream.create(0) as other, testing.latch(other) as latch:
        stream.wait(other)
        use(buffer)
        del buffer
        gc.collect()
        assert alive() is not None
        latch.release()
    assert eventually(lambda: alive() is None)


def test_a_capture_in_the_way_of_the_end_frees_nothing_before_it_is_over(memory: int) -> None:
    """The legacy stream cannot be marked beside it: nobody can tell when its work is done."""
    legacy = us.Stream.legacy_default()
    buffer = array(memory, None)
    alive = weakref.ref(buffer)
    with (
        device_current(0),
        us.Stream.create(0, nonblocking=False) as captured,
    ):
        block = us.borrow(buffer, stream=legacy, producer=None)
        block.__enter__()
        captured.begin_capture()
        with pytest.raises(us.CaptureError):
            block.__exit__(None, None, None)
        del buffer, block
        gc.collect()
        held_objects.sweep()
        assert alive() is not None
        assert captured.end_capture() is not None
    assert eventually(lambda: alive() is None), "without a further call"


def test_a_borrow_that_fails_in_its_end_holds_until_a_later_point(
    memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a Ctrl-C there: the buffers are let go of once the stream cannot be using them."""
    stream = us.get_stream(0)

    def use(buffer: Any) -> None:
        block = us.borrow(buffer)
        block.__enter__()
        with monkeypatch.context() as patch:
            patch.setattr(core, "mark", _interrupt)
            with pytest.raises(KeyboardInterrupt):
                block.__exit__(None, None, None)
        us.hold(stream=stream)  # a later call

    assert held_while(stream, use, memory) == [True, False]


def test_a_release_that_is_interrupted_frees_nothing(
    memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = us.get_stream(0)
    buffer = array(memory, None)
    alive = weakref.ref(buffer)
    with testing.latch(stream):
        borrow = us.borrow(buffer)
        borrow.__enter__()
        with monkeypatch.context() as patch:
            patch.setattr(core, "mark", _interrupt)
            with pytest.raises(KeyboardInterrupt):
                borrow.__exit__(None, None, None)
        del buffer, borrow
        gc.collect()
        assert alive() is not None


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_hold_that_is_interrupted_does_not_stop_the_watcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = us.get_stream(0)
    assert eventually(lambda: not held_objects._watched)
    with monkeypatch.context() as patch:
        patch.setattr(watcher, "watch", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            us.hold(Thing(), stream=stream)
    thing = Thing()
    alive = weakref.ref(thing)
    with testing.latch(stream):
        us.hold(thing, stream=stream)
        del thing
    assert eventually(lambda: alive() is None), "without a further call"


def test_what_is_held_when_a_release_is_interrupted_is_let_go_of(
    memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = us.get_stream(0)

    def use(buffer: Any) -> None:
        block = us.borrow(buffer)
        block.__enter__()
        with monkeypatch.context() as patch:
            patch.setattr(held_objects, "_begin_watch", _interrupt)
            patch.setattr(core, "sweep", _interrupt)
            with pytest.raises(KeyboardInterrupt):
                block.__exit__(None, None, None)
        us.hold(stream=stream)

    assert held_while(stream, use, memory) == [True, False]


def is_gone(reference: Callable[[], object]) -> bool:
    return reference() is None


@pytest.mark.parametrize("more", [{}, {"keep": False}, {"producer": "device"}], ids=str)
def test_whatever_signal_comes_to_an_end_its_producer_waits(
    memory: int, producer: us.Stream, more: dict[str, Any]
) -> None:
    """At its very first step too, before which Python leaves no place for anything."""
    stream, another = us.get_stream(0), us.get_stream(0, name="another")

    def end_cut_short(at: int) -> tuple[bool, weakref.ref[Any]]:
        buffer = array(memory, producer)
        block = us.borrow(buffer, **more)
        block.__enter__()
        return cut_short(lambda: block.__exit__(None, None, None), at), weakref.ref(buffer)

    end_cut_short(1 << 30)  # what is made at the first use is there
    for at in itertools.count():
        with testing.latch(stream) as latch:
            came, alive = end_cut_short(at)
            another.sync(timeout=10)  # a later call
            assert "keep" in more or alive() is not None, f"signal {at}"
            assert not producer.record().is_done, f"signal {at}"
            latch.release()
        producer.sync(timeout=10)
        gc.collect()  # an exception in whose traceback it is itself
        assert eventually(functools.partial(is_gone, alive)), f"signal {at}"
        another.sync(timeout=10)
        assert not held_objects.in_use, f"signal {at}"
        if not came:
            break
    assert at > 2


def test_a_block_that_is_left_in_the_middle_ends_there(memory: int, producer: us.Stream) -> None:
    """A generator of contextlib that is collected ends its block the same way."""
    stream = us.get_stream(0)
    another = us.get_stream(0, name="another")
    buffer = array(memory, producer)
    with testing.latch(stream) as latch:
        us.borrow(buffer).__enter__()
        another.sync(timeout=10)  # a later call
        assert not producer.record().is_done
        latch.release()
    producer.sync(timeout=10)
    another.sync(timeout=10)
    assert not held_objects.in_use


def test_a_block_left_on_a_per_thread_stream_ends_in_its_thread(memory: int) -> None:
    us.borrow(array(memory, None), stream=us.Stream.per_thread_default()).__enter__()
    in_thread(held_objects.sweep)
    assert held_objects.in_use, "the handle names another stream in that thread"
    held_objects.sweep()
    assert not held_objects.in_use


def test_what_is_held_is_no_orphan(memory: int) -> None:
    """Each would be looked at once more, by the next wait or the watcher."""
    stream, buffer = us.get_stream(0), array(memory, None)
    held_objects.sweep()
    with device_memory(0) as other, testing.latch(stream):
        for more in ({}, {"keep": False}):
            with us.borrow(buffer, **more):
                pass
        us.release(buffer)
        us.copyto(buffer, array(other, None))
        assert not held_objects.orphans
        assert not held_objects.in_use


@pytest.mark.simulated
def test_an_end_that_was_prevented_and_fails_is_tried_again(
    memory: int, producer: us.Stream
) -> None:
    stream, buffer = us.get_stream(0), array(memory, producer)
    another = us.get_stream(0, name="another")
    alive = weakref.ref(buffer)
    with testing.latch(stream) as latch:
        block = us.borrow(buffer)
        block.__enter__()
        del buffer
        with testing.inject("cuStreamWaitEvent", 2, count=9):
            del block
            another.sync(timeout=10)
        another.sync(timeout=10)
        assert alive() is not None
        assert not producer.record().is_done
        latch.release()
    producer.sync(timeout=10)
    gc.collect()  # errors, in whose tracebacks they are themselves
    assert eventually(lambda: alive() is None)


def test_other_borrows_free_nothing_of_one_that_never_ended(memory: int) -> None:
    buffer, other = array(memory, None), array(memory, None)
    alive = weakref.ref(buffer)
    with testing.latch(us.get_stream(0)):
        us.borrow(buffer).__enter__()
        del buffer
        # One of them usually gets the address of the one that is gone.
        with contextlib.ExitStack() as stack:
            for borrow in [us.borrow(other) for _ in range(100)]:
                stack.enter_context(borrow)
        assert alive() is not None
    held_objects.in_use.clear()
