"""Calls that a program repeats: the judge does little for them, and finds the same races."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cuda.bindings import driver
from cuda.core import ObjectCode

import userstream as us
from helpers import checked
from observed import SIZE, Room, a_room, calls_of_judge, captured, fill, handle, judge_of
from userstream.testing import Pointer, kernel

pytestmark = [
    pytest.mark.simulated,
    pytest.mark.no_races(False),  # they watch themselves
]

TIMES = 6000  # the judge forgets accesses every 4096 calls


def same_fill(address: int, stream: us.Stream | int, size: int = SIZE) -> None:
    checked(driver.cuMemsetD8Async(address, 1, size, handle(stream)))


def recorded(path: Path, program: Callable[[Room], None]) -> Path:
    with a_room() as room, us.observe(log=path / "run.uslog", judge="later"):
        program(room)
    return path / "run.uslog"


def kinds(log: Path) -> list[str]:
    return [race.kind for race in judge_of(log).races()]


def test_a_repeated_call_is_decoded_once(tmp_path: Path) -> None:
    def program(room: Room) -> None:
        for _ in range(TIMES):
            same_fill(room.x, room.a)
            same_fill(room.x, 0)
            room.a.sync()
            us.wait_for_device(0)

    found, calls = calls_of_judge(recorded(tmp_path, program))
    assert found.calls()["cuMemsetD8Async"] == 2 * TIMES
    assert calls["fill"] == 2


def test_a_repeated_call_is_of_the_stream_that_has_the_handle_now(tmp_path: Path) -> None:
    handles = []

    def program(room: Room) -> None:
        for _ in range(2):
            stream = int(checked(driver.cuStreamCreate(1)))
            handles.append(stream)
            same_fill(room.x, stream)
            checked(driver.cuStreamDestroy(stream))
        us.wait_for_device(0)

    log = recorded(tmp_path, program)
    # The driver gives a handle again, but not always at once.
    first, second = (struct.pack("<Q", each) for each in handles)
    log.write_bytes(log.read_bytes().replace(second, first))
    assert kinds(log) == ["write after write"]


def test_a_repeated_call_that_is_captured_does_nothing_yet(tmp_path: Path) -> None:
    def program(room: Room) -> None:
        same_fill(room.x, room.a)
        room.a.sync()
        captured(room, lambda: same_fill(room.x, room.a))
        fill(room.x, room.b)

    assert kinds(recorded(tmp_path, program)) == []


def test_a_call_that_was_captured_first_is_not_captured_for_ever(tmp_path: Path) -> None:
    def program(room: Room) -> None:
        captured(room, lambda: same_fill(room.x, room.a))
        same_fill(room.x, room.a)
        fill(room.x, room.b)

    assert kinds(recorded(tmp_path, program)) == ["write after write"]


@kernel("repeats_one")
@kernel("repeats_other")
def _touch(grid: Any, block: Any, to: Pointer) -> None:
    pass


def test_a_repeated_launch_is_of_the_kernel_that_has_the_handle_now(tmp_path: Path) -> None:
    names = ("repeats_one", "repeats_other")
    kernels = [ObjectCode.from_ptx(b"any").get_kernel(name) for name in names]
    handles = [int(each.handle) for each in kernels]

    def program(room: Room) -> None:
        for each in handles:
            parameters = ((room.x,), (ctypes.c_void_p,))
            shape = (1, 1, 1, 1, 1, 1, 0)
            checked(driver.cuLaunchKernel(each, *shape, handle(room.a), parameters, 0))
        fill(room.x, room.b)

    log = recorded(tmp_path, program)
    first, second = (struct.pack("<Q", each) for each in handles)
    log.write_bytes(log.read_bytes().replace(second, first))
    (race,) = judge_of(log, possible=True).races()
    assert race.first.name == "repeats_other"


def waits(room: Room) -> None:
    for _ in range(TIMES):
        same_fill(room.x, room.a)
        room.a.sync()


def halves(room: Room) -> None:
    """Two streams that nothing orders."""
    for _ in range(TIMES):
        same_fill(room.x, room.a, SIZE // 2)
        same_fill(room.x + SIZE // 2, room.b, SIZE // 2)


@pytest.mark.parametrize(
    ("program", "most"), [(waits, {"touch": 1, "touch_again": 2}), (halves, {"touch": 4})]
)
def test_a_repeated_access_is_compared_with_no_other(
    program: Callable[[Room], None], most: dict[str, int], tmp_path: Path
) -> None:
    found, calls = calls_of_judge(recorded(tmp_path, program))
    assert found.races() == ()
    for name, count in most.items():
        assert calls[name] <= count
