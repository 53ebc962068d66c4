"""`observe` on the simulated driver: reports, stalls, kernels, and what may go wrong."""

from __future__ import annotations

import ctypes
import ctypes.util
import json
import queue
import threading
from pathlib import Path
from traceback import FrameSummary
from typing import Literal

import pytest
from cuda.bindings import driver

import observed
import userstream as us
from helpers import (
    checked,
    run_python,
)
from internals import lose_calls
from observed import (
    SIZE,
    Room,
    a_room,
    copy,
    engine_of,
    event_too_early,
    fill,
    future_was_told,
    handle,
    host_function_told,
    needs_frames,
    no_edge,
    watched,
)
from userstream.testing import latch, reset

pytestmark = [
    pytest.mark.simulated,  # test_cases.py is for both
    pytest.mark.no_races(False),  # they watch themselves
    needs_frames,
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


def test_all_pairs_of_many_streams_in_no_order_are_counted() -> None:
    with a_room() as room, us.observe() as seen:
        for _ in range(50):
            fill(room.x, room.stream())
            copy(room.y, room.x, room.stream())
    assert sorted(race.count for race in seen.races) == [50 * 49 // 2, 50 * 49 // 2, 50 * 50]


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


# -- what is remembered ---------------------------------------------------------------------------


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
    library, number = seen._recorder._library, 4000
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
        fill(room.x, room.a)  # the recorder has forgotten it too, and tells of it anew
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
        lose_calls(seen, 3)
        copy(room.y, room.x, room.b)
        fill(room.x, room.a)
        assert [race.kind for race in seen.races] == ["write after read"]


def test_a_thread_that_python_does_not_know_is_watched_without_the_gil() -> None:
    """The GIL is held until that thread has ended: a callback that took it would never return."""
    holding_the_gil = ctypes.PyDLL(None)
    synchronize = ctypes.cast(ctypes.CDLL("libcuda.so.1").cuStreamSynchronize, ctypes.c_void_p)
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
