"""`observe` on the simulated driver: reports, stalls, kernels, and what may go wrong."""

from __future__ import annotations

import ctypes
import ctypes.util
import dataclasses
import itertools
import json
import queue
import re
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from traceback import FrameSummary
from typing import Any, Literal

import numpy as np
import pytest
from cuda.bindings import driver
from cuda.core import LaunchConfig, ObjectCode, launch

import observed
import userstream as us
from helpers import (
    THOROUGH,
    checked,
    device_memory,
    run_python,
)
from observed import (
    SIZE,
    Room,
    a_room,
    captured,
    copy,
    engine_of,
    event_too_early,
    fill,
    future_was_told,
    handle,
    host_function_told,
    no_edge,
    watched,
)
from userstream._observe import logger
from userstream._observe.judge import found, log, remedies
from userstream._observe.judge.launches import readable
from userstream._observe.judge.memory import READS, TOGETHER, WRITES, Guesses
from userstream.testing import Pointer, kernel, latch, reset
from userstream.testing._simulated import _side_door

pytestmark = [
    pytest.mark.simulated,  # test_observe_cases.py is for both
    pytest.mark.no_races(False),  # they watch themselves
    pytest.mark.skipif(
        sys.version_info >= (3, 14) and not logger.the_logger().has_stacks,
        reason="the frames of this version of Python cannot be read",
    ),
]


def test_an_observation_says_what_it_has_found() -> None:
    seen = us.observe()
    assert repr(seen) == "<userstream.Observation: new>"
    with a_room() as room, seen:
        assert repr(seen) == "<userstream.Observation: watches>"
        fill(room.x, room.a)
        copy(room.y, room.x, room.b)
    calls = sum(seen.as_dict()["calls"].values())
    assert repr(seen) == f"<userstream.Observation: 1 race, 0 stalls, {calls} driver calls>"


def test_memory_that_was_freed_is_not_used() -> None:
    with a_room() as room:
        address = int(checked(driver.cuMemAllocAsync(SIZE, handle(room.a))))
        with latch(room.a) as held:
            with us.observe() as seen:
                checked(driver.cuMemFreeAsync(address, handle(room.a)))
                copy(room.y, address, room.a)  # ordered, and wrong
            held.release()
            driver.cuStreamSynchronize(handle(room.a))
        reset()  # the GPU fails
    (race,) = seen.races
    assert (race.kind, race.first.access, race.second.access) == ("use after free", "free", "read")


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


MANGLED = "_ZN8observed5scaleEPfPKf"


@kernel(MANGLED)
def scale(grid: Any, block: Any, to: Pointer, source: Pointer) -> None:
    del grid, block, to, source


def scale_at(room: Room, address: int) -> None:
    function = ObjectCode.from_ptx(b"any").get_kernel(MANGLED)
    launch(room.b, LaunchConfig(grid=1, block=1), function, address, room.y)


@pytest.mark.parametrize("name", ["cuMemAlloc_v2", "cuMemAllocPitch_v2", "cuMemHostRegister_v2"])
def test_a_word_that_was_no_address_may_become_one(room: Room, name: str) -> None:
    """The driver reuses addresses, and the simulated one does not: memory of the host stands in."""
    size, within = 8 << 20, 5 << 20
    data, pitch = (ctypes.c_char * size)(), ctypes.c_uint64(1 << 20)
    address = ctypes.c_uint64(ctypes.addressof(data))
    words = [ctypes.addressof(address), size]
    if name == "cuMemAllocPitch_v2":
        words[1:] = ctypes.addressof(pitch), 1 << 20, 8, 4
    word = address.value + within
    with us.observe() as seen:
        scale_at(room, word)
        library, number = seen._logger._library, 4000
        if name != "cuMemHostRegister_v2":  # what stands in for the driver goes unseen
            library.recorder_watch(number_of("cuMemHostRegister_v2"), b"cuFabricCpyBatchAsync")
        checked(driver.cuMemHostRegister(address.value, size, 0))
        if name != "cuMemHostRegister_v2":
            library.recorder_watch(number, name.encode())
            for site in (0, 1):
                library.recorder_call(site, number, (ctypes.c_uint64 * 5)(*words), 5, 0, None)
        scale_at(room, word)
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
    wanted, access = driver.CUmemAllocationProp(), driver.CUmemAccessDesc()
    wanted.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.type = wanted.location.type
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    size = int(checked(driver.cuMemGetAllocationGranularity(wanted, least)))
    address = int(checked(driver.cuMemAddressReserve(size, 0, 0, 0)))
    physical = checked(driver.cuMemCreate(size, wanted, 0))
    with us.observe() as seen:
        scale_at(room, address)
        checked(driver.cuMemMap(address, size, 0, physical, 0))
        checked(driver.cuMemSetAccess(address, size, [access], 1))
        scale_at(room, address)
        fill(address, room.a)
        us.wait_for_device(0)
        checked(driver.cuMemUnmap(address, size))
    checked(driver.cuMemRelease(physical))
    checked(driver.cuMemAddressFree(address, size))
    assert [race.address for race in seen.races] == [address]


def test_the_recorder_demangles_the_names_of_kernels(room: Room) -> None:
    if not ctypes.util.find_library("stdc++"):
        pytest.skip("needs the runtime of C++")
    function = ObjectCode.from_ptx(b"any").get_kernel(MANGLED)
    with us.observe() as seen:
        fill(room.x, room.a)
        launch(room.b, LaunchConfig(grid=1, block=1), function, room.x, room.y)
        assert {race.second.name for race in seen.races} == {"observed::scale"}


# -- threads ---------------------------------------------------------------------------------------


def in_turns(room: Room, *, worker_comes_late: bool = False) -> None:
    """One thread waits for what it queued, and then another one queues; a queue tells it when."""
    told: queue.SimpleQueue[None] = queue.SimpleQueue()
    ready = threading.Event()

    def work() -> None:
        if not worker_comes_late:
            fill(room.y, room.b)
        ready.set()
        told.get()
        fill(room.x, room.b)

    worker = threading.Thread(target=work)
    worker.start()
    assert ready.wait(10)
    fill(room.x, room.a)
    driver.cuStreamSynchronize(handle(room.a))
    told.put(None)
    worker.join()


@pytest.mark.parametrize(
    ("threads", "late", "expected"),
    [
        ("shared", False, []),
        ("strict", False, ["write after write"]),
        ("strict", True, []),  # what it knows from the start cannot be seen, so it knows all
    ],
)
def test_what_a_thread_knows_of_anothers_wait(
    threads: Literal["shared", "strict"], late: bool, expected: list[str]
) -> None:
    with a_room() as room, us.observe(threads=threads) as seen:
        in_turns(room, worker_comes_late=late)
    assert [race.kind for race in seen.races] == expected


def test_a_strict_thread_knows_what_it_has_waited_for() -> None:
    with a_room() as room, us.observe(threads="strict") as seen:
        fill(room.x, room.a)
        driver.cuStreamSynchronize(handle(room.a))
        fill(room.x, room.b)
        room.a.wait(room.b)
        fill(room.x, room.a)
    assert seen.races == ()


def test_a_strict_observation_keeps_nothing_for_threads_that_ended() -> None:
    with a_room() as room, us.observe(threads="strict") as seen:
        in_turns(room)
        engine_of(seen)
        driver.cuStreamQuery(handle(room.a))
        assert len(seen.races) == 1
        assert len(engine_of(seen).world.clocks._hosts) == 1


def test_threads_are_shared_or_strict() -> None:
    with pytest.raises(ValueError, match='threads must be "shared" or "strict", not \'loose\''):
        us.observe(threads="loose")  # type: ignore[arg-type]


# -- what users get -------------------------------------------------------------------------------


def test_the_report_has_both_lines_and_what_to_do() -> None:
    seen, _ = watched(no_edge)
    (race,) = seen.races
    text = str(seen)
    assert "1 race, " in text
    for side in (race.first, race.second):
        assert side.line is not None
        assert f"{Path(observed.__file__).name}:{side.line.lineno} in {side.line.name}" in text
    assert race.advice in text
    assert (race.nbytes, race.memory, race.count) == (SIZE, "device", 1)
    assert (race.first.device, race.first.known, race.first.thread) == (0, "exact", "MainThread")
    assert "of device 0" in race.first.stream


def test_one_race_for_each_pair_of_lines() -> None:
    with a_room() as room, us.observe() as seen:
        for _ in range(5):
            no_edge(room)
            room.release()
            us.wait_for_device(0)
    (race,) = seen.races
    assert race.count == 5


def test_it_tells_until_where_the_two_were_in_order() -> None:
    seen, _ = watched(event_too_early)
    (race,) = seen.races
    assert race.ordered_until is None or race.ordered_until.name.startswith("cuStreamWaitValue")
    with a_room() as room, us.observe() as seen:
        copy(room.y, room.x, room.a)
        room.b.wait(room.a)
        fill(room.x, room.a)
        copy(room.pinned, room.x, room.b)
    (race,) = seen.races
    assert race.ordered_until is not None
    assert race.ordered_until.name == "cuMemcpyAsync"


def test_a_race_is_suppressed_by_its_own_line(tmp_path: Path) -> None:
    seen, _ = watched(no_edge)
    (race,) = seen.races
    assert race.key == ("race=read-write memory=device line=observed.py:copy line=observed.py:fill")
    file = tmp_path / "races.txt"
    for line, left in (
        (race.key, 0),
        ("race=*write", 0),
        ("line=other.py:*", 1),
        ("line=observed.py:copy line=observed.py:copy", 1),
        ("memory=pinned", 1),
        ("# none", 1),
    ):
        file.write_text(f"# known\n\n{line}\n")
        for suppress in (file, str(file), [line]):
            with a_room() as room, us.observe(suppress=suppress) as seen:
                no_edge(room)
                seen.stop()
                room.release()
            assert len(seen.races) == left


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
    (suppression,) = found.read_suppressions([race.key])
    assert found.covers(suppression, race)
    other = dataclasses.replace(race, second=dataclasses.replace(operation, name="b"))
    assert not found.covers(suppression, other)


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
        (suppression,) = found.read_suppressions([race.key])
        assert found.covers(suppression, race)
        assert not found.covers(found.Suppression(memory="pinned"), race)


def test_a_key_is_the_same_whichever_of_the_two_is_first() -> None:
    line = FrameSummary("a.py", 1, "f", lookup_line=False)
    one = us.Operation("copy", "read", "exact", "stream 1", 0, "main", line)
    other = us.Operation("fill", "write", "exact", "stream 2", 0, "main")
    races = [
        us.Race(kind, 1, 1, "device", (), None, *sides, None, False, 1, "")
        for kind, sides in (
            ("write after read", (one, other)),
            ("read after write", (other, one)),
        )
    ]
    assert {race.key for race in races} == {"race=read-write memory=device line=a.py:f line=fill"}


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


def test_a_quotation_that_does_not_end_is_refused_with_its_place(tmp_path: Path) -> None:
    file = tmp_path / "races.txt"
    file.write_text("# known\nfirst='a b\n")
    with pytest.raises(ValueError, match=r"races.txt:2: \"first='a b\" is not .* closing quot"):
        us.observe(suppress=file)


@pytest.mark.parametrize(
    "line",
    [
        *("race", "kind=x", "race=", "race=raed-write", "race=read", "memory=of-device"),
        *("line=a.py:f line=b.py:g line=c.py:h", "race=read-write race=write-write"),
    ],
)
def test_what_is_no_suppression_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="is not a suppression"):
        us.observe(suppress=[line])


def test_a_program_that_never_stops_keeps_nobody_from_looking(room: Room) -> None:
    end = threading.Event()

    def call() -> None:
        while not end.is_set():
            driver.cuStreamQuery(1)

    threads = [threading.Thread(target=call) for _ in range(2)]
    with us.observe() as seen:
        for thread in threads:
            thread.start()
        try:
            fill(room.x, room.a)
            fill(room.x, room.b)
            assert [race.kind for race in seen.races] == ["write after write"]
            assert ": 1 race, " in str(seen)
        finally:
            end.set()
            for thread in threads:
                thread.join()


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(TypeError, match="stall must be seconds, an int or a float, not 'long'"):
        us.observe(stall="long")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="stall must be at least 0 seconds, not -1"):
        us.observe(stall=-1)
    with pytest.raises(TypeError, match="an iterable of lines"):
        us.observe(suppress=[1])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="an iterable of lines"):
        us.observe(suppress=1)  # type: ignore[arg-type]
    seen = us.observe()
    with pytest.raises(RuntimeError, match="nothing has been observed yet"):
        seen.races  # noqa: B018
    with seen, pytest.raises(RuntimeError, match="already being observed"), us.observe():
        pass
    with pytest.raises(RuntimeError, match="used once"), seen:
        pass
    with pytest.raises(ValueError, match=r"saved as .html, .* or .txt, not as 'seen.xml'"):
        seen.save("seen.xml")


def test_all_of_it_is_saved(tmp_path: Path) -> None:
    seen, _ = watched(no_edge)
    seen.save(tmp_path / "seen.json")
    document = json.loads((tmp_path / "seen.json").read_text())
    (race,) = document["races"]
    assert race["kind"] == "read after write"
    assert race["first"]["stack"][-1][2] == "fill"
    assert document["calls"]["cuMemsetD8Async"] == 1


def test_a_stall_has_its_line_and_its_time() -> None:
    with a_room() as room, us.observe() as seen:
        with latch(room.a) as held:
            timer = threading.Timer(0.05, held.release)
            timer.start()
            checked(driver.cuStreamSynchronize(handle(room.a)))
        timer.join()
    (stall,) = [each for each in seen.stalls if each.name == "cuStreamSynchronize"]
    assert stall.seconds >= 0.04
    assert stall.line is not None
    assert stall.line.name == "test_a_stall_has_its_line_and_its_time"
    assert str(stall) in str(seen)


def test_what_may_be_in_order_is_possible_alone() -> None:
    for case in (future_was_told, host_function_told):
        with a_room() as room, us.observe(possible=True) as seen:
            case(room)
        (race,) = seen.races
        assert race.possible
        assert str(race).startswith("possible ")


def test_a_result_that_nobody_waited_for_is_possibly_read_too_early() -> None:
    with a_room() as room:
        with us.observe(possible=True) as seen:
            copy(room.pinned, room.x, room.a)
        with us.observe(possible=True) as waited:
            copy(room.pinned, room.x, room.a)
            room.a.sync()
    assert [race.kind for race in seen.races] == ["host read before the copy"]
    assert waited.races == ()


def test_user_streams_are_named() -> None:
    with a_room() as room:
        stream = us.get_stream(0, name="side")
        with us.observe() as seen:
            fill(room.x, room.a)
            fill(room.x, stream)
            assert "user stream 'side'" in seen.races[0].second.stream


def test_streams_that_are_gone_count() -> None:
    with a_room() as room, us.observe() as seen:
        for _ in range(2):
            with us.Stream.create(0) as stream:
                fill(room.x, stream)
                stream.sync(timeout=20)
    assert "on 2 streams" in str(seen)


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


def test_it_is_not_loaded_until_it_is_used() -> None:
    done = run_python(
        """
        import sys
        import userstream as us
        us.wait(us.get_stream(0))
        assert not [name for name in sys.modules if name.startswith("userstream._observe")]
        us.observe
        assert "userstream._observe" in sys.modules
        """
    )
    assert done.returncode == 0, done.stderr


def test_a_forked_child_and_an_exit_go_on() -> None:
    done = run_python(
        """
        import os
        import userstream as us
        from cuda.bindings import driver

        seen = us.observe().__enter__()
        stream = us.get_stream(0)
        child = os.fork()
        if child == 0:
            driver.cuDriverGetVersion()
            refused = 0
            for use in (us.observe, lambda: seen.races, lambda: print(seen), seen.as_dict):
                try:
                    use()
                except us.ForkedError:
                    refused += 1
            seen.stop()
            os._exit(0 if refused == 4 else 1)
        assert os.waitpid(child, 0)[1] == 0
        us.wait(stream)
        """
    )
    assert done.returncode == 0, done.stderr


def test_without_the_simulated_driver_it_says_what_is_missing() -> None:
    done = run_python(
        """
        import userstream as us
        try:
            us.observe().__enter__()
        except us.DriverNotFoundError as error:
            assert "simulate()" in str(error)
        else:
            raise AssertionError
        """,
        simulate=None,
    )
    assert done.returncode == 0, done.stderr


# -- kernels --------------------------------------------------------------------------------------


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


def test_memory_of_the_host_that_is_pinned_no_more_is_its_own_again() -> None:
    data = (ctypes.c_char * SIZE)()
    address = ctypes.addressof(data)
    with a_room() as room, us.observe() as seen:
        checked(driver.cuMemHostRegister(address, SIZE, 0))
        copy(address, room.x, room.a)
        checked(driver.cuMemHostUnregister(address))
        checked(driver.cuMemcpyDtoH(address, room.x, SIZE))
    assert seen.races == ()


def told(seen: us.Observation, name: str, *words: int) -> None:
    """Let the recorder be told of a call that the simulated driver does not have."""
    library, number = seen._logger._library, 4000
    library.recorder_watch(number, name.encode())
    library.recorder_call(0, number, (ctypes.c_uint64 * len(words))(*words), len(words), 0, None)


def test_memory_that_is_unmapped_is_unknown_wherever_it_was_cut() -> None:
    with a_room() as room, us.observe() as seen:
        fill(room.x, room.a)
        fill(room.y, room.a)
        begin, end = sorted((room.x, room.y))
        told(seen, "cuMemUnmap", begin + 1, end - begin)
        memory = engine_of(seen).world.memory
        assert (memory.find(room.x), memory.find(room.y)) == (None, None)
        fill(room.x, room.a)  # the logger has forgotten it too, and tells of it anew
        fill(room.y, room.a)
        engine_of(seen)
        assert None not in (memory.find(room.x), memory.find(room.y))
        told(seen, "cuIpcCloseMemHandle", room.x)
        engine_of(seen)
        assert memory.find(room.x) is None
        assert memory.find(room.y) is not None


def test_what_was_freed_into_a_pool_goes_with_it() -> None:
    properties = driver.CUmemPoolProps()
    properties.allocType = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    with a_room() as room, us.observe() as seen:
        pool = checked(driver.cuMemPoolCreate(properties))
        one, other = (
            int(checked(driver.cuMemAllocFromPoolAsync(SIZE, pool, handle(room.a))))
            for _ in range(2)
        )
        checked(driver.cuMemFreeAsync(one, handle(room.a)))
        memory = engine_of(seen).world.memory
        assert memory.find(one) is not None
        room.a.sync()
        checked(driver.cuMemPoolDestroy(pool))
        engine_of(seen)
        assert memory.find(one) is None
        assert memory.find(other) is not None  # its memory stays until it is freed
        checked(driver.cuMemFreeAsync(other, handle(room.a)))


def test_what_is_remembered_does_not_grow() -> None:
    with a_room() as room, us.observe() as seen:
        for _ in range(2000):  # the host waits for none of it
            fill(room.x, room.a)
            room.b.wait(room.a)
            copy(room.y, room.x, room.b)
            room.a.wait(room.b)
        world = engine_of(seen).world
        accesses = [*world.memory, world.memory.elsewhere]
        assert sum(len(each.accesses) for each in accesses) < 10
        room.a.sync()
        for _ in range(100):
            stream = us.Stream.create(0)
            fill(room.x, stream)
            room.a.wait(stream)
            event = room.a.record()
            stream.sync()
            stream.close()
            room.b.sync()  # the stream is forgotten, and the event still knows of it
            event.sync()
        world = engine_of(seen).world
        assert seen.races == ()
        assert len(list(world.clocks.lanes())) < 10
        assert len(world.clocks._host.clock) < 10
        assert len(world.clocks.known_to_any_thread) < 10


def test_only_what_comes_before_lost_calls_counts_as_ordered() -> None:
    """An edge may be among the calls that are missing."""
    with a_room() as room, us.observe() as seen:
        fill(room.x, room.a)
        seen._logger.note(log.LOST, [3])
        copy(room.y, room.x, room.b)
        fill(room.x, room.a)
        assert [race.kind for race in seen.races] == ["write after read"]


def test_a_thread_that_python_does_not_know_is_watched_without_the_gil() -> None:
    """The GIL is held until that thread has ended: a callback that took it would never return."""
    holding_the_gil = ctypes.PyDLL(None)
    synchronize = ctypes.cast(_side_door("a test").cuStreamSynchronize, ctypes.c_void_p)
    thread = ctypes.c_ulong()
    with a_room() as room:
        fill(room.x, room.a)
        with us.observe() as seen:
            arguments = (ctypes.byref(thread), None, synchronize, ctypes.c_void_p(handle(room.a)))
            assert holding_the_gil.pthread_create(*arguments) == 0
            assert holding_the_gil.pthread_join(thread, None) == 0
            fill(room.x, room.b)
        assert seen.races == ()
        assert seen.as_dict()["calls"]["cuStreamSynchronize"] == 1
