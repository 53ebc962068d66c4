"""Buffers are held until the stream that uses them has passed."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

import userstream as us
from helpers import (
    Exporting,
    array,
    device_current,
    eventually,
    held_while,
    run_python,
)
from internals import sweep
from userstream import testing

pytestmark = pytest.mark.usefixtures("no_garbage")


# -- memory -------------------------------------------------------------------------------------


def borrowing(**more: Any) -> Callable[[Any], None]:
    def use(buffer: Any) -> None:
        with us.borrow(buffer, **more):
            pass

    return use


def test_buffers_are_held_until_the_stream_has_passed(memory: int) -> None:
    stream = us.get_stream(0)
    assert held_while(stream, borrowing(), memory) == [True, False]
    assert held_while(stream, us.release, memory) == [True, False]
    assert held_while(stream, lambda b: us.hold(b, stream=stream), memory) == [True, False]
    assert held_while(stream, borrowing(keep=False), memory) == [False, False]
    assert held_while(stream, us.acquire, memory) == [False, False]


def test_what_a_wait_has_passed_is_let_go_of(producer: us.Stream) -> None:
    exporting = Exporting(producer)
    with testing.latch(producer) as latch:
        with us.borrow(exporting):
            pass
        assert exporting.capsule is not None
        assert exporting.capsule() is not None
        latch.release()
        us.wait(exporting, timeout=10)
    assert exporting.capsule() is None


def test_held_on_streams_of_any_kind(memory: int) -> None:
    with us.Stream.create(0) as mine, device_current(0):
        for stream in (mine, us.Stream.legacy_default(), us.Stream.per_thread_default()):
            assert held_while(
                stream, lambda b, stream=stream: us.hold(b, stream=stream), memory
            ) == [True, False]


def test_held_on_the_streams_of_a_buffer(memory: int) -> None:
    """Without a stream: on those that a wait for it waits for."""
    named = us.get_stream(0, name="io")
    assert held_while(named, lambda b: us.hold(b, name="io"), memory) == [True, False]
    assert held_while(us.get_stream(0), us.hold, memory) == [True, False]
    buffer = array(memory, None)
    alive = weakref.ref(buffer)
    with testing.latch(named):
        us.hold(buffer)
        del buffer
        assert eventually(lambda: alive() is None), "held on the unnamed one, which is idle"

    def hold(buffer: Any) -> None:
        us.acquire(buffer, name="io")
        us.hold([buffer])

    assert held_while(named, hold, memory) == [True, False]
    with pytest.raises(us.UnsupportedBufferError, match=r"objects\[1\] is 'tmp'.* stream= with"):
        us.hold(array(memory, None), "tmp")
    with pytest.raises(us.NoUserStreamError, match=r"only .* and 'io'"):
        us.hold(array(memory, None), name="oi")
    us.hold()


def test_what_is_held_on_one_stream_holds_up_no_other(memory: int) -> None:
    stream = us.get_stream(0)
    with us.Stream.create(0) as stuck, testing.latch(stuck):
        us.hold(array(memory, None), stream=stuck)
        assert held_while(stream, lambda b: us.hold(b, stream=stream), memory) == [True, False]


def test_a_destructor_may_hold_something_else(memory: int) -> None:
    stream = us.get_stream(0)
    ended = []

    class Nested:
        def __del__(self) -> None:
            us.hold(array(memory, None), stream=stream)
            ended.append(self)

    us.hold(Nested(), stream=stream)
    assert eventually(lambda: len(ended) == 1)
    ended.clear()


@pytest.mark.schedules(0)  # waits for another process
def test_a_program_ends_with_things_held() -> None:
    done = run_python(
        """
        import userstream as us
        from userstream import testing

        class Loud:
            def __del__(self):
                print("freed")

        stream = us.get_stream(0)
        testing.latch(stream).__enter__()
        us.hold(Loud(), stream=stream)
        print("end")
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


# -- what is held, under pressure -----------------------------------------------------------------


class Thing:
    pass


@pytest.mark.simulated
@pytest.mark.parametrize("code", [2, 201, 304, 800, 999, 12345])
def test_a_failure_to_ask_lets_go_of_nothing(code: int) -> None:
    """Only an error that a context does not get over says that nothing runs there any more."""
    thing = Thing()
    alive = weakref.ref(thing)
    with us.Stream.create(0) as stream:
        with testing.latch(stream) as latch:
            before = testing.calls("cuEventQuery")
            with testing.inject("cuEventQuery", code, count=1 << 30):
                us.hold(thing, stream=stream)
                del thing
                sweep()
                assert eventually(lambda: testing.calls("cuEventQuery") > before + 3)
            sweep()
            assert alive() is not None
            latch.release()
        assert eventually(lambda: alive() is None)


@pytest.mark.simulated
def test_after_an_error_of_the_gpu_nothing_is_held() -> None:
    thing = Thing()
    alive = weakref.ref(thing)
    with us.Stream.create(0) as stream:
        with testing.latch(stream):
            us.hold(thing, stream=stream)
            del thing
            testing.async_error(stream, 700)
        assert eventually(lambda: alive() is None)


# -- a long backlog --------------------------------------------------------------------------------


def alive(things: list[weakref.ref[Thing]]) -> int:
    return sum(thing() is not None for thing in things)


@pytest.mark.simulated
@pytest.mark.parametrize("consumer", [lambda: us.get_stream(0), us.Stream.legacy_default])
def test_events_do_not_grow_with_the_backlog(
    memory: int, consumer: Callable[[], us.Stream]
) -> None:
    """A later event of a stream covers the buffers of earlier borrows."""
    source, stream, things = us.Stream.create(0), consumer(), []
    created = testing.calls("cuEventCreate")
    with device_current(0), testing.latch(stream) as latch:
        for _ in range(10_000):
            buffer = array(memory, source)
            buffer.thing = Thing()
            things.append(weakref.ref(buffer.thing))
            with us.borrow(buffer, stream=stream):
                pass
            del buffer
        # 64 are held, one is for edges, and a sweep that comes late keeps 64 which were merged.
        assert testing.calls("cuEventCreate") - created <= 140
        sweep()
        assert alive(things) == 10_000
        latch.release()
    assert eventually(lambda: not alive(things))
    source.close()


def test_a_backlog_is_released_as_the_stream_passes() -> None:
    """An event covers at most a small part of the backlog."""
    with us.Stream.create(0) as stream:
        first, second = testing.latch(stream), testing.latch(stream)
        things = []
        for latch in (first, second):
            latch.__enter__()
            for _ in range(500):
                thing = Thing()
                things.append(weakref.ref(thing))
                us.hold(thing, stream=stream)
                del thing
        first.release()
        assert eventually(lambda: alive(things) <= 600)
        assert alive(things[500:]) == 500
        second.release()
        assert eventually(lambda: not alive(things))


def test_threads_share_a_long_backlog() -> None:
    """Events that two threads record at the same time have no order, and cover themselves alone."""
    things: list[weakref.ref[Thing]] = []

    def hold(stream: us.Stream) -> None:
        for _ in range(1000):
            thing = Thing()
            things.append(weakref.ref(thing))
            us.hold(thing, stream=stream)

    with us.Stream.create(0) as stream:
        with testing.latch(stream) as latch:
            threads = [threading.Thread(target=hold, args=(stream,)) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            sweep()
            assert alive(things) == 4000
            latch.release()
        assert eventually(lambda: not alive(things))
