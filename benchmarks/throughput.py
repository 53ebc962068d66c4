"""Threads that give a GPU work, while another one copies what is there to the host."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from cuda.bindings import driver
from cuda.core import Device

import userstream as us
from benchmarks.harness import Comparison, Comparisons, Run, case, settle
from benchmarks.limits import at_least, at_most, shown
from benchmarks.work import Interface, Spinner, external
from userstream.typing import Producer

SYNC = "torch.cuda.synchronize(), output.cpu()"
BARE = "cuMemHostAlloc, cuMemcpyDtoHAsync, cuMemFreeHost"
AHEAD = 4  # steps that are queued before the oldest is waited for
SIZE = 2048


class Pipeline:
    """A chain of kernels on a side stream, the newest output in `output`."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.stream = torch.cuda.Stream(0)
        with torch.cuda.stream(self.stream):
            self._weights = torch.randn(SIZE, SIZE, device="cuda:0") / SIZE**0.5
            self.output = torch.randn(SIZE, SIZE, device="cuda:0")
        self.run(0.2)  # loads the kernels

    def run(self, seconds: float) -> float:
        """Go on for a while; return the steps of each second."""
        torch, steps = self._torch, 0
        queued: deque[Any] = deque()
        with torch.cuda.stream(self.stream):
            self.stream.synchronize()
            begin = time.perf_counter()
            while time.perf_counter() - begin < seconds:
                output = self.output
                for _ in range(4):
                    output = torch.tanh(output @ self._weights)
                self.output = output
                queued.append(self.stream.record_event())
                steps += 1
                if len(queued) > AHEAD:
                    queued.popleft().synchronize()
            self.stream.synchronize()
            return steps / (time.perf_counter() - begin)


@contextlib.contextmanager
def repeated(look: Callable[[], object]) -> Iterator[list[float]]:
    """Look again and again in a thread; the list has when each look ended."""
    looks: list[float] = []
    failures: list[Exception] = []
    over = threading.Event()

    def work() -> None:
        try:
            while not over.is_set():
                look()
                looks.append(time.perf_counter())
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield looks
    finally:
        over.set()
        thread.join()
    if failures:
        raise failures[0]


@case
def inspected(run: Run) -> Comparisons:
    torch = run.need("torch")
    pipeline, seconds = Pipeline(torch), run.scaled(1.0, 0.1)

    def synchronized() -> Any:
        torch.cuda.synchronize()
        return pipeline.output.cpu().numpy()

    def beside(look: Callable[[], object]) -> Callable[[], tuple[float, float]]:
        def steps() -> tuple[float, float]:
            with repeated(look) as looks:
                rate = pipeline.run(seconds)
                return rate, len(looks) / seconds

        return steps

    alone = "alone"
    yield Comparison(
        "a pipeline whose outputs a thread looks at",
        {
            "us.asnumpy(output, producer=stream)": beside(
                lambda: us.asnumpy(pipeline.output, producer=pipeline.stream)
            ),
            SYNC: beside(synchronized),
            alone: lambda: (pipeline.run(seconds), 0.0),
        },
        (at_least(0.97, alone), shown(SYNC)),
        rounds=9,
        measures=(("steps", "/s"), ("looks", "/s")),
        returns=True,
        plain=True,
    )


@case
def two_pipelines(run: Run) -> Comparisons:
    """Blocks on the user stream beside a pipeline that has nothing to do with their buffer.

    Each block keeps one multiprocessor busy for 0.2 ms, so both could run at once. Where nothing
    says which stream writes the buffer, blocks and pipeline wait for each other.
    """
    torch = run.need("torch")
    pipeline, seconds = Pipeline(torch), run.scaled(1.0, 0.1)
    buffer, theirs = torch.zeros(1024, device="cuda:0"), us.Stream.create(0)
    pointer, user = driver.CUdeviceptr(buffer.data_ptr()), external(torch, us.get_stream(0))
    cycles = Spinner(torch).cycles(0.2e-3)

    def block(producer: Producer) -> None:
        with us.borrow(pointer, producer=producer), torch.cuda.stream(user):
            torch.cuda._sleep(cycles)
        us.wait(0, timeout=60)

    def beside(producer: Producer) -> Callable[[], tuple[float, float]]:
        def steps() -> tuple[float, float]:
            with repeated(lambda: block(producer)) as blocks:
                rate = pipeline.run(seconds)
                return rate, len(blocks) / seconds

        return steps

    alone, known = "alone", "borrow(pointer, producer=stream)"
    yield Comparison(
        "a pipeline beside blocks on the user stream",
        {
            "borrow(pointer)": beside("auto"),
            known: beside(theirs),
            alone: lambda: (pipeline.run(seconds), 0.0),
        },
        (shown(known), shown(alone)),
        rounds=9,
        measures=(("steps", "/s"), ("blocks", "/s")),
        returns=True,
        plain=True,
    )


def longest_launch(look: Callable[[], object], launch: Callable[[], object]) -> float:
    """Return the seconds of the longest launch while another thread looks once."""
    longest, count = 0.0, 0
    thread = threading.Thread(target=look)
    thread.start()
    while thread.is_alive():
        begin = time.perf_counter()
        launch()
        longest = max(longest, time.perf_counter() - begin)
        count += 1
        if count % 64 == 0:
            settle()  # or the queue would be full, and the launch wait for that
    return longest


@case
def first_look(run: Run) -> Comparisons:
    """Look with memory that is new: page-locking it takes long."""
    nbytes = 1 << 20 if run.quick or run.simulated else 1 << 28
    theirs = Device(0).create_stream()
    word = Device(0).allocate(64, stream=theirs)
    buffer = Device(0).allocate(nbytes, stream=theirs)
    theirs.sync()
    source = int(buffer.handle)
    array = Interface(source, nbytes, theirs)
    launch = partial(driver.cuMemsetD8Async, int(word.handle), 1, 64, theirs.handle)

    def bare() -> None:
        Device(0).set_current()
        memory = driver.cuMemHostAlloc(nbytes, 0)[1]
        driver.cuMemcpyDtoHAsync(memory, source, nbytes, us.get_stream(0).handle)
        us.get_stream(0).sync()
        driver.cuMemFreeHost(memory)

    def forget() -> None:
        us.UserStream.set_pinned_limit(0)
        for thread in threading.enumerate():
            if thread.name == "userstream-trim":
                thread.join()
        us.UserStream.set_pinned_limit(4 << 30)
        settle()

    yield Comparison(
        f"the longest launch of a thread, while another looks at {nbytes >> 20} MiB at first",
        {
            "us.asnumpy(array)": partial(longest_launch, partial(us.asnumpy, array), launch),
            BARE: partial(longest_launch, bare, launch),
        },
        (at_most(0.1, BARE),),
        rounds=9,
        before=forget,
        returns=True,
    )
