"""Host waits for work that ends later: the CPU time that they take, and how late they end."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

from cuda.bindings import driver

import userstream as us
from benchmarks.harness import Comparison, Comparisons, Run, Skipped, case
from benchmarks.limits import at_most, no_more_than
from benchmarks.work import external
from userstream import testing


def after(seconds: float, latches: list[testing.latch]) -> tuple[threading.Thread, list[float]]:
    """Release the latches after a while, in a thread; return it and when it did so."""
    when: list[float] = []

    def release() -> None:
        time.sleep(seconds)
        when.append(time.perf_counter())
        for latch in latches:
            latch.release()

    thread = threading.Thread(target=release)
    return thread, when


def measure(stream: us.Stream, wait: Callable[[], object], seconds: float) -> tuple[float, float]:
    """Return how late a wait ends, and the share of a core that it takes."""
    latch = testing.latch(stream)
    with latch:
        thread, when = after(seconds, [latch])
        thread.start()
        started, cpu = time.perf_counter(), time.thread_time()
        wait()
        ended, cpu = time.perf_counter(), time.thread_time() - cpu
        thread.join()
    return ended - when[0], cpu / (ended - started)


def blocking(stream: us.Stream) -> Callable[[], object]:
    """Return a wait that sleeps in the driver, which no timeout and no Ctrl-C can end."""
    result, event = driver.cuEventCreate(
        driver.CUevent_flags.CU_EVENT_BLOCKING_SYNC | driver.CUevent_flags.CU_EVENT_DISABLE_TIMING
    )
    if result != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"cuEventCreate: {result.name}")

    def wait() -> None:
        driver.cuEventRecord(event, stream.handle)
        driver.cuEventSynchronize(event)

    return wait


@case
def one_wait(run: Run) -> Comparisons:
    """Measure what one wait takes of a core, and how late it ends."""
    stream = us.get_stream(0)
    waits: dict[str, Callable[[], object]] = {
        "us.wait": lambda: us.wait(stream),
        'us.wait, policy="spin"': lambda: us.wait(stream, policy="spin"),
        "us.completion(…).result()": lambda: us.completion(stream).result(),
        "us.wait_for_device": lambda: us.wait_for_device(0),
        "cuStreamSynchronize": lambda: driver.cuStreamSynchronize(stream.handle),
        "cuEventSynchronize, blocking": blocking(stream),
    }
    with contextlib.suppress(Skipped):  # the others are measured without it
        waits["torch.cuda.Stream.synchronize"] = external(run.need("torch"), stream).synchronize
    most_late = {0.001: 150e-6, 0.01: 220e-6, 0.1: 350e-6, 0.3: 400e-6}
    lengths = [(0.0002, 15), (0.001, 15), (0.01, 11), (0.1, 5), (0.3, 3)]
    for seconds, rounds in run.scaled(lengths, lengths[:3]):
        yield Comparison(
            f"a wait for {seconds * 1e3:g} ms",
            {name: partial(measure, stream, wait, seconds) for name, wait in waits.items()},
            (no_more_than(most_late[seconds]),) if seconds in most_late else (),
            rounds=rounds,
            measures=(("how late it ends", "s"), ("of a core", "share")),
            returns=True,
            plain=True,
        )


def thread_cpu(name: str) -> float:
    """Return the CPU seconds of a thread of this process."""
    for thread in threading.enumerate():
        if thread.name == name:
            stat = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text()
            return int(stat.split()[0]) / 1e9
    return 0.0


def await_many(count: int, streams: list[us.Stream], seconds: float) -> tuple[float, float, float]:
    """Await many times at once; return the lateness (median, p99) and the watcher's CPU share."""
    late: list[float] = []

    async def one(stream: us.Stream, when: list[float]) -> None:
        await us.wait_async(stream)
        late.append(time.perf_counter() - when[0])

    async def main(stack: contextlib.ExitStack) -> float:
        latches = [stack.enter_context(testing.latch(stream)) for stream in streams]
        thread, when = after(seconds, latches)
        tasks = [
            asyncio.create_task(one(streams[number % len(streams)], when))
            for number in range(count)
        ]
        await asyncio.sleep(0)
        thread.start()
        cpu, started = thread_cpu("userstream-watcher"), time.perf_counter()
        while not when:
            await asyncio.sleep(0.005)
        share = (thread_cpu("userstream-watcher") - cpu) / (time.perf_counter() - started)
        await asyncio.gather(*tasks)
        thread.join()
        return share

    with contextlib.ExitStack() as stack:  # no stream stays held after a failure
        share = asyncio.run(main(stack))
    return *middle_and_end(late), share


def await_bare(count: int) -> tuple[float, float, float]:
    """Do the same with futures that one callback sets: what asyncio alone is late."""
    late: list[float] = []
    when: list[float] = []

    async def one(future: asyncio.Future[None]) -> None:
        await future
        late.append(time.perf_counter() - when[0])

    async def main() -> None:
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in range(count)]

        def settle() -> None:
            when.append(time.perf_counter())
            for future in futures:
                future.set_result(None)

        tasks = [asyncio.create_task(one(future)) for future in futures]
        await asyncio.sleep(0)
        loop.call_soon(settle)
        await asyncio.gather(*tasks)

    asyncio.run(main())
    return *middle_and_end(late), 0.0


def middle_and_end(late: list[float]) -> tuple[float, float]:
    """Return the median and the 99th percentile."""
    ranked = sorted(late)
    return ranked[len(ranked) // 2], ranked[int(len(ranked) * 0.99)]


@case
def many_awaits(run: Run) -> Comparisons:
    """Measure how late many awaits at once are; asyncio's own part is beside it."""
    streams = [us.get_stream(0, name=f"await {number}") for number in range(8)]
    asyncio_alone = "futures of asyncio, set at once"
    lengths = [(8, 0.1), (8, 0.3), (1000, 0.5), (10_000, 2.0)]
    for count, seconds in run.scaled(lengths, lengths[:1]):
        yield Comparison(
            f"{count:,} awaits over 8 streams, {seconds:g} s",
            {
                "us.wait_async": partial(await_many, count, streams, seconds),
                asyncio_alone: partial(await_bare, count),
            },
            (no_more_than(15e-3), at_most(1, asyncio_alone)) if count == 10_000 else (),
            rounds=5,
            measures=(("median late", "s"), ("slowest hundredth", "s"), ("watcher", "share")),
            returns=True,
            plain=True,
        )


@case
def one_await(run: Run) -> Comparisons:
    """Compare one await with numba's ``async_done``."""
    stream = run.need("numba.cuda").stream()
    mine = us.get_stream(stream)

    async def theirs() -> None:
        await stream.async_done()

    try:
        await_one(theirs, mine, 0.1)
    except AttributeError as error:  # of numba-cuda 0.30.4 on its own streams
        raise Skipped(f"numba async_done fails: {error}") from error
    yield Comparison(
        "one await, 0.1 s",
        {
            "us.wait_async": lambda: await_one(lambda: us.wait_async(mine), mine, 0.1),
            "numba async_done": lambda: await_one(theirs, mine, 0.1),
        },
        rounds=5,
        returns=True,
    )


def await_one(
    awaiting: Callable[[], Coroutine[Any, Any, None]], stream: us.Stream, seconds: float
) -> float:
    """Return how late an await of a held stream ends."""

    async def main() -> float:
        with testing.latch(stream) as latch:
            thread, when = after(seconds, [latch])
            task = asyncio.create_task(awaiting())
            await asyncio.sleep(0)
            thread.start()
            await asyncio.wait_for(task, 30)
            late = time.perf_counter() - when[0]
            thread.join()
        return late

    return asyncio.run(main())
