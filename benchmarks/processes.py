"""Cost of one wait for the user streams of all Dask workers of a machine, by their number.

``python -m benchmarks.processes``, with ``distributed`` installed, on a GPU if there is one and on
the simulated driver otherwise. The workers share device 0. Beside the wait stand the same calls
with an empty function, which is what Dask alone takes, and one call of it for all workers. Times
are in milliseconds: the median of some runs, and the 10th and 90th percentile.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import distributed

sys.path.insert(0, str(Path(__file__).parents[1] / "docs/examples/engines"))

import dask_workers  # the pattern that the documentation shows

import userstream as us

COUNTS = (2, 4, 8, 16)


async def nothing() -> None:
    """Take no time."""


def make_stream() -> None:
    us.get_stream(0)


async def ask_everywhere(client: Any, function: Callable[..., Awaitable[None]]) -> None:
    """Do what `finish_everywhere` does, with another function."""
    workers = list(await client.nthreads())
    await asyncio.gather(*(client.run(function, workers=[worker]) for worker in workers))


def timed(runs: int, *compared: Callable[[], object]) -> list[list[float]]:
    """Run these in turns; return how long each took, in ms, without the first, which connects."""
    times: list[list[float]] = [[] for _ in compared]
    for _ in range(1 + runs):
        for once, seen in zip(compared, times, strict=True):
            started = time.perf_counter()
            once()
            seen.append((time.perf_counter() - started) * 1e3)
    return [seen[1:] for seen in times]


def local_wait(runs: int) -> list[float]:
    """Wait in one process for its one stream, as each worker does."""

    async def main() -> list[float]:
        times = []
        for _ in range(runs):
            started = time.perf_counter()
            await us.wait_all_async(timeout=60)
            times.append((time.perf_counter() - started) * 1e3)
        return times

    make_stream()
    return asyncio.run(main())


def shown(times: list[float]) -> str:
    tenths = statistics.quantiles(times, n=10)
    return f"{statistics.median(times):>12.2f} ({tenths[0]:.2f} to {tenths[-1]:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=100)
    runs = parser.parse_args().runs
    print(f"{'workers':>7}{'wait':>28}{'Dask alone':>28}{'one call for all':>28}")
    for count in COUNTS:
        cluster = distributed.LocalCluster(
            n_workers=count,
            threads_per_worker=1,
            dashboard_address=":0",
            memory_limit=None,
            silence_logs=logging.CRITICAL,
        )
        with cluster, distributed.Client(cluster) as client:
            client.wait_for_workers(count, timeout=300)
            client.register_plugin(dask_workers.Prepare())
            client.run(make_stream)

            def wait(client: Any = client) -> None:
                answers = client.sync(dask_workers.finish_everywhere, client, 60)
                assert set(answers.values()) == {None}, answers

            def bare(client: Any = client) -> None:
                client.sync(ask_everywhere, client, nothing)

            def one_call(client: Any = client) -> None:
                client.run(nothing)

            cells = [f"{shown(times):>28}" for times in timed(runs, wait, bare, one_call)]
            print(f"{count:>7}" + "".join(cells), flush=True)
    dask_workers.Prepare().setup(None)
    print(f"the wait itself, in one process: {shown(local_wait(runs)).strip()}")


if __name__ == "__main__":
    main()
