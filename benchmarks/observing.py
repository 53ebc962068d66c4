"""What it costs to watch a program: ``python -m benchmarks.observing``, on a GPU with PyTorch.

Two programs run bare, under `userstream.observe`, under PyTorch's own race detector, which sees
PyTorch alone (``TORCH_CUDA_SANITIZER=1``), and under ``compute-sanitizer`` (memcheck), each in a
process of its own, in turns. One launches small kernels as fast as it can, the other trains a small
network. The times are microseconds per iteration: the median of the runs, and the range.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

_TIMED = """
import time
import torch

{setup}

def run(count):
    for _ in range(count):
        step()
    torch.cuda.synchronize()

run(20)
best = float("inf")
for _ in range(5):
    began = time.perf_counter()
    run({count})
    best = min(best, time.perf_counter() - began)
print("MICROSECONDS", best / {count} * 1e6)
"""

_LAUNCHES = """
x = torch.zeros(1024, device="cuda")
def step():
    x.add_(1)
"""

_TRAINING = """
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8))).cuda()
optimizer = torch.optim.AdamW(model.parameters())
inputs = torch.randn(64, 256, device="cuda")
def step():
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()
"""

PROGRAMS = {"a launch": (_LAUNCHES, 1000), "a training step": (_TRAINING, 50)}
WAYS: dict[str, tuple[list[str], dict[str, str]]] = {
    "bare": ([sys.executable], {}),
    "userstream observe": (
        [sys.executable, "-m", "userstream", "observe", "--fail-on", "nothing"],
        {},
    ),
    "TORCH_CUDA_SANITIZER=1": ([sys.executable], {"TORCH_CUDA_SANITIZER": "1"}),
    "compute-sanitizer": (["compute-sanitizer", "--tool", "memcheck", sys.executable], {}),
}


def microseconds(way: str, program: Path) -> float | None:
    """Run a program; return what it measured, None if this way is not to be had."""
    command, environment = WAYS[way]
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(
        [*command, os.fspath(program)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    for line in done.stdout.splitlines():
        if line.startswith("MICROSECONDS"):
            return float(line.split()[1])
    print(f"{way}: {done.stdout[-500:]}{done.stderr[-500:]}", file=sys.stderr)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3, help="of each program in each way")
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as directory:
        for name, (setup, count) in PROGRAMS.items():
            program = Path(directory, "program.py")
            program.write_text(_TIMED.format(setup=setup, count=count), encoding="utf-8")
            measured: dict[str, list[float]] = {way: [] for way in WAYS}
            for _ in range(runs):
                for way, seen in measured.items():
                    took = microseconds(way, program)
                    if took is not None:
                        seen.append(took)
            bare = statistics.median(measured["bare"])
            for way, seen in measured.items():
                if not seen:
                    print(f"{name:16} {way:24} not measured", flush=True)
                    continue
                middle = statistics.median(seen)
                spread = f"{min(seen):.1f} to {max(seen):.1f}"
                print(
                    f"{name:16} {way:24} {middle:10.1f}  ({spread})  {middle / bare:.2f} x bare",
                    flush=True,
                )


if __name__ == "__main__":
    main()
