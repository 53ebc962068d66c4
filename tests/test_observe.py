"""`observe`: what is a race and what is none, in programs without kernels."""

from __future__ import annotations

import ctypes
import json
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver
from cuda.core import LaunchConfig, ObjectCode, launch

import userstream as us
from helpers import (
    checked,
    current_context,
    device_memory,
    pinned_memory,
    run_python,
)
from userstream import _driver
from userstream.testing import Pointer, kernel, latch, reset

pytestmark = [
    pytest.mark.simulated,  # the calls of a GPU cannot be seen yet
    pytest.mark.no_races(False),  # they watch themselves
]

SIZE = 4096
LEGACY = 1


class Room:
    """What a case works with: streams and memory of device 0, current there."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.a = self.stream()
        self.b = self.stream()
        self.x = stack.enter_context(device_memory(0, SIZE))
        self.y = stack.enter_context(device_memory(0, SIZE))
        self.pinned = stack.enter_context(pinned_memory(0, SIZE))
        self.latch: latch | None = None

    def stream(self, *, nonblocking: bool = True) -> us.Stream:
        return self._stack.enter_context(us.Stream.create(0, nonblocking=nonblocking))

    def hold(self, stream: us.Stream) -> None:
        """Hold a stream until the end of the case, or not: what is a race is one either way."""
        if random.random() < 0.5:
            self.latch = latch(stream)
            self.latch.__enter__()

    def release(self) -> None:
        if self.latch is not None:
            self.latch.release()


def handle(stream: us.Stream | int) -> int:
    return stream if isinstance(stream, int) else int(stream.handle)


def fill(address: int, stream: us.Stream | int, size: int = SIZE) -> None:
    checked(driver.cuMemsetD8Async(address, 7, size, handle(stream)))


def copy(to: int, source: int, stream: us.Stream | int, size: int = SIZE) -> None:
    checked(driver.cuMemcpyAsync(to, source, size, handle(stream)))


def overwrite(address: int, value: int) -> None:
    ctypes.memset(address, value, SIZE)


# -- what has to be reported --------------------------------------------------------------------


def no_edge(room: Room) -> str:
    room.hold(room.a)
    fill(room.x, room.a)
    copy(room.y, room.x, room.b)
    return "read after write"


def write_after_read(room: Room) -> str:
    room.hold(room.a)
    copy(room.y, room.x, room.a)
    fill(room.x, room.b)
    return "write after read"


def both_write(room: Room) -> str:
    room.hold(room.a)
    fill(room.x, room.a)
    fill(room.x + SIZE - 1, room.b, 1)
    return "write after write"


def event_too_early(room: Room) -> str:
    room.hold(room.a)
    event = room.a.record()
    fill(room.x, room.a)
    room.b.wait(event)
    copy(room.y, room.x, room.b)
    return "read after write"


def beside_the_legacy_stream(room: Room) -> str:
    room.hold(room.a)
    fill(room.x, room.a)
    copy(room.y, room.x, LEGACY)
    return "read after write"


def stream_0_inside_of_a_side_stream(room: Room) -> str:
    """As in `with torch.cuda.stream(side)`: what goes to stream 0 there is not ordered with it."""
    fill(room.x, 0)
    room.hold(room.a)
    copy(room.y, room.x, room.a)
    return "read after write"


def source_overwritten(room: Room) -> str:
    overwrite(room.pinned, 1)
    room.hold(room.a)
    copy(room.x, room.pinned, room.a)
    overwrite(room.pinned, 2)
    room.release()
    room.a.sync()
    return "host overwrote the source of a copy"


def source_overwritten_for_the_next_copy(room: Room) -> str:
    for value in range(3):
        overwrite(room.pinned, value)
        copy(room.x, room.pinned, room.a)
    return "host overwrote the source of a copy"


def freed_while_another_reads(room: Room) -> str:
    address = int(checked(driver.cuMemAllocAsync(SIZE, handle(room.a))))
    room.b.wait(room.a)
    with latch(room.a):  # it goes well this time
        copy(room.y, address, room.b)
        checked(driver.cuMemFreeAsync(address, handle(room.a)))
        room.b.sync()
    return "use after free"


def used_before_it_was_allocated(room: Room) -> str:
    address = int(checked(driver.cuMemAllocAsync(SIZE, handle(room.a))))
    with latch(room.b):  # it goes well this time
        fill(address, room.b)
        room.a.sync()
    room.a.wait(room.b)
    checked(driver.cuMemFreeAsync(address, handle(room.a)))
    return "use before allocation"


def a_buffer_that_was_not_borrowed(room: Room) -> str:
    room.hold(room.a)
    fill(room.x, room.a)
    with us.borrow(driver.CUdeviceptr(room.y), producer=None, stream=room.b):
        copy(room.y, room.x, room.b)
    return "read after write"


def acquired_and_not_released(room: Room) -> str:
    fill(room.x, room.a)
    stream = us.acquire(driver.CUdeviceptr(room.x), producer=room.a, stream=room.b)
    room.hold(room.b)
    copy(room.y, room.x, stream)
    fill(room.x, room.a)
    return "write after read"


def graph_beside_a_write(room: Room) -> str:
    graph = captured(room, lambda: copy(room.y, room.x, room.a))
    room.hold(room.b)
    fill(room.x, room.b)
    checked(driver.cuGraphLaunch(graph, handle(room.a)))
    return "read after write"


def inside_of_a_graph(room: Room) -> str:
    def work() -> None:
        room.b.wait(room.a)
        fill(room.x, room.a)
        copy(room.y, room.x, room.b)
        room.a.wait(room.b)

    captured(room, work)
    return "read after write"


def rows_of_two_copies_meet(room: Room) -> str:
    fill_rows(room.x, 16, 8, room.a)
    fill_rows(room.x + 15, 16, 8, room.b)
    return "write after write"


def housekeeping_is_no_order(room: Room) -> str:
    """What userstream asks an event for its own sake is not what the program knows."""
    fill(room.x, room.a)
    with us.borrow(driver.CUdeviceptr(room.x), producer=room.a, stream=room.b):
        fill(room.x, room.b)
    for _ in range(3):
        time.sleep(0.001)
        us.hold(object(), stream=room.b)  # looks, now and then, what it can let go of
    fill(room.x, room.stream())
    return "write after write"


def from_another_device(room: Room) -> str:
    fill(room.x, room.a)
    with us.Stream.create(1) as far:
        copy(room.y, room.x, far)
        far.sync()
    return "read after write"


REPORTED = [
    no_edge,
    write_after_read,
    both_write,
    event_too_early,
    beside_the_legacy_stream,
    stream_0_inside_of_a_side_stream,
    source_overwritten,
    source_overwritten_for_the_next_copy,
    freed_while_another_reads,
    used_before_it_was_allocated,
    a_buffer_that_was_not_borrowed,
    acquired_and_not_released,
    graph_beside_a_write,
    inside_of_a_graph,
    rows_of_two_copies_meet,
    housekeeping_is_no_order,
    from_another_device,
]


# -- what must not be reported ------------------------------------------------------------------


def an_edge(room: Room) -> None:
    fill(room.x, room.a)
    room.b.wait(room.a)
    copy(room.y, room.x, room.b)
    room.a.wait(room.b)
    fill(room.x, room.a)


def event_recorded_again(room: Room) -> None:
    event = checked(driver.cuEventCreate(0))
    fill(room.x, room.a)
    checked(driver.cuEventRecord(event, handle(room.a)))
    checked(driver.cuStreamWaitEvent(handle(room.b), event, 0))
    fill(room.y, room.a)
    checked(driver.cuEventRecord(event, handle(room.a)))
    copy(room.pinned, room.x, room.b)
    checked(driver.cuStreamWaitEvent(handle(room.b), event, 0))
    copy(room.pinned, room.y, room.b)
    checked(driver.cuEventDestroy(event))


def blocking_streams_around_the_legacy_one(room: Room) -> None:
    one, other = room.stream(nonblocking=False), room.stream(nonblocking=False)
    fill(room.x, one)
    copy(room.y, room.x, LEGACY)
    fill(room.x, other)
    fill(room.y, 2)  # that of this thread


def read_on_two_streams(room: Room) -> None:
    copy(room.y, room.x, room.a, SIZE // 2)
    copy(room.y + SIZE // 2, room.x, room.b, SIZE // 2)


def chunks_of_one_allocation(room: Room) -> None:
    half = SIZE // 2
    fill(room.x, room.a, half)
    fill(room.x + half, room.b, half)


def columns_of_one_matrix(room: Room) -> None:
    fill_rows(room.x, 16, 8, room.a)
    fill_rows(room.x + 16, 16, 8, room.b)


def address_used_again(room: Room) -> None:
    for stream in (room.a, room.b, room.a):
        address = int(checked(driver.cuMemAllocAsync(SIZE, handle(stream))))
        fill(address, stream)
        checked(driver.cuMemFreeAsync(address, handle(stream)))
    for stream in (room.a, room.b):
        with device_memory(0, SIZE) as address:
            fill(address, stream)


def freed_behind_the_reader(room: Room) -> None:
    address = int(checked(driver.cuMemAllocAsync(SIZE, handle(room.a))))
    room.b.wait(room.a)
    copy(room.y, address, room.b)
    room.a.wait(room.b)
    checked(driver.cuMemFreeAsync(address, handle(room.a)))


def pinned_block_used_again(room: Room) -> None:
    for value in range(3):
        overwrite(room.pinned, value)
        copy(room.x, room.pinned, room.a)
        event = room.a.record()
        while not event.is_done:
            pass


def one_waits_another_launches(room: Room) -> None:
    arrived: queue.Queue[int] = queue.Queue()

    def wait() -> None:
        checked(driver.cuStreamSynchronize(handle(room.a)))
        arrived.put(1)

    fill(room.x, room.a)
    thread = threading.Thread(target=wait)
    thread.start()
    arrived.get()
    copy(room.y, room.x, room.b)
    thread.join()


def borrowed(room: Room) -> None:
    fill(room.x, room.a)
    with us.borrow(driver.CUdeviceptr(room.x), producer=room.a) as stream:
        fill(room.x, stream)
    fill(room.x, room.a)


def waited_for(room: Room) -> None:
    for wait in (
        room.a.sync,
        lambda: us.wait_for_device(0),
        lambda: checked(driver.cuCtxSynchronize()),
        lambda: until(lambda: room.a.is_done),
    ):
        fill(room.x, room.a)
        wait()
        fill(room.x, room.b)
        room.b.sync()


def synchronous_copies(room: Room) -> None:
    blocking = room.stream(nonblocking=False)
    data = (ctypes.c_char * SIZE)()
    fill(room.x, blocking)
    checked(driver.cuMemcpyDtoH(ctypes.addressof(data), room.x, SIZE))
    fill(room.x, room.b)
    checked(driver.cuMemcpyDtoHAsync(ctypes.addressof(data), room.x, SIZE, handle(room.b)))
    fill(room.x, room.a)  # pageable: the copy was over when the call came back


def copied_to_the_host(room: Room) -> None:
    for stream in (room.a, room.b):
        fill(room.x, stream)
        us.asnumpy(view(room.x, stream))
        us.wait(stream)


def graph_in_order(room: Room) -> None:
    graph = captured(room, lambda: copy(room.y, room.x, room.a))
    fill(room.x, room.b)
    room.a.wait(room.b)
    checked(driver.cuGraphLaunch(graph, handle(room.a)))
    checked(driver.cuGraphLaunch(graph, handle(room.a)))
    room.b.wait(room.a)
    fill(room.x, room.b)


def captured_work_is_no_launch(room: Room) -> None:
    fill(room.x, room.b)
    captured(room, lambda: copy(room.y, room.x, room.a))


def forked_inside_of_a_graph(room: Room) -> None:
    def work() -> None:
        fill(room.x, room.a)
        room.b.wait(room.a)
        copy(room.y, room.x, room.b)
        room.a.wait(room.b)
        fill(room.x, room.a)

    graph = captured(room, work)
    checked(driver.cuGraphLaunch(graph, handle(room.a)))


def words_in_memory(room: Room) -> None:
    word = room.pinned + 64
    ctypes.c_uint32.from_address(word).value = 0
    fill(room.x, room.a)
    room.a.write_value_32(word, 1)
    room.b.wait_value_32(word, 1)
    copy(room.y, room.x, room.b)
    room.b.sync()
    room.a.wait_value_32(word, 2)  # it is written later
    copy(room.y, room.x, room.a)
    fill(room.y, room.b)
    room.b.write_value_32(word, 2)


def everything_in_the_context(room: Room) -> None:
    event = checked(driver.cuEventCreate(0))
    context = current_context()
    fill(room.x, room.a)
    checked(driver.cuCtxRecordEvent(context, event))
    checked(driver.cuCtxWaitEvent(context, event))
    copy(room.y, room.x, room.b)
    copy(room.pinned, room.x, room.stream())
    checked(driver.cuEventDestroy(event))


def stream_of_a_used_handle(room: Room) -> None:
    for _ in range(3):
        with us.Stream.create(0) as stream:
            fill(room.x, stream)
            stream.sync()


def another_device(room: Room) -> None:
    with us.Stream.create(1) as far, device_memory(1, SIZE) as there:
        fill(room.x, room.a)
        far.wait(room.a)
        copy(there, room.x, far)
        room.b.wait(far)
        fill(room.x, room.b)


def future_was_told(room: Room) -> None:
    fill(room.x, room.a)
    us.completion(room.a).result(10)
    fill(room.x, room.b)


def host_function_told(room: Room) -> None:
    told = threading.Event()
    fill(room.x, room.a)
    room.a.launch_host_func(told.set)
    told.wait(10)
    fill(room.x, room.b)


SILENT = [
    an_edge,
    event_recorded_again,
    blocking_streams_around_the_legacy_one,
    read_on_two_streams,
    chunks_of_one_allocation,
    columns_of_one_matrix,
    address_used_again,
    freed_behind_the_reader,
    pinned_block_used_again,
    one_waits_another_launches,
    borrowed,
    waited_for,
    synchronous_copies,
    copied_to_the_host,
    graph_in_order,
    captured_work_is_no_launch,
    forked_inside_of_a_graph,
    words_in_memory,
    everything_in_the_context,
    stream_of_a_used_handle,
    another_device,
    future_was_told,
    host_function_told,
]


# -- how ----------------------------------------------------------------------------------------


def until(done: Callable[[], bool]) -> None:
    while not done():
        pass


def fill_rows(address: int, width: int, height: int, stream: us.Stream) -> None:
    checked(driver.cuMemsetD2D8Async(address, 64, 7, width, height, handle(stream)))


def view(address: int, stream: us.Stream) -> Any:
    class Array:
        @property
        def __cuda_array_interface__(self) -> dict[str, Any]:
            return {
                "shape": (SIZE,),
                "typestr": "|u1",
                "data": (address, False),
                "version": 3,
                "stream": handle(stream),
            }

    return Array()


def captured(room: Room, work: Callable[[], None]) -> Any:
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    checked(driver.cuStreamBeginCapture(handle(room.a), relaxed))
    work()
    graph = checked(driver.cuStreamEndCapture(handle(room.a)))
    made = checked(driver.cuGraphInstantiate(graph, 0))
    checked(driver.cuGraphDestroy(graph))
    room._stack.callback(lambda: checked(driver.cuGraphExecDestroy(made)))
    return made


@contextmanager
def a_room() -> Iterator[Room]:
    with ExitStack() as stack:
        stack.enter_context(_driver.entered(_driver.primary_context(0)))
        room = Room(stack)
        try:
            yield room
        finally:
            room.release()
            for stream in (room.a, room.b):
                stream.sync()


def watched(case: Callable[[Room], Any]) -> tuple[us.Observation, Any]:
    with a_room() as room:
        with us.observe() as seen:
            expected = case(room)
            seen.stop()
            room.release()
    return seen, expected


@pytest.mark.parametrize("case", REPORTED)
def test_it_is_reported_with_both_lines(case: Callable[[Room], str]) -> None:
    seen, kind = watched(case)
    assert {race.kind for race in seen.races} == {kind}, seen
    for race in seen.races:
        for side in (race.first, race.second):
            assert side.line is not None
            assert side.line.filename == __file__
            assert side.stack[-1].name
    with pytest.raises(us.RaceError) as raised:
        seen.check()
    assert kind in str(raised.value)


@pytest.mark.parametrize("case", SILENT)
def test_it_is_not_reported(case: Callable[[Room], None]) -> None:
    seen, _ = watched(case)
    assert seen.races == (), seen
    seen.check()


def test_all_of_them_over_and_over_in_random_order() -> None:
    cases: list[Any] = [*REPORTED, *SILENT] * 5
    random.shuffle(cases)
    for case in cases:
        seen, kind = watched(case)
        kinds = {race.kind for race in seen.races}
        assert kinds == (set() if kind is None else {kind}), (case.__name__, str(seen))


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


# -- what users get -------------------------------------------------------------------------------


def test_the_report_has_both_lines_and_what_to_do() -> None:
    seen, _ = watched(no_edge)
    (race,) = seen.races
    text = str(seen)
    assert "1 race, " in text
    for side in (race.first, race.second):
        assert side.line is not None
        assert f"{__file__}:{side.line.lineno} in {side.line.name}" in text
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
    assert (
        race.key == "race=read-after-write first=test_observe.py:fill second=test_observe.py:copy"
    )
    file = tmp_path / "races.txt"
    for line, left in ((race.key, 0), ("race=*write", 0), ("first=other.py:*", 1), ("# none", 1)):
        file.write_text(f"# known\n\n{line}\n")
        for suppress in (file, str(file), [line]):
            with a_room() as room, us.observe(suppress=suppress) as seen:
                no_edge(room)
                seen.stop()
                room.release()
            assert len(seen.races) == left


@pytest.mark.parametrize("line", ["race", "kind=x", "race="])
def test_what_is_no_suppression_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match=f"'{line}' is no suppression"):
        us.observe(suppress=[line])


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(TypeError, match="stall must be seconds, an int or a float, not 'long'"):
        us.observe(stall="long")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="stall must be at least 0 seconds, not -1"):
        us.observe(stall=-1)
    with pytest.raises(TypeError, match="an iterable of lines"):
        us.observe(suppress=[1])  # type: ignore[list-item]
    seen = us.observe()
    with pytest.raises(RuntimeError, match="nothing was observed yet"):
        seen.races  # noqa: B018
    with seen, pytest.raises(RuntimeError, match="observed already"), us.observe():
        pass
    with pytest.raises(RuntimeError, match="used once"), seen:
        pass
    with pytest.raises(ValueError, match=r"saved as .json, not as 'seen.txt'"):
        seen.save("seen.txt")


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


def test_many_threads_call_while_it_begins_and_ends() -> None:
    end = threading.Event()

    def work() -> None:
        with a_room() as room:
            while not end.is_set():
                fill(room.x, room.a)
                room.b.wait(room.a)
                copy(room.y, room.x, room.b)
                room.a.wait(room.b)

    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        with us.observe() as seen:
            time.sleep(0.001)
        assert seen.races == (), seen
    end.set()
    for thread in threads:
        thread.join()


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
            os._exit(0 if seen.races == () else 1)
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
        except us.NotSupportedError as error:
            assert "simulate()" in str(error)
        else:
            raise AssertionError
        """,
        simulate=None,
    )
    assert done.returncode == 0, done.stderr


# -- kernels --------------------------------------------------------------------------------------


@kernel("observed_double")
def _double(grid: Any, block: Any, to: Pointer, source: Pointer, n: np.int64) -> None:
    to.array(n, np.uint8)[:] = source.array(n, np.uint8) * 2 + 1


def doubler() -> Callable[[us.Stream, int, int], None]:
    double = ObjectCode.from_ptx(b"any").get_kernel("observed_double")

    def run(stream: us.Stream, to: int, source: int) -> None:
        launch(stream, LaunchConfig(grid=1, block=1), double, to, source, np.int64(SIZE))

    return run


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
    assert race.first.known == "learned"
    assert race.second.known == "exact"


def test_two_kernels_that_write_race() -> None:
    with a_room() as room:
        double = doubler()
        with us.observe() as seen:
            learn(room, double)
            double(room.a, room.y, room.x)
            double(room.b, room.y, room.x)
        (race,) = seen.races
    assert (race.kind, race.address) == ("write after write", room.y)


def test_a_kernel_that_is_not_known_yet_is_sure_to_touch_what_it_gets() -> None:
    with a_room() as room:
        double = doubler()
        with us.observe(possible=True) as seen:
            fill(room.x, room.a)
            double(room.b, room.y, room.x)
            double(room.a, room.pinned, room.y)
        found = {(race.address, race.possible) for race in seen.races}
    assert (room.x, False) in found  # one side writes for sure
    assert (room.y, True) in found


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
    assert race.kind == "write after write"
    assert "observed_double in a graph launched at" in race.first.name


def test_memory_of_the_host_that_is_pinned_no_more_is_its_own_again() -> None:
    data = (ctypes.c_char * SIZE)()
    address = ctypes.addressof(data)
    with a_room() as room, us.observe() as seen:
        checked(driver.cuMemHostRegister(address, SIZE, 0))
        copy(address, room.x, room.a)
        checked(driver.cuMemHostUnregister(address))
        checked(driver.cuMemcpyDtoH(address, room.x, SIZE))
    assert seen.races == ()
