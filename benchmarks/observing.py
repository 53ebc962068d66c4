"""Cost of observing a program, beside other tools that look for races or errors.

These are the race detector of PyTorch, which sees PyTorch alone, and compute-sanitizer (memcheck).
One program launches small kernels as fast as it can, the other trains a small network; each runs in
a process of its own. What a call and the judge cost is measured without PyTorch as well.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from cuda.bindings import driver

import userstream as us
from benchmarks.harness import Comparison, Comparisons, Run, Skipped, case
from benchmarks.limits import Limit, at_most_added, shown
from userstream._observe.judge import Judge, judged

ADDED = 2.5e-6  # to a launch
PATIENCE = 120  # seconds
BARE = "bare"
CHECKER = "compute-sanitizer"
COMMANDS = {
    "us.observe": [sys.executable, "-m", "userstream", "observe", "--fail-on", "nothing"],
    BARE: [sys.executable],
    "TORCH_CUDA_SANITIZER=1": [sys.executable],
    CHECKER: [CHECKER, "--tool", "memcheck", sys.executable],
}
ENVIRONMENT = {"TORCH_CUDA_SANITIZER=1": {"TORCH_CUDA_SANITIZER": "1"}}

TIMED = """
import time
import torch

{setup}

def run():
    begin = time.perf_counter()
    for _ in range({count}):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / {count}

run()
print("SECONDS", min(run() for _ in range(5)))
"""

LAUNCH = """
x = torch.zeros(1024, device="cuda")

def step():
    x.add_(1)
"""

TRAINING = """
layers = [torch.nn.Linear(256, 256) for _ in range(8)]
model = torch.nn.Sequential(*layers).cuda()
optimizer = torch.optim.AdamW(model.parameters())
inputs = torch.randn(64, 256, device="cuda")

def step():
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()
"""


def seconds(way: str, program: str) -> float:
    """Run a program in one of the ways; return what it says that a step took."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "program.py")
        file.write_text(program, encoding="utf-8")
        done = subprocess.run(
            [*COMMANDS[way], os.fspath(file)],
            env={**os.environ, **ENVIRONMENT.get(way, {})},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    for line in done.stdout.splitlines():
        if line.startswith("SECONDS "):
            return float(line.split()[1])
    raise RuntimeError(f"{way}: {done.stdout[-500:]}{done.stderr[-500:]}")


def in_ways(name: str, setup: str, counts: dict[str, int], limit: Limit) -> Comparison:
    """Compare the ways in which a program runs, so many steps at a time in each."""

    def call(way: str, count: int) -> Callable[[], float]:
        return lambda: seconds(way, TIMED.format(setup=setup, count=count))

    calls = {way: call(way, count) for way, count in counts.items()}
    return Comparison(name, calls, (limit,), rounds=1, returns=True)


@case
def launch(run: Run) -> Comparisons:
    run.need("torch")
    counts = dict.fromkeys(("us.observe", BARE, "TORCH_CUDA_SANITIZER=1"), run.scaled(1000, 100))
    yield in_ways("a launch of torch", LAUNCH, counts, at_most_added(ADDED, BARE))


@case
def checked_launch(run: Run) -> Comparisons:
    run.need("torch")
    if shutil.which(CHECKER) is None:
        raise Skipped(f"there is no {CHECKER}")
    counts = {"us.observe": run.scaled(1000, 100), CHECKER: 50}
    yield in_ways(f"a launch of torch, {CHECKER}", LAUNCH, counts, shown(CHECKER))


@case
def training(run: Run) -> Comparisons:
    run.need("torch")
    counts = dict.fromkeys(("us.observe", BARE, "TORCH_CUDA_SANITIZER=1"), run.scaled(50, 5))
    yield in_ways("a training step of torch", TRAINING, counts, shown(BARE))


# -- a call, and the judge ------------------------------------------------------------------------

RECORDED = 1e-6  # seconds, at most, that recording adds to a call with its stack
Way = Literal["later", "process", "thread"]
WAYS: dict[str, Way | None] = {
    "recorded": "later",
    BARE: None,
    "judged in a process": "process",
    "judged in a thread": "thread",
}


@contextmanager
def observed(way: Way | None) -> Iterator[None]:
    """Observe what the block does, and throw the findings away."""
    if way is None:
        yield
        return
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory, "run.uslog") if way == "later" else None
        with us.observe(judge=way, log=log):
            yield


def filling(count: int, threads: int) -> Callable[[], float]:
    """Return a call that fills memory in several threads, and returns the seconds of a fill."""
    memory = int(driver.cuMemAlloc(64)[1])
    streams = [int(driver.cuStreamCreate(1)[1]) for _ in range(threads)]

    def fill(stream: int) -> None:
        for _ in range(count):
            driver.cuMemsetD8Async(memory, 1, 8, stream)

    def run() -> float:
        workers = [threading.Thread(target=fill, args=(stream,)) for stream in streams]
        begin = time.perf_counter()
        for each in workers:
            each.start()
        for each in workers:
            each.join()
        return (time.perf_counter() - begin) / count / threads

    return run


@case
def recording(run: Run) -> Comparisons:
    for threads in (1, 3):
        fill = filling(run.scaled(20_000, 500), threads)

        def in_way(way: Way | None, fill: Callable[[], float] = fill) -> Callable[[], float]:
            def call() -> float:
                with observed(way):
                    fill()  # what is seen for the first time is not timed
                    return fill()

            return call

        name = "a driver call" if threads == 1 else f"a driver call, {threads} threads at once"
        yield Comparison(
            name,
            {name: in_way(way) for name, way in WAYS.items()},
            (at_most_added(RECORDED, BARE),),
            rounds=7,
            returns=True,
        )


@case
def judging(run: Run) -> Comparisons:
    count: int = run.scaled(200_000, 2000)
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory, "run.uslog")
        with us.observe(log=log, judge="later"):
            filling(count, 1)()

        def judge() -> float:
            begin = time.perf_counter()
            with log.open("rb") as file:
                judged(file, Judge())
            return (time.perf_counter() - begin) / count

        yield Comparison("a call, judged", {"Judge": judge}, rounds=5, returns=True)
