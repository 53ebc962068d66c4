"""Begin and end observations while threads use the driver: ``python tests/observe/storm.py 60``.

The threads launch, copy, allocate and free, the process forks, and a signal handler raises at
random moments in the thread that observes. The program ends with status 0 if every result was
right, no race was reported, and nothing crashed or hung.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import sys
import threading
import time
from typing import Any

import numpy as np
from cuda.bindings import driver
from cuda.core import LaunchConfig, ObjectCode, launch

import userstream as us
from userstream.testing import Pointer, kernel, simulate

SIZE = 4096
THREADS = 8
CHILD_SECONDS = 30


class Interrupted(Exception):
    """Raised by the signal handler."""


@kernel("storm_add")
def _add(grid: Any, block: Any, to: Pointer, source: Pointer, number: np.int64) -> None:
    del grid, block
    to.array(SIZE, np.uint8)[:] = source.array(SIZE, np.uint8) + number


def ok(result: tuple[Any, ...]) -> Any:
    assert not result[0], result
    return result[1] if len(result) > 1 else None


class Worker(threading.Thread):
    """Uses a stream and memory of its own, always in order, and checks each result."""

    def __init__(self, seed: int, end: threading.Event) -> None:
        super().__init__(daemon=True)
        self.chance = random.Random(seed)
        self.end = end
        self.rounds = 0
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            ok(driver.cuCtxSetCurrent(ok(driver.cuDevicePrimaryCtxRetain(0))))
            stream = us.Stream.create(0)
            code = ObjectCode.from_ptx(b"any")
            while not self.end.is_set():
                self.round(stream, code.get_kernel("storm_add"))
                self.rounds += 1
                if self.rounds % 16 == 0:
                    code = ObjectCode.from_ptx(b"any")  # the module of the other one is unloaded
                    stream.close()
                    stream = us.Stream.create(0)
        except BaseException as error:
            self.failure = error

    def round(self, stream: us.Stream, double: Any) -> None:
        handle, number = int(stream.handle), self.chance.randrange(100)
        pinned = int(ok(driver.cuMemHostAlloc(2 * SIZE, 0)))
        x = int(ok(driver.cuMemAllocAsync(SIZE, handle)))
        y = int(ok(driver.cuMemAlloc(SIZE)))
        ctypes.memset(pinned, number, SIZE)
        ok(driver.cuMemcpyHtoDAsync(x, pinned, SIZE, handle))
        refused = driver.cuMemcpyHtoDAsync(x, pinned, 1 << 40, handle)
        assert refused[0] == driver.CUresult.CUDA_ERROR_INVALID_VALUE, refused
        launch(stream, LaunchConfig(grid=1, block=1), double, y, x, np.int64(1))
        ok(driver.cuMemcpyDtoHAsync(pinned + SIZE, y, SIZE, handle))
        ok(driver.cuMemFreeAsync(x, handle))
        stream.sync()
        assert ctypes.string_at(pinned + SIZE, SIZE) == bytes([number + 1]) * SIZE
        ok(driver.cuMemFree(y))
        ok(driver.cuMemFreeHost(pinned))


def fork() -> None:
    """Fork: the child is refused an observation, and ends without a hang or a crash."""
    child = os.fork()
    if not child:
        status = 1
        try:
            with us.observe():
                pass
        except us.ForkedError:
            status = 0
        finally:
            os._exit(status)
    end = time.monotonic() + CHILD_SECONDS
    while (waited := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            raise AssertionError("a forked child hangs")
        time.sleep(0.002)
    assert waited[1] == 0, f"a forked child ended with status {waited[1]:#x}"


def main(seconds: float) -> None:
    simulate()
    us.get_stream(0)
    end = threading.Event()
    workers = [Worker(seed, end) for seed in range(THREADS)]
    for worker in workers:
        worker.start()
    chance = random.Random(0)
    observations = forks = signals = 0

    def interrupt(*_: Any) -> None:
        nonlocal signals
        signals += 1
        raise Interrupted

    signal.signal(signal.SIGALRM, interrupt)
    begin = time.monotonic()
    while time.monotonic() - begin < seconds and not any(each.failure for each in workers):
        seen = us.observe()
        try:
            try:
                if observations % 4 == 3:
                    signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-5, 5e-3))
                with seen:
                    time.sleep(chance.choice((0, 0, 1e-4, 5e-3)))
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except Interrupted:
            seen.stop()
        except RuntimeError as error:  # of `threading`, where the signal came
            if not isinstance(error.__context__, Interrupted):
                raise
            seen.stop()
        else:
            assert seen.races == (), seen
        observations += 1
        if observations % 25 == 0:
            fork()
            forks += 1
    end.set()
    for worker in workers:
        worker.join(30)
        assert not worker.is_alive(), "a thread hangs"
        if worker.failure is not None:
            raise worker.failure
    with us.observe() as seen:  # still possible
        us.get_stream(0).sync()
    assert seen.as_dict()["calls"]
    rounds = sum(worker.rounds for worker in workers)
    print(f"{rounds} rounds, {observations} observations, {forks} forks, {signals} signals")
    sys.stdout.flush()
    os._exit(0)  # a worker's stream may be closed at any time: that is the test of others


if __name__ == "__main__":
    main(float(sys.argv[1]))
