"""`UserStream`: which stream, when it is made, and when it goes."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import pytest
from cuda.bindings import driver
from cuda.core import Device

import userstream as us
from helpers import checked, current_context, device_current, entered, in_thread, on
from userstream import testing


def device_of_handle(stream: us.Stream) -> int:
    """Ask the driver, not the stream, where it is."""
    with entered(checked(driver.cuStreamGetCtx(stream.handle))):
        return int(checked(driver.cuCtxGetDevice()))


def test_one_stream_per_device_and_name() -> None:
    stream = us.get_stream(0)
    assert us.get_stream(0) is stream
    assert us.get_stream(on(0)) is stream
    assert us.get_stream(on(0)) is stream, "also once the type was learned"
    assert in_thread(lambda: us.get_stream(0)) is stream
    named = us.get_stream(0, name="io")
    assert named is us.get_stream(on(0), name="io")
    assert named is not stream
    assert (stream.name, named.name) == (None, "io")
    assert dict(us.streams()) == {(0, None): stream, (0, "io"): named}


def test_streams_are_non_blocking_and_of_priority_0() -> None:
    stream = us.get_stream(0)
    assert stream.flags == 1
    assert stream.is_nonblocking
    assert stream.priority == 0
    assert checked(driver.cuStreamGetPriority(stream._live())) == 0


@pytest.mark.multi_device
def test_a_stream_is_made_on_its_device_whichever_is_current() -> None:
    with device_current(0):
        before = current_context()
        stream = us.get_stream(1)
        assert current_context() == before
        assert stream.device.device_id == 1
        assert device_of_handle(stream) == 1
        assert us.get_stream(on(1)) is stream
        assert us.get_stream(0) is not stream
        us.wait(on(1), timeout=10)


@pytest.mark.multi_device
def test_without_a_target_the_current_device_counts() -> None:
    assert in_thread(us.get_stream).device.device_id == 0, "without a context: device 0"

    def on_device_1() -> us.Stream:
        Device(1).set_current()
        return us.get_stream()

    assert in_thread(on_device_1) is us.get_stream(1)


def test_collections() -> None:
    stream = us.get_stream(0)
    assert us.get_stream([on(0), on(0)]) is stream
    assert us.get_stream((on(0), [{"a": on(0)}, (on(0),)])) is stream
    assert us.get_stream({"a": on(0), "b": [on(0)]}) is stream


def test_a_stream_is_taken_as_it_is() -> None:
    mine = us.Stream.create(0)
    assert us.get_stream(mine) is mine
    with pytest.raises(ValueError, match="is a stream already"):
        us.get_stream(mine, name="io")
    with pytest.raises(ValueError, match="is a stream already"):
        us.get_stream(mine, priority=0)
    with pytest.raises(ValueError, match="is a stream already"):
        us.wait(mine, name="io")
    us.wait(mine, timeout=10)
    theirs = driver.CUstream(int(mine.handle))
    assert us.get_stream(theirs) == mine
    assert us.streams() == {}
    mine.close()


def test_priorities() -> None:
    least, greatest = us.Stream.priority_range(0)
    assert us.get_stream(0, name="fast", priority=greatest).priority == greatest
    assert us.get_stream(0, name="fastest", priority=greatest - 99).priority == greatest
    assert us.get_stream(0, name="slow", priority=99).priority == least
    assert us.get_stream(0, name="fast", priority=greatest - 1).name == "fast", "clamped first"
    us.get_stream(0)
    with pytest.raises(ValueError, match="has priority 0, not"):
        us.get_stream(0, priority=greatest)
    with pytest.raises(TypeError, match=r"priority must be an integer, not 1\.5"):
        us.get_stream(0, priority=1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [1, b"io", ["io"], True])
def test_a_name_is_a_string(name: object) -> None:
    for function in (us.get_stream, us.wait):
        with pytest.raises(TypeError, match="name must be a string"):
            function(0, name=name)  # type: ignore[operator]


def test_a_name_is_not_empty() -> None:
    for function in (us.get_stream, us.wait):
        with pytest.raises(ValueError, match="name must not be empty"):
            function(0, name="")  # type: ignore[operator]
    assert us.streams() == {}


def test_64_threads_get_one_stream() -> None:
    barrier = threading.Barrier(64)
    found: list[us.Stream] = []

    def ask() -> None:
        barrier.wait()
        found.append(us.get_stream(on(0)))

    before = testing.calls("cuStreamCreateWithPriority") if _simulated() else 0
    threads = [threading.Thread(target=ask) for _ in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 64
    assert len({id(stream) for stream in found}) == 1
    if _simulated():
        assert testing.calls("cuStreamCreateWithPriority") - before == 1


def _simulated() -> bool:
    from conftest import SIMULATED

    return SIMULATED


class Tattling:
    """A lock that counts its takers."""

    def __init__(self) -> None:
        self.taken = 0

    def __enter__(self) -> None:
        self.taken += 1

    def __exit__(self, *_: object) -> None:
        pass


def test_a_hit_takes_no_lock() -> None:
    registry = us.UserStream()
    lock = registry._table._lock = Tattling()  # type: ignore[assignment]
    buffer = on(0)
    registry.get_stream(buffer)
    taken = lock.taken
    assert taken > 0
    registry.get_stream(buffer)
    registry.get_stream(0)
    registry.get_stream(0, name=None)
    registry.wait(buffer)
    assert lock.taken == taken
    registry.close()


def test_streams_is_a_read_only_snapshot() -> None:
    stream = us.get_stream(0)
    found = us.streams()
    us.get_stream(0, name="later")
    assert dict(found) == {(0, None): stream}
    with pytest.raises(TypeError):
        found[0, "x"] = stream  # type: ignore[index]


def test_close_empties_and_can_be_used_again() -> None:
    number = us.get_stream(0).stream_id
    us.close(timeout=10)
    assert us.streams() == {}
    gc.collect()
    assert us.get_stream(0).stream_id != number


@pytest.mark.parametrize("name", [None, "io"])
def test_close_takes_no_stream_from_whoever_holds_it(name: str | None) -> None:
    theirs = us.get_stream(0, name=name)
    us.close(timeout=10)
    assert us.streams() == {}
    assert not theirs.is_closed
    theirs.sync(timeout=10)
    assert us.get_stream(0, name=name) is theirs, "a second one would be in no order with it"
    assert dict(us.streams()) == {(0, name): theirs}
    us.close(timeout=10)
    another = us.get_stream(0, name=name, priority=-1)
    assert another is not theirs, "nobody asks for a stream like that one"
    assert another.priority == -1


def test_one_stream_for_all_that_ask_while_a_registry_is_emptied() -> None:
    mine = us.UserStream()
    stream = mine.get_stream(0)
    stop = threading.Event()

    def empty() -> None:
        while not stop.is_set():
            mine.close(timeout=10)

    thread = threading.Thread(target=empty)
    thread.start()
    try:
        assert all(mine.get_stream(0) is stream for _ in range(300))
    finally:
        stop.set()
        thread.join(20)


@pytest.mark.simulated
def test_a_stream_that_the_gpu_failed_does_not_come_back() -> None:
    stream = us.get_stream(0)
    testing.async_error(stream, driver.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS)
    with pytest.raises(us.WaitErrors):
        us.close(timeout=10)
    testing.reset()
    assert us.get_stream(0) is not stream


def test_nobody_closes_the_stream_of_everybody() -> None:
    stream = us.get_stream(0, name="io")
    for close in (stream.close, us.Stream.from_handle(stream).close):
        with pytest.raises(RuntimeError, match=r"name='io'.*us\.close\(\).*create.*UserStream\(\)"):
            close()
    stream.sync(timeout=10)
    assert us.get_stream(0, name="io") is stream
    us.close(timeout=10)
    with pytest.raises(RuntimeError, match="cannot be closed"):
        stream.close()  # others may hold it as well
    assert us.get_stream(0, name="io") is stream


def test_whoever_has_a_registry_closes_its_streams() -> None:
    mine = us.UserStream()
    stream = mine.get_stream(0)
    mine.close(timeout=10)
    stream.close()
    assert stream.is_closed
    assert mine.get_stream(0) is not stream


def test_a_stream_goes_with_its_last_owner() -> None:
    stream = us.get_stream(0)
    gone = weakref.ref(stream)
    us.close()
    del stream
    gc.collect()
    assert gone() is None


def test_a_closed_stream_leaves_its_registry() -> None:
    with us.UserStream() as mine:
        stream = mine.get_stream(0)
        named = mine.get_stream(0, name="io")
        named.close()
        assert dict(mine.streams()) == {(0, None): stream}
        stream.close()
        assert mine.streams() == {}
        again = mine.get_stream(0)
        assert again is not stream
        stream.close()
        assert mine.get_stream(0) is again, "closing twice takes nobody else out"


def test_close_with_a_stream_held() -> None:
    stream = us.get_stream(0)
    with testing.latch(stream):
        with pytest.raises(us.WaitTimeout):
            us.close(timeout=0.02)
        assert dict(us.streams()) == {(0, None): stream}
    us.close(timeout=10)
    assert us.streams() == {}


def test_a_registry_of_its_own() -> None:
    with us.UserStream() as mine:
        stream = mine.get_stream(0)
        assert stream is not us.get_stream(0)
        assert "1 stream>" in repr(mine)
        assert "of the process" in repr(us.UserStream.get())
        assert mine.device_of(on(0)).device_id == 0
        assert mine.describe(on(0)).device_id == 0
    assert "closed" in repr(mine)
    for call in (
        lambda: mine.get_stream(0),
        lambda: mine.wait(0),
        mine.wait_all,
        lambda: mine.wait_for_device(0),
        mine.__enter__,
    ):
        with pytest.raises(us.ClosedError, match=r"UserStream was closed.*; create another one"):
            call()
    stream.sync(timeout=10)


def test_a_registry_is_closed_also_if_its_end_fails() -> None:
    mine = us.UserStream()
    stream = mine.get_stream(0)
    stream.begin_capture()
    with pytest.raises(us.CaptureError), mine:
        pass
    with pytest.raises(us.ClosedError):
        mine.get_stream(0)
    assert not mine.streams()
    stream.end_capture()


def test_a_dropped_registry_leaves_its_streams_alone() -> None:
    registry = us.UserStream()
    stream = registry.get_stream(0)
    del registry
    gc.collect()
    stream.sync(timeout=10)
    stream.close()


def test_hits_need_no_driver_call_but_the_objects_own() -> None:
    if not _simulated():
        pytest.skip("counts driver calls")
    stream = us.get_stream(0)
    testing.reset()
    buffer = on(0)
    assert us.get_stream(buffer) is stream
    for function in ("cuCtxGetDevice", "cuCtxGetCurrent", "cuStreamQuery", "cuCtxPushCurrent"):
        assert testing.calls(function) == 0


def test_an_interrupted_close_leaves_no_closed_stream_behind() -> None:
    mine = us.UserStream()
    stream = mine.get_stream(0)
    forget = stream._resolve().on_close

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    stream._resolve().on_close = interrupted
    with pytest.raises(KeyboardInterrupt):
        stream.close()
    mine.get_stream(0).sync(timeout=10)
    stream._resolve().on_close = forget
    stream.close()
    assert mine.get_stream(0) is not stream


def test_a_stream_that_two_threads_close() -> None:
    stream = us.get_stream(0)

    def meanwhile(_: object) -> None:
        stream._resolve().on_close = None
        in_thread(stream.close)

    stream._resolve().on_close = meanwhile
    stream.close()
    assert stream.is_closed


def test_a_stream_that_another_thread_closes_meanwhile_is_left_out() -> None:
    closed, stream = us.Stream.create(0), us.get_stream(0)
    closed.close()
    us.UserStream.get()._table.named["closed"] = {0: closed}
    us.wait_all(timeout=10)
    asyncio.run(us.wait_all_async(timeout=10))
    with testing.latch(stream), pytest.raises(us.WaitTimeout) as caught:
        us.wait_all(timeout=0.01)
    assert caught.value.streams == (repr(stream),)
    us.close(timeout=10)
    assert us.streams() == {}


def test_the_table_may_change_while_it_is_read() -> None:
    registry = us.UserStream()
    stop = threading.Event()
    errors: list[BaseException] = []

    def change() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            registry.get_stream(0, name=f"{number % 50}").close()

    def read() -> None:
        try:
            for _ in range(300):
                registry.streams()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=change), threading.Thread(target=read)]
    for thread in threads:
        thread.start()
    threads[1].join()
    stop.set()
    threads[0].join()
    assert not errors
    registry.close()
