"""Buffers are held until the stream that uses them has passed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest

import standins
import userstream as us
from helpers import (
    array,
    device_current,
    eventually,
    held_while,
    run_python,
)
from internals import sweep
from userstream import testing

pytestmark = pytest.mark.usefixtures("no_garbage")


class Exporting(standins.DrJitArray):
    """A DLPack array of a type that is known to order a consumer after its own stream itself."""

    def __init__(self, stream: us.Stream, device: int = 0) -> None:
        self.stream, self.device = stream, device
        self.asked: list[int] = []
        self.capsule: weakref.ref[Any] | None = None

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, self.device)

    def __dlpack__(self, *, stream: int) -> Any:
        self.asked.append(stream)
        us.Stream.from_handle(stream).wait(self.stream)
        capsule = Capsule()
        self.capsule = weakref.ref(capsule)
        return capsule


class Capsule:
    pass


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
