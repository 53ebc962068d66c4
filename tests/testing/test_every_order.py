"""`testing.schedules`: every order of a small program."""

from __future__ import annotations

import ctypes
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from cuda.bindings import driver
from cuda.core import LaunchConfig, ObjectCode, launch

from helpers import checked, virtual_memory
from scheduled import SIZE, Room, a_room, ordered, unordered
from userstream import testing

pytestmark = [
    pytest.mark.simulated,
    pytest.mark.no_races(False),  # some have to race
    pytest.mark.usefixtures("no_garbage"),
]


@pytest.fixture
def room() -> Iterator[Room]:
    with a_room() as room:
        yield room


def tried(program: Callable[[Room], object], room: Room, **options: Any) -> testing.schedules:
    """Run a program in all orders, each of which must find memory that is all zeros."""
    runs = testing.schedules(**options)
    for run in runs:
        checked(driver.cuMemsetD8(room.place(0), 0, 8 * SIZE))
        with run:
            program(room)
    return runs


def independent(room: Room) -> None:
    for number in range(4):
        room.fill(number, number)
        room.copy(number + 4, number, number)
    room.sync()


def two_pairs(room: Room) -> None:
    for number in range(4):
        room.fill(number // 2, number, number)
    room.sync()


def three_writers(room: Room) -> None:
    for number in range(3):
        room.fill(0, number, number)
    room.sync()


def three_writers_of_new_memory(room: Room) -> None:
    """Each run has memory at another address."""
    memory = checked(driver.cuMemAlloc(SIZE))
    for stream in room.streams[:3]:
        checked(driver.cuMemsetD8Async(memory, 1, SIZE, stream.handle))
    room.sync()
    checked(driver.cuMemFree(memory))


@testing.kernel("reads_texture")
def reads_texture(grid: object, block: object, texture: testing.Texture) -> None: ...


def read_as_a_texture(room: Room) -> None:
    resource = driver.CUDA_RESOURCE_DESC()
    resource.resType = driver.CUresourcetype.CU_RESOURCE_TYPE_LINEAR
    resource.res.linear.devPtr, resource.res.linear.sizeInBytes = room.place(0), SIZE
    resource.res.linear.format = driver.CUarray_format.CU_AD_FORMAT_UNSIGNED_INT8
    resource.res.linear.numChannels = 1
    texture = checked(driver.cuTexObjectCreate(resource, driver.CUDA_TEXTURE_DESC(), None))
    kernel = ObjectCode.from_ptx(b"any").get_kernel("reads_texture")
    launch(room.streams[0], LaunchConfig(grid=1, block=1), kernel, ctypes.c_uint64(int(texture)))
    room.fill(0, 1)
    room.sync()
    checked(driver.cuTexObjectDestroy(texture))


def at_two_addresses(room: Room) -> None:
    properties, access = virtual_memory()
    size = 2 << 20
    begin = int(checked(driver.cuMemAddressReserve(2 * size, 0, 0, 0)))
    physical = checked(driver.cuMemCreate(size, properties, 0))
    for number in range(2):
        checked(driver.cuMemMap(begin + number * size, size, 0, physical, 0))
        checked(driver.cuMemSetAccess(begin + number * size, size, [access], 1))
    for number, stream in enumerate(room.streams[:2]):
        checked(driver.cuMemsetD8Async(begin + number * size, 7, SIZE, stream.handle))
    room.sync()
    for number in range(2):
        checked(driver.cuMemUnmap(begin + number * size, size))
    checked(driver.cuMemRelease(physical))
    checked(driver.cuMemAddressFree(begin, 2 * size))


@pytest.mark.parametrize(
    ("program", "result"),
    [
        (read_as_a_texture, "all 2 orders tried"),
        (at_two_addresses, "all 2 orders tried"),
        (independent, "the only order tried"),
        (ordered, "the only order tried"),
        (unordered, "all 2 orders tried"),
        (two_pairs, "all 4 orders tried"),
        (three_writers, "all 6 orders tried"),
        (three_writers_of_new_memory, "all 6 orders tried"),
    ],
)
def test_orders_differ_if_they_exchange_operations_that_conflict(
    room: Room, program: Callable[[Room], None], result: str
) -> None:
    assert str(tried(program, room)) == result


def test_the_limit_comes_first(room: Room) -> None:
    runs = tried(three_writers, room, limit=4)
    assert (str(runs), runs.complete, runs.orders) == ("4 orders tried, not all", False, 4)


def has_ones(data: bytes) -> bool:
    """Compare where pytest does not see it: on CI it would explain for minutes what is wrong."""
    return data == b"\1" * SIZE


def staged(room: Room, *, is_right: bool) -> None:
    """Copy two values by way of one page-locked buffer."""
    for number in (1, 2):
        ctypes.memset(room.pinned, number, SIZE)
        handle = room.streams[0].handle
        checked(driver.cuMemcpyHtoDAsync(room.place(number), room.pinned, SIZE, handle))
        if is_right:
            room.streams[0].sync()
    room.streams[0].sync()
    assert has_ones(room.bytes(1))


def read_back(room: Room, *, is_right: bool) -> None:
    ctypes.memset(room.pinned, 0, SIZE)
    room.fill(0, 0)
    checked(driver.cuMemcpyDtoHAsync(room.pinned, room.place(0), SIZE, room.streams[0].handle))
    if is_right:
        room.streams[0].sync()
    assert has_ones(ctypes.string_at(room.pinned, SIZE))


def handed_over(room: Room, *, is_right: bool) -> None:
    """A second batch overwrites the first one, which another stream has yet to read."""
    for number in (1, 2):
        room.fill(0, 0, number)
        room.streams[1].wait(room.streams[0])
        room.copy(number, 0, 1)
        if is_right:
            room.streams[0].wait(room.streams[1])
    room.sync()
    assert has_ones(room.bytes(1))


@pytest.mark.parametrize("program", [staged, read_back, handed_over])
def test_a_wrong_program_fails_in_one_of_all_orders_and_a_right_one_in_none(
    room: Room, program: Callable[..., None]
) -> None:
    assert tried(lambda room: program(room, is_right=True), room).complete
    with pytest.raises(AssertionError) as raised:
        tried(lambda room: program(room, is_right=False), room)
    (note,) = raised.value.__notes__
    seed = re.fullmatch(r"in the order of userstream\.testing\.schedule\('(.*)'\)", note)
    assert seed, note
    with pytest.raises(AssertionError), testing.schedule(seed[1]):
        program(room, is_right=False)


def all_outcomes(program: Callable[[Room], object], room: Room) -> set[bytes]:
    """Return what a program leaves in memory, in all orders that there are."""
    found, todo = set(), ["t1"]
    while todo:
        seed = todo.pop()
        checked(driver.cuMemsetD8(room.place(0), 0, 8 * SIZE))
        with testing.schedule(seed) as run:
            program(room)
        found.add(b"".join(map(room.bytes, range(4))))
        assert run._log is not None
        turns = [line.split()[1:] for line in run._log.splitlines() if line.startswith("turn")]
        taken = ["t1", *(actor for actor, *_ in turns)]
        for i in range(seed.count(" "), len(turns)):
            others = {*turns[i][1:]} - {turns[i][0]}
            todo += [" ".join([*taken[: i + 1], other]) for other in others]
    return found


@pytest.mark.parametrize("number", range(3))
def test_orders_that_are_left_out_make_no_difference(room: Room, number: int) -> None:
    chosen = random.Random(number)
    steps = [(chosen.random(), *chosen.sample(range(3), 2)) for _ in range(4)]

    def program(room: Room) -> None:
        for i, (kind, one, other) in enumerate(steps):
            if kind < 0.4:
                room.fill(one, other, i + 1)
            elif kind < 0.8:
                room.copy(one, other, i % 3)
            else:
                room.streams[one].wait(room.streams[other])

    found = set()
    for run in testing.schedules():
        checked(driver.cuMemsetD8(room.place(0), 0, 8 * SIZE))
        with run:
            program(room)
        found.add(b"".join(map(room.bytes, range(4))))
    assert found == all_outcomes(program, room)


def test_a_program_that_depends_on_earlier_runs_is_refused(room: Room) -> None:
    numbers = iter(range(1000))

    def program(room: Room) -> None:
        for _ in range(next(numbers)):
            room.sync()
        three_writers(room)

    with pytest.raises(RuntimeError, match="took another way under the same choices"):
        tried(program, room)
    with pytest.raises(RuntimeError, match="each schedule must be run"):
        list(testing.schedules())
