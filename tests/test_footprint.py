"""How much of userstream a call passes through: what a reader follows, and what it costs."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import NamedTuple

import pytest

import userstream as us

pytestmark = pytest.mark.simulated

# What is one call of C where there is the compiled core.
IN_C = {"userstream._driver.pure", "userstream._driver.streams"}


class Footprint(NamedTuple):
    modules: set[str]
    calls: list[str]


def footprint(call: Callable[[], object]) -> Footprint:
    """Call a function once more, and tell which functions of userstream are called."""
    call()
    calls: list[tuple[str, str]] = []

    def profile(frame: types.FrameType, event: str, _: object) -> None:
        module = frame.f_globals.get("__name__", "")
        if event == "call" and module.startswith("userstream.") and module not in IN_C:
            calls.append((module, frame.f_code.co_name))

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(before)
    return Footprint({module for module, _ in calls}, [name for _, name in calls])


def test_a_wait_for_an_idle_stream(torch: types.ModuleType) -> None:
    tensor = torch.Tensor(torch.device("cuda", 0))
    us.get_stream(tensor)
    passed = footprint(lambda: us.wait(tensor))
    assert len(passed.modules) <= 5, passed.modules
    assert len(passed.calls) <= 8, passed.calls


def test_a_stream_that_exists(torch: types.ModuleType) -> None:
    tensor = torch.Tensor(torch.device("cuda", 0))
    assert len(footprint(lambda: us.get_stream(tensor)).calls) <= 4
