"""Programs that queue work on several streams, from one thread or several: for schedules.

As a program, print a digest of the traces of each one under some seeds.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import hashlib
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
from cuda.bindings import driver
from cuda.core import Device, LaunchConfig, ObjectCode, launch

import userstream as us
from helpers import checked, device_current, device_memory, pinned_memory
from userstream import testing

SIZE = 4096


class Room:
    """Streams of device 0, memory of the device, and memory of the host."""

    def __init__(self, streams: list[us.Stream], memory: int, pinned: int) -> None:
        self.streams = streams
        self.memory = memory
        self.pinned = pinned

    def place(self, number: int) -> int:
        return self.memory + number * SIZE

    def fill(self, number: int, stream: int, value: int = 1) -> None:
        with device_current(0):
            handle = self.streams[stream].handle
            checked(driver.cuMemsetD8Async(self.place(number), value, SIZE, handle))

    def copy(self, to: int, source: int, stream: int) -> None:
        handle = self.streams[stream].handle
        checked(driver.cuMemcpyAsync(self.place(to), self.place(source), SIZE, handle))

    def bytes(self, number: int) -> bytes:
        data = (ctypes.c_char * SIZE)()
        checked(driver.cuMemcpyDtoH(ctypes.addressof(data), self.place(number), SIZE))
        return bytes(data)

    def sync(self) -> None:
        for stream in self.streams:
            stream.sync()


@contextmanager
def a_room() -> Iterator[Room]:
    with device_current(0), device_memory(0, 8 * SIZE) as memory, pinned_memory(0, SIZE) as pinned:
        streams = [us.Stream.create(0) for _ in range(4)]
        checked(driver.cuMemsetD8(memory, 0, 8 * SIZE))
        checked(driver.cuCtxSynchronize())
        yield Room(streams, memory, pinned)
        for stream in streams:
            stream.close()


def unordered(room: Room) -> None:
    room.fill(0, 0, 1)
    room.copy(1, 0, 1)
    room.streams[1].sync()


def ordered(room: Room) -> None:
    room.fill(0, 0, 1)
    room.streams[1].wait(room.streams[0])
    room.copy(1, 0, 1)
    room.streams[1].sync()


# -- programs -------------------------------------------------------------------------------------


def edges(room: Room) -> None:
    room.fill(0, 0)
    room.fill(1, 1)
    room.streams[2].wait(room.streams[0])
    room.copy(2, 0, 2)
    room.copy(3, 1, 3)
    room.sync()


def a_worker(room: Room) -> None:
    """A thread that takes from one queue and puts into another."""
    todo: queue.Queue[int | None] = queue.Queue()
    done: queue.Queue[int] = queue.Queue()

    def work() -> None:
        while (number := todo.get()) is not None:
            room.fill(number, 1)
            room.copy(number + 1, number, 2)
            room.streams[2].sync()
            done.put(number)

    thread = threading.Thread(target=work)
    thread.start()
    for number in range(3):
        room.fill(5, 0)
        todo.put(number)
        room.copy(6, 5, 3)
    todo.put(None)
    assert [done.get(timeout=60) for _ in range(3)] == [0, 1, 2]
    thread.join()
    room.sync()


def three_consumers(room: Room) -> None:
    todo: queue.Queue[int | None] = queue.Queue()
    taken: list[int] = []
    lock = threading.Lock()

    def work() -> None:
        while (number := todo.get()) is not None:
            with lock:
                taken.append(number)
            room.fill(number, number % 4)
            room.copy(number + 1, number, (number + 1) % 4)
            room.streams[number % 4].sync()

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for item in (*range(6), *(None for _ in threads)):
        todo.put(item)
    for thread in threads:
        thread.join()
    assert sorted(taken) == [*range(6)]


def a_pool_of_threads(room: Room) -> None:
    def work(number: int) -> int:
        room.fill(number, number % 4)
        room.copy(number + 1, number, (number + 2) % 4)
        room.streams[(number + 2) % 4].sync()
        return number

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(work, range(5))) == [*range(5)]
        futures = [pool.submit(work, number) for number in range(3)]
        assert [future.result(60) for future in futures] == [0, 1, 2]


def a_barrier(room: Room) -> None:
    barrier = threading.Barrier(3)

    def work(number: int) -> None:
        room.fill(number, number)
        barrier.wait()
        room.copy(number + 4, number, number + 1)
        barrier.wait()
        room.streams[number + 1].sync()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def completions(room: Room) -> None:
    room.fill(0, 0)
    first = us.completion(room.streams[0])
    room.copy(2, 3, 1)
    room.fill(4, 2)
    first.result(60)
    room.copy(1, 0, 1)
    second = us.completion(room.streams[1])
    room.fill(5, 3)
    second.result(60)


def callbacks(room: Room) -> None:
    done: queue.Queue[int] = queue.Queue()
    for number in range(3):
        room.fill(number, number)
        us.completion(room.streams[number]).add_done_callback(lambda _, n=number: done.put(n))
        room.streams[number].add_callback(lambda *_, n=number: done.put(n))
    for number in [done.get(timeout=60) for _ in range(6)]:
        room.copy(5, number, number)
    room.sync()


def coroutines(room: Room) -> None:
    async def task(number: int) -> None:
        room.fill(number, number)
        await us.wait_async(room.streams[number])
        other = (number + 1) % 4
        room.copy(number + 4, number, other)
        await us.wait_async(room.streams[other])

    async def main() -> None:
        await asyncio.gather(*(task(number) for number in range(4)))

    asyncio.run(main())


def host_functions(room: Room) -> None:
    called: list[int] = []
    told = threading.Event()
    for number in range(3):
        room.fill(number, number)
        room.streams[number].launch_host_func(called.append, number, blocking=number != 1)
        room.copy(number + 1, number, number)
    room.streams[3].launch_host_func(told.set)
    assert told.wait(60)
    room.sync()


class Owner:
    """Memory that the destructor frees: the driver waits for all streams first."""

    def __init__(self) -> None:
        self.address = int(checked(driver.cuMemAlloc(SIZE)))

    def __del__(self) -> None:
        checked(driver.cuMemFree(self.address))


def keep(owner: Owner, future: object) -> None:
    """Keep an object for a future: a callback that does nothing."""


def three_held_streams(room: Room) -> ctypes.c_uint32:
    word = ctypes.c_uint32.from_address(room.pinned)
    word.value = 0
    for number in range(3):
        room.streams[number].wait_value_32(room.pinned, 1)
    for number in range(3):
        room.fill(number, number)
    return word


def called_back_and_called(room: Room) -> None:
    """Both threads of the library call the driver: for callbacks, and for a host function."""
    done: queue.Queue[int] = queue.Queue()

    def call(number: int) -> None:
        room.fill(number, 3)
        done.put(number)

    def called(number: int, future: object) -> None:
        call(number)

    word = three_held_streams(room)
    room.streams[0].launch_host_func(call, 4, blocking=False)
    futures = [us.completion(stream) for stream in room.streams[:3]]
    owner = Owner()
    futures[0].add_done_callback(functools.partial(keep, owner))
    for number in (1, 2):
        futures[number].add_done_callback(functools.partial(called, number + 4))
    room.streams[2].add_callback(lambda *_: call(7))
    del futures[0], owner
    word.value = 1
    room.fill(3, 3)
    assert sorted(done.get(timeout=60) for _ in range(4)) == [4, 5, 6, 7]
    for future in futures:
        future.result(60)
    room.sync()


def freed_by_the_library(room: Room) -> None:
    word = three_held_streams(room)
    futures = [us.completion(stream) for stream in room.streams[:3]]
    owner = Owner()
    futures[0].add_done_callback(functools.partial(keep, owner))
    del futures[0], owner
    word.value = 1
    room.fill(3, 3)
    room.sync()
    for future in futures:
        future.result(60)


def borrows(room: Room) -> None:
    one, other = room.streams[:2]
    x = Device(0).allocate(64, stream=one)
    y = Device(0).allocate(64, stream=other)
    x.fill(1, stream=one)
    with us.borrow(x, producer=one) as stream:
        y.copy_from(x, stream=stream)
    us.wait(x)
    host = us.asnumpy(y, producer=other)
    queued = us.asnumpy_async(x, producer=one)
    room.fill(1, 2)
    assert (queued.result() == 1).all()
    us.copyto(x, host)
    us.wait_for_device(0)
    for buffer in (x, y):
        buffer.close()


def a_sleeper(room: Room) -> None:
    told: list[int] = []

    def work() -> None:
        room.fill(0, 0)
        room.streams[0].sync()
        told.append(1)
        room.fill(1, 1)

    thread = threading.Thread(target=work)
    thread.start()
    while not told:
        time.sleep(0.001)
    room.fill(2, 2)
    thread.join()
    room.sync()


@testing.kernel("increment")
def increment(
    grid: tuple[int, int, int], block: tuple[int, int, int], x: testing.Pointer, n: np.int32
) -> None:
    x.array(n, np.uint8)[:] += 1


def kernels(room: Room) -> None:
    kernel = ObjectCode.from_ptx(b"any").get_kernel("increment")
    config = LaunchConfig(grid=1, block=1)
    for number in range(3):
        launch(room.streams[number], config, kernel, room.place(0), np.int32(8))
        launch(room.streams[number], config, kernel, room.place(number), np.int32(8))
    room.sync()


def graphs(room: Room) -> None:
    one, other = room.streams[:2]
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    checked(driver.cuStreamBeginCapture(one.handle, relaxed))
    room.fill(0, 0)
    other.wait(one)
    room.copy(1, 0, 1)
    room.fill(2, 0)
    one.wait(other)
    graph = checked(driver.cuStreamEndCapture(one.handle))
    executable = checked(driver.cuGraphInstantiate(graph, 0))
    room.fill(1, 2)
    for stream in room.streams[:2]:
        checked(driver.cuGraphLaunch(executable, stream.handle))
    room.sync()
    checked(driver.cuGraphExecDestroy(executable))
    checked(driver.cuGraphDestroy(graph))


def pools_and_devices(room: Room) -> None:
    one, other = room.streams[:2]
    address = int(checked(driver.cuMemAllocAsync(SIZE, one.handle)))
    other.wait(one)
    checked(driver.cuMemsetD8Async(address, 1, SIZE, other.handle))
    one.wait(other)
    checked(driver.cuMemFreeAsync(address, one.handle))
    with us.Stream.create(1) as far, device_memory(1, SIZE) as there:
        far.wait(other)
        checked(driver.cuMemcpyAsync(there, room.place(0), SIZE, far.handle))
        room.fill(1, 0)
        far.sync()
    room.sync()


def words(room: Room) -> None:
    word = room.pinned
    ctypes.c_uint32.from_address(word).value = 0
    room.streams[1].wait_value_32(word, 1)
    room.copy(1, 0, 1)
    room.fill(0, 0)
    room.streams[0].write_value_32(word, 1)
    room.fill(2, 2)
    room.sync()


PROGRAMS = [
    edges,
    a_worker,
    three_consumers,
    a_pool_of_threads,
    a_barrier,
    completions,
    callbacks,
    coroutines,
    host_functions,
    called_back_and_called,
    borrows,
    kernels,
    graphs,
    pools_and_devices,
    words,
]


def traces(program: Callable[[Room], object], room: Room, count: int) -> list[str]:
    """Return the orders that a program takes under the two extremes and some seeds."""
    found = []
    for seed in ("lazy", "eager", *range(count)):
        with testing.schedule(seed, length=30) as run:
            program(room)
        found.append(run.trace)
    return found


def main() -> None:
    testing.simulate(4)
    with a_room() as room:
        for program in PROGRAMS:
            found = "\n\n".join(traces(program, room, int(sys.argv[1])))
            print(program.__name__, hashlib.sha256(found.encode()).hexdigest())


if __name__ == "__main__":
    main()
