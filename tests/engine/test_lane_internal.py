"""Lanes: one stream of the driver in one context, to which every stream resolves."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Iterator

import pytest
from cuda.bindings import driver

import userstream as us
from helpers import CAI, checked, device_current, eventually, on, primary_context
from userstream import _driver, testing
from userstream._engine import lanes
from userstream._engine.lane import Lane

DEFAULTS = [us.Stream.legacy_default, us.Stream.per_thread_default]


@pytest.fixture
def _device_0() -> Iterator[None]:
    with device_current(0):
        yield


def test_a_stream_is_one_lane_for_life() -> None:
    stream = us.Stream.create(0)
    lane = stream._resolve()
    assert stream._resolve() is lane
    assert stream._resolve(0) is lane, "it is of its device, whichever is asked for"
    assert (lane.device, lane.owned, lane.is_context_independent) == (0, True, True)
    assert repr(lane) == repr(stream)


@pytest.mark.parametrize("default", DEFAULTS)
@pytest.mark.usefixtures("_device_0")
def test_a_default_stream_is_the_lane_of_the_current_context(default: type[us.Stream]) -> None:
    lane = default()._resolve()
    assert lane is default()._resolve(), "found, not made again"
    assert (lane.device, lane.owned, lane.is_context_independent) == (0, False, False)
    assert int(lane.context) == int(primary_context(0))


@pytest.mark.multi_device
@pytest.mark.parametrize("default", DEFAULTS)
@pytest.mark.usefixtures("_device_0")
def test_a_default_stream_is_another_lane_on_each_device(default: type[us.Stream]) -> None:
    here = default()._resolve()
    there = default()._resolve(1)
    assert (here.device, there.device) == (0, 1)
    assert not here.is_same(there)
    with device_current(1):
        assert default()._resolve() is there
        # A lane needs nothing to be current: it was resolved at the door.
        assert here.is_idle()
        assert eventually(here.completion().is_done)


def test_the_same_stream_of_the_driver_has_one_lane() -> None:
    stream = us.Stream.create(0)
    handle = int(stream.handle)
    assert us.Stream.from_handle(handle) is stream
    assert lanes.of_framework(handle, 0) is stream._resolve()
    assert lanes.at_handle(handle) is stream._resolve()
    stream.close()
    assert stream._resolve().handle is None


def test_the_lane_of_a_stream_that_others_made_needs_no_object_of_cuda_core(
    memory: int, producer: us.Stream
) -> None:
    # As many events as the edges can need, however long each is in use.
    points = [producer._resolve().completion() for _ in range(8)]
    producer.sync(timeout=10)
    assert all(_driver.streams.relaxed(point.is_done) for point in points)
    with device_current(0):
        handle = checked(driver.cuStreamCreate(1))
    lanes.of_frameworks.get(0, {}).pop(int(handle), None)  # of a stream that had it before
    try:
        array = CAI(memory, stream=int(handle))
        with us.borrow(array) as stream:
            pass
        us.release(array)
        stream.sync(timeout=10)
        lane = lanes.named(int(handle), 0)
        assert lane is lanes.of_framework(int(handle), 0), "found, not made again"
        assert lane._core is None, "an edge needs none"
        assert lane.core is lane.core, "made when it is needed"
        assert lane.core.__cuda_stream__() == (0, int(handle))
    finally:
        lanes.forget(lane, int(handle))
        checked(driver.cuStreamDestroy(handle))


@pytest.mark.multi_device
def test_what_is_remembered_of_a_handle_is_not_believed(memory: int) -> None:
    """The driver reuses handles: this one is of device 1 by now."""
    with us.Stream.create(1) as producer:
        handle = int(producer._live())
        stale = Lane(driver.CUstream(handle), 0, primary_context(0))
        lanes.of_frameworks.setdefault(0, {})[handle] = stale
        try:
            with testing.latch(producer) as latch:
                stream = us.acquire(CAI(memory, stream=handle))
                assert not stream.is_done
                latch.release()
            stream.sync(timeout=10)
            assert lanes.named(handle, 0) is producer._resolve()
        finally:
            lanes.of_frameworks[0].pop(handle, None)


def test_a_lane_outlives_its_stream() -> None:
    stream = us.Stream.create(0)
    lane, handle = stream._resolve(), int(stream._live())
    gone = weakref.ref(stream)
    del stream
    gc.collect()
    assert gone() is None
    again = us.Stream.from_handle(handle)
    assert again._resolve() is lane, "what shows it may come and go"


@pytest.mark.simulated
def test_a_stream_and_its_lane_go_without_the_garbage_collector() -> None:
    gc.disable()
    try:
        before = testing.calls("cuStreamDestroy")
        stream = us.Stream.create(0)
        del stream
        assert testing.calls("cuStreamDestroy") == before + 1
    finally:
        gc.enable()


def test_the_rule_of_captures() -> None:
    stream = us.Stream.create(0)
    lane = stream._resolve()
    assert int(lane.usable()) == int(lane.usable("; not now")) == int(stream._live())
    with stream.capture():
        assert int(lane.usable()) == int(stream._live()), "work becomes a node"
        with pytest.raises(us.CaptureError, match=r"is being captured; ask me later$"):
            lane.usable("; ask me later")
    stream.close()
    with pytest.raises(us.ClosedError):
        lane.usable()


@pytest.mark.usefixtures("_device_0")
def test_the_legacy_stream_is_of_no_use_beside_a_capture() -> None:
    blocking = us.Stream.create(0, nonblocking=False)
    lane = us.Stream.legacy_default()._resolve()
    lane.usable()
    with blocking.capture():
        for reason in (None, "; not now"):
            with pytest.raises(us.CaptureError, match="legacy default stream would invalidate"):
                lane.usable(reason)


def test_edges_between_lanes() -> None:
    one, other = (us.Stream.create(0)._resolve() for _ in range(2))
    with testing.latch(us.Stream._of(one)) as latch:
        other.add_edge(one, may_join=False)
        assert not other.is_idle()
        latch.release()
    us.Stream._of(other).sync(timeout=10)
    assert one.is_idle()


@pytest.mark.multi_device
@pytest.mark.parametrize("default", DEFAULTS)
@pytest.mark.usefixtures("_device_0")
def test_edges_between_the_default_streams_of_two_devices(default: type[us.Stream]) -> None:
    """Their handles are the same number, which means each of them in its own context alone."""
    here, there = (default()._resolve(device) for device in (0, 1))
    there.add_edge(here, may_join=False)  # which leaves an event behind
    with testing.latch(default()) as latch:
        for device in (0, 1):
            with device_current(device):
                there.add_edge(here, may_join=False)
        assert not there.is_idle()
        latch.release()
    assert eventually(there.is_idle)


@pytest.mark.usefixtures("_device_0")
def test_what_is_resolved_is_what_messages_show() -> None:
    buffer = on(0)
    found = us.acquire(buffer, stream=us.Stream.legacy_default(), producer=None)
    assert isinstance(found, us.Stream)
    assert isinstance(found._lane, Lane)
    assert repr(found) == "<userstream.Stream device=0 legacy default>"
    assert found == us.Stream.legacy_default()


@pytest.mark.schedules(0)  # a thread that only makes streams never gives way
def test_the_streams_may_change_while_they_are_listed() -> None:
    stop = threading.Event()

    def change() -> None:
        while not stop.is_set():
            kept = [us.Stream.create(0) for _ in range(50)]
            del kept

    thread = threading.Thread(target=change)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        thread.start()
        for _ in range(5000):
            assert all(lane.device == 0 for lane in lanes.ours())
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join()
