"""Programs of a few calls: which of them have a race, for `observe` to tell."""

from __future__ import annotations

import cProfile
import ctypes
import itertools
import json
import queue
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from io import FileIO
from pathlib import Path
from typing import Any, Literal

import pytest
from cuda.bindings import driver

import userstream as us
from helpers import checked, current_context, device_current, device_memory, pinned_memory
from userstream._observe import recording
from userstream._observe.judge import Judge, judged
from userstream._observe.judging import InThread
from userstream.testing import latch

SIZE = 4096
LEGACY = 1

# Reports need the frames of a program, which the recorder reads only where it knows their layout.
needs_frames = pytest.mark.skipif(
    sys.version_info >= (3, 14) and not recording.the_recorder().has_stacks,
    reason="the frames of this version of Python cannot be read",
)


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

    def stream(self, *, nonblocking: bool = True, sms: int | None = None) -> us.Stream:
        made = us.Stream.create(0, nonblocking=nonblocking, sms=sms)
        return self._stack.enter_context(made)

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


# Each fill of a case writes another value, and an even one: what the kernels of cases write is odd.
_values = itertools.count(2, 2)


def fill(address: int, stream: us.Stream | int, size: int = SIZE) -> None:
    value = next(_values) % 256
    checked(driver.cuMemsetD8Async(address, value, size, handle(stream)))


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
    return "freed while in use"


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


def two_graphs_of_the_same_work(room: Room) -> str:
    graphs = [captured(room, lambda: fill(room.x, room.a)) for _ in range(2)]
    for graph, stream in zip(graphs, (room.a, room.b), strict=True):
        checked(driver.cuGraphLaunch(graph, handle(stream)))
    return "write after write"


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


def waited_for_too_early(room: Room) -> str:
    fill(room.y, room.a)
    checked(driver.cuStreamSynchronize(handle(room.a)))
    room.hold(room.a)
    fill(room.x, room.a)
    fill(room.x, room.b)
    return "write after write"


def polled_an_event_recorded_too_early(room: Room) -> str:
    event = checked(driver.cuEventCreate(0))
    checked(driver.cuEventRecord(event, handle(room.a)))
    room.hold(room.a)
    fill(room.x, room.a)
    until(lambda: checked_or_busy(driver.cuEventQuery(event)))
    copy(room.y, room.x, room.b)
    checked(driver.cuEventDestroy(event))
    return "read after write"


def the_default_stream_waits_for_no_non_blocking_one(room: Room) -> str:
    room.hold(room.a)
    fill(room.x, room.a)
    checked(driver.cuStreamSynchronize(LEGACY))
    fill(room.x, room.b)
    return "write after write"


def a_fill_that_takes_no_stream(room: Room) -> str:
    """The host does not wait for it, and non-blocking streams are not ordered behind it."""
    checked(driver.cuMemsetD8(room.x, 7, SIZE))
    copy(room.y, room.x, room.a)
    return "read after write"


def waited_for_another_device(room: Room) -> str:
    fill(room.x, room.a)
    with device_current(1):
        checked(driver.cuCtxSynchronize())
    fill(room.x, room.b)
    return "write after write"


def housekeeping_inside_of_a_wait_for_something_else(room: Room) -> str:
    with us.borrow(view(room.x, room.a), stream=room.a):
        fill(room.x, room.a)
    us.hold(object(), stream=room.a)
    time.sleep(0.001)
    us.asnumpy(view(room.y, room.b), stream=room.b)  # lets go of what was held as well
    us.wait(room.b)
    fill(room.x, room.b)
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
    two_graphs_of_the_same_work,
    inside_of_a_graph,
    rows_of_two_copies_meet,
    housekeeping_is_no_order,
    housekeeping_inside_of_a_wait_for_something_else,
    waited_for_too_early,
    polled_an_event_recorded_too_early,
    the_default_stream_waits_for_no_non_blocking_one,
    a_fill_that_takes_no_stream,
    waited_for_another_device,
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
    copy(room.y, room.x, room.a)
    copy(room.pinned, room.x, room.b)
    room.b.sync()


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


def graph_on_two_streams(room: Room) -> None:
    """Its launches run one after the other, and what comes before and after them too."""
    graph = captured(room, lambda: copy(room.x, room.y, room.a))
    fill(room.y, room.a)
    for stream in (room.a, room.b):
        checked(driver.cuGraphLaunch(graph, handle(stream)))
    fill(room.y, room.b)


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


def stream_that_goes_during_a_capture(room: Room) -> None:
    def work() -> None:
        fill(room.x, room.a)
        room.a.record(event)
        with us.Stream.create(0) as stream:
            fill(room.pinned, stream)
            stream.sync()
        room.stream().sync()
        room.b.wait(event)
        copy(room.y, room.x, room.b)
        room.a.wait(room.b)

    event = room.a.record()
    captured(room, work)


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


def everything_in_a_part_of_the_device(room: Room) -> None:
    """A green context belongs to the primary one, but is what the driver says of its streams."""
    part = room.stream(sms=16)
    fill(room.x, part)
    with us.borrow(driver.CUdeviceptr(room.x), stream=room.a, producer="device"):
        fill(room.x, room.a)
    fill(room.x, part)
    us.wait_for_device(0)
    fill(room.x, room.b)


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


def freeing_waits(room: Room) -> None:
    fill(room.x, room.a)
    with device_memory(0, SIZE):
        pass  # cuMemFree waits for the device
    fill(room.x, room.b)


def source_overwritten_by_the_gpu(room: Room) -> None:
    overwrite(room.pinned, 1)
    fill(room.x, room.a)
    copy(room.y, room.pinned, room.a)
    copy(room.pinned, room.x, room.a)
    room.a.sync()


def polled_a_stream(room: Room) -> None:
    fill(room.x, room.a)
    until(lambda: checked_or_busy(driver.cuStreamQuery(handle(room.a))))
    fill(room.x, room.b)


def polled_an_event(room: Room) -> None:
    event = checked(driver.cuEventCreate(0))
    fill(room.x, room.a)
    checked(driver.cuEventRecord(event, handle(room.a)))
    until(lambda: checked_or_busy(driver.cuEventQuery(event)))
    copy(room.y, room.x, room.b)
    checked(driver.cuEventDestroy(event))


def waited_for_an_event_that_does_not_spin(room: Room) -> None:
    event = checked(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_BLOCKING_SYNC))
    fill(room.x, room.a)
    checked(driver.cuEventRecord(event, handle(room.a)))
    checked(driver.cuEventSynchronize(event))
    fill(room.x, room.b)
    checked(driver.cuEventDestroy(event))


def the_default_stream_waits_for_blocking_ones(room: Room) -> None:
    fill(room.x, room.stream(nonblocking=False))
    checked(driver.cuStreamSynchronize(LEGACY))
    fill(room.x, room.b)


def work_on_the_default_stream_comes_between(room: Room) -> None:
    fill(room.x, room.stream(nonblocking=False))
    fill(room.y, LEGACY)
    checked(driver.cuStreamSynchronize(LEGACY))
    checked(driver.cuStreamSynchronize(LEGACY))
    copy(room.y, room.x, room.b)


def a_fill_of_pinned_memory_waits(room: Room) -> None:
    checked(driver.cuMemsetD8(room.pinned, 7, SIZE))
    copy(room.x, room.pinned, room.a)


def rows_copied_to_the_host(room: Room) -> None:
    shape = driver.CUDA_MEMCPY2D()
    shape.srcMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    shape.srcDevice, shape.srcPitch = room.x, 64
    shape.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_HOST
    shape.dstHost, shape.dstPitch = room.pinned, 64
    shape.WidthInBytes, shape.Height = 16, 8
    fill(room.x, LEGACY)
    checked(driver.cuMemcpy2D(shape))
    fill(room.x, room.b)


def between_two_places_of_the_host(room: Room) -> None:
    """Such a copy waits, whatever it is called."""
    half = SIZE // 2
    overwrite(room.pinned, 1)
    copy(room.pinned + half, room.pinned, room.a, half)
    copy(room.x, room.pinned + half, room.b, half)


def future_was_told(room: Room) -> None:
    told = threading.Event()  # by a thread that has seen it: the caller has not
    with latch(room.a):
        fill(room.x, room.a)
        us.completion(room.a).add_done_callback(lambda _: told.set())
    told.wait(10)
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
    graph_on_two_streams,
    captured_work_is_no_launch,
    forked_inside_of_a_graph,
    stream_that_goes_during_a_capture,
    words_in_memory,
    everything_in_the_context,
    everything_in_a_part_of_the_device,
    stream_of_a_used_handle,
    another_device,
    freeing_waits,
    source_overwritten_by_the_gpu,
    polled_a_stream,
    polled_an_event,
    waited_for_an_event_that_does_not_spin,
    the_default_stream_waits_for_blocking_ones,
    work_on_the_default_stream_comes_between,
    a_fill_of_pinned_memory_waits,
    rows_copied_to_the_host,
    between_two_places_of_the_host,
    future_was_told,
    host_function_told,
]


# -- how ----------------------------------------------------------------------------------------


def until(done: Callable[[], bool]) -> None:
    while not done():
        pass


def checked_or_busy(answer: tuple[driver.CUresult]) -> bool:
    """Tell whether a query says that the work is done."""
    if answer[0] == driver.CUresult.CUDA_ERROR_NOT_READY:
        return False
    checked(answer)
    return True


def fill_rows(address: int, width: int, height: int, stream: us.Stream) -> None:
    value = next(_values) % 256
    checked(driver.cuMemsetD2D8Async(address, 64, value, width, height, handle(stream)))


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
    global _values  # noqa: PLW0603 - of the present case
    _values = itertools.count(2, 2)
    with ExitStack() as stack:
        stack.enter_context(device_current(0))
        room = Room(stack)
        try:
            yield room
        finally:
            room.release()
            for stream in (room.a, room.b):
                stream.sync()


def engine_of(seen: us.Observation) -> Any:
    """Return the state of the analysis, up to what has been called until now."""
    seen.races  # noqa: B018 -- asks, so that the log is applied until now
    assert isinstance(seen._judging, InThread)
    return seen._judging.judge._engine


def watched(
    case: Callable[[Room], Any], judge: Literal["thread", "process"] = "thread"
) -> tuple[us.Observation, Any]:
    with a_room() as room, tempfile.TemporaryDirectory() as directory:
        log = Path(directory, "run.uslog")
        with us.observe(log=log, judge=judge) as seen:
            expected = case(room)
            seen.stop()
            room.release()
        assert findings_of(log) == without_time(seen.as_dict())
    return seen, expected


def judge_of(log: Path, **options: Any) -> Judge:
    with open(log, "rb") as file:
        return judged(file, Judge(**options))


class _Pieces(FileIO):
    """A log that comes a few records at a time."""

    def read(self, size: int = -1, /) -> bytes:
        return super().read(min(size, 1000))


def calls_of_judge(log: Path) -> tuple[Judge, Counter[str]]:
    """Return a judge of a log, and how often it called its functions, by their names."""
    with _Pieces(log) as pieces, cProfile.Profile() as profile:
        judge = judged(pieces, Judge())
    calls = Counter[str]()
    for each in profile.getstats():
        if not isinstance(each.code, str) and "_observe/judge" in each.code.co_filename:
            calls[each.code.co_name] += each.callcount
    return judge, calls


def findings_of(log: Path) -> dict[str, Any]:
    """Return the findings of a judge that knows the log alone."""
    return without_time(judge_of(log).report().document())


def without_time(document: dict[str, Any]) -> dict[str, Any]:
    """Return findings as JSON would give them back, without how long was watched."""
    found: dict[str, Any] = json.loads(json.dumps(document))
    for each in (found, *found["processes"]):
        del each["seconds"]
    return found
