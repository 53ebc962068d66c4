"""Schedules of the labelled programs of `observe`: each wrong one fails, and no right one."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

import pytest
from cuda.bindings import driver

import observed
import userstream as us
from helpers import checked
from observed import REPORTED, SILENT, SIZE, Room, a_room
from userstream import testing

pytestmark = [
    pytest.mark.simulated,
    pytest.mark.no_races(False),
    pytest.mark.usefixtures("no_garbage"),
]

SEEDS = 50  # within which a wrong program has to fail
RIGHT_SEEDS = int(os.environ.get("USERSTREAM_SCHEDULES", "12"))

# They hold a stream until all goes well, launch nothing, or overwrite what went wrong.
GO_WELL = (
    observed.freed_while_another_reads,
    observed.used_before_it_was_allocated,
    observed.inside_of_a_graph,
    observed.source_overwritten_for_the_next_copy,
)


def outcome(case: Callable[[Room], Any], seed: int | str) -> object:
    """Return what a program leaves in memory, or the error that ends it."""
    with a_room() as room:
        for address in (room.x, room.y):
            checked(driver.cuMemsetD8(address, 0, SIZE))
        ctypes.memset(room.pinned, 0, SIZE)
        try:
            with testing.schedule(seed, length=20):
                case(room)
        except (us.UserStreamError, AssertionError) as error:
            testing.reset()
            return type(error), str(error)
        data = (ctypes.c_char * (2 * SIZE))()
        for i, address in enumerate((room.x, room.y)):
            checked(driver.cuMemcpyDtoH(ctypes.addressof(data) + i * SIZE, address, SIZE))
        return bytes(data) + ctypes.string_at(room.pinned, SIZE)


@pytest.fixture(autouse=True)
def _nothing_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs hold a stream at random: here the schedule decides."""
    monkeypatch.setattr(Room, "hold", lambda room, stream: None)


@pytest.mark.parametrize("case", [case for case in REPORTED if case not in GO_WELL])
def test_a_wrong_program_fails_under_some_schedule(case: Callable[[Room], str]) -> None:
    right = outcome(case, "eager")
    seeds = ["lazy", *range(SEEDS)]
    assert any(outcome(case, seed) != right for seed in seeds)


@pytest.mark.parametrize("case", SILENT)
def test_a_right_program_fails_under_none(case: Callable[[Room], None]) -> None:
    right = outcome(case, "eager")
    assert isinstance(right, bytes)
    for seed in ("lazy", *range(RIGHT_SEEDS)):
        assert outcome(case, seed) == right, seed
