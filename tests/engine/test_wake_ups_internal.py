"""Waits of random kinds for work that ends at random moments: no wake-up is lost.

``USERSTREAM_WAITS=1000000`` makes so many waits, which takes minutes.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import queue
import random
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import userstream as us
from helpers import eventually, untraced
from userstream import testing
from userstream._engine import events, futures, watcher
from watching import is_idle

pytestmark = [pytest.mark.simulated, pytest.mark.timeout(3600)]

WAITS = int(os.environ.get("USERSTREAM_WAITS", "2000"))
THREADS = 4
PATIENCE = 20.0  # seconds: a wait that takes longer has missed its wake-up
SEED = 37


@pytest.fixture(autouse=True)
def _nobody_looks_without_a_bell(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Otherwise a wake-up that is lost is only 40 ms late."""
    assert eventually(is_idle)
    for module in (events, futures, watcher):
        monkeypatch.setattr(module, "LONGEST_SLEEP", 10 * PATIENCE)
    yield
    us.close()


class Worker:
    """Waits for a stream of its own, which another thread releases after a random while."""

    def __init__(self, number: int) -> None:
        self.random = random.Random(SEED + number)
        self.stream = us.get_stream(0, name=f"worker {number}")
        self.releases: queue.SimpleQueue[tuple[Callable[[], object], float] | None]
        self.releases = queue.SimpleQueue()
        self.given_up = 0
        self.ways: list[Callable[[asyncio.AbstractEventLoop], None]] = [
            self.sync,
            self.time_out,
            self.result,
            self.callback,
            self.cancel,
            self.await_it,
            self.await_no_longer,
        ]

    def run(self, count: int) -> None:
        releasing = threading.Thread(target=self.release)
        releasing.start()
        loop = asyncio.new_event_loop()
        try:
            for _ in range(count):
                with testing.latch(self.stream) as latch:
                    pause = self.random.choice((0, 2e-5, 1e-4, 3e-4)) * self.random.random()
                    self.releases.put((latch.release, pause))
                    began = time.monotonic()
                    self.random.choice(self.ways)(loop)
                    assert time.monotonic() - began < PATIENCE
        finally:
            self.releases.put(None)
            releasing.join()
            loop.close()

    def release(self) -> None:
        while (given := self.releases.get()) is not None:
            release, pause = given
            time.sleep(pause)
            release()

    def sync(self, _: asyncio.AbstractEventLoop) -> None:
        self.stream.sync()

    def time_out(self, _: asyncio.AbstractEventLoop) -> None:
        try:
            self.stream.sync(timeout=1e-4 * self.random.random())
        except us.WaitTimeout:
            self.given_up += 1

    def result(self, _: asyncio.AbstractEventLoop) -> None:
        us.completion(self.stream).result()

    def callback(self, _: asyncio.AbstractEventLoop) -> None:
        over = threading.Event()
        us.completion(self.stream).add_done_callback(lambda _: over.set())
        assert over.wait(PATIENCE)

    def cancel(self, _: asyncio.AbstractEventLoop) -> None:
        future, other = us.completion(self.stream), us.completion(self.stream)
        self.given_up += future.cancel()
        assert not concurrent.futures.wait([other], PATIENCE).not_done

    def await_it(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.run_until_complete(us.wait_async(self.stream))

    def await_no_longer(self, loop: asyncio.AbstractEventLoop) -> None:
        async def wait() -> None:
            async with asyncio.timeout(1e-4):
                await us.wait_async(self.stream)

        try:
            loop.run_until_complete(wait())
        except TimeoutError:
            self.given_up += 1


class Interrupted(Worker):
    """Waits in the main thread, where Ctrl-C comes before or after the end of each first wait."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        main = threading.main_thread().ident
        assert main is not None

        def interrupt(wait: Callable[[], object]) -> None:
            pause = 3e-4 * self.random.random()
            try:
                self.releases.put((lambda: signal.pthread_kill(main, signal.SIGINT), pause))
                wait()
                assert eventually(lambda: False), "no Ctrl-C came"
            except KeyboardInterrupt:
                self.given_up += 1
            wait()

        self.ways = [
            lambda _: interrupt(self.stream.sync),
            lambda _: interrupt(us.completion(self.stream).result),
            lambda _: interrupt(us.wait_for_device),
        ]


def native_threads() -> int:
    """Return the number of threads that block in the driver."""
    names = []
    for path in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # the thread has ended meanwhile
            names.append(path.read_text())
    return names.count("userstream-wait\n")


def test_no_wake_up_is_lost_and_nothing_grows() -> None:
    workers = [Worker(number) for number in range(THREADS)]
    interrupted = Interrupted(THREADS)
    pool = workers[0].stream._lane.pool
    before = native_threads()

    def wait(count: int) -> int:
        """Return the greatest memory of the process, in KiB."""
        with concurrent.futures.ThreadPoolExecutor(THREADS) as executor:
            running = [executor.submit(worker.run, count // THREADS) for worker in workers]
            with untraced():
                interrupted.run(count // 20)
            for done in running:
                done.result()
        assert eventually(is_idle)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    memory, pooled = wait(max(WAITS // 10, 500)), len(pool.free)
    assert wait(WAITS) - memory < 8 << 10
    assert sum(worker.given_up for worker in workers) > WAITS / 20, "it tries something else"
    assert interrupted.given_up >= WAITS // 20
    assert len(pool.free) <= pooled + 100  # as many as were pending at once
    # One, and others where a wait that was interrupted began again before the event was over.
    assert native_threads() <= before + THREADS
