"""What it costs to watch a program, beside other tools that look for races or errors.

These are the race detector of PyTorch, which sees PyTorch alone, and compute-sanitizer (memcheck).
One program launches small kernels as fast as it can, the other trains a small network; each runs in
a process of its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.harness import Comparison, Comparisons, Run, Skipped, case
from benchmarks.limits import Limit, at_most_added, shown

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
