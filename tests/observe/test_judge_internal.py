"""The judge of `observe`, part by part: memory, clocks, calls, suppressions, the text."""

from __future__ import annotations

import dataclasses
import gc
import os
import pty
import random
import re
import struct
import termios
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cuda.bindings import driver

import userstream as us
from helpers import checked
from observed import a_room, copy, fill, handle
from records import record
from userstream._driver import account
from userstream._observe.judge import Engine, finding_types, functions, log, races, remedies
from userstream._observe.judge.allocations import Block, Blocks
from userstream._observe.judge.clocks import Clocks, Lane, join
from userstream._observe.judge.copies import Copies
from userstream._observe.judge.functions import FUNCTIONS, Call
from userstream._observe.judge.launches import Launches, parameter_types, readable
from userstream._observe.judge.lines import CONTROLS, Source, Style, Text, render, style_of
from userstream._observe.judge.memory import (
    ASSUMED,
    DEVICE,
    EXACT,
    LEARNED,
    READS,
    TOGETHER,
    TYPED,
    WRITES,
    Access,
    Allocation,
    Guesses,
    Memory,
    Place,
    _passed,
)
from userstream._observe.judge.order import Words, _Wait
from userstream._observe.judge.races import RecordedOperation
from userstream._observe.judge.world import Timeline, World

if TYPE_CHECKING:
    from collections.abc import Callable


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


def test_only_what_a_kernel_may_reach_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer that streams share piece by piece has thousands of accesses."""
    clocks = Clocks()
    one, other = (clocks.lane(handle, 1, 1) for handle in (10, 11))
    memory = Allocation(0, 1 << 20, DEVICE)
    memory.touch(Access(0, 64, one, 1, None, True))
    copied = Access(512, 576, other, 1, None, True)
    memory.touch(copied)
    with monkeypatch.context() as without:
        without.delattr(Allocation, "accesses")
        assert memory.reached(copied) == []
    kernel = Access(128, 129, one, 2, None, True)
    kernel.reach = 1 << 20
    memory.touch(kernel)
    assert memory.reached(copied) == [kernel]


def test_an_access_is_compared_with_those_near_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """An allocation may have thousands of accesses, some of them across the ends of all pages."""
    clocks = Clocks()
    one, other = (clocks.lane(handle, 1, 1) for handle in (10, 11))
    size = 20_000
    memory = Allocation(0, 4000 * size, DEVICE)
    for start in range(0, 4000 * size, size):
        memory.touch(Access(start, start + size, one, 1, None, True))
    compared = 0

    def passed(accesses: list[Access], *rest: object) -> list[Access]:
        nonlocal compared
        compared += len(accesses)
        return _passed(accesses, *rest)

    monkeypatch.setattr("userstream._observe.judge.memory._passed", passed)
    for number in (0, 13, 838, 2000, 3998):
        new = Access((number + 1) * size - 1, (number + 1) * size + 1, other, number, None, True)
        starts = {each.start for each in memory.touch(new)}
        assert starts == {number * size, (number + 1) * size}
    assert compared < 5 * 200


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


def test_all_parameters_that_point_there_settle_what_is_guessed() -> None:
    learned: dict[int, str] = {}
    guesses = Guesses(learned, struct.pack("<6Q", 0, 64, 8, 64, 16, 128))
    assert guesses.at(64).writes is None
    learned[0] = READS
    assert guesses.at(64).writes is None
    learned[8] = WRITES
    assert (guesses.at(64).writes, guesses.at(128).writes) == (True, None)
    learned[8] = learned[16] = TOGETHER
    assert (guesses.at(64).writes, guesses.at(128).writes) == (True, None)
    learned[8] = READS
    assert guesses.at(64).writes is False


# -- clocks ---------------------------------------------------------------------------------------


def test_the_legacy_stream_is_beside_the_blocking_ones_that_there_are() -> None:
    clocks = Clocks()
    legacy = clocks.lane(0, 1, 1)
    first = clocks.seen_stream(10, 1, blocking=True)
    clocks.seen_stream(11, 1, blocking=False)
    elsewhere = clocks.seen_stream(12, 2, blocking=True)
    thread = clocks.lane(2, 1, 7)
    assert list(clocks.beside(legacy)) == [first, thread]
    assert list(clocks.beside(first)) == [legacy]
    assert not list(clocks.beside(elsewhere))
    clocks.drop_stream(10)
    assert list(clocks.beside(legacy)) == [first, thread], "its work may be in flight"
    clocks.host_knows(clocks.of_context(1))
    assert list(clocks.beside(legacy)) == [thread]
    again = clocks.seen_stream(10, 1, blocking=True)
    assert list(clocks.beside(legacy)) == [thread, again]
    newer = clocks.seen_stream(10, 1, blocking=True)  # its end was not seen
    assert list(clocks.beside(legacy)) == [thread, again, newer]


def test_the_legacy_stream_joins_only_the_clocks_that_have_changed() -> None:
    class Counted(dict[int, int]):
        reads = 0

        def items(self) -> Any:
            Counted.reads += 1
            return super().items()

    clocks = Clocks()
    legacy = clocks.lane(0, 1, 1)
    blocking = [clocks.seen_stream(handle, 1, blocking=True) for handle in range(10, 110)]
    for lane in blocking:
        lane.clock = Counted()
        clocks.step(lane, None)
    clocks.step(legacy, None)
    Counted.reads = 0
    for _ in range(3):
        clocks.step(blocking[7], None)
        clocks.step(legacy, None)
    assert Counted.reads == 3
    assert legacy.clock[blocking[7].id] == 4
    for lane in blocking:
        clocks.drop_stream(lane.handle)
    clocks.host_knows(clocks.of_context(1))
    assert not legacy.seen_beside


def test_the_legacy_stream_follows_all_that_a_blocking_stream_does() -> None:
    world = World()
    clocks, words = world.clocks, Words(world)
    legacy, writer = clocks.lane(0, 1, 1), clocks.lane(11, 1, 1)
    blocking = clocks.seen_stream(10, 1, blocking=True)
    changes: list[Callable[[], object]] = [
        lambda: clocks.step(blocking, None, ()),
        lambda: clocks.depend_on_unseen(blocking),
        lambda: words._value_written(writer, clocks.step(writer, None), 64, 1, None),
    ]
    for change in changes:
        words.await_value(blocking, (1, 64), _Wait(64, 1, 0), None)
        clocks.settle(legacy)
        before = dict(blocking.clock)
        change()
        assert blocking.clock != before
        assert clocks.settle(legacy).items() >= blocking.clock.items()


def test_nothing_is_left_of_a_stream_that_has_finished() -> None:
    """Nor does it wait for a collection of cycles, which is seldom."""
    world = World(timeline=1)
    clocks = world.clocks
    kept, told_late = clocks.lane(10, 1, 1), clocks.lane(11, 1, 1)
    gc.collect()
    before = sum(type(each) is Lane for each in gc.get_objects())
    gc.disable()
    try:
        for handle in range(100, 120):
            lane = clocks.seen_stream(handle, 1, blocking=False)
            clocks.step(lane, RecordedOperation("fill", -1, 1, lane))
            join(clocks.settle(kept), lane.clock)
            late = dict(lane.clock)  # as of a word in memory that it wrote
            clocks.drop_stream(handle)
            clocks.host_knows(lane.clock)
            assert kept.clock.keys() <= {kept.id}
            join(told_late.clock, late)
            assert len(told_late.clock) < 10
        del lane
        assert sum(type(each) is Lane for each in gc.get_objects()) == before
    finally:
        gc.enable()


def test_a_stream_with_the_handle_of_another_has_its_number_if_the_same_line_created_it() -> None:
    clocks = Clocks()
    numbers = []
    for stack in (7, 7, 8, 7):
        clocks.created_stream(0x50, stack)
        lane = clocks.seen_stream(0x50, 1, blocking=False)
        numbers.append((lane.number, lane.created))
        clocks.drop_stream(0x50)
    assert numbers == [(1, 7), (1, 7), (2, 8), (1, 7)]
    assert clocks.seen_stream(0x50, 1, blocking=False).created == -1


# -- calls ----------------------------------------------------------------------------------------


def applied(name: str, words: tuple[int, ...], *fetched: bytes) -> list[tuple[int, int, bool]]:
    """Return which bytes a call uses, as the judge sees it."""
    engine = Engine({}, stall=1.0)
    memory = engine.world.memory
    for start in (0x10000, 0x20000):
        memory.add(Allocation(start, start + 0x8000, DEVICE))
    engine.take(record(log.FUNCTION, (1,), name.encode()) + record(1, words, *fetched))
    return sorted((each.start, each.end, each.write) for found in memory for each in found.accesses)


def test_a_batch_of_shaped_copies() -> None:
    def operand(address: int, row: int = 0, layer: int = 0) -> bytes:
        return struct.pack("<QQQQQ", 1, address, row, layer, 0)

    operation = operand(0x10000) + operand(0x20000, 64, 8) + struct.pack("<QQQQ", 16, 2, 1, 0)
    expected = [
        (0x10000, 0x10020, False),
        (0x20000, 0x20010, True),
        (0x20040, 0x20050, True),
    ]
    assert applied("cuMemcpy3DWithAttributesAsync", (0, 0, 9), operation) == expected
    assert applied("cuMemcpy3DBatchAsync", (1, 0, 0, 0, 9), operation) == expected
    assert applied("cuMemcpy3DBatchAsync_v2", (1, 0, 0, 9), operation) == expected


def test_a_shaped_copy_of_packed_layers() -> None:
    place = (0, 0, 0, 0, 2, 0)
    sides = (*place, 0x10000, 0, 0, 0, 0), (*place, 0x20000, 0, 0, 0, 0)
    operation = struct.pack("<25Q", *sides[0], *sides[1], 16, 2, 2)
    assert applied("cuMemcpy3DAsync_v2", (0, 9), operation) == [
        (0x10000, 0x10040, False),
        (0x20000, 0x20040, True),
    ]
    sides_of_3d = Copies(World(), pinned=None).sides_of_3d
    assert [write for _, write, _ in sides_of_3d(operation)] == [False, True]


@pytest.mark.parametrize(("name", "more"), [("cuMemFree_v2", ()), ("cuMemFreeAsync", (9,))])
def test_a_free_that_fails_frees_nothing(name: str, more: tuple[int, ...]) -> None:
    engine, words = Engine({}, stall=1.0), (0x10000, *more)
    allocation = Allocation(0x10000, 0x18000, DEVICE)
    engine.world.memory.add(allocation)
    engine.take(record(log.FUNCTION, (1,), name.encode()) + record(1, words, leaving=0))
    assert allocation.freed is not None
    engine.take(record(1, words, result=2))
    assert allocation.freed is None
    assert engine.world.memory.find(0x10000) is allocation
    engine.take(record(1, words, leaving=0) + record(1, words))
    assert (engine.world.memory.find(0x10000) is None) is (name == "cuMemFree_v2")


def test_the_names_of_threads_that_ended_long_ago_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(races, "_MOST_NAMED", 10)
    engine = Engine({}, stall=1.0)
    named = engine.world.collector
    for number in range(100):
        engine.take(record(log.THREAD, (number, 1000 + number), b""))
        named.name_thread(1000 + number, f"worker {number}")
        if number:  # the first one goes on
            engine.take(record(log.THREAD_ENDS, (), thread=number))
    assert len(named._threads) == len(named._given) == 11
    assert named.thread_name(0) == "worker 0"
    assert named.thread_name(89) == "an unknown thread"
    assert named.thread_name(90) == "worker 90"


def test_a_batch_of_copies_of_cuda_12() -> None:
    to, source, sizes = (struct.pack("<Q", each) for each in (0x20000, 0x10000, 16))
    assert applied("cuMemcpyBatchAsync", (0, 0, 0, 1, 0, 0, 0, 0, 9), to, source, sizes) == [
        (0x10000, 0x10010, False),
        (0x20000, 0x20010, True),
    ]


def test_a_batch_of_decompressions() -> None:
    parameters = struct.pack("<5QI20x", 100, 400, 0, 0x10000, 0x20000, 0)
    assert applied("cuMemBatchDecompressAsync", (0, 1, 0, 0, 9), parameters) == [
        (0x10000, 0x10000 + 100, False),
        (0x20000, 0x20000 + 400, True),
    ]


def test_a_copy_with_attributes() -> None:
    assert applied("cuMemcpyWithAttributesAsync", (0x20000, 0x10000, 16, 0, 9)) == [
        (0x10000, 0x10010, False),
        (0x20000, 0x20010, True),
    ]


# -- what it reports ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("demangled", "name"),
    [
        ("scale", "scale"),
        ("scale(float*, int)", "scale"),
        ("(anonymous namespace)::push(void (*)(float const*), float)", "push"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctorOnSelf_add"
            "<float>, std::array<char*, 2ul> >(int, at::native::CUDAFunctorOnSelf_add<float>, "
            "std::array<char*, 2ul>)",
            "at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctorOnSelf_add<float>,"
            " std::array<char*, 2ul> >",
        ),
        ("_Znot a name", "_Znot a name"),
    ],
)
def test_kernels_have_the_names_of_their_sources(demangled: str, name: str) -> None:
    assert readable(demangled) == name


@pytest.mark.parametrize(
    "name",
    [
        "sum",
        "sum<int*>",
        "T::operator[]",
        "f(int (&)[3])",
        "f::{lambda()#1}",
        "it's",
        "a\\b",
        "[ab]",
    ],
)
def test_a_name_is_suppressed_by_the_line_that_shows_it(name: str) -> None:
    operation = us.Operation(name, "write", "learned", "stream 1", 0, "main")
    both = (operation, operation)
    race = us.Race("write after write", 1, 1, "device", (), None, *both, None, False, 1, "")
    (suppression,) = finding_types.read_suppressions([race.key])
    assert finding_types.covers(suppression, race)
    other = dataclasses.replace(race, second=dataclasses.replace(operation, name="b"))
    assert not finding_types.covers(suppression, other)


def test_every_kind_of_race_can_be_suppressed() -> None:
    assert us.Race.__doc__ is not None
    kinds = re.findall(r'``"(.*?)"``', us.Race.__doc__.split("address,")[0])
    assert len(kinds) == 11
    for kind in kinds:
        second, _, first = kind.partition(" after ")
        sides = [
            us.Operation("f", access, "assumed" if access == "use" else "exact", "s", 0, "main")
            for access in (first or "read", second)
        ]
        race = us.Race(kind, 1, 1, "device", (), None, *sides, None, False, 1, "")
        (suppression,) = finding_types.read_suppressions([race.key])
        assert finding_types.covers(suppression, race)
        assert not finding_types.covers(finding_types.Suppression(memory="pinned"), race)


def test_the_advice_for_a_collective_is_to_wait_for_its_work(tmp_path: Path) -> None:
    file = tmp_path / "buckets.py"
    file.write_text("work = all_reduce(bucket, async_op=True)\nbucket.mul_(0.5)\n")
    lines = [log.Frame(str(file), line, "<module>", log.PROGRAM, line) for line in (1, 2)]
    sides = [
        us.Operation(name, "use", "assumed", f"stream {number}", 0, "main", line)
        for number, (name, line) in enumerate(
            zip(("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "mul"), lines, strict=True)
        )
    ]
    race = us.Race("use after use", 1, 1, "device", (), None, *sides, None, False, 1, "")
    race = remedies.advised(race)
    (edit,) = race.edits
    assert (edit.line, edit.end, edit.code) == (2, 2, "work.wait()\n")
    assert "call wait() of the work that it returns before" in race.advice


@pytest.mark.parametrize(
    ("source", "edits"),
    [
        ("def f(x, s):\n    {}\n", [(3, 3, "    d.cuStreamSynchronize(s)\n")]),
        ("def f(x, s):\n    with a:\n        {}\n", [(4, 4, "        d.cuStreamSynchronize(s)\n")]),
        ("def f(x, s):\n    if x: {}\n", [(3, 3, "    d.cuStreamSynchronize(s)\n")]),
        ("\f\ndef f(x, s):\n    {}\n", [(4, 4, "    d.cuStreamSynchronize(s)\n")]),
        ("\ufeffdef f(x, s):\n    {}\n", [(3, 3, "    d.cuStreamSynchronize(s)\n")]),
        ("def f(x, s):\n    {}", []),
        ("def f(x, s): {}\n", []),
        ("def f(x, s):\n    return {}\n", []),
        ("def f(x, s):\n    for s in (a, b): {}\n", []),
        ("def f(x, s):\n    while {}:\n        pass\n", []),
        ("def f(x, s):\n    {}; {}\n", []),
        ("def f(x, s):\n    [{} for s in (a, b)]\n", []),
    ],
)
def test_a_change_is_advised_where_the_line_allows_it(
    source: str, edits: list[tuple[int, int, str]], tmp_path: Path
) -> None:
    """Both operations are of one line, which a loop or two callers run on two streams."""
    file, call = tmp_path / "filling.py", "d.cuMemsetD8Async(x, 1, 4, s)"
    file.write_text(source.format(call, call))
    number = next(at for at, line in enumerate(source.split("\n"), 1) if "{}" in line)
    line = log.Frame(str(file), number, "f", log.PROGRAM, number)
    sides = [
        us.Operation("cuMemsetD8Async", "write", "exact", f"stream {each}", 0, "main", line)
        for each in (1, 2)
    ]
    race = us.Race("write after write", 1, 1, "device", (), None, *sides, None, False, 1, "")
    advised = remedies.advised(race)
    assert [(each.line, each.end, each.code) for each in advised.edits] == edits


# -- its text -------------------------------------------------------------------------------------


@pytest.fixture
def seen() -> us.Observation:
    """Return an observation of one race."""
    with a_room() as room, us.observe() as seen:
        fill(room.x, room.a)
        fill(room.x, room.b)
    assert len(seen.races) == 1
    return seen


def lines_of(seen: us.Observation, style: Style) -> list[str]:
    return render(seen._report().lines(), style).splitlines()


@pytest.mark.simulated
@pytest.mark.no_races(False)  # it watches itself
@pytest.mark.parametrize("width", [40, 60, 100])
def test_the_text_fits_a_terminal_and_says_the_same(seen: us.Observation, width: int) -> None:
    whole = lines_of(seen, Style())
    fitting = lines_of(seen, Style(width))
    kept = re.compile(r"  suppress: |  ordered until: |    \S+:\d+ in ")  # to be copied, and paths
    assert all(len(line) <= width for line in fitting if not kept.match(line))
    assert any(line.endswith("…") for line in fitting) is (width < 70)
    without_source = [
        " ".join(line for line in lines if " | " not in line).split() for lines in (whole, fitting)
    ]
    assert without_source[0] == without_source[1]


@pytest.mark.simulated
@pytest.mark.no_races(False)  # it watches itself
def test_colors_change_no_word(seen: us.Observation) -> None:
    colored = lines_of(seen, Style(None, color=True))
    assert colored != lines_of(seen, Style())
    assert [re.sub(r"\x1b\[[\d;]*m", "", line) for line in colored] == lines_of(seen, Style())
    assert "\x1b[1;31mwrite after write\x1b[0m: " in "\n".join(colored)


@pytest.mark.parametrize(
    ("environment", "colored"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"NO_COLOR": ""}, True), ({"TERM": "dumb"}, False)],
)
def test_a_terminal_has_colors_and_a_width(environment: dict[str, str], colored: bool) -> None:
    leader, terminal = pty.openpty()
    try:
        termios.tcsetwinsize(terminal, (24, 87))
        assert style_of(terminal, environment) == Style(87, colored)
        assert style_of(terminal, {**environment, "COLUMNS": "60"}).width == 60
    finally:
        os.close(leader)
        os.close(terminal)


def test_a_file_has_neither_unless_it_is_asked_for(tmp_path: Path) -> None:
    with open(tmp_path / "report.txt", "w") as file:
        assert style_of(file, {"COLUMNS": "60"}) == Style(None, color=False)
        assert style_of(file, {"FORCE_COLOR": "1"}) == Style(None, color=True)
        assert style_of(file, {"FORCE_COLOR": "1", "NO_COLOR": "1"}) == Style()
    assert style_of(file) == Style()  # closed


# -- names and sources that contain anything -------------------------------------------------------

ODD = "a\x1b]0;b\x07\n\r\x85\u202e\u2066\x7f\udcff\u2028"
SHOWN = r"a\x1b]0;b\x07\n\r\x85\u202e\u2066\x7f\udcff\u2028"


@pytest.mark.parametrize("style", [Style(), Style(300), Style(40), Style(None, color=True)])
def test_control_characters_are_escaped(style: Style) -> None:
    lines = [Text(f"  first: {ODD}é漢", "first", 9), Source(7, f"\t{ODD}f(é)", 20, 24, "first")]
    text = re.sub(r"\x1b\[[\d;]*m", "", render(lines, style))
    assert f"first: {SHOWN}é漢" in " ".join(text.split())
    assert len(text.splitlines()) == text.count("\n") + 1
    assert not CONTROLS.search(text.replace("\n", ""))


@pytest.mark.parametrize("width", [None, 40, 90])
@pytest.mark.parametrize("before", ["", "\t", "\x1b[2J", "漢字" * 9, "e\u0301" * 9, "\u202e" * 30])
@pytest.mark.parametrize("after", ["", "\x1b", "漢" * 200])
def test_the_marks_are_below_the_call(before: str, after: str, width: int | None) -> None:
    call = "f(x, 漢字)"
    source = Source(12, before + call + after, len(before), len(before + call), "first")
    line, marks = render([source], Style(width)).splitlines()
    columns = [0 if each == "\u0301" else 2 if each in "漢字" else 1 for each in line]
    at = line.index(call)
    assert marks == f"       | {' ' * (sum(columns[:at]) - 9)}{'^' * 10}"
    assert sum(columns) <= (width or 160)


def test_a_long_line_is_cut_around_the_call() -> None:
    source = "a" * 3000 + " f(x) " + "b" * 3000
    line, marks = render([Source(12, source, 3001, 3005, "first")]).splitlines()
    assert line == f"    12 | …{'a' * 6} f(x) {'b' * 137}…"
    assert marks == f"       | {' ' * 8}^^^^"
    line, marks = render([Source(12, source, 0, 6006, "first")]).splitlines()
    assert (line, marks) == (f"    12 | {'a' * 150}…", f"       | {'^' * 151}")


def test_findings_as_text_have_no_control_characters() -> None:
    line = log.Frame(ODD, 1, ODD, log.PROGRAM)
    side = us.Operation(ODD, "write", "exact", ODD, 0, ODD, line, (line,), origin=ODD)
    edit = us.Edit(ODD, 1, 2, f"f({ODD})")
    until = dataclasses.replace(side, since=line)
    race = us.Race(
        *("write after write", 1, 1, "device", (line,), "torch", side, until, side, True, 1, ODD),
        edits=(edit,),
    )
    for each in (
        side,
        edit,
        race,
        us.Stall(ODD, 1.0, 1.0, 1, None, ODD, line),
        us.WrongStream(ODD, ODD, 0, 1, ODD, line),
    ):
        assert not CONTROLS.search(str(each).replace("\n", ""))
        assert SHOWN in str(each)


# -- blocks of frameworks -------------------------------------------------------------------------


def test_of_several_blocks_the_newest_at_that_time_is_meant() -> None:
    def block(start: int, end: int, time: int) -> Block:
        return Block(start, end, time, tuple, "torch")

    old, older, oldest = block(0, 512, 30), block(0, 1024, 20), block(512, 1024, 0)
    blocks = Blocks(World())
    blocks._listed = [older, oldest, old]
    assert blocks.at(0, 40) is blocks.at(0, 0) is blocks.at(511, 30) is old
    assert blocks.at(0, 29) is blocks.at(512, 40) is older
    assert blocks.at(512, 19) is oldest
    assert blocks.at(0, 19) is None
    assert blocks.at(1024, 40) is None
