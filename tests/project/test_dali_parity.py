"""Each row of the table "DALI parity" in the documentation."""

from __future__ import annotations

import pytest

import userstream as us
from helpers import device_count, device_current, in_thread, is_blocked, on, running
from userstream import testing


def test_get_is_one_per_process_and_the_same_in_every_thread() -> None:
    assert us.UserStream.get() is us.UserStream.get()
    assert in_thread(us.UserStream.get) is us.UserStream.get()
    assert us.UserStream() is not us.UserStream.get()


def test_get_stream_of_a_tensor() -> None:
    assert us.get_stream(on(0)) is us.get_stream(0)


def test_get_stream_of_a_list_of_tensors() -> None:
    assert us.get_stream([on(0), on(0)]) is us.get_stream(0)


def test_wait_for_a_tensor() -> None:
    with testing.latch(us.get_stream(on(0))) as latch:
        with running(lambda: us.wait(on(0))) as result:
            assert is_blocked(result)
            latch.release()
            result()


@pytest.mark.multi_device
def test_wait_for_a_list_waits_for_all_its_devices() -> None:
    us.get_stream(0)
    with testing.latch(us.get_stream(1)) as latch:
        with running(lambda: us.wait([on(0), on(1)])) as result:
            assert is_blocked(result)
            latch.release()
            result()


@pytest.mark.multi_device
def test_wait_without_a_target_is_for_the_current_device() -> None:
    us.get_stream(0)
    with testing.latch(us.get_stream(1)) as latch:
        us.wait(timeout=10)
        with (
            device_current(1),
            pytest.raises(us.WaitTimeout),
        ):
            us.wait(timeout=0.01)
        latch.release()


@pytest.mark.multi_device
def test_wait_for_device_of_a_tensor_and_a_list() -> None:
    other = us.Stream.create(1)  # not a user stream
    with testing.latch(other) as latch:
        us.wait_for_device(on(0), timeout=10)
        for target in (on(1), [on(0), on(1)]):
            with pytest.raises(us.WaitTimeout):
                us.wait_for_device(target, timeout=0.01)
        latch.release()
    us.wait_for_device([on(0), on(1)], timeout=10)
    other.close()


def test_wait_all() -> None:
    streams = [us.get_stream(device) for device in range(device_count())]
    for stream in streams:
        with testing.latch(stream) as latch:
            with pytest.raises(us.WaitTimeout):
                us.wait_all(timeout=0.01)
            latch.release()
    us.wait_all(timeout=10)


def test_streams_are_made_on_demand_non_blocking_and_of_default_priority() -> None:
    assert us.streams() == {}
    stream = us.get_stream(on(0))
    assert (stream.is_nonblocking, stream.priority) == (True, 0)
    assert list(us.streams()) == [(0, None)]


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(us.InvalidDeviceError):
        us.get_stream(on(99))
    with pytest.raises(us.UnsupportedBufferError):
        us.get_stream(object())


def test_waiting_without_a_user_stream_is_refused() -> None:
    with pytest.raises(us.NoUserStreamError, match="can only wait on user streams"):
        us.wait(on(0))
