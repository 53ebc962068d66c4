"""`Stream`: a cuda.core stream in every respect, made in the right context."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import cuda.core
import numpy as np
import pytest
from cuda.bindings import driver
from cuda.core import Device, DeviceResources, Event, EventOptions

import userstream as us
from helpers import (
    checked,
    current_context,
    device_current,
    in_thread,
    is_blocked,
    on,
    primary_context,
    running,
)
from userstream import testing


@pytest.fixture
def device() -> Device:
    """Device 0, current for this test."""
    device = Device(0)
    with device_current(0):
        device.set_current()
        yield device


def test_it_is_a_cuda_core_stream(device: Device) -> None:
    stream = us.get_stream(0)
    assert isinstance(stream, cuda.core.Stream)
    buffer = device.allocate(64, stream=stream)
    other = device.allocate(64, stream=stream)
    buffer.fill(7, stream=stream)
    buffer.copy_to(other, stream=stream)
    builder = stream.create_graph_builder()
    builder.begin_building()
    builder.end_building()
    builder.close()
    assert stream.__cuda_stream__() == (0, int(stream.handle))
    assert us.get_stream(buffer) is stream
    us.wait(0, timeout=10)


def test_cuda_core_launches_on_it(device: Device) -> None:
    """`cuda.core.launch` checks its stream before anything else."""
    config = cuda.core.LaunchConfig(grid=1, block=1)
    with pytest.raises(TypeError) as with_ours:
        cuda.core.launch(us.get_stream(0), config, "no kernel")
    with pytest.raises(TypeError) as with_theirs:
        cuda.core.launch(device.create_stream(), config, "no kernel")
    assert str(with_ours.value) == str(with_theirs.value), "it went as far as with its own stream"


def test_the_constructor_is_refused_and_names_the_factories() -> None:
    for arguments in ((), (0,), (5, "x")):
        with pytest.raises(TypeError, match=r"get_stream.*create.*from_handle.*legacy_default"):
            us.Stream(*arguments)


def test_it_is_neither_copied_nor_pickled() -> None:
    stream = us.get_stream(0)
    for function in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            function(stream)


def test_create() -> None:
    before = current_context()
    with us.Stream.create() as stream:
        assert stream.device.device_id == 0
        assert (stream.flags, stream.is_nonblocking, stream.priority) == (1, True, 0)
        assert stream.name is None
        assert stream._live() is not None
        stream.sync(timeout=10)
    assert stream.is_closed
    blocking = us.Stream.create(0, nonblocking=False, flags=0)
    assert (blocking.flags, blocking.is_nonblocking) == (0, False)
    us.Stream.create(Device(0), flags=driver.CUstream_flags.CU_STREAM_NON_BLOCKING).close()
    assert current_context() == before
    assert us.streams() == {}
    blocking.close()


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"flags": 0}, ValueError, "contradicts"),
        ({"flags": 1, "nonblocking": False}, ValueError, "contradicts"),
        ({"flags": 2}, ValueError, "contradicts"),
        ({"flags": "1"}, TypeError, "flags must be an integer, not '1'"),
        ({"flags": True}, TypeError, "flags must be an integer, not True"),
        ({"priority": 0.5}, TypeError, "priority must be an integer, not 0.5"),
        ({"priority": None}, TypeError, "priority must be an integer, not None"),
        ({"priority": np.False_}, TypeError, "priority must be an integer, not .*False"),
        ({"device": 99}, us.InvalidDeviceError, "no CUDA device 99"),
        ({"device": -1}, us.InvalidDeviceError, "no CUDA device -1"),
        ({"device": True}, TypeError, "a device is .*, not True$"),
        ({"device": "gpu:0"}, TypeError, "a device is .*, not 'gpu:0'$"),
        ({"device": np.zeros(3)}, TypeError, "a device is .*, not numpy.ndarray$"),
    ],
)
def test_create_refuses(arguments: dict[str, object], error: type, match: str) -> None:
    with pytest.raises(error, match=match):
        us.Stream.create(**arguments)  # type: ignore[arg-type]


def test_create_takes_integers_of_numpy() -> None:
    with us.Stream.create(0, priority=np.int64(-1), flags=np.uint8(1)) as stream:
        assert stream.priority == -1


def test_priority_range() -> None:
    least, greatest = us.Stream.priority_range()
    assert greatest < 0 == least
    assert us.Stream.priority_range(Device(0)) == (least, greatest)
    for wanted, got in ((greatest - 1, greatest), (greatest, greatest), (1, 0), (0, 0)):
        with us.Stream.create(0, priority=wanted) as stream:
            assert stream.priority == got
    with pytest.raises(us.InvalidDeviceError):
        us.Stream.priority_range(99)


def test_identity() -> None:
    stream = us.get_stream(0)
    assert stream.stream_id == checked(driver.cuStreamGetId(stream._live()))
    assert stream.stream_id != us.Stream.create(0).stream_id
    assert stream == cuda.core.Stream.from_handle(int(stream.handle))
    assert len({stream, us.get_stream(0)}) == 1
    assert weakref.ref(stream)() is stream
    text = repr(us.get_stream(0, name="io"))
    assert text.startswith("<userstream.Stream device=0 name='io' id=")
    assert "handle=0x" in text


def test_a_closed_stream() -> None:
    stream = us.Stream.create(0)
    stream.close()
    stream.close()
    assert stream.is_closed
    assert "closed" in repr(stream)
    for use in (
        stream.sync,
        stream.record,
        stream.__cuda_stream__,
        stream.__enter__,
        lambda: stream.handle,
        lambda: stream.is_done,
        lambda: stream.flags,
        lambda: stream.priority,
        lambda: stream.stream_id,
        lambda: stream.wait(us.get_stream(0)),
        lambda: us.get_stream(0).wait(stream),
        lambda: us.get_stream(stream),
        lambda: us.wait(stream),
        lambda: us.wait_for_device(stream),
        lambda: us.Stream.from_handle(stream),
    ):
        with pytest.raises(us.ClosedError, match="is closed"):
            use()


def test_a_closed_stream_of_cuda_core() -> None:
    with device_current(0):
        theirs = Device(0).create_stream()
    theirs.close()
    for use in (
        lambda: us.Stream.from_handle(theirs),
        lambda: us.Stream.from_handle(theirs, owner=1),
        lambda: us.wait(theirs),
        lambda: us.get_stream(0).wait(theirs),
        lambda: us.get_stream(0).copy_attributes_from(theirs),
        lambda: us.acquire(on(0), stream=theirs),
        lambda: us.acquire(on(0), producer=theirs),
    ):
        with pytest.raises(us.ClosedError, match=r"cuda\.core.* is closed"):
            use()


def test_only_what_create_made_closes_in_a_with_statement() -> None:
    for stream in (
        us.get_stream(0),
        us.Stream.legacy_default(),
        us.Stream.from_handle(int(us.get_stream(0).handle)),
    ):
        with pytest.raises(TypeError, match="with statement"), stream:
            pass
        assert not stream.is_closed


def test_close_lets_queued_work_finish() -> None:
    stream = us.Stream.create(0)
    with testing.latch(stream) as latch:
        event = stream.record()
        stream.close()
        assert not event.is_done
        latch.release()
        event.sync()


# -- streams of somebody else -----------------------------------------------------------------


class Owner:
    def __init__(self, handle: int, version: int = 0) -> None:
        self.answer = (version, handle)

    def __cuda_stream__(self) -> tuple[int, int]:
        return self.answer


class Stranger:
    """A stream whose protocol returns no version and address."""

    def __init__(self, answer: object) -> None:
        self.answer = answer

    def __cuda_stream__(self) -> Any:
        return self.answer


@pytest.fixture
def foreign() -> int:
    """The handle of a stream that this library did not make."""
    with device_current(0):
        handle = checked(driver.cuStreamCreate(1))
    yield int(handle)
    checked(driver.cuStreamDestroy(handle))


def test_from_handle(foreign: int) -> None:
    for handle in (foreign, driver.CUstream(foreign), Owner(foreign)):
        stream = us.Stream.from_handle(handle)
        assert type(stream) is us.Stream
        assert int(stream.handle) == foreign
        assert stream.device.device_id == 0
        assert stream.flags == 1
        assert "id=" not in repr(stream), "it was not asked"
        assert stream.stream_id == checked(driver.cuStreamGetId(driver.CUstream(foreign)))
        assert "id=" in repr(stream)
        stream.sync(timeout=10)
        stream.close()
    checked(driver.cuStreamQuery(driver.CUstream(foreign)))  # it was not destroyed
    mine = us.get_stream(0)
    assert us.Stream.from_handle(mine) is mine


@pytest.mark.parametrize(
    "answer", [None, 1, (0,), (0, None), (0, 1.5), ("0", 1), (0, 1, 2)], ids=str
)
def test_an_odd_answer_of_the_protocol(answer: Any) -> None:
    class Odd:
        def __cuda_stream__(self) -> Any:
            return answer

    for use in (us.Stream.from_handle, us.get_stream, us.get_stream(0).wait):
        with pytest.raises(
            TypeError, match=r"__cuda_stream__ of this .*Odd does not return a version"
        ):
            use(Odd())


def test_a_handle_may_be_an_integer_of_numpy(foreign: int) -> None:
    assert int(us.Stream.from_handle(np.uint64(foreign)).handle) == foreign
    assert us.Stream.from_handle(np.int32(1)) is us.Stream.legacy_default()


def test_of_shared_streams_no_owner_is_kept() -> None:
    owner = Owner(0)
    alive = weakref.ref(owner)
    with us.Stream.create(0) as mine:
        streams = [us.Stream.from_handle(handle, owner) for handle in (1, 2, mine)]
        del owner
        assert alive() is None
        assert streams[2] is mine


def test_from_handle_keeps_the_owner(foreign: int) -> None:
    owner, tag = Owner(foreign), Owner(foreign)
    alive = [weakref.ref(owner), weakref.ref(tag)]
    implicit = us.Stream.from_handle(owner)
    explicit = us.Stream.from_handle(foreign, owner=tag)
    del owner, tag
    gc.collect()
    assert None not in [each() for each in alive]
    implicit.close()
    del explicit
    gc.collect()
    assert [each() for each in alive] == [None, None]


@pytest.mark.multi_device
def test_from_handle_finds_the_device(device: Device) -> None:
    with device_current(1):
        handle = checked(driver.cuStreamCreate(1))
    stream = us.Stream.from_handle(handle)
    assert stream.device.device_id == 1
    stream.sync(timeout=10)
    checked(driver.cuStreamDestroy(handle))


@pytest.mark.parametrize(
    ("handle", "error", "match"),
    [
        (0, ValueError, "not the handle of a stream"),
        (-1, ValueError, "not the handle of a stream"),
        (1 << 64, ValueError, "not the handle of a stream"),
        (driver.CUstream(0), ValueError, "not the handle of a stream"),
        (True, TypeError, "not True"),
        (np.True_, TypeError, "a stream is an address, .* not .*True"),
        (np.int64(-1), ValueError, "not the handle of a stream"),
        (np.float64(1.5), TypeError, "not float64"),
        (1.5, TypeError, "not float"),
        ("1", TypeError, "not str"),
        (None, TypeError, "not NoneType"),
        (Owner(7, version=1), TypeError, "version 1"),
    ],
)
def test_from_handle_refuses(handle: object, error: type, match: str) -> None:
    with pytest.raises(error, match=match):
        us.Stream.from_handle(handle)  # type: ignore[arg-type]


def test_a_stream_of_cuda_core_is_shared(device: Device) -> None:
    theirs = device.create_stream()
    mine = us.Stream.from_handle(theirs)
    assert mine == theirs
    theirs.close()
    mine.sync(timeout=10)
    mine.close()


# -- the default streams ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "token", "text"),
    [
        (us.Stream.legacy_default, 1, "legacy default"),
        (us.Stream.per_thread_default, 2, "per-thread default"),
    ],
)
def test_default_streams(make: object, token: int, text: str) -> None:
    stream = make()  # type: ignore[operator]
    assert make() is stream  # type: ignore[operator]
    assert in_thread(make) is stream  # type: ignore[arg-type]
    assert isinstance(stream, us.Stream)
    assert int(stream.handle) == token
    assert stream.__cuda_stream__() == (0, token)
    assert us.Stream.from_handle(token) is stream
    assert us.get_stream(Owner(token)) is stream
    assert text in repr(stream)
    for thread in (in_thread, lambda function: function()):  # with and without a context
        assert thread(lambda: stream.device.device_id) == 0
        assert thread(lambda: stream.flags) == 0
        assert thread(lambda: stream.is_nonblocking) is False
        assert thread(lambda: stream.priority) == 0
        assert thread(lambda: stream.sync(timeout=10)) is None
        assert thread(lambda: stream.is_done) is True
        assert thread(lambda: stream.stream_id) > 0
        assert thread(lambda: us.wait(stream, timeout=10)) is None
        assert isinstance(thread(stream.record), Event)
    with pytest.raises(RuntimeError, match="cannot be closed"):
        stream.close()
    assert not stream.is_closed


def test_0_of_an_object_is_the_legacy_default_stream() -> None:
    assert us.get_stream(Owner(0)) is us.Stream.legacy_default()


def test_a_default_stream_is_waited_for() -> None:
    legacy = us.Stream.legacy_default()
    with device_current(0):
        latch = testing.latch(legacy)
        with latch, running(legacy.sync) as result:
            assert is_blocked(result)
            assert not legacy.is_done
            with pytest.raises(us.WaitTimeout, match="legacy default"):
                legacy.sync(timeout=0)
            latch.release()
            result()


@pytest.mark.multi_device
def test_a_default_stream_is_the_one_of_the_current_context() -> None:
    legacy = us.Stream.legacy_default()
    with device_current(1), testing.latch(legacy):
        assert legacy.device.device_id == 1
        assert not legacy.is_done
        assert in_thread(lambda: legacy.is_done), "there it is the one of device 0"
    with device_current(1):
        legacy.sync(timeout=10)


# -- order ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        us.Stream.legacy_default,
        us.Stream.per_thread_default,
        lambda: us.Stream.create(0),
        lambda: us.get_stream(0),
    ],
    ids=["legacy", "per-thread", "created", "user"],
)
@pytest.mark.parametrize("current", [None, 0, pytest.param(1, marks=pytest.mark.multi_device)])
def test_its_context_and_resources(make: Callable[[], us.Stream], current: int | None) -> None:
    stream = make()
    device = (current or 0) if int(stream._live()) in (1, 2) else 0

    def look() -> None:
        if current is not None:
            checked(driver.cuCtxSetCurrent(primary_context(current)))
        assert int(stream.context.handle) == int(primary_context(device))
        assert isinstance(stream.resources, DeviceResources)
        assert stream.device.device_id == device

    in_thread(look)


@pytest.mark.multi_device
def test_the_context_of_a_default_stream_changes_with_the_device() -> None:
    for stream in (us.Stream.legacy_default(), us.Stream.per_thread_default()):
        for device in (0, 1, 0):
            with device_current(device):
                assert int(stream.context.handle) == int(primary_context(device))


def ordered(first: us.Stream, second: us.Stream) -> bool:
    """Return whether `second` waits for `first` after `second.wait(first)`."""
    with testing.latch(first) as latch:
        second.wait(first)
        event = second.record()
        held = not event.is_done
        latch.release()
        event.sync()
    return held


def test_wait_orders_streams() -> None:
    first, second = us.Stream.create(0), us.Stream.create(0)
    assert ordered(first, second)
    assert in_thread(lambda: ordered(first, second)), "without a context"
    foreign = us.Stream.create(0)
    with testing.latch(first) as latch:
        foreign.wait(Owner(int(first.handle)))
        assert not foreign.is_done
        latch.release()
    foreign.sync(timeout=10)


@pytest.mark.multi_device
def test_wait_orders_across_devices(device: Device) -> None:
    first, second = us.get_stream(0), us.get_stream(1)
    assert ordered(first, second)
    assert ordered(second, first)
    with testing.latch(second) as latch:
        first.wait(Owner(int(second.handle)))
        assert not first.is_done
        latch.release()
    us.wait_all(timeout=10)


def test_wait_with_the_default_streams() -> None:
    legacy, stream = us.Stream.legacy_default(), us.Stream.create(0)
    with device_current(0):
        for source in (legacy, Owner(1), Owner(0)):
            with testing.latch(legacy) as latch:
                stream.wait(source)
                assert not stream.is_done
                latch.release()
            stream.sync(timeout=10)
        with testing.latch(stream) as latch:
            legacy.wait(stream)
            assert not legacy.is_done
            latch.release()
        legacy.sync(timeout=10)


def test_wait_for_an_event() -> None:
    first, second = us.Stream.create(0), us.Stream.create(0)
    with testing.latch(first) as latch:
        second.wait(first.record())
        assert not second.is_done
        latch.release()
    second.sync(timeout=10)


@pytest.mark.parametrize("thing", [None, 7.0, "stream", object()])
def test_wait_refuses_what_is_no_stream(thing: object) -> None:
    with pytest.raises(TypeError, match="takes an event or a stream"):
        us.get_stream(0).wait(thing)  # type: ignore[arg-type]


def test_an_edge_holds_nothing_back_that_comes_later() -> None:
    """A pooled event is recorded again at once: the wait keeps the record that it saw."""
    first, second, third = (us.Stream.create(0) for _ in range(3))
    with testing.latch(third):
        second.wait(first)
        second.wait(third)
        first.wait(second)
        other = us.Stream.create(0)
        event = other.record()
        with contextlib.suppress(us.WaitTimeout):  # it may share a hardware queue with `second`
            other.sync(timeout=1)
        assert not second.is_done
        del event
    first.sync(timeout=10)


def test_record() -> None:
    stream = us.get_stream(0)
    event = in_thread(stream.record)
    event.sync()
    with testing.latch(stream):
        assert stream.record(event) is event
        assert not event.is_done
    timed = stream.record(options=EventOptions(timing_enabled=True))
    timed.sync()
    us.wait(0, timeout=10)


def test_a_closed_event_is_refused() -> None:
    for stream in (us.get_stream(0), us.Stream.legacy_default()):
        event = stream.record()
        event.close()
        for use in (stream.wait, stream.wait_event, stream.record):
            with pytest.raises(us.ClosedError, match=r"Event .* is closed; pass an open event"):
                use(event)
            with pytest.raises(RuntimeError):  # as of cuda.core
                use(event)


@pytest.mark.parametrize("thing", ["x", None, 3, object(), Stranger(0), Stranger("a"), Stranger])
def test_what_is_no_stream_is_refused_as_in_cuda_core(thing: Any, device: Device) -> None:
    theirs = device.create_stream()
    if thing is not None:  # which makes cuda.core wait for a new stream
        with pytest.raises(ValueError):
            theirs.wait(thing)
    for kind in (us.UnsupportedStreamError, TypeError, ValueError):
        with pytest.raises(kind):
            us.Stream.create(0).wait(thing)
    theirs.close()


def test_flags_and_priority_of_a_stream_of_ours_can_be_read_in_a_capture() -> None:
    with us.Stream.create(0, priority=-1, nonblocking=False) as stream:
        with stream.capture():
            assert (stream.flags, stream.is_nonblocking, stream.priority) == (0, False, -1)
            stream.wait(stream)
        user = us.get_stream(0, name="captured", priority=-1)
        with user.capture():
            assert (user.flags, user.is_nonblocking, user.priority) == (1, True, -1)
            assert us.get_stream(0, name="captured", priority=-1) is user


@pytest.mark.parametrize("thing", [5, EventOptions(), driver.CUevent(0)])
def test_record_refuses_what_is_no_event(thing: Any) -> None:
    for stream in (us.get_stream(0), us.Stream.legacy_default()):
        name = type(thing).__name__
        with pytest.raises(
            TypeError, match=rf"record takes a cuda.core event.*not .*{name}; without one"
        ):
            stream.record(thing)


@pytest.mark.multi_device
def test_an_event_of_another_device_is_waited_for_and_not_recorded(device: Device) -> None:
    event = us.get_stream(1).record()
    legacy = us.Stream.legacy_default()
    for stream in (us.get_stream(0), legacy):
        stream.wait(event)
        with pytest.raises(
            us.DeviceMismatchError, match=r"belongs to device 1 and .* device 0"
        ) as caught:
            stream.record(event)
        assert caught.value.devices == (0, 1)
    with device_current(1):
        assert legacy.record(event) is event


@pytest.mark.multi_device
def test_record_on_another_device(device: Device) -> None:
    event = us.get_stream(1).record()
    event.sync()
    assert event.device.device_id == 1


def test_many_threads_use_one_stream() -> None:
    stream, other = us.get_stream(0), us.Stream.create(0)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(50):
                other.wait(stream)
                stream.wait(other)
                stream.sync(timeout=10)
                stream.record()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


@pytest.mark.simulated
def test_errors_of_a_default_stream_name_the_device_of_its_lane() -> None:
    with (
        testing.inject("cuStreamGetId", 2, this_thread=True),
        pytest.raises(us.DriverError) as caught,
    ):
        _ = us.Stream.legacy_default().stream_id
    assert (caught.value.code, caught.value.device) == (2, 0)
    assert "device=0 legacy default" in str(caught.value)
