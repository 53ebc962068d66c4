"""`observe`: what is a race and what is none, in programs without kernels, on both drivers."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

import observed
import userstream as us
from helpers import THOROUGH
from observed import (
    REPORTED,
    SILENT,
    Room,
    a_room,
    another_device,
    from_another_device,
    future_was_told,
    host_function_told,
    needs_frames,
    waited_for_another_device,
    watched,
)

pytestmark = [
    pytest.mark.no_races(False),  # they watch themselves
    pytest.mark.usefixtures("can_be_watched"),
    needs_frames,
]

ON_TWO = (from_another_device, another_device, waited_for_another_device)


def _each(cases: list[Callable[[Room], Any]]) -> list[Any]:
    return [
        pytest.param(case, marks=pytest.mark.multi_device if case in ON_TWO else ())
        for case in cases
    ]


@pytest.mark.parametrize("case", _each(REPORTED))
def test_it_is_reported_with_both_lines(case: Callable[[Room], str]) -> None:
    seen, kind = watched(case)
    assert {race.kind for race in seen.races} == {kind}, seen
    for race in seen.races:
        for side in (race.first, race.second):
            assert side.line is not None
            assert side.line.filename == observed.__file__
            assert side.stack[-1].name
    with pytest.raises(us.RaceError) as raised:
        seen.check()
    assert kind in str(raised.value)


@pytest.mark.parametrize("case", _each(SILENT))
def test_it_is_not_reported(case: Callable[[Room], None]) -> None:
    seen, _ = watched(case)
    assert seen.races == (), seen
    seen.check()


@pytest.mark.parametrize(
    "case", _each([case for case in SILENT if case not in (future_was_told, host_function_told)])
)
def test_it_is_not_even_possible(case: Callable[[Room], None]) -> None:
    with a_room() as room, us.observe(possible=True) as seen:
        case(room)
        seen.stop()
        room.release()
    assert {race.kind for race in seen.races} <= {"host read before the copy"}, seen


@pytest.mark.skipif(not THOROUGH, reason="each of them runs once above, every night in any order")
def test_all_of_them_over_and_over_in_random_order() -> None:
    cases = [case for case in (*REPORTED, *SILENT) if case not in ON_TWO] * 5
    random.shuffle(cases)
    for case in cases:
        seen, kind = watched(case)
        kinds = {race.kind for race in seen.races}
        assert kinds == (set() if kind is None else {kind}), (case.__name__, str(seen))
