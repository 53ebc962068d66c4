"""Streams that may use a part of their device: green contexts."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver
from cuda.core import Device

import userstream as us
from helpers import (
    CAI,
    array,
    checked,
    content,
    copy,
    current_context,
    device_current,
    device_memory,
    driver_version,
    eventually,
    fill,
    in_thread,
    instantiated,
    run_python,
    running,
)
from internals import alive_in_driver, hide_splits, is_split
from userstream import testing

SIZE = 256
TIMES = 50


@pytest.fixture(autouse=True)
def _whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin with devices that are not split. Real ones keep the green contexts of earlier tests."""
    if driver_version() < 12050:
        pytest.skip("needs a driver of CUDA 12.5")
    hide_splits(monkeypatch)


@pytest.fixture
def part() -> Iterator[us.Stream]:
    """A stream of the caller's own that may use 16 SMs of device 0."""
    with us.Stream.create(0, sms=16) as stream:
        yield stream


def count(stream: us.Stream) -> int:
    """Return how many SMs a stream may use, as cuda.core says."""
    return int(stream.resources.sm.sm_count)


# -- what it is -----------------------------------------------------------------------------------


def test_a_user_stream_of_a_part() -> None:
    stream = us.get_stream(0, name="part", sms=16)
    assert (stream.sms, count(stream)) == (16, 16)
    assert us.get_stream(0, name="part") is stream
    assert us.get_stream(0, name="part", sms=16) is stream
    assert us.streams()[0, "part"] is stream
    assert (stream.device.device_id, stream.is_nonblocking, stream.priority) == (0, True, 0)
    assert "name='part' sms=16 " in repr(stream)


def test_a_stream_of_the_whole_device(producer: us.Stream) -> None:
    assert producer.sms is None
    assert us.Stream.legacy_default().sms is None
    assert us.Stream.from_handle(int(producer.handle)).sms is None
    assert "sms" not in repr(producer)


def test_a_stream_of_ones_own(part: us.Stream) -> None:
    assert (part.sms, count(part)) == (16, 16)
    greatest = us.Stream.priority_range(0)[1]
    with us.Stream.create(0, sms=16, priority=greatest) as fast:
        assert fast.priority == greatest
    assert fast.is_closed


@pytest.mark.parametrize(
    ("asked", "given"), [(1, 8), (8, 8), (10, 16), (np.int64(20), 24), (33, 40), (124, 128)]
)
def test_it_is_rounded_up_to_what_the_device_splits(asked: int, given: int) -> None:
    with us.Stream.create(0, sms=asked) as stream:
        assert stream.sms == count(stream) >= asked
        if Device(0).compute_capability == (9, 0):
            assert stream.sms == given
        with us.Stream.create(0, sms=asked) as another:
            assert another.sms == stream.sms


def test_the_rest_shares_nothing_with_the_part(producer: us.Stream, part: us.Stream) -> None:
    rest = us.get_stream(0, name="framework", sms="rest")
    assert rest.sms == count(rest) == count(producer) - 16
    assert us.get_stream(0, name="framework", sms="rest") is rest


def test_a_device_is_split_once(part: us.Stream) -> None:
    """Two parts that were split one by one might have the same SMs."""
    mine = us.UserStream().get_stream(0, sms=16)
    assert int(mine.context.handle) == int(part.context.handle)
    with pytest.raises(ValueError, match=r"is split into 16 and \d+ SMs, once for the process"):
        us.Stream.create(0, sms=64)
    assert us.Stream.create(0, sms=15).sms == 16, "it is rounded to the same part"


@pytest.mark.multi_device
def test_each_device_is_split_on_its_own(part: us.Stream) -> None:
    with us.Stream.create(1, sms=64) as other:
        assert (other.device.device_id, other.sms, count(other)) == (1, 64, 64)


def test_the_current_context_stays(part: us.Stream) -> None:
    assert in_thread(lambda: (us.Stream.create(0, sms="rest").sms, current_context()))[1] == 0
    with device_current(0):
        before = current_context()
        us.get_stream(0, name="x", sms=16)
        assert current_context() == before


def test_a_stream_by_its_handle(part: us.Stream) -> None:
    assert us.Stream.from_handle(int(part.handle)) is part
    other = us.Stream.from_handle(int(part.handle), owner=object())
    assert other == part
    assert other._resolve().identity() == part._resolve().identity()


@pytest.mark.simulated
def test_threads_that_split_a_device_at_once() -> None:
    barrier = threading.Barrier(4)

    def make() -> int:
        barrier.wait(20)
        with us.Stream.create(0, sms=16) as stream:
            return int(stream.context.handle)

    with running(make) as one, running(make) as two, running(make) as three:
        assert len({make(), one(), two(), three()}) == 1
    made = testing.calls("cuGreenCtxCreate")
    assert made == 1 + testing.calls("cuGreenCtxDestroy")


@pytest.mark.simulated
@pytest.mark.parametrize("function", ["cuGreenCtxCreate", "cuCtxFromGreenCtx"])
def test_a_part_that_cannot_be_made(function: str) -> None:
    with (
        testing.inject(function, driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY),
        pytest.raises(us.DriverError, match=f"{function} failed with CUDA_ERROR_OUT_OF_MEMORY"),
    ):
        us.Stream.create(0, sms=16)
    made = testing.calls("cuGreenCtxCreate") - (function == "cuGreenCtxCreate")
    assert testing.calls("cuGreenCtxDestroy") == made
    us.Stream.create(0, sms=16).close()


# -- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sms", "kind", "message"),
    [
        (0, ValueError, "sms must be at least 1, not 0"),
        (-8, ValueError, "sms must be at least 1, not -8"),
        (True, TypeError, "sms must be an integer, not True"),
        (16.0, TypeError, r"sms must be an integer, not 16\.0"),
        ("half", ValueError, "sms must be a number of multiprocessors or 'rest', not 'half'"),
        ("whole", ValueError, "sms must be a number of multiprocessors or 'rest', not 'whole'"),
        ([16], TypeError, r"sms must be an integer, not \[16\]"),
    ],
)
def test_what_is_no_number_of_sms(sms: Any, kind: type[Exception], message: str) -> None:
    for make in (us.get_stream, us.Stream.create):
        with pytest.raises(kind, match=message):
            make(0, sms=sms)  # type: ignore[operator]
    assert not is_split()


@pytest.mark.parametrize("more", [1, 100, 1 << 40])
def test_more_than_there_are(producer: us.Stream, more: int) -> None:
    there = count(producer)
    with pytest.raises(ValueError, match=f"has {there} SMs, from which no part of {there + more}"):
        us.get_stream(0, sms=there + more)
    assert not us.streams()


def test_the_rest_of_a_device_that_is_not_split() -> None:
    with pytest.raises(ValueError, match="device 0 has not been split, so there is no rest yet"):
        us.get_stream(0, sms="rest")


def test_another_part_than_that_of_the_existing_stream() -> None:
    us.get_stream(0)
    with pytest.raises(ValueError, match="has all the SMs of its device, not 16: pass another"):
        us.get_stream(0, sms=16)
    assert not is_split(), "it was split for nobody"
    us.get_stream(0, name="another", sms=16)
    with pytest.raises(ValueError, match="has sms=16, not 'rest': pass another name"):
        us.get_stream(0, name="another", sms="rest")
    with pytest.raises(ValueError, match="there is no part of 64"):
        us.get_stream(0, name="another", sms=64)


def test_with_a_stream_or_for_a_blocking_one(part: us.Stream) -> None:
    with pytest.raises(ValueError, match="is a stream already: pass no name, no priority and no"):
        us.get_stream(part, sms=16)
    with pytest.raises(ValueError, match="sms=16 is for non-blocking streams only"):
        us.Stream.create(0, sms=16, nonblocking=False)


@pytest.mark.simulated
def test_an_older_driver() -> None:
    done = run_python(
        """
        from userstream import testing
        testing.simulate(1, driver_version=12040)
        import userstream as us
        for make in (us.get_stream, us.Stream.create):
            try:
                make(0, sms=16)
            except us.NotSupportedError as error:
                assert "12.5" in str(error) and error.function == "cuGreenCtxCreate", error
            else:
                raise AssertionError
        """,
        simulate=None,
    )
    assert done.returncode == 0, done.stderr


def test_a_green_context_that_was_destroyed() -> None:
    """One of others: those of userstream are kept."""
    sm = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    with device_current(0):
        whole = checked(driver.cuDeviceGetDevResource(0, sm))
        (group,), _, _ = checked(driver.cuDevSmResourceSplitByCount(1, whole, 0, 16))
        description = checked(driver.cuDevResourceGenerateDesc([group], 1))
        green = checked(driver.cuGreenCtxCreate(description, 0, 1))
        theirs = us.Stream.from_handle(int(checked(driver.cuGreenCtxStreamCreate(green, 1, 0))))
        theirs.sync(timeout=20)
        checked(driver.cuGreenCtxDestroy(green))
    with pytest.raises(us.DriverError, match="CUDA_ERROR_CONTEXT_IS_DESTROYED"):
        theirs.sync(timeout=20)


# -- order ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["the stream", "the device"])
@pytest.mark.parametrize("in_part", ["the user", "the producer"])
def test_borrow_orders_both_ways(
    part: us.Stream, producer: us.Stream, memory: int, by: str, in_part: str
) -> None:
    """An event of the primary context covers its green contexts, says the driver's manual."""
    user, writer = (part, producer) if in_part == "the user" else (producer, part)
    how: dict[str, Any] = {"producer": "device"} if by == "the device" else {}
    with device_memory(0) as mine, device_memory(0) as seen:
        fill(writer, mine, 0)
        for number in range(TIMES):
            value = 1 + number % 250
            with testing.latch(writer) as latch:
                fill(writer, memory, value)
                with us.borrow(array(memory, writer), stream=user, **how):
                    copy(user, mine, memory)
                    fill(user, memory, value + 1)
                copy(writer, seen, memory)
                assert not user.is_done
                latch.release()
                writer.sync(timeout=20)
            assert user.is_done, "the producer continued before the end of the borrow"
            assert content(mine) == {value}, "the user read before the producer had written"
            assert content(seen) == {value + 1}, "the producer read before the user had written"


def test_a_stream_of_the_part_that_is_made_later(producer: us.Stream, memory: int) -> None:
    with us.Stream.create(0, sms=16), device_memory(0) as seen:
        fill(producer, memory, 1)
        producer.sync(timeout=20)
        with testing.latch(producer) as latch:
            with us.borrow(CAI(memory, stream=None), stream=producer, producer="device"):
                fill(producer, memory, 2)
            with us.Stream.create(0, sms=16) as later:
                copy(later, seen, memory)
                assert not later.is_done
                latch.release()
                later.sync(timeout=20)
        assert content(seen) == {2}


def test_the_part_and_the_rest(part: us.Stream, memory: int) -> None:
    with us.Stream.create(0, sms="rest") as rest, device_memory(0) as seen:
        with testing.latch(rest) as latch:
            fill(rest, memory, 1)
            with us.borrow(array(memory, rest), stream=part):
                copy(part, seen, memory)
            assert not part.is_done
            latch.release()
            part.sync(timeout=20)
        assert content(seen) == {1}


def test_nothing_else_is_held_up(part: us.Stream, producer: us.Stream) -> None:
    with testing.latch(producer):
        part.sync(timeout=20)
    with testing.latch(part):
        producer.sync(timeout=20)


def test_what_is_held_for_it(part: us.Stream, producer: us.Stream, memory: int) -> None:
    buffer = array(memory, producer)
    kept = weakref.ref(buffer)
    with testing.latch(part) as latch:
        with us.borrow(buffer, stream=part):
            pass
        del buffer
        gc.collect()
        assert kept() is not None
        latch.release()
        part.sync(timeout=20)

    def let_go() -> bool:
        us.hold(object(), stream=part)
        return kept() is None

    assert eventually(let_go)


def test_what_is_told_of_a_buffer_that_it_writes(part: us.Stream, memory: int) -> None:
    told = us.describe(array(memory, part))
    assert (told.ordering, told.producer) == ("exact", int(part.handle))


def test_frameworks_work_on_it(part: us.Stream, torch: Any, cupy: Any) -> None:
    with part.activate("torch", "cupy"):
        assert torch.cuda.current_stream(0).cuda_stream == int(part.handle)
        assert cupy.cuda.get_current_stream(0).ptr == int(part.handle)
    assert torch.cuda.current_stream(0).cuda_stream != int(part.handle)


# -- waits ----------------------------------------------------------------------------------------


def test_waits_cover_it(memory: int) -> None:
    stream = us.get_stream(0, name="waited for", sms=16)
    with testing.latch(stream) as latch:
        for wait in (
            lambda timeout: us.wait(0, name="waited for", timeout=timeout),
            lambda timeout: us.wait_all(timeout=timeout),
            lambda timeout: us.wait_for_device(0, timeout=timeout),
            lambda timeout: us.wait_for_device(stream, timeout=timeout),
            lambda timeout: us.completion(stream).result(timeout=timeout),
        ):
            with pytest.raises(TimeoutError):
                wait(0.02)
        latch.release()
        us.wait_for_device(0, timeout=20)
        assert stream.is_done


def test_copies_and_host_functions(part: us.Stream, memory: int) -> None:
    us.copyto(CAI(memory), np.arange(4, dtype="f4"), stream=part)
    assert us.asnumpy(CAI(memory), stream=part, timeout=20).tolist() == [0, 1, 2, 3]
    called: list[int] = []
    part.launch_host_func(called.append, 1)
    part.sync(timeout=20)
    assert called == [1]


# -- captures -------------------------------------------------------------------------------------


def test_its_work_can_be_captured(part: us.Stream, memory: int) -> None:
    with part.capture("relaxed") as graph:
        fill(part, memory, 7)
    executable = instantiated(graph)
    executable.launch(part)
    part.sync(timeout=20)
    assert content(memory) == {7}
    executable.close()


def test_a_capture_on_it_is_seen_before_an_edge_of_the_device_breaks_it(
    part: us.Stream, producer: us.Stream, memory: int
) -> None:
    with part.capture("relaxed"):
        fill(part, memory, 7)
        with pytest.raises(us.CaptureError):
            us.acquire(CAI(memory), stream=producer, producer="device")
        with pytest.raises(us.CaptureError):
            us.wait_for_device(0, timeout=20)
        assert part.is_capturing


def test_captures_of_others_survive(producer: us.Stream, part: us.Stream, memory: int) -> None:
    with us.Stream.create(0, sms=16) as other, producer.capture("relaxed"):
        fill(producer, memory, 7)
        with testing.latch(other):
            with pytest.raises(us.WaitTimeout):
                other.sync(timeout=0.02)
            part.wait(other)
        assert producer.is_capturing


def test_attributes(part: us.Stream, producer: us.Stream) -> None:
    with us.Stream.create(0, sms=16) as other:
        other.set_attribute("sync_policy", "spin")
        part.copy_attributes_from(other)
        assert part.get_attribute("sync_policy") == "spin"
    with pytest.raises(ValueError, match="belongs to another context"):
        producer.copy_attributes_from(part)


# -- the end --------------------------------------------------------------------------------------


def test_a_closed_one_is_made_again() -> None:
    with us.UserStream() as mine:
        stream = mine.get_stream(0, name="part", sms=16)
        context = int(stream.context.handle)
        stream.close()
        assert (0, "part") not in mine.streams()
        assert (stream.sms, stream.is_closed) == (16, True)
        again = mine.get_stream(0, name="part", sms=16)
        assert again is not stream
        assert int(again.context.handle) == context, "contexts are kept"


def test_one_that_was_let_go_comes_back() -> None:
    stream = us.get_stream(0, name="let go", sms=16)
    us.close(timeout=20)
    stream.sync(timeout=20)
    assert us.get_stream(0, name="let go", sms=16) is stream


@pytest.mark.simulated
def test_streams_of_it_are_destroyed() -> None:
    us.Stream.create(0, sms=16).close()
    gc.collect()
    before = alive_in_driver().streams
    for _ in range(10):
        us.Stream.create(0, sms=16)
    gc.collect()
    assert alive_in_driver().streams == before
    assert testing.calls("cuGreenCtxCreate") == 1


def test_work_in_flight_at_exit() -> None:
    done = run_python(
        """
        import userstream as us
        from userstream.testing import latch
        held = latch(us.get_stream(0, name="part", sms=16))
        held.__enter__()
        """
    )
    assert done.returncode == 0, done.stderr
