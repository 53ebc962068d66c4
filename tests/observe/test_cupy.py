"""`observe(allocations=True)` asks CuPy which line allocated an array: a stand-in."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Iterator

import pytest

import standins
import userstream as us
from helpers import device_memory
from observed import Room, a_room, copy, fill, needs_frames

pytestmark = [
    pytest.mark.simulated,
    pytest.mark.no_races(False),  # they watch themselves
    needs_frames,
]

SEGMENT = 1 << 16
SIZE = 1 << 10


@pytest.fixture
def memory(cupy: types.ModuleType) -> Iterator[standins.CupyMemory]:
    with a_room(), device_memory(0, SEGMENT) as segment:
        yield standins.CupyMemory(cupy, segment, SEGMENT)


def test_chunks_of_a_pool_are_no_race(memory: standins.CupyMemory, room: Room) -> None:
    with us.observe(allocations=True, possible=True) as seen:
        for stream in (room.a, room.b) * 3:
            array = memory.malloc(SIZE)
            fill(array, stream, SIZE)
            copy(room.y if stream is room.a else room.x, array, stream, SIZE)
    assert seen.races == ()


def test_a_race_names_the_line_that_allocated_the_array(
    memory: standins.CupyMemory, room: Room
) -> None:
    def zeros() -> int:
        return memory.malloc(SIZE)

    with us.observe(allocations=True) as seen:
        memory.malloc(SIZE)
        array = zeros()
        memory.malloc(SIZE)
        fill(array, room.a, SIZE)
        copy(room.y, array + 256, room.b, SIZE - 256)
    (race,) = seen.races
    assert race.framework == "cupy"
    assert race.allocated[-1].filename == standins.__file__  # CuPy's own
    assert race.allocated[-2].name.endswith("zeros")
    assert "  allocated by cupy: " in str(seen)
    assert memory.hooks() == {}
    assert seen.not_seen == ()


def test_memory_that_another_array_was_given_too_early(
    memory: standins.CupyMemory, room: Room
) -> None:
    with us.observe(allocations=True) as seen:
        first = memory.malloc(SIZE)
        copy(room.y, first, room.b, SIZE)
        memory.free(first)
        assert memory.malloc(SIZE) == first
        fill(first, room.a, SIZE)
    (race,) = (each for each in seen.races if each.kind != "freed while in use")
    assert "it was freed in between, and allocated again" in race.advice
    assert f"keep it until {race.first.stream} has done with it, or let " in race.advice
    assert "record_stream" not in race.advice  # CuPy has no such function


@pytest.mark.parametrize("in_order", [False, True])
def test_an_array_that_is_freed_while_another_stream_uses_it(
    in_order: bool, memory: standins.CupyMemory, room: Room
) -> None:
    memory.stream = int(room.a.handle)
    with us.observe(allocations=True) as seen:
        array = memory.malloc(SIZE)
        room.b.wait(room.a)
        copy(room.y, array + 256, room.b, SIZE - 256)
        memory.free(array)
        if in_order:
            room.a.wait(room.b)
        memory.malloc(2 * SIZE)
    assert [race.kind for race in seen.races] == ["freed while in use"] * (not in_order)
    if not in_order:
        (race,) = seen.races
        assert (race.address, race.nbytes, race.framework) == (array + 256, SIZE - 256, "cupy")
        assert "second: the allocator of cupy frees on " in str(race)


def test_the_last_arrays_of_a_process_are_freed_without_the_log(
    memory: standins.CupyMemory, room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The modules of userstream may be gone by then."""
    monkeypatch.setattr(sys, "is_finalizing", lambda: True)
    memory.stream = int(room.a.handle)
    with us.observe(allocations=True) as seen:
        array = memory.malloc(SIZE)
        room.b.wait(room.a)
        copy(room.y, array, room.b, SIZE)
        memory.free(array)
        memory.malloc(SIZE)
    assert seen.races == ()


def test_a_hook_of_another_thread_stays_and_does_nothing(
    memory: standins.CupyMemory, room: Room
) -> None:
    """CuPy's hooks are of a thread, which may be in the middle of going through them."""
    with us.observe(allocations=True) as seen:
        ending = threading.Thread(target=seen.stop)
        ending.start()
        ending.join()
    assert len(memory.hooks()) == 1
    memory.malloc(SIZE)
    with us.observe(allocations=True) as again:
        assert len(memory.hooks()) == 2
        array = memory.malloc(SIZE)
        fill(array, room.a, SIZE)
        copy(room.y, array, room.b, SIZE)
    assert again.races[0].framework == "cupy"
    assert again.not_seen == seen.not_seen == ()
    memory.hooks().clear()


def test_a_failed_allocation_is_none(memory: standins.CupyMemory, room: Room) -> None:
    with us.observe(allocations=True) as seen:
        (hook,) = memory.hooks().values()
        size = room.x + SIZE  # of a block at address 0, in which all of the room would lie
        hook.malloc_postprocess(device_id=0, size=8, mem_size=size, mem_ptr=0, pmem_id=0)
        fill(room.x, room.a, SIZE)
        copy(room.y, room.x, room.b, SIZE)
        assert [race.framework for race in seen.races] == [None]


@pytest.mark.parametrize("there", ["nothing", "half"])
def test_cupy_that_is_not_there(there: str, room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    if there == "half":  # in the middle of its import
        monkeypatch.setitem(sys.modules, "cupy", types.ModuleType("cupy"))
    with us.observe(allocations=True) as seen:
        fill(room.x, room.a)
        copy(room.y, room.x, room.b)
    assert seen.races[0].framework is None
    assert seen.not_seen == ()


def test_nobody_is_asked_by_default(memory: standins.CupyMemory) -> None:
    with us.observe():
        assert memory.hooks() == {}
