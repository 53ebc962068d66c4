"""The import, in fresh processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.harness import Comparison, Comparisons, Run, case
from benchmarks.limits import at_most_added

ROOT = Path(__file__).parents[1]


def seconds(module: str) -> float:
    """Import a module in a process of its own, and return what it took there."""
    code = f"import time; s = time.perf_counter(); import {module}; print(time.perf_counter() - s)"
    command = [sys.executable, "-c", code]
    return float(subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout)


@case
def fresh(run: Run) -> Comparisons:
    del run
    calls = {name: lambda name=name: seconds(name) for name in ("userstream", "cuda.core")}
    limit = at_most_added(10e-3, "cuda.core")
    yield Comparison("import, fresh processes", calls, (limit,), rounds=15, returns=True)
