"""Who touched which bytes last, as `observe` remembers it."""

from __future__ import annotations

import random
import struct
from collections import deque

import pytest
from cuda.bindings import driver

import userstream as us
from helpers import checked
from observed import a_room, copy, fill, handle
from userstream._driver import account
from userstream._observe.judge import functions
from userstream._observe.judge.clocks import Clocks, join
from userstream._observe.judge.functions import FUNCTIONS, Call
from userstream._observe.judge.launches import Launches, parameter_types
from userstream._observe.judge.memory import (
    ASSUMED,
    DEVICE,
    EXACT,
    LEARNED,
    TYPED,
    Access,
    Allocation,
    Memory,
    Place,
)
from userstream._observe.judge.races import RecordedOperation
from userstream._observe.judge.world import Timeline, World


def told(accesses: list[Access]) -> list[tuple[object, ...]]:
    return sorted(
        (
            *(each.time, each.lane.id, each.operation),
            *(each.start, each.end, each.write, each.known, each.loose),
        )
        for each in accesses
    )


@pytest.mark.parametrize("seed", range(20))
def test_what_is_repeated_is_judged_like_anything_else(seed: int) -> None:
    chance = random.Random(seed)
    clocks = Clocks()
    quick, slow = (Allocation(0, 1 << 20, DEVICE) for _ in range(2))
    lanes = [clocks.lane(handle, 1, 1) for handle in (10, 11, 12)]
    lane = lanes[0]
    recent: deque[tuple[int, int, bool, str, bool]] = deque(maxlen=3)
    places: dict[object, Place] = {}
    again = repeated = 0
    for number in range(400):
        if chance.random() < 0.1:
            before, lane = lane, chance.choice(lanes)
            if chance.random() < 0.9:
                join(clocks.settle(lane), before.clock)
        if chance.random() < 0.05:  # else little is repeated once two streams are in conflict
            quick.clear()
            slow.clear()
        if number % 50 < 10 or chance.random() < 0.2:
            start = chance.randrange(2)
            end = start + chance.choice((1, 1, 2, 1 << 16))  # the last one spans pages
            write, known = chance.random() < 0.3, chance.choice((EXACT, LEARNED, ASSUMED))
            recent.append((start, end, write, known, chance.random() < 0.1))
        key = start, end, write, known, loose = chance.choice(recent)
        what = (start, end, lane, clocks.step(lane, None), number)
        conflicts = slow.touch(Access(*what, write, known, loose))
        if not quick.touch_places([places.get(key)], lane, what[3], number):
            again += 1
            assert not conflicts
        elif place := quick.touch_again(*what, write, known, loose):
            places[key] = place
            repeated += 1
            assert not conflicts
        else:
            assert told(quick.touch(Access(*what, write, known, loose))) == told(conflicts)
        assert told(quick.accesses) == told(slow.accesses)
    assert again
    assert repeated


def test_nothing_repeats_what_used_memory_that_is_gone() -> None:
    memory, lane = Memory(), Clocks().lane(10, 1, 1)

    def place() -> Place:
        allocation = Allocation(4096, 8192, DEVICE, device=0)
        memory.add(allocation)
        allocation.touch(Access(4096, 4097, lane, 1, None, write=True))
        found = allocation.touch_again(4096, 4097, lane, 2, None, True, EXACT)
        assert found
        assert not allocation.touch_places([found], lane, 3, None)
        return found

    dropped = place()
    memory.drop(dropped[0])
    forgotten = place()
    memory.forget(0)
    replaced, freed = place(), place()
    freed[0].freed = object()
    places = [dropped, forgotten, replaced, freed, None]
    assert Allocation.touch_places(places, lane, 4, None) == [0, 1, 2, 3, 4]


def test_nothing_repeats_an_access_once_another_stream_uses_the_memory() -> None:
    lane, other = (Clocks().lane(handle, 1, 1) for handle in (10, 11))
    allocation = Allocation(0, 1 << 20, DEVICE)
    allocation.touch(Access(0, 1, lane, 1, None, write=True))
    place = allocation.touch_again(0, 1, lane, 2, None, True, EXACT)
    assert allocation.touch_places([place], lane, 3, None) == []
    allocation.touch(Access(1 << 16, 1 << 17, other, 1, None, write=True))  # elsewhere in it
    assert allocation.touch_places([place], lane, 4, None) == [0]
    assert allocation.touch_places([place], other, 2, None) == [0]


def test_what_is_not_quite_repeated_is_not_taken_for_it() -> None:
    clocks = Clocks()
    lane, other = (clocks.lane(handle, 1, 1) for handle in (10, 11))
    allocation = Allocation(0, 1 << 20, DEVICE)

    def repeats(start: int, end: int, *, write: bool, known: str = EXACT) -> bool:
        return allocation.touch_again(start, end, lane, 2, None, write, known)

    assert not repeats(0, 8, write=True)
    allocation.touch(Access(0, 8, lane, 1, None, write=True))
    assert repeats(0, 8, write=True)
    assert not repeats(0, 4, write=True)
    assert not repeats(0, 8, write=False), "the write still counts"
    assert not repeats(0, 8, write=True, known=ASSUMED), "it may write nothing"
    assert not repeats(0, 8, write=True, known=LEARNED), "the other has to go"
    allocation.touch(Access(0, 8, lane, 2, None, write=True, known=LEARNED))
    assert repeats(0, 8, write=True, known=LEARNED)
    allocation.touch(Access(100, 1 << 16, lane, 3, None, write=True))
    assert repeats(0, 8, write=True, known=LEARNED)
    allocation.touch(Access(4, 1 << 16, other, 1, None, write=False))
    assert not repeats(0, 8, write=True, known=LEARNED), "another stream has read there"
    allocation.clear()
    allocation.touch(Access(0, 8, lane, 4, None, write=True))
    allocation.touch(Access(0, 1, other, 2, None, write=False))
    assert not repeats(0, 8, write=True), "another stream has read there"
    allocation.clear()
    allocation.touch(Access(0, 8, lane, 5, None, write=True))
    allocation.freed = object()
    assert not repeats(0, 8, write=True), "it is an error"


def test_the_accounts_of_the_log_are_those_of_the_core() -> None:
    for name in ("PROGRAM", "FUTURE", "HOUSEKEEPING"):
        assert getattr(functions, name) == getattr(account, name)


@pytest.mark.parametrize(
    ("symbol", "types"),
    [
        ("scale(float const*, float*, int)", ["float const*", "float*", "int"]),
        (
            "void path<tuple<int, float> >(tuple<int, float>, tuple<int, float> const*)",
            ["tuple<int, float>", "tuple<int, float> const*"],
        ),
        (
            "(anonymous namespace)::push(void (*)(float const*), float const*)",
            ["void (*)(float const*)", "float const*"],
        ),
        ("nothing()", []),
        ("scale", []),
    ],
)
def test_types_of_the_parameters_of_a_kernel(symbol: str, types: list[str]) -> None:
    assert parameter_types(symbol) == types


@pytest.mark.parametrize(
    ("symbol", "whole", "known"),
    [
        ("scale(float*, float const*, int)", 0, TYPED),
        ("scale(float*, float*, int)", 0, ASSUMED),
        ("scale(float*, float*, int)", 1, LEARNED),
        ("scale", 0, ASSUMED),
        ("scale", 1, LEARNED),
    ],
)
def test_a_parameter_only_reads_if_all_was_compared_or_its_type_says_so(
    symbol: str, whole: int, known: str
) -> None:
    kernel, offset, address = 7, 8, 4096
    world = World()
    world.memory.add(Allocation(address, 2 * address, DEVICE))
    launches = Launches(world)

    offsets = struct.pack("<3I", 0, offset, 16)
    launches.seen_kernel(call((kernel,), b"symbol", symbol.encode(), offsets, b""))
    launches.learned(call((kernel, offset, 0, 1, whole)))
    launch = call((kernel, *[0] * 7, 10, 0, 0), struct.pack("<QQ", offset, address))
    launch.name, launch.function = "cuLaunchKernel", FUNCTIONS["cuLaunchKernel"]
    launches.launch(launch)
    ((access,),) = (memory.accesses for memory in world.memory)
    assert (access.known, access.write) == (known, known == ASSUMED)


def call(words: tuple[int, ...], *fetched: bytes) -> Call:
    """Return a record, as the engine gives it to the subject that applies it."""
    made = Call()
    made.leaving, made.thread, made.context = 1, 1, 1
    made.words, made.fetched = list(words), list(fetched)
    return made


def test_what_was_learned_of_a_kernel_is_not_known_of_the_next_at_its_handle() -> None:
    kernel, offset, address = 7, 8, 4096
    world = World()
    world.memory.add(Allocation(address, 2 * address, DEVICE))
    launches = Launches(world)

    def launched() -> str:
        launch = call((kernel, *[0] * 7, 10, 0, 0), struct.pack("<QQ", offset, address))
        launch.name, launch.function = "cuLaunchKernel", FUNCTIONS["cuLaunchKernel"]
        launches.launch(launch)
        (memory,) = world.memory
        return memory.accesses[-1].known

    launches.seen_kernel(call((kernel,), b"one", b"", b"", b""))
    assert launched() == ASSUMED
    launches.learned(call((kernel, offset, 1, 1)))
    assert launched() == LEARNED
    launches.seen_kernel(call((kernel,), b"one", b"", b"", b""))
    assert launched() == LEARNED
    assert world.memory.find(address).accesses[-1].write  # type: ignore[union-attr]
    # It may be another one of that name: it is looked at anew.
    launches.learned(call((kernel, offset, 0, 1)))
    assert launched() == LEARNED
    assert not world.memory.find(address).accesses[-1].write  # type: ignore[union-attr]
    launches.seen_kernel(call((kernel,), b"another", b"", b"", b""))
    assert launched() == ASSUMED

    (memory,) = world.memory
    before = memory.accesses[-1].operation.guesses.at(address)
    launches.seen_kernel(call((kernel,), b"third", b"", b"", b""))
    launches.learned(call((kernel, offset, 1, 1)))
    assert before.writes is None, "that was another kernel"


@pytest.mark.no_races(False)  # it watches itself
def test_rows_that_repeat_a_fill_of_all_leave_what_is_between_them() -> None:
    """They are too many to be taken one by one: a read between two of them may be no race."""
    with a_room() as room:
        pitch, width, rows = 32, 16, 100
        with us.observe(possible=True) as seen:
            fill(room.x, room.a, (rows - 1) * pitch + width)
            room.b.wait(room.a)
            rowwise = driver.cuMemsetD2D8Async
            checked(rowwise(room.x, pitch, 7, width, rows, handle(room.a)))
            copy(room.y, room.x + width, room.b, width)
        assert [race.possible for race in seen.races] == [True]


def test_the_timeline_keeps_few_of_what_a_batch_touches() -> None:
    timeline, lane = Timeline(10), Clocks().lane(10, 1, 1)
    batch = RecordedOperation("cuMemcpyBatchAsync", -1, 1, lane)
    timeline.queued(batch, lane, ())
    timeline.touched(tuple((at, at + 1, True, EXACT) for at in range(4096)))
    assert len(batch.touches) < 100
