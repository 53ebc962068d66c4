"""What kernels read and write: `observe` learns it from their launches on the simulated driver."""

from __future__ import annotations

import ctypes
import ctypes.util
import itertools
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver
from cuda.core import LaunchConfig, ObjectCode, launch

import userstream as us
from helpers import (
    THOROUGH,
    checked,
    device_memory,
    virtual_memory,
)
from observed import (
    SIZE,
    Room,
    a_room,
    captured,
    copy,
    engine_of,
    fill,
    handle,
    needs_frames,
)
from userstream.testing import Pointer, kernel, latch

pytestmark = [
    pytest.mark.simulated,
    pytest.mark.no_races(False),  # they watch themselves
    needs_frames,
]


# Mangled: `observed_double(unsigned char *, unsigned char const *, long)`. Only the type tells that
# the source is only read, because more memory lies there than is compared.
DOUBLE = "_Z15observed_doublePhPKhl"


@kernel(DOUBLE)
def _double(grid: Any, block: Any, to: Pointer, source: Pointer, n: np.int64) -> None:
    to.array(n, np.uint8)[:] = source.array(n, np.uint8) * 2 + 1


def doubler() -> Callable[[us.Stream, int, int], None]:
    double = ObjectCode.from_ptx(b"any").get_kernel(DOUBLE)

    def run(stream: us.Stream, to: int, source: int) -> None:
        launch(stream, LaunchConfig(grid=1, block=1), double, to, source, np.int64(SIZE))

    return run


def prepare(room: Room) -> None:
    """Let the first launch change what it writes, whatever was in that memory before."""
    for address in (room.x, room.y):
        fill(address, room.a)
    us.wait_for_device(0)


def learn(room: Room, double: Callable[[us.Stream, int, int], None]) -> None:
    """Let it be seen what the kernel reads and writes, with other contents each time."""
    for value in range(6):
        checked(driver.cuMemsetD8Async(room.x, value, SIZE, handle(room.a)))
        double(room.a, room.y, room.x)
        room.a.sync()


def test_what_is_learned_counts_for_calls_that_are_repeated() -> None:
    with a_room() as room, us.observe() as seen:
        double = doubler()
        learn(room, double)
        double(room.a, room.y, room.x)
        memory = engine_of(seen).world.memory.find(room.y)
        assert memory.accesses[-1].known == "learned"


def test_what_a_kernel_writes_is_learned() -> None:
    with a_room() as room:
        double = doubler()
        with us.observe() as seen:
            learn(room, double)
            room.b.wait(room.a)
            double(room.a, room.y, room.x)
            double(room.b, room.pinned, room.x)  # both read it
            assert seen.races == (), seen
            fill(room.x, room.b)
        (race,) = seen.races
    assert race.kind == "write after read"
    assert race.first.name == "observed_double"
    assert race.first.known == "typed"
    assert race.second.known == "exact"


@kernel("observed_reader")
def _reader(grid: Any, block: Any, to: Pointer, source: Pointer, n: np.int64) -> None:
    del grid, block
    to.array(n, np.uint8)[:] = source.array(n, np.uint8) + 1


@pytest.mark.parametrize("size", [512, SIZE])
def test_that_a_parameter_only_reads_is_known_if_all_of_its_memory_was_compared(size: int) -> None:
    """A ring buffer or a cache gets its base and an index: the kernel may write further behind."""
    with a_room() as room, device_memory(0, size) as source, us.observe(possible=True) as seen:
        reader = ObjectCode.from_ptx(b"any").get_kernel("observed_reader")
        for value in range(6):
            checked(driver.cuMemsetD8Async(source, value, size, handle(room.a)))
            launch(room.a, LaunchConfig(grid=1, block=1), reader, room.y, source, np.int64(size))
            room.a.sync()
        room.b.wait(room.a)
        launch(room.a, LaunchConfig(grid=1, block=1), reader, room.y, source, np.int64(size))
        copy(room.pinned, source, room.b, size)
        found = [(race.possible, race.first.name, race.first.known) for race in seen.races]
    assert found == ([] if size <= 512 else [(True, "observed_reader", "assumed")])


def test_a_kernel_that_worked_in_place_is_not_taken_to_write_what_it_reads() -> None:
    with a_room() as room:
        double = doubler()
        prepare(room)
        with us.observe() as seen:
            checked(driver.cuMemsetD8Async(room.x, 3, SIZE, handle(room.a)))
            double(room.a, room.x, room.x)
            us.wait_for_device(0)
            double(room.a, room.y, room.x)
            room.b.wait(room.a)
            double(room.a, room.y, room.x)
            double(room.b, room.pinned, room.x)  # both read it
            us.wait_for_device(0)
        assert seen.races == (), seen


def test_it_is_learned_of_what_is_always_done_in_place() -> None:
    with a_room() as room:
        double = doubler()
        prepare(room)
        with us.observe() as seen:
            for _ in range(5):
                double(room.a, room.x, room.x)
                us.wait_for_device(0)
            double(room.a, room.x, room.x)
            copy(room.pinned, room.x, room.b)
            us.wait_for_device(0)
            (race,) = seen.races
            assert (race.kind, race.first.known) == ("read after write", "learned")
            double(room.a, room.y, room.x)  # for once it is not
            copy(room.pinned, room.y, room.b)
            us.wait_for_device(0)
        assert [race.count for race in seen.races] == [2]  # both of the same lines


def test_a_launch_that_writes_what_was_there_takes_nothing_back() -> None:
    with a_room() as room:
        double = doubler()
        prepare(room)
        with us.observe() as seen:
            with latch(room.a):
                double(room.a, room.y, room.x)
                double(room.a, room.y, room.x)  # as soon as it is over, both are looked at
                fill(room.pinned, room.b)
            us.wait_for_device(0)
            assert seen.races == ()
            double(room.a, room.y, room.x)
            copy(room.pinned, room.y, room.b)
        (race,) = seen.races
    assert (race.kind, race.first.known) == ("read after write", "learned")


def test_it_is_learned_on_the_default_stream_too() -> None:
    with a_room() as room:
        double = doubler()
        with us.observe() as seen:
            for value in range(6):
                checked(driver.cuMemsetD8Async(room.x, value, SIZE, 0))
                double(us.Stream.legacy_default(), room.y, room.x)
                checked(driver.cuStreamSynchronize(0))
            double(us.Stream.legacy_default(), room.y, room.x)
            double(room.b, room.pinned, room.y)
        (race,) = seen.races
    assert (race.kind, race.first.known) == ("read after write", "learned")


def test_a_capture_survives_that_a_kernel_is_looked_at() -> None:
    with a_room() as room:
        double = doubler()
        blocking = room.stream(nonblocking=False)
        with us.observe():
            with blocking.capture() as builder:
                double(room.a, room.y, room.x)
            assert builder is not None


def test_two_kernels_that_write_race() -> None:
    with a_room() as room:
        double = doubler()
        with us.observe() as seen:
            learn(room, double)
            double(room.a, room.y, room.x)
            double(room.b, room.y, room.x)
        (race,) = seen.races
    assert (race.kind, race.address) == ("use after use", room.y)


def test_a_kernel_that_is_not_known_yet_is_sure_to_touch_what_it_gets() -> None:
    with a_room() as room:
        double = doubler()
        with us.observe(possible=True) as seen, latch(room.a), latch(room.b):
            fill(room.x, room.a)
            double(room.b, room.y, room.x)
            double(room.a, room.pinned, room.y)
            found = {(race.address, race.possible) for race in seen.races}
    assert (room.x, False) in found  # one side writes for sure
    assert (room.y, True) in found


@pytest.mark.parametrize("in_a_graph", [False, True])
def test_a_race_of_the_first_launch_is_reported_once_it_is_learned_that_it_writes(
    in_a_graph: bool,
) -> None:
    with a_room() as room:
        double = doubler()
        prepare(room)
        with us.observe() as seen:
            if in_a_graph:
                graph = captured(room, lambda: double(room.a, room.y, room.x))
                checked(driver.cuGraphLaunch(graph, handle(room.a)))
            else:
                double(room.a, room.y, room.x)
            copy(room.pinned, room.y, room.b)
            us.wait_for_device(0)
            if in_a_graph:
                assert seen.races == (), "it is not looked at there"
                fill(room.y, room.a)
                double(room.a, room.y, room.x)
                us.wait_for_device(0)
        (race,) = seen.races
    assert (race.kind, race.possible, race.count) == ("read after write", False, 1)
    assert (race.first.access, race.first.known) == ("write", "learned")
    assert (race.second.access, race.second.known) == ("read", "exact")
    with pytest.raises(us.RaceError):
        seen.check()


def test_a_race_of_the_first_launch_is_dropped_once_it_is_learned_that_it_reads() -> None:
    with a_room() as room, device_memory(0, 512) as source, us.observe(possible=True) as seen:
        reader = ObjectCode.from_ptx(b"any").get_kernel("observed_reader")
        one = LaunchConfig(grid=1, block=1)
        launch(room.a, one, reader, room.y, source, np.int64(512))
        copy(room.pinned, source, room.b, 512)
        us.wait_for_device(0)
        (race,) = seen.races  # it may have written the value that was there
        assert (race.possible, race.first.known) == (True, "assumed")
        for value in range(6):
            checked(driver.cuMemsetD8Async(source, value, 512, handle(room.a)))
            launch(room.a, one, reader, room.y, source, np.int64(512))
            room.a.sync()
        assert seen.races == ()


@kernel("apply<TensorListMetadata<2> >")
def _apply(grid: Any, block: Any, to: Pointer, other: Pointer) -> None:
    """As a kernel of PyTorch that takes a list of tensors; one pointer is left of a longer list."""
    del grid, block, other
    to.array(SIZE, np.uint8)[:] += 1


def test_what_a_table_of_pointers_has_left_over_is_only_possible() -> None:
    """It may be the address of anything: a race with that was reported in a training (H200)."""
    apply = ObjectCode.from_ptx(b"any").get_kernel("apply<TensorListMetadata<2> >")

    def work(room: Room) -> None:
        for _ in range(6):
            launch(room.a, LaunchConfig(grid=1, block=1), apply, room.y, room.x)
            room.a.sync()
        launch(room.a, LaunchConfig(grid=1, block=1), apply, room.y, room.x)
        fill(room.x, room.b)

    with a_room() as room:
        with us.observe() as seen:
            work(room)
        assert seen.races == (), seen
        with us.observe(possible=True) as seen:
            work(room)
        (race,) = seen.races
    assert race.possible
    assert (race.first.name, race.second.known) == ("apply<TensorListMetadata<2> >", "exact")


def test_what_a_table_of_pointers_names_hides_no_sure_access() -> None:
    apply = ObjectCode.from_ptx(b"any").get_kernel("apply<TensorListMetadata<2> >")
    with a_room() as room:
        double = doubler()
        with us.observe() as seen:
            learn(room, double)
            double(room.a, room.y, room.x)
            launch(room.a, LaunchConfig(grid=1, block=1), apply, room.y, room.x)
            fill(room.x, room.b)
        (race,) = seen.races
    assert (race.kind, race.first.name) == ("write after read", "observed_double")


def test_a_race_of_a_launch_of_which_nothing_is_learned_stays_possible() -> None:
    with a_room() as room, us.observe() as seen:
        with latch(room.a):
            doubler()(room.a, room.y, room.x)
            copy(room.pinned, room.y, room.b)
            seen.stop()
        us.wait_for_device(0)
        found = seen.as_dict()["possible"]
    assert "assumed" in [race["first"]["known"] for race in found]
    assert seen.races == ()


def test_a_held_stream_is_not_waited_for_in_order_to_learn() -> None:
    with a_room() as room:
        double = doubler()
        with us.observe() as seen, latch(room.a):
            for _ in range(50):
                double(room.a, room.y, room.x)
            assert not room.a.is_done
        assert seen.races == ()


def test_kernels_of_a_graph_race_with_what_is_outside() -> None:
    with a_room() as room:
        double = doubler()
        with us.observe() as seen:
            learn(room, double)
            graph = captured(room, lambda: double(room.a, room.y, room.x))
            room.a.wait(room.b)
            checked(driver.cuGraphLaunch(graph, handle(room.a)))
            fill(room.y, room.b)
        (race,) = seen.races
    assert race.kind == "write after use"
    first = race.first
    assert first.line is not None
    assert first.captured is not None
    assert first.name == "observed_double"
    assert (first.line.name, first.captured.name) == (
        "test_kernels_of_a_graph_race_with_what_is_outside",
        "doubler.<locals>.run",
    )
    file, text = Path(__file__).name, str(first)
    assert re.search(rf"in a graph launched at \S*{file}:{first.line.lineno} in ", text)
    assert re.search(rf"captured at \S*{file}:{first.captured.lineno} in doubler", text)


# -- names and addresses --------------------------------------------------------------------------


MANGLED = "_ZN8observed5scaleEPfPKf"


@kernel(MANGLED)
def scale(grid: Any, block: Any, to: Pointer, source: Pointer) -> None:
    del grid, block, to, source


WORDS = 4095  # as many as the parameters of a kernel may have; 64, and 8, are looked up together
TABLE = np.dtype([("words", "u8", (WORDS,))])


@kernel("observed_table")
def _table(grid: Any, block: Any, table: TABLE) -> None:  # type: ignore[valid-type]
    del grid, block, table


def user_of_tables(room: Room) -> Callable[..., None]:
    """Return a function that launches a kernel with addresses among other words."""
    function = int(ObjectCode.from_ptx(b"any").get_kernel("observed_table").handle)

    def run(*addresses: int) -> None:
        words = np.arange(WORDS, dtype="u8")
        words[WORDS - len(addresses) :] = addresses
        parameters = (ctypes.c_void_p * 1)(words.ctypes.data)
        shape = (1, 1, 1, 1, 1, 1, 0)
        where = ctypes.addressof(parameters)
        checked(driver.cuLaunchKernel(function, *shape, handle(room.b), where, 0))

    return run


def test_all_addresses_of_a_large_table_are_used(room: Room) -> None:
    with us.observe() as seen:
        user_of_tables(room)(*[room.x] * 250, room.y)
        fill(room.y, room.a)
        us.wait_for_device(0)
    assert [race.address for race in seen.races] == [room.y]


def test_a_launch_with_more_addresses_than_fit_is_told_of_as_lost(room: Room) -> None:
    with us.observe() as seen:
        user_of_tables(room)(*[room.x] * 4090)
    assert "calls that came faster than they could be analyzed (1)" in seen.not_seen


def test_an_address_is_found_wherever_one_word_changes(room: Room) -> None:
    use, words = user_of_tables(room), [*range(WORDS)]
    changes = (0, 7, 63, 64, 130, WORDS - 2, WORDS - 1)
    with us.observe() as seen:
        use(*words)
        for changed in changes:
            use(*words[:changed], room.y, *words[changed + 1 :])
            fill(room.y, room.a)
            us.wait_for_device(0)
    assert [(race.address, race.count) for race in seen.races] == [(room.y, len(changes))]


@pytest.mark.parametrize(
    "name",
    [
        *("cuMemAlloc_v2", "cuMemAllocPitch_v2", "cuMemHostRegister_v2"),
        *("cuIpcOpenMemHandle_v2", "cuMemPoolImportPointer", "cuExternalMemoryGetMappedBuffer"),
        *("cuGraphAddMemAllocNode", "cuGraphAddNode"),
    ],
)
def test_a_word_that_was_no_address_may_become_one(room: Room, name: str) -> None:
    """The driver reuses addresses, and the simulated one does not: memory of the host stands in."""
    size, within = 8 << 20, 5 << 20
    data, pitch = (ctypes.c_char * size)(), ctypes.c_uint64(1 << 20)
    address = ctypes.c_uint64(ctypes.addressof(data))
    words = [ctypes.addressof(address), size]
    if name == "cuMemAllocPitch_v2":
        words[1:] = ctypes.addressof(pitch), 1 << 20, 8, 4
    node = (ctypes.c_int32 * 64)(10)  # a CUgraphNodeParams: CU_GRAPH_NODE_TYPE_MEM_ALLOC
    if name.startswith("cuGraph"):
        words[1:] = 1, 0, 0, ctypes.addressof(node)
    word, use = address.value + within, user_of_tables(room)
    with us.observe() as seen:
        use(word)
        library, number = seen._recorder._library, 4000
        if name != "cuMemHostRegister_v2":  # what stands in for the driver goes unseen
            library.recorder_watch(number_of("cuMemHostRegister_v2"), b"cuEventDestroy_v2")
        checked(driver.cuMemHostRegister(address.value, size, 0))
        if name != "cuMemHostRegister_v2":
            library.recorder_watch(number, name.encode())
            for site in (0, 1):
                library.recorder_call(site, number, (ctypes.c_uint64 * 5)(*words), 5, 0, None)
        use(word)
        checked(driver.cuMemsetD8Async(word, 0, 8, handle(room.a)))
        us.wait_for_device(0)
        assert len(seen.races) == 1
        checked(driver.cuMemHostUnregister(address.value))


def number_of(name: str) -> int:
    """Return the number by which the simulated driver tells the recorder of a function."""
    symbol = ctypes.CDLL("libcuda.so.1").userstream_symbol
    symbol.restype = ctypes.c_char_p
    return next(number for number in itertools.count() if symbol(number) == name.encode())


def test_memory_may_be_mapped_at_a_word_that_was_no_address(room: Room) -> None:
    wanted, access = virtual_memory()
    least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    size = int(checked(driver.cuMemGetAllocationGranularity(wanted, least)))
    address = int(checked(driver.cuMemAddressReserve(2 * size, 0, 0, 0)))
    physical = checked(driver.cuMemCreate(size, wanted, 0))
    use = user_of_tables(room)
    with us.observe() as seen:
        use(address)
        for _ in range(2):
            checked(driver.cuMemMap(address + size, size, 0, physical, 0))
            checked(driver.cuMemUnmap(address + size, size))
        checked(driver.cuMemMap(address, size, 0, physical, 0))
        checked(driver.cuMemSetAccess(address, size, [access], 1))
        use(address)
        fill(address, room.a)
        us.wait_for_device(0)
        assert seen.not_seen == ()
        checked(driver.cuMemMap(address + size, size, 0, physical, 0))
        for each in (address, address + size):
            checked(driver.cuMemUnmap(each, size))
    checked(driver.cuMemRelease(physical))
    checked(driver.cuMemAddressFree(address, 2 * size))
    assert [race.address for race in seen.races] == [address]
    assert seen.not_seen == ("races at the second address of memory that is mapped twice (1)",)


def test_the_recorder_demangles_the_names_of_kernels(room: Room) -> None:
    if not ctypes.util.find_library("stdc++"):
        pytest.skip("needs the runtime of C++")
    function = ObjectCode.from_ptx(b"any").get_kernel(MANGLED)
    with us.observe() as seen:
        fill(room.x, room.a)
        launch(room.b, LaunchConfig(grid=1, block=1), function, room.x, room.y)
        assert {race.second.name for race in seen.races} == {"observed::scale"}


# -- beside other threads -------------------------------------------------------------------------


def observe_beside(work: Callable[[threading.Event], None], threads: int, times: int) -> None:
    """Begin and end observations while threads work, until an event ends them."""
    end = threading.Event()
    workers = [threading.Thread(target=work, args=(end,)) for _ in range(threads)]
    for worker in workers:
        worker.start()
    try:
        for _ in range(times):
            with us.observe() as seen:
                time.sleep(0.001)
            assert seen.races == (), seen
    finally:
        end.set()
        for worker in workers:
            worker.join()


def test_many_threads_call_while_it_begins_and_ends() -> None:
    def work(end: threading.Event) -> None:
        with a_room() as room:
            while not end.is_set():
                fill(room.x, room.a)
                room.b.wait(room.a)
                copy(room.y, room.x, room.b)
                room.a.wait(room.b)

    observe_beside(work, threads=16, times=20)


@kernel("observed_nothing")
def _nothing(grid: Any, block: Any, at: Pointer) -> None:
    pass


def test_many_threads_launch_while_it_begins_and_ends() -> None:
    """A launch of one observation may still be looked at when the next one begins."""
    code = ObjectCode.from_ptx(b"any")

    def work(end: threading.Event) -> None:
        with a_room() as room:
            kernels = [code.get_kernel(name) for name in ("observed_nothing", DOUBLE)]
            while not end.is_set():
                one = LaunchConfig(grid=1, block=1)
                launch(room.a, one, kernels[0], room.x)
                launch(room.a, one, kernels[1], room.y, room.x, np.int64(8))
                end.wait(0.02)  # or the others would get nowhere

    observe_beside(work, threads=64, times=8 if THOROUGH else 2)


def test_the_recorder_keeps_the_newest_of_the_memory_that_was_freed_in_stream_order() -> None:
    """The simulated driver gives no address twice."""
    with a_room() as room:
        nothing = ObjectCode.from_ptx(b"any").get_kernel("observed_nothing")
        freed = []
        with us.observe() as seen:
            for _ in range(4100):
                freed.append(int(checked(driver.cuMemAllocAsync(SIZE, handle(room.a)))))
                checked(driver.cuMemFreeAsync(freed[-1], handle(room.a)))
            for address in (freed[0], freed[-2000], freed[-1]):
                launch(room.a, LaunchConfig(grid=1, block=1), nothing, address)
    assert len(set(freed)) == len(freed)
    (race,) = seen.races
    assert (race.kind, race.count, race.address) == ("use after free", 2, freed[-2000])
