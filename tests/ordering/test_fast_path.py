"""The fast path of ordering decides as the general path does."""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import standins
import userstream as us
from helpers import (
    array,
    copy,
    device_current,
    device_memory,
    eventually,
    fill,
    in_thread,
    waits_for,
)
from userstream import testing

pytestmark = pytest.mark.usefixtures("no_garbage")


@pytest.mark.multi_device
def test_a_closed_stream_that_an_array_of_another_device_named_is_not_found_again() -> None:
    stream, others = us.Stream.create(0), []
    handle = int(stream._live())
    with device_memory(1) as there:
        with us.borrow(array(there, stream)):
            pass
        stream.close()
        while len(others) < 100:  # the driver gives the handle again
            others.append(us.Stream.create(0))
            if int(others[-1]._live()) == handle:
                break
        else:
            pytest.skip("the driver has not given the handle again")
        with us.borrow(array(there, others[-1])):
            pass


@pytest.mark.multi_device
@pytest.mark.parametrize("is_passed", [False, True])
def test_arrays_on_two_devices_are_refused(is_passed: bool, producer: us.Stream) -> None:
    """Also at the second use, when their type and the user streams of both devices are known."""
    more: dict[str, Any] = {"producer": producer} if is_passed else {}
    with device_memory(0) as here, device_memory(1) as there:
        arrays = array(here, producer), array(there, producer)
        for each in arrays:
            with us.borrow(each, **more):
                pass
        for _ in range(2):
            for pair in (arrays, arrays[::-1]):
                with pytest.raises(us.DeviceMismatchError):
                    us.borrow(*pair, **more).__enter__()


@pytest.mark.parametrize("of", ["asnumpy", "asnumpy_async", "copyto"])
def test_a_producer_that_is_passed_counts_for_an_array_that_names_a_stream(
    of: str, producer: us.Stream, memory: int
) -> None:
    """The array names an idle stream; the copy waits for the stream that was passed."""
    with us.Stream.create(0) as idle:
        fill(idle, memory, 1)
        idle.sync(timeout=10)
        found = array(memory, idle)
        host = np.empty(4, "f4")
        us.asnumpy(found)
        with testing.latch(producer) as latch:
            fill(producer, memory, 2)
            if of == "asnumpy_async":
                copied = us.asnumpy_async(found, producer=producer)
                assert not us.get_stream(0).is_done
                latch.release()
                host = copied.result(timeout=10)
            else:
                arguments = (found,) if of == "asnumpy" else (host, found)
                with pytest.raises(us.WaitTimeout):
                    getattr(us, of)(*arguments, producer=producer, timeout=0.05)
                latch.release()
                host = us.asnumpy(found, producer=producer, timeout=10)
        assert set(host.view("u1").ravel()) == {2}


def test_a_borrow_with_the_per_thread_stream_of_numba_ends_in_its_thread(
    monkeypatch: pytest.MonkeyPatch, memory: int
) -> None:
    config = types.SimpleNamespace(CUDA_PER_THREAD_DEFAULT_STREAM=1)
    monkeypatch.setitem(sys.modules, "numba", types.SimpleNamespace(config=config))
    us.get_stream(0)
    with device_current(0):
        for _ in range(2):  # at the second use the type is known
            borrow = us.borrow(standins.NumbaArray(0, memory, stream=None))
            borrow.__enter__()
            with pytest.raises(RuntimeError, match="in the thread where it began"):
                in_thread(lambda borrow=borrow: borrow.__exit__(None, None, None))
            borrow.__exit__(None, None, None)


def test_an_interface_without_a_version_is_ordered_with_the_device_at_each_use(
    producer: us.Stream, memory: int
) -> None:
    found = array(memory, producer)
    del found.interface["version"]
    us.get_stream(0)
    for _ in range(3):
        assert us.describe(found).ordering == "device"
        assert waits_for(producer, lambda: us.acquire(found))


def test_a_closed_registry_returns_no_stream(producer: us.Stream) -> None:
    with us.UserStream() as registry:
        assert registry.get_stream(producer) is producer
    for target in (0, producer):
        with pytest.raises(us.ClosedError):
            registry.get_stream(target)


def test_the_id_of_the_per_thread_stream_is_one_per_thread() -> None:
    """The lane keeps no identifier: the handle names another stream in another thread."""
    stream = us.Stream.per_thread_default()

    def identify() -> int:
        with device_current(0):
            return stream.stream_id

    here = identify()
    assert in_thread(identify) != here
    assert identify() == here


@pytest.mark.parametrize("is_passed", [True, False], ids=["stream passed", "user stream"])
@pytest.mark.parametrize("use", ["borrow", "release"])
def test_a_user_stream_that_is_passed_as_producer_joins_no_capture(
    use: str, is_passed: bool, memory: int
) -> None:
    """At the release the producer would wait for a stream that is captured by then."""
    user = us.get_stream(0, name="producer")
    found = array(memory, None)
    us.acquire(found)
    with us.Stream.create(0) as mine:
        consumer = mine if is_passed else us.get_stream(0)
        more: dict[str, Any] = {"stream": mine} if is_passed else {}
        block = us.borrow(found, producer=user, **more)
        block.__enter__()

        def end() -> None:
            if use == "borrow":
                block.__exit__(None, None, None)
            else:
                us.release(found, producer=user, **more)

        with consumer.capture(), pytest.raises(us.CaptureError, match="would become part"):
            end()
        assert not user.is_capturing
        if use == "release":
            block.__exit__(None, None, None)


def test_a_copy_waits_for_the_one_of_two_arrays_that_another_stream_produces(
    producer: us.Stream, memory: int
) -> None:
    user = us.get_stream(0)

    def copy_to(to: Any, source: Any) -> us.Stream:
        us.copyto(to, source)
        return user

    with device_memory(0) as other:
        pair = array(memory, user), array(other, producer)
        for to, source in (pair, pair[::-1]) * 2:  # the first use of a type is slower
            assert waits_for(producer, functools.partial(copy_to, to, source))
        user.sync(timeout=30)


@pytest.mark.parametrize("known", [True, False])
def test_arrays_whose_instances_carry_the_interface(
    known: bool, producer: us.Stream, memory: int
) -> None:
    found = types.SimpleNamespace(
        __cuda_array_interface__=array(memory, producer).__cuda_array_interface__
    )
    if known:
        us.acquire(found)
    assert waits_for(producer, lambda: us.acquire(found))
    with device_memory(0) as other:
        with us.borrow(found) as stream, testing.latch(stream) as latch:
            fill(stream, memory, 7)
            block = us.borrow(found)
            block.__enter__()
            block.__exit__(None, None, None)
            copy(producer, other, memory)
            assert not producer.is_done
            latch.release()
        producer.sync(timeout=10)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize(("shape", "strides"), [((4, 8), (0, 4)), ((4,), (0,))])
def test_the_copy_of_a_broadcast_array_is_read_only(
    given: bool, shape: tuple[int, ...], strides: tuple[int, ...], producer: us.Stream, memory: int
) -> None:
    """Several of its elements are one: a write would change them all."""
    broadcast = array(memory, producer, shape=shape, strides=strides)
    more: dict[str, Any] = {"stream": producer} if given else {}
    for _ in range(3):  # the plan of the copy is known from the second call on
        host = us.asnumpy(broadcast, **more)
        assert not host.flags.writeable
        assert host.strides == strides
    assert us.asnumpy(array(memory, producer, shape=shape), **more).flags.writeable


def test_a_borrow_that_is_dropped_lets_its_buffer_go_though_its_stream_is_closed(
    producer: us.Stream, memory: int
) -> None:
    """The end of the borrow can order nothing any more."""
    buffer = array(memory, producer)
    gone = weakref.ref(buffer)
    with us.Stream.create(0) as stream:
        borrow = us.borrow(buffer, stream=stream)
        borrow.__enter__()
    del borrow, buffer
    with device_memory(0) as other:
        for _ in range(3):  # later calls take care of what was dropped
            us.acquire(array(other, producer))
            us.release(array(other, producer))
        us.wait(0)
        assert eventually(lambda: gone() is None)


def calls_of(use: Callable[[], object]) -> int:
    """Return the least number of Python calls in userstream that a use takes."""
    package = us.__file__.removesuffix("__init__.py")
    counts = []
    for _ in range(200):
        names: list[str] = []

        def note(frame: types.FrameType, event: str, _: object, names: list[str] = names) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(package):
                names.append(frame.f_code.co_name)

        sys.setprofile(note)
        try:
            use()
        finally:
            sys.setprofile(None)
        counts.append(len(names))
    return min(counts)


def test_an_order_with_a_device_takes_no_call_for_each_stream(memory: int) -> None:
    buffer = array(memory)

    def use() -> None:
        with us.borrow(buffer, producer="device"):
            pass

    use()
    few = calls_of(use)
    others = [us.Stream.create(0) for _ in range(20)]
    assert calls_of(use) < few + len(others)
    us.wait(others, timeout=10)
