"""Edges between streams of captures and others."""

from __future__ import annotations

import sys
import sysconfig
import weakref

import pytest
from cuda.bindings import driver
from cuda.core import Device

import standins
import userstream as us
from helpers import (
    Exporting,
    array,
    checked,
    copy,
    device_current,
    device_memory,
    fill,
    in_thread,
)
from userstream import testing

pytestmark = pytest.mark.usefixtures("no_garbage")


# -- captures -----------------------------------------------------------------------------------


def begin(stream: us.Stream) -> None:
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
    checked(driver.cuStreamBeginCapture(stream._live(), mode))


def end(stream: us.Stream) -> int:
    """End a capture, which must have survived; return how many nodes its graph has."""
    graph = checked(driver.cuStreamEndCapture(stream._live()))
    _, count = checked(driver.cuGraphGetNodes(graph))
    checked(driver.cuGraphDestroy(graph))
    return int(count)


def is_captured(stream: us.Stream) -> bool:
    status = checked(driver.cuStreamIsCapturing(stream.handle))
    return bool(status != driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE)


def test_both_in_one_capture(producer: us.Stream, memory: int, other: int) -> None:
    with us.Stream.create(0) as mine:
        begin(producer)
        fill(producer, memory, 1)
        with us.borrow(array(memory, producer), stream=mine):
            assert is_captured(mine)
            copy(mine, other, memory)
            with us.borrow(array(memory, producer), stream=mine):
                pass
        fill(producer, memory, 2)
        assert end(producer) == 3
        assert not is_captured(mine)


def test_a_user_stream_joins_no_capture(producer: us.Stream, memory: int) -> None:
    stream, named = us.get_stream(0), us.get_stream(0, name="io")
    begin(producer)
    for use in (
        lambda: us.acquire(array(memory, producer)),
        lambda: us.acquire(array(memory, producer), stream=named),
        lambda: us.borrow(array(memory, None), producer=producer).__enter__(),
        lambda: us.acquire(array(memory, producer), stream=stream._live()),
        lambda: stream.wait(producer),
    ):
        with pytest.raises(us.CaptureError, match="would become part of that graph"):
            use()
    assert not is_captured(stream)
    assert not is_captured(named)
    end(producer)


def test_a_captured_user_stream_pulls_no_producer_in(producer: us.Stream, memory: int) -> None:
    stream = us.get_stream(0)
    begin(stream)
    for use, match in (
        (lambda: us.acquire(array(memory, producer)), "on work outside.*producer=None"),
        (lambda: us.release(array(memory, producer)), "would become part of that graph"),
        (lambda: us.release([array(memory, producer)]), "would become part of that graph"),
        (
            lambda: us.release(array(memory, producer), stream=stream),
            "would become part of that graph",
        ),
        (lambda: us.acquire(Exporting(producer)), "cannot depend on the work"),
        (lambda: us.hold(1, stream=stream), "keep the objects as long as the graph"),
    ):
        with pytest.raises(us.CaptureError, match=match):
            use()
    assert not is_captured(producer)
    end(stream)


def test_two_captures_stay_apart(memory: int) -> None:
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    with us.Stream.create(0) as one, us.Stream.create(0) as two:
        for stream in (one, two):
            checked(driver.cuStreamBeginCapture(stream._live(), relaxed))
        with pytest.raises(us.CaptureError, match="two graphs"):
            us.acquire(array(memory, one), stream=two)
        end(one)
        end(two)


def test_the_legacy_stream_beside_a_captured_blocking_stream(memory: int) -> None:
    with (
        us.Stream.create(0, nonblocking=False) as captured,
        device_current(0),
    ):
        begin(captured)
        for use in (us.acquire, us.release, lambda b: us.borrow(b).__enter__()):
            with pytest.raises(us.CaptureError, match="legacy default stream would invalidate"):
                use(standins.NumbaArray(0, memory, stream=1))
        end(captured)


def test_beside_a_global_capture_of_another_thread(producer: us.Stream, memory: int) -> None:
    with us.Stream.create(0) as captured:
        begin(captured)

        def use() -> None:
            for _ in range(20):
                with us.borrow(array(memory, producer)) as stream:
                    fill(stream, memory, 3)
                us.hold(1, stream=stream)
                us.wait(stream, timeout=10)
            us.acquire(Exporting(producer))
            us.wait_all(timeout=10)

        in_thread(use)
        end(captured)


@pytest.mark.parametrize("name", ["torch", "cupy"])
def test_a_capture_on_the_current_stream_of_a_framework_is_seen(
    name: str, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else tells of the capture, which an edge with the whole device would invalidate."""
    us.get_stream(0)
    with device_current():
        theirs = us.Stream.from_handle(Device(0).create_stream())
    monkeypatch.setitem(sys.modules, name, getattr(standins, name)(int(theirs.handle)))
    begin(theirs)
    for use in (us.acquire, lambda pointer: us.borrow(pointer).__enter__()):
        with pytest.raises(us.CaptureError, match="would invalidate"):
            use(driver.CUdeviceptr(memory))
    end(theirs)
    us.acquire(driver.CUdeviceptr(memory))


@pytest.mark.multi_device
@pytest.mark.parametrize("device", [0, 1])
def test_a_capture_on_another_device_is_none_of_its_business(device: int) -> None:
    """The order with everything on a device breaks only captures there."""
    with us.Stream.create(1 - device) as captured, device_memory(device) as address:
        begin(captured)
        with us.borrow(driver.CUdeviceptr(address)) as stream:
            fill(stream, address, 1)
        assert end(captured) == 0


def test_nothing_is_held_for_a_graph(memory: int) -> None:
    with us.Stream.create(0) as mine:
        buffer = array(memory, mine)
        alive = weakref.ref(buffer)
        begin(mine)
        with us.borrow(buffer, stream=mine):
            pass
        end(mine)
        del buffer
        assert alive() is None


# -- what is held, under pressure -----------------------------------------------------------------


class Thing:
    pass


@pytest.mark.skipif(
    bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
    reason="leaves destructors to the thread that made the object, which captures here",
)
def test_destructors_break_no_capture(memory: int) -> None:
    stream = us.get_stream(0)
    event = us.Stream.create(0).record()

    class Freeing:
        def __del__(self) -> None:
            driver.cuEventQuery(event.handle)

    with us.Stream.create(0) as captured:
        latch = testing.latch(stream)
        latch.__enter__()
        us.hold(Freeing(), stream=stream)
        with captured.capture():
            latch.release()
            in_thread(lambda: us.wait(stream, timeout=10))
            in_thread(lambda: us.hold(1, stream=stream))


def test_a_producer_of_ones_own_may_join(memory: int) -> None:
    with us.Stream.create(0) as mine, us.Stream.create(0) as other:
        begin(mine)
        us.release(array(memory, None), stream=mine, producer=other)
        assert is_captured(other)
        us.acquire(array(memory, None), stream=mine, producer=other)
        end(mine)
