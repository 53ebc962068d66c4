"""Copies of buffers that order a consumer by DLPack alone: their producers go on after the copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver

import userstream as us
from helpers import (
    Delegating,
    array,
    checked,
    content,
    copy,
    device_current,
    device_memory,
    eventually,
    fill,
    is_blocked,
    running,
)
from internals import wait_in_every_block
from userstream import testing

SIZE = 256
NEW = np.full(SIZE, 7, "u1")


def delegating(address: int, producer: us.Stream, **more: Any) -> Delegating:
    return Delegating(address, producer, shape=(SIZE,), typestr="|u1", **more)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("later", [False, True])
def test_the_producer_of_a_target_goes_on_after_the_copy(
    later: bool, named: bool, producer: us.Stream, memory: int
) -> None:
    """On the stream that it names; if it names none, on any, also one that is made later."""
    target = delegating(memory, producer)
    if named:
        target = delegating(memory, producer, stream=int(producer.handle))
    with device_memory(0) as seen:
        fill(producer, memory, 1)
        producer.sync()
        with testing.latch(us.get_stream(0)) as latch, us.Stream.create(0) as other:
            us.copyto(target, NEW)
            with us.Stream.create(0) as made_later:
                reader = made_later if later and not named else producer
                copy(reader, seen, memory, SIZE)
                if named:  # and nobody else
                    assert other.is_done
                assert not reader.is_done
                latch.release()
                us.wait_for_device(0)
        assert content(seen) == {7}, "it read what was there before the copy"


def test_the_producer_of_a_source_goes_on_after_the_copy(producer: us.Stream, memory: int) -> None:
    stream = us.get_stream(0)
    with device_memory(0) as target:
        fill(producer, memory, 1)
        producer.sync()
        with testing.latch(stream) as latch:
            us.copyto(
                array(target, producer, shape=(SIZE,), typestr="|u1"), delegating(memory, producer)
            )
            fill(producer, memory, 2)
            latch.release()
            us.wait_for_device(0)
        assert content(target) == {1}, "it was overwritten under the copy"


def test_a_copy_that_was_late(producer: us.Stream, memory: int) -> None:
    """It goes on, so its producer has to wait for it."""
    fill(producer, memory, 1)
    producer.sync()
    with testing.latch(us.get_stream(0)) as latch:
        with pytest.raises(us.WaitTimeout):
            us.asnumpy(delegating(memory, producer), timeout=0.01)
        fill(producer, memory, 2)
        assert not producer.is_done
        latch.release()


def test_a_capture_on_the_device_survives(producer: us.Stream, memory: int) -> None:
    """Then the copy is waited for, as an edge of the whole device would invalidate it."""
    stream = us.get_stream(0)
    us.copyto(delegating(memory, producer), NEW)
    us.wait_for_device(0)
    with us.Stream.create(0) as captured, captured.capture("relaxed"):
        with testing.latch(stream) as latch:
            with running(lambda: us.copyto(delegating(memory, producer), NEW)) as result:
                assert is_blocked(result)
                latch.release()
                result()
            with testing.latch(stream), pytest.raises(us.WaitTimeout) as error:
                us.copyto(delegating(memory, producer), NEW, timeout=0.02)
            assert error.value.seconds == 0.02
        assert captured.is_capturing
    assert content(memory) == {7}


def test_a_capture_that_cannot_be_seen(producer: us.Stream, memory: int) -> None:
    """The edge invalidates it, which is told; the copy is done, and was waited for."""
    us.copyto(delegating(memory, producer), NEW)
    us.wait_for_device(0)
    with device_current(0):
        handle = checked(driver.cuStreamCreateWithPriority(1, 0))  # somebody else's
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    checked(driver.cuStreamBeginCapture(handle, mode))
    with pytest.raises(us.CaptureError) as caught:
        us.copyto(delegating(memory, producer), NEW + 1)
    assert "pass producer=" in caught.value.__notes__[0]
    assert eventually(lambda: us.get_stream(0).is_done)
    driver.cuStreamEndCapture(handle)
    assert content(memory) == {8}
    us.copyto(delegating(memory, producer), NEW)
    checked(driver.cuStreamDestroy(handle))


@pytest.mark.no_races(False)  # it writes what nobody writes
def test_an_immutable_array_needs_none(producer: us.Stream, jax: Any, memory: int) -> None:
    """Nobody writes it again, and it is held: other streams of the device are left alone."""

    class Array(jax.Array):  # type: ignore[misc]
        def unsafe_buffer_pointer(self) -> int:
            return memory

        def __dlpack__(self, *, stream: int, **_: Any) -> object:
            return object()

    source = Array(jax.Device(0))
    with device_memory(0) as target, testing.latch(us.get_stream(0)):
        us.copyto(array(target, producer, shape=(2, 4)), source)
        with us.Stream.create(0) as other:
            fill(other, memory, 0)
            other.sync(timeout=20)


# -- USERSTREAM_SYNC=1 ----------------------------------------------------------------------------


@pytest.fixture
def sync(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_in_every_block(monkeypatch)


USES: dict[str, Callable[[Any, float], object]] = {
    "asnumpy": lambda buffer, timeout: us.asnumpy(buffer, timeout=timeout),
    "copyto": lambda buffer, timeout: us.copyto(buffer, NEW, timeout=timeout),
    "copyto the host": lambda buffer, timeout: us.copyto(NEW.copy(), buffer, timeout=timeout),
}


@pytest.mark.usefixtures("sync")
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("whose", ["the producer", "ours"])
def test_a_timeout_holds_with_sync(whose: str, use: str, producer: us.Stream, memory: int) -> None:
    stream = us.get_stream(0)
    buffer = array(memory, producer, shape=(SIZE,), typestr="|u1")
    USES[use](buffer, 20)
    with testing.latch(producer if whose == "the producer" else stream):
        with running(lambda: USES[use](buffer, 0.05)) as result:
            with pytest.raises(us.WaitTimeout) as error:
                result()
    assert error.value.seconds == 0.05
    assert not getattr(error.value, "__notes__", [])
    USES[use](buffer, 20)


def test_a_registry_that_refuses_edges_to_the_device(memory: int, producer: us.Stream) -> None:
    """Only a copy can do without one, because the host waits for the copy."""
    source = delegating(memory, producer)
    fill(producer, memory, 7)
    with us.UserStream(unknown="raise") as mine:
        assert set(mine.asnumpy(source)) == {7}
        for use in (mine.acquire, mine.release):
            with pytest.raises(us.UnknownProducerError, match="producer="):
                use(source)
        # Not until the copy is done, as for the producer of a copy that has not failed.
        with testing.latch(mine.get_stream(0)):
            with running(lambda: mine.asnumpy(source, timeout=0.05)) as result:
                with pytest.raises(us.WaitTimeout):
                    result()
