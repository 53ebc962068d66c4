"""What a host wait costs: CPU time and lateness, beside what PyTorch and numba-cuda offer.

Run it on a machine with a GPU: ``python benchmarks/waits.py``. Every figure is the median of some
runs, and the peers are measured in the same process, in turns.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from cuda.bindings import driver

import userstream as us
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
    """Return the share of a core that a wait takes, and how late it ends, in µs."""
    latch = testing.latch(stream)
    with latch:
        thread, when = after(seconds, [latch])
        thread.start()
        started, cpu = time.perf_counter(), time.thread_time()
        wait()
        ended, cpu = time.perf_counter(), time.thread_time() - cpu
        thread.join()
    return cpu / (ended - started), (ended - when[0]) * 1e6


def waits(stream: us.Stream) -> dict[str, Callable[[], object]]:
    """Return what is compared."""
    found: dict[str, Callable[[], object]] = {
        "us.wait": lambda: us.wait(stream),
        'us.wait, "spin"': lambda: us.wait(stream, policy="spin"),
        "us.completion": lambda: us.completion(stream).result(),
        "us.wait_for_device": lambda: us.wait_for_device(0),
        "cuStreamSynchronize": lambda: driver.cuStreamSynchronize(stream.handle),
    }
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        theirs = torch.cuda.ExternalStream(int(stream.handle))
        found["torch synchronize()"] = theirs.synchronize
    return found


def table(stream: us.Stream) -> None:
    compared = waits(stream)
    print(f"{'':24}{'CPU share, late (µs)':>40}")
    lengths = [(0.0002, 15), (0.001, 15), (0.01, 11), (0.1, 5), (0.3, 3)]
    print(f"{'':24}" + "".join(f"{seconds * 1e3:>15g} ms" for seconds, _ in lengths))
    rows: dict[str, str] = dict.fromkeys(compared, "")
    for seconds, runs in lengths:
        seen: dict[str, list[tuple[float, float]]] = {name: [] for name in compared}
        for _ in range(runs):
            for name, wait in compared.items():
                seen[name].append(measure(stream, wait, seconds))
        for name, results in seen.items():
            share = statistics.median(result[0] for result in results)
            late = statistics.median(result[1] for result in results)
            rows[name] += f"{share:>9.1%}{late:>9.0f}"
    for name, row in rows.items():
        print(f"{name:24}{row}")


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

    async def main() -> float:
        latches = [testing.latch(stream) for stream in streams]
        for latch in latches:
            latch.__enter__()
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

    share = asyncio.run(main())
    return *middle_and_end(late), share


def await_bare(count: int) -> tuple[float, float]:
    """Do the same with futures that one callback sets; return what asyncio alone is late."""
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
    return middle_and_end(late)


def middle_and_end(late: list[float]) -> tuple[float, float]:
    """Return the median and the 99th percentile."""
    ranked = sorted(late)
    return ranked[len(ranked) // 2], ranked[int(len(ranked) * 0.99)]


def awaits(streams: list[us.Stream]) -> None:
    lengths = [(8, 0.1, 5), (8, 0.3, 5), (1000, 0.5, 5), (10_000, 2.0, 5)]
    for count, seconds, runs in lengths:
        results: list[tuple[float, float, float]] = []
        bare: list[tuple[float, float]] = []
        for _ in range(runs):
            results.append(await_many(count, streams, seconds))
            bare.append(await_bare(count))
        late, end, share = map(statistics.median, zip(*results, strict=True))
        bare_late, bare_end = map(statistics.median, zip(*bare, strict=True))
        print(
            f"{count} awaits over {len(streams)} streams, {seconds} s: late by {late * 1e3:.2f} ms "
            f"(median), {end * 1e3:.2f} ms (p99); watcher {share:.1%} of a core; of that asyncio "
            f"alone {bare_late * 1e3:.2f} ms, {bare_end * 1e3:.2f} ms"
        )


def await_numba(seconds: float) -> None:
    """Do the same with numba's ``async_done``, for one stream."""
    from numba import cuda

    stream = cuda.stream()
    mine = us.get_stream(stream)

    async def main() -> float:
        latch = testing.latch(mine)
        with latch:
            thread, when = after(seconds, [latch])
            done = stream.async_done()
            thread.start()
            await done
            late = time.perf_counter() - when[0]
            thread.join()
        return late

    try:
        late = statistics.median(asyncio.run(main()) for _ in range(5))
    except AttributeError as error:  # of numba-cuda 0.30.4 on its own streams
        print(f"numba async_done fails: {error}")
        return
    print(f"numba async_done, 1 await, {seconds} s: late by {late * 1e3:.2f} ms (median)")


def main() -> None:
    for name in ("torch", "numba.cuda"):
        try:
            __import__(name)
        except ImportError:
            print(f"{name} is not here: not compared")
    stream = us.get_stream(0)
    table(stream)
    streams = [us.get_stream(0, name=f"await {number}") for number in range(8)]
    awaits(streams)
    if "numba.cuda" in sys.modules:
        await_numba(0.1)


if __name__ == "__main__":
    main()
