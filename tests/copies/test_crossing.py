"""Pickling: objects that cross a process boundary or refuse to, and UUIDs of devices."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from cuda.bindings.driver import CUresult

import userstream as us
from helpers import array, device_uuid, on
from internals import forget_uuids, shown_uuid
from userstream import errors, testing

WAYS = {
    "pickle": lambda obj: pickle.loads(pickle.dumps(obj)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())


def a_borrow() -> Any:
    borrow = us.borrow(on(0))
    with borrow:
        pass
    return borrow


STAY = {
    "a stream": lambda: (us.get_stream(0), "userstream.get_stream()"),
    "a default stream": lambda: (us.Stream.legacy_default(), "userstream.get_stream()"),
    "a registry": lambda: (us.UserStream(), "a function"),
    "a future": lambda: (us.completion(us.get_stream(0)), "its result"),
    "a borrow": lambda: (a_borrow(), "call borrow()"),
}


@ways
@pytest.mark.parametrize("made", STAY.values(), ids=STAY.keys())
def test_what_belongs_to_its_process_stays_there(
    made: Callable[[], tuple[Any, str]], way: Callable[[Any], Any]
) -> None:
    obj, advice = made()
    with pytest.raises(TypeError, match="cannot be copied or pickled") as caught:
        way(obj)
    assert repr(obj) in str(caught.value)
    assert advice in str(caught.value)


@ways
def test_the_registry_of_the_process_becomes_that_of_the_other(way: Callable[[Any], Any]) -> None:
    assert way(us.UserStream.get()) is us.UserStream.get()
    for function in (us.get_stream, us.wait_all_async, us.describe, us.borrow):
        assert way(function) == function


def test_a_pending_future_stays_too() -> None:
    stream = us.get_stream(0)
    with testing.latch(stream):
        future = us.completion(stream)
        for way in WAYS.values():
            with pytest.raises(TypeError, match="state=pending"):
                way(future)
    future.result(timeout=20)


@ways
@pytest.mark.parametrize(
    "value",
    [
        us.WaitValue(256, 1),
        us.WriteValue(256, 1),
        us.MemoryBarrier(),
        us.FlushRemoteWrites(),
        us.WaitFlags.GEQ,
        us.AccessPolicyWindow(256, 16),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_cross(value: object, way: Callable[[Any], Any]) -> None:
    assert way(value) == value


@ways
def test_a_description_crosses(memory: int, way: Callable[[Any], Any]) -> None:
    info = us.describe(array(memory))
    assert info.device_uuid == device_uuid(0)
    assert way(info) == info


@ways
def test_a_late_wait_crosses(way: Callable[[Any], Any]) -> None:
    stream = us.get_stream(0)
    with testing.latch(stream), pytest.raises(us.WaitTimeout) as caught:
        stream.sync(timeout=0)
    error, uuid = way(caught.value), device_uuid(0)
    assert (error.device_uuid, error.device_uuids) == (uuid, (uuid,))
    assert f"; device 0 is {uuid};" in str(error)
    assert error.streams == (repr(stream),)
    assert vars(error) == vars(caught.value)


@pytest.mark.simulated
@ways
def test_a_group_of_errors_crosses(way: Callable[[Any], Any]) -> None:
    late, failing = us.get_stream(0), us.get_stream(1)
    testing.async_error(failing, CUresult.CUDA_ERROR_ILLEGAL_ADDRESS)
    with pytest.raises(us.DriverError):
        failing.sync(timeout=20)
    with testing.latch(late), pytest.raises(us.WaitErrors) as caught:
        us.wait_all(timeout=0)
    group = way(caught.value)
    failed, timeout = group.exceptions
    uuids = [device_uuid(device) for device in (0, 1)]
    assert (timeout.devices, timeout.device_uuids) == ((0,), (uuids[0],))
    assert (failed.device, failed.device_uuid) == (1, uuids[1])
    stays = "earlier work may have caused it, and the context does not recover: start a new process"
    assert str(failed).endswith(f"; device 1 is {uuids[1]}; {stays}")
    for copied, original in zip(group.exceptions, caught.value.exceptions, strict=True):
        assert vars(copied) == vars(original)


@pytest.mark.multi_device
def test_several_devices_are_named_each() -> None:
    with pytest.raises(us.DeviceMismatchError) as caught:
        us.get_stream([on(0), on(1)])
    assert caught.value.device_uuids == tuple(device_uuid(at) for at in (0, 1))
    assert len(set(caught.value.device_uuids)) == 2


def test_the_device_of_a_device_wait() -> None:
    stream = us.get_stream(0)
    with testing.latch(stream), pytest.raises(us.WaitTimeout) as caught:
        us.wait_for_device(0, timeout=0)
    assert caught.value.device_uuid == device_uuid(0)


def test_there_is_no_name_for_no_device() -> None:
    assert errors.DriverError("m").device_uuid is None
    assert errors.InvalidDeviceError("m", device=99).device_uuid is None
    assert errors.WaitErrors("m", [ValueError()]).device_uuid is None


@pytest.mark.simulated
def test_an_error_is_made_even_if_the_name_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_uuids(monkeypatch)
    with testing.inject("cuDeviceGetUuid", CUresult.CUDA_ERROR_UNKNOWN, this_thread=True):
        assert errors.DriverError("m", device=0).device_uuid is None
    assert errors.DriverError("m", device=0).device_uuid is not None


@pytest.mark.simulated
def test_a_device_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_uuids(monkeypatch)
    before = testing.calls("cuDeviceGetUuid")
    for _ in range(3):
        errors.DriverError("m", device=0)
    assert testing.calls("cuDeviceGetUuid") == before + 1


def test_a_part_of_a_gpu_has_a_name_of_its_own() -> None:
    whole = shown_uuid(0, "NVIDIA H200")
    part = shown_uuid(0, "NVIDIA H200 MIG 1g.18gb")
    assert (whole[:4], part[:4]) == ("GPU-", "MIG-")
