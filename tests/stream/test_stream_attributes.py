"""`Stream`: its attributes, and `wait_event`."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from cuda.bindings import driver

import userstream as us
from helpers import (
    CAI,
    checked,
    current_context,
    device_current,
    in_thread,
    instantiated,
    pinned_memory,
    refused_in_a_child,
)
from userstream import AccessPolicyWindow, testing


def test_what_a_new_stream_has(stream: us.Stream) -> None:
    assert stream.get_attribute("sync_policy") is None
    assert stream.get_attribute("mem_sync_domain") == "default"
    assert stream.get_attribute("mem_sync_domain_map") == (0, 1)
    assert stream.get_attribute("access_policy_window").nbytes == 0
    with us.Stream.create(0, priority=-2) as other:
        assert other.get_attribute("priority") == -2


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("sync_policy", ["auto", "spin", "yield", "blocking"]),
        ("mem_sync_domain", ["remote", "default"]),
        ("mem_sync_domain_map", [(1, 0), (0, 0), (0, 1)]),
    ],
)
def test_setting(stream: us.Stream, name: str, values: list[object]) -> None:
    before = current_context()
    for value in values:
        stream.set_attribute(name, value)  # type: ignore[call-overload]
        assert stream.get_attribute(name) == value  # type: ignore[call-overload]
        in_thread(lambda value=value: stream.set_attribute(name, value))
        assert in_thread(lambda: stream.get_attribute(name)) == value  # type: ignore[call-overload]
    assert current_context() == before


def test_the_access_policy_window(stream: us.Stream, memory: int) -> None:
    for window in (
        AccessPolicyWindow(memory, 64),
        AccessPolicyWindow(memory, 256, 0.5, "streaming", "normal"),
        AccessPolicyWindow(0, 0, 0.0, "normal", "normal"),
    ):
        stream.set_attribute("access_policy_window", window)
        assert stream.get_attribute("access_policy_window") == window
    stream.set_attribute("access_policy_window", AccessPolicyWindow(CAI(memory, (4,)), 16))
    assert stream.get_attribute("access_policy_window").address == memory


def test_the_window_of_a_new_stream_can_be_set_as_it_is(stream: us.Stream) -> None:
    with us.Stream.create(0) as other:
        stream.set_attribute("access_policy_window", other.get_attribute("access_policy_window"))


def test_numbers_of_numpy(stream: us.Stream, memory: int) -> None:
    window = AccessPolicyWindow(np.uint64(memory), np.int64(64), np.float32(0.5))  # type: ignore[arg-type]
    stream.set_attribute("access_policy_window", window)
    assert stream.get_attribute("access_policy_window") == AccessPolicyWindow(memory, 64, 0.5)
    stream.set_attribute("mem_sync_domain_map", (np.int8(0), np.uint64(0)))  # type: ignore[arg-type]
    with contextlib.suppress(us.DriverError):  # where it cannot be changed
        stream.set_attribute("priority", np.int32(0))  # type: ignore[arg-type]
    stream.wait_event(stream.record(), np.int64(0))  # type: ignore[arg-type]


def test_the_priority(stream: us.Stream) -> None:
    """The driver decides whether the priority can be changed."""
    changed = -1
    try:
        stream.set_attribute("priority", -1)
    except us.DriverError:
        changed = 0
    assert stream.get_attribute("priority") == changed


@pytest.mark.parametrize("name", ["", "Priority", "cooperative", 8, None, ["priority"]])
def test_unknown_attributes(stream: us.Stream, name: object) -> None:
    with pytest.raises(ValueError, match="'sync_policy', not"):
        stream.get_attribute(name)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="'sync_policy', not"):
        stream.set_attribute(name, 1)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("name", "value", "error", "match"),
    [
        ("sync_policy", "block", ValueError, "'blocking', not 'block'"),
        ("sync_policy", None, ValueError, "not None"),
        ("sync_policy", ["auto"], ValueError, "'blocking', not"),
        ("mem_sync_domain", 1, ValueError, "'remote', not 1"),
        ("mem_sync_domain_map", 1, TypeError, "tuple of two"),
        ("mem_sync_domain_map", (0, 1, 2), TypeError, "tuple of two"),
        ("mem_sync_domain_map", (0, 99), ValueError, "numbered from 0"),
        ("mem_sync_domain_map", (-1, 0), ValueError, "numbered from 0"),
        ("mem_sync_domain_map", ("0", 0), TypeError, "mem_sync_domain_map must be an integer"),
        ("priority", 1, ValueError, "a priority must be"),
        ("priority", -99, ValueError, "a priority must be"),
        ("priority", 0.0, TypeError, "priority must be an integer, not 0.0"),
        ("priority", False, TypeError, "priority must be an integer, not False"),
        ("access_policy_window", None, TypeError, "AccessPolicyWindow, not NoneType"),
        ("access_policy_window", AccessPolicyWindow(0, 1 << 40), ValueError, "up to"),
        ("access_policy_window", AccessPolicyWindow(True, 8), TypeError, "not True"),
        ("access_policy_window", AccessPolicyWindow(-8, 8), ValueError, "-8 is not an address"),
        ("access_policy_window", AccessPolicyWindow(1 << 64, 0), ValueError, "is not an address"),
        (
            "access_policy_window",
            AccessPolicyWindow(0, 8),
            ValueError,
            "not in memory that CUDA knows",
        ),
        (
            "access_policy_window",
            AccessPolicyWindow(64, 8),
            ValueError,
            "not in memory that CUDA know",
        ),
        (
            "access_policy_window",
            AccessPolicyWindow(CAI(64, (4,)), 17),
            us.UnsupportedBufferError,
            "not in memory",
        ),
    ],
)
def test_bad_values(
    stream: us.Stream, name: str, value: object, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        stream.set_attribute(name, value)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ((0, -1), ValueError, "nbytes must be at least 0"),
        ((0, 1.5), TypeError, "nbytes must be an integer, not 1.5"),
        ((0, True), TypeError, "nbytes must be an integer, not True"),
        ((0, 8, 1.5), ValueError, "hit_ratio must be from 0 to 1"),
        ((0, 8, float("nan")), ValueError, "hit_ratio must be from 0 to 1"),
        ((0, 8, "1"), TypeError, "hit_ratio must be a number, not '1'"),
        ((0, 8, None), TypeError, "hit_ratio must be a number, not None"),
        ((0, 8, 1, "keep"), ValueError, "'keep'"),
        ((0, 8, 1, "normal", "persisting"), ValueError, "'persisting'"),
    ],
)
def test_bad_windows(arguments: tuple[object, ...], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        AccessPolicyWindow(*arguments)  # type: ignore[arg-type]


def test_copying(stream: us.Stream) -> None:
    with us.Stream.create(0) as other:
        stream.set_attribute("sync_policy", "yield")
        other.copy_attributes_from(stream)
        assert other.get_attribute("sync_policy") == "yield"
        stream.set_attribute("sync_policy", "spin")
        in_thread(lambda: other.copy_attributes_from(driver.CUstream(int(stream.handle))))
        assert other.get_attribute("sync_policy") == "spin"
        for wrong in (None, 5.0, "stream"):
            with pytest.raises(TypeError, match="__cuda_stream__"):
                other.copy_attributes_from(wrong)  # type: ignore[arg-type]


@pytest.mark.multi_device
def test_copying_stays_on_its_device(stream: us.Stream) -> None:
    with us.Stream.create(1) as other:
        with pytest.raises(us.DeviceMismatchError, match="device 1") as error:
            stream.copy_attributes_from(other)
        assert error.value.devices == (0, 1)


def test_on_the_default_streams() -> None:
    for stream in (us.Stream.legacy_default(), us.Stream.per_thread_default()):
        with (
            us.Stream.create(0) as other,
            device_current(0),
        ):
            policy = stream.get_attribute("sync_policy")
            other.set_attribute("sync_policy", "spin")
            stream.copy_attributes_from(other)
            assert stream.get_attribute("sync_policy") == "spin"
            if policy is not None:
                stream.set_attribute("sync_policy", policy)


@pytest.mark.multi_device
def test_a_default_stream_is_copied_from_where_the_stream_is(stream: us.Stream) -> None:
    legacy = us.Stream.legacy_default()
    policies = ["auto", "spin"]
    for device, policy in enumerate(policies):
        with device_current(device):
            legacy.set_attribute("sync_policy", policy)
    with (
        us.Stream.create(1) as other,
        device_current(1),
    ):
        for each in (stream, other):
            each.copy_attributes_from(legacy)
        assert [each.get_attribute("sync_policy") for each in (stream, other)] == policies


def test_captures_survive(stream: us.Stream) -> None:
    with us.Stream.create(0) as other, stream.capture() as graph:
        for use in (
            lambda: stream.get_attribute("priority"),
            lambda: stream.set_attribute("sync_policy", "spin"),
            lambda: stream.copy_attributes_from(other),
            lambda: other.copy_attributes_from(stream),
        ):
            with pytest.raises(us.CaptureError, match="being captured"):
                use()
        other.set_attribute("sync_policy", "spin")
    assert graph.nodes() == set()


def test_a_closed_stream(stream: us.Stream) -> None:
    event = stream.record()
    stream.close()
    with us.Stream.create(0) as other:
        for use in (
            lambda: stream.get_attribute("priority"),
            lambda: stream.set_attribute("sync_policy", "spin"),
            lambda: stream.copy_attributes_from(other),
            lambda: other.copy_attributes_from(stream),
            lambda: stream.wait_event(event),
        ):
            with pytest.raises(us.ClosedError, match="is closed"):
                use()


# -- wait_event -------------------------------------------------------------------------------


class TorchEvent:
    """Stands for ``torch.cuda.Event``."""

    def __init__(self, event: object) -> None:
        self.cuda_event = int(event)  # type: ignore[call-overload]


class Event:
    """Stands for ``cupy.cuda.Event``."""

    def __init__(self, event: object) -> None:
        self.ptr = int(event)  # type: ignore[call-overload]


Event.__module__ = "cupy.cuda.stream"


@pytest.mark.parametrize("wrap", [lambda event: event, TorchEvent, Event])
def test_events_of_anybody(stream: us.Stream, wrap: type) -> None:
    with us.Stream.create(0) as other, testing.latch(other) as latch:
        event = other.record()
        before = current_context()
        in_thread(lambda: stream.wait_event(wrap(event.handle)))
        assert current_context() == before
        with pytest.raises(us.WaitTimeout):
            stream.sync(timeout=0.01)
        latch.release()
        stream.sync(timeout=10)


def test_events_of_cuda_core(stream: us.Stream) -> None:
    with us.Stream.create(0) as other, testing.latch(other) as latch:
        stream.wait_event(other.record())
        assert not stream.is_done
        latch.release()
        stream.sync(timeout=10)


@pytest.mark.multi_device
def test_events_of_another_device(stream: us.Stream) -> None:
    with us.Stream.create(1) as other, testing.latch(other) as latch:
        stream.wait_event(other.record())
        assert not stream.is_done
        latch.release()
        stream.sync(timeout=10)


def test_an_event_of_torch_that_was_never_recorded(stream: us.Stream) -> None:
    stream.wait_event(TorchEvent(0))
    assert stream.is_done


def test_a_default_stream_waits_for_an_event(stream: us.Stream) -> None:
    legacy = us.Stream.legacy_default()
    with testing.latch(stream) as latch:
        legacy.wait_event(stream.record())
        assert not legacy.is_done
        latch.release()
        legacy.sync(timeout=10)


def test_no_events(stream: us.Stream) -> None:
    event = stream.record()
    for thing in (None, 7, "event", object(), stream, TorchEvent, CAI(0)):
        with pytest.raises(TypeError, match=r"takes an event .*; stream\.wait\(other\) waits"):
            stream.wait_event(thing)
    for flags in (2, -1):
        with pytest.raises(ValueError, match="CU_EVENT_WAIT_EXTERNAL"):
            stream.wait_event(event, flags)
    with pytest.raises(TypeError, match="flags must be an integer, not '0'"):
        stream.wait_event(event, "0")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is not being captured"):
        stream.wait_event(event, 1)
    with pytest.raises(ValueError, match="is a null handle"):
        stream.wait_event(driver.CUevent(0))
    event.close()
    with pytest.raises(us.ClosedError, match="is closed; pass an open event"):
        stream.wait_event(event)


def test_an_external_wait_is_captured(stream: us.Stream) -> None:
    with us.Stream.create(0) as other, pinned_memory() as word:
        event = other.record()
        other.sync(timeout=10)
        with stream.capture() as graph:
            stream.wait_event(event, driver.CUevent_wait_flags.CU_EVENT_WAIT_EXTERNAL)
            stream.write_value_32(word, 1)
        assert checked(driver.cuGraphGetNodes(graph.handle, 0))[1] == 2
        executable = instantiated(graph)
        with testing.latch(other) as latch:
            other.record(event)
            executable.launch(stream)
            with pytest.raises(us.WaitTimeout):
                stream.sync(timeout=0.01)
            latch.release()
            stream.sync(timeout=10)


def test_a_captured_event_pulls_a_stream_in(stream: us.Stream) -> None:
    with us.Stream.create(0) as other:
        with stream.capture():
            other.wait_event(stream.record())
            assert other.is_capturing
            stream.wait_event(other.record())
        assert not other.is_capturing


def test_legacy_beside_a_capture_on_a_blocking_stream(stream: us.Stream) -> None:
    legacy, event = us.Stream.legacy_default(), stream.record()
    with (
        us.Stream.create(0, nonblocking=False) as captured,
        device_current(0),
        captured.capture(),
    ):
        for use in (
            lambda: legacy.wait_event(event),
            lambda: legacy.get_attribute("priority"),
            lambda: legacy.set_attribute("sync_policy", "spin"),
        ):
            with pytest.raises(us.CaptureError, match="blocking stream of its context"):
                use()


def test_in_a_forked_child() -> None:
    refused_in_a_child(
        """
        lambda: stream.get_attribute("priority"),
        lambda: stream.set_attribute("sync_policy", "spin"),
        lambda: stream.copy_attributes_from(stream),
        lambda: stream.wait_event(event),
        """
    )
