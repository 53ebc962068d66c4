"""The exceptions: the tree, their facts, pickling."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from userstream import errors

BASES = {
    "DriverError": RuntimeError,
    "DriverNotFoundError": RuntimeError,
    "NotSupportedError": RuntimeError,
    "ForkedError": RuntimeError,
    "CaptureError": RuntimeError,
    "ClosedError": RuntimeError,
    "UnsupportedBufferError": TypeError,
    "HostBufferError": errors.UnsupportedBufferError,
    "UnsupportedStreamError": (TypeError, ValueError),
    "DeviceMismatchError": ValueError,
    "InvalidDeviceError": ValueError,
    "UnknownProducerError": ValueError,
    "NoUserStreamError": LookupError,
    "RaceError": AssertionError,
    "StallError": AssertionError,
    "WaitTimeout": TimeoutError,
    "WaitErrors": ExceptionGroup,
}

FULL = [
    errors.DriverError(
        "m", function="cuStreamQuery", code=700, name="CUDA_ERROR_X", device=1, stream="<s>"
    ),
    errors.NotSupportedError("m", function="cuCtxRecordEvent", device=2, stream="<s>"),
    errors.DeviceMismatchError("m", devices=[0, 1], device=0, stream="<s>"),
    errors.WaitTimeout("m", seconds=1.5, devices=[3], streams=["<s>"]),
    errors.WaitTimeout("m", seconds=1.5, devices=[3, 4], streams=["<s>", "<t>"]),
    *(
        getattr(errors, name)("m", device=1, stream="<s>")
        for name in BASES
        if name not in ("WaitTimeout", "WaitErrors")
    ),
]


def test_the_tree_is_complete() -> None:
    assert {*BASES, "UserStreamError"} == set(errors.__all__)


@pytest.mark.parametrize(("name", "base"), BASES.items())
def test_each_is_a_userstream_error_and_a_builtin_one(name: str, base: Any) -> None:
    kind = getattr(errors, name)
    assert issubclass(kind, errors.UserStreamError)
    assert all(issubclass(kind, each) for each in (base if isinstance(base, tuple) else (base,)))
    assert kind.__module__ == "userstream"


@pytest.mark.parametrize("error", FULL, ids=lambda error: type(error).__name__)
def test_facts_survive_pickling(error: errors.UserStreamError) -> None:
    error.add_note("a note")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error) == "m"
    assert vars(copy) == vars(error)
    assert copy.stream is not None or len(copy.streams) > 1


def test_a_timeout_of_one_names_its_device_and_stream() -> None:
    one, two = FULL[3], FULL[4]
    assert (one.device, one.stream) == (3, "<s>")
    assert (two.device, two.stream) == (None, None)


def test_wait_errors_is_a_group() -> None:
    failed, late = FULL[0], FULL[3]
    group = errors.WaitErrors("two waits", [failed, late])
    copy = pickle.loads(pickle.dumps(group))
    assert [type(each) for each in copy.exceptions] == [errors.DriverError, errors.WaitTimeout]
    assert copy.exceptions[0].code == 700
    matching, rest = group.split(errors.WaitTimeout)
    assert type(matching) is type(rest) is errors.WaitErrors
    assert matching.exceptions == (late,)
    assert rest.exceptions == (failed,)
    assert group.subgroup(KeyError) is None
    seen = []
    try:
        raise group
    except* errors.DriverError as caught:
        seen.extend(caught.exceptions)
    except* TimeoutError as caught:
        seen.extend(caught.exceptions)
    assert seen == [failed, late]
