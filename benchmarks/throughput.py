"""A busy pipeline, while another thread looks at what it makes."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import userstream as us
from benchmarks.harness import Comparison, Comparisons, Run, case
from benchmarks.limits import at_least, shown

SYNC = "torch.cuda.synchronize(), output.cpu()"
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
