"""Cost as the work grows: devices, names, threads, producers, buffers, and a million calls."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cuda.core import Device

import userstream as us
from benchmarks.finding import POINTER, pointer_of
from benchmarks.harness import Comparison, Comparisons, Run, Skipped, case, timed
from benchmarks.limits import at_most, no_more_than, shown
from benchmarks.ordering import borrowing
from benchmarks.work import Interface

# "Flat" leaves room for what a machine that others use adds to one of two equal things.
FLAT = 1.25
NBYTES = 64
BATCH = 100


@contextlib.contextmanager
def arrays(streams: Sequence[Any], device: int = 0) -> Iterator[list[Interface]]:
    """Yield an array for each stream of a device, in memory of their own."""
    with Device(device).allocate(NBYTES * len(streams), stream=streams[0]) as memory:
        streams[0].sync()
        address = int(memory.handle)
        yield [Interface(address + n * NBYTES, NBYTES, each) for n, each in enumerate(streams)]
        us.wait(us.get_stream(device))


def each_of(calls: Sequence[Callable[[], Any]]) -> Callable[[], None]:
    def all_of_them() -> None:
        for call in calls:
            call()

    return all_of_them


@case
def devices(run: Run) -> Comparisons:
    del run
    count = len(Device.get_all_devices())
    if count < 2:
        raise Skipped("needs a second GPU")
    buffers = []
    try:
        for device in map(Device, range(count)):
            device.set_current()
            buffers.append(device.allocate(NBYTES, stream=device.create_stream()))
    finally:
        Device(0).set_current()  # for the next case, whatever happens here
    every = [lambda buffer=buffer: us.get_stream(buffer) for buffer in buffers]
    alone = f"{count} buffers on one device"
    yield Comparison(
        f"get_stream on {count} devices",
        {f"{count} buffers on {count} devices": each_of(every), alone: each_of(every[:1] * count)},
        (at_most(FLAT, alone),),
    )


@case
def names(run: Run) -> Comparisons:
    del run
    every = [lambda name=f"growth {n}": us.get_stream(0, name=name) for n in range(64)]
    alone = "get_stream(0, name=) of one name"
    yield Comparison(
        "get_stream of 64 names",
        {"get_stream(0, name=) of 64 names": each_of(every), alone: each_of(every[:1] * 64)},
        (at_most(FLAT, alone),),
        number=100,
    )


def in_threads(count: int, call: Callable[[], Any], calls: int) -> float:
    """Share calls out among threads; return what one takes, from first begin to last end."""
    barrier = threading.Barrier(count)
    spans: list[tuple[float, float]] = []

    def work() -> None:
        barrier.wait()
        begin = time.perf_counter()
        for _ in range(calls // count):
            call()
        spans.append((begin, time.perf_counter()))

    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return (max(end for _, end in spans) - min(begin for begin, _ in spans)) / calls


@case
def threads(run: Run) -> Comparisons:
    calls = run.scaled(320_000, 3200)
    with Device(0).allocate(NBYTES, stream=Device(0).create_stream()) as buffer:

        def look() -> us.Stream:
            return us.get_stream(buffer)

        yield Comparison(
            "get_stream in 32 threads",
            {f"threads: {count}": partial(in_threads, count, look, calls) for count in (32, 8, 1)},
            (at_most(FLAT, "threads: 1"),),
            rounds=7,
            returns=True,
        )
    # Where the driver is asked, the call lets another thread run, as the bare call does.
    with arrays([Device(0).create_stream()]) as (array,):
        find, ask = lambda: us.get_stream(array), pointer_of(array)
        for count in (32, 1):
            yield Comparison(
                f"get_stream of an array with an interface, threads: {count}",
                {
                    "us.get_stream(array)": partial(in_threads, count, find, calls),
                    POINTER: partial(in_threads, count, ask, calls),
                },
                (shown(POINTER),),
                rounds=7,
                returns=True,
            )


@case
def producers(run: Run) -> Comparisons:
    """So much for each producer, however many there are."""
    number = run.scaled(100, 5)
    with arrays([Device(0).create_stream() for _ in range(32)]) as every:
        calls = {}
        for count in (32, 8, 2):
            borrow = borrowing(*every[:count])
            calls[f"producers: {count}, for each"] = partial(for_each, borrow, number, count)
        limit = at_most(FLAT, "producers: 2, for each")
        yield Comparison("borrow of 32 producers", calls, (limit,), returns=True)


def for_each(borrow: Callable[[], None], number: int, producers: int) -> float:
    """Return what a borrow takes for each of its producers."""
    return timed(borrow, number) / producers


@case
def buffers(run: Run) -> Comparisons:
    del run
    with arrays([Device(0).create_stream()] * 64) as every:
        yield Comparison(
            "borrow of buffers of one producer",
            {f"buffers: {count}": borrowing(*every[:count]) for count in (64, 8, 1)},
            number=200,
        )


def resident() -> int:
    """Return the bytes of memory that this process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def left_over(call: Callable[[], Any], calls: int) -> tuple[float, float]:
    """Return the memory and the events that so many calls leave behind, after some to warm up."""
    pool = us.get_stream(0)._resolve().pool

    def state(calls: int) -> tuple[int, int]:
        for _ in range(calls // BATCH):
            for _ in range(BATCH):
                call()
            us.wait(0)  # so that what is under way is no more at the end than at the begin
        gc.collect()
        return resident(), len(pool.free)

    memory, events = state(max(calls // 50, 1000))
    memory_after, events_after = state(calls)
    return (memory_after - memory) / (1 << 20), events_after - events


@case
def million_calls(run: Run) -> Comparisons:
    calls = run.scaled(100_000 if run.simulated else 1_000_000, 2_000)
    with arrays([Device(0).create_stream()]) as (array,):
        hot = {
            "get_stream": (lambda: us.get_stream(array), calls),
            "wait": (lambda: us.wait(array), calls),
            "acquire": (lambda: us.acquire(array), calls),
            "release": (lambda: us.release(array), calls),
            "borrow": (borrowing(array), calls),
            "asnumpy": (lambda: us.asnumpy(array), calls // 10),
        }
        for name, (call, count) in hot.items():
            yield Comparison(
                f"{name}, {count:,} calls",
                {f"us.{name}": partial(left_over, call, count)},
                # 4 bytes for each of a million calls would show, and an event for each 5000.
                (no_more_than(4.0), no_more_than(2 * BATCH, measure=1)),
                rounds=1,
                measures=(("memory more", "MiB"), ("events more", "")),
                returns=True,
            )
