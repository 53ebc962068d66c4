"""The import, in fresh processes, of what was compiled before."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.harness import Comparison, Comparisons, Run, case
from benchmarks.limits import no_more_than

ROOT = Path(__file__).parents[1]
# The first import compiles the modules of a clone, as pip did those of the others: they are kept.
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
CODE = """
import time{first}
begin = time.perf_counter()
import {module}
print(time.perf_counter() - begin)
"""


def seconds(module: str, first: str = "") -> float:
    """Import a module in a process of its own, and return what it took there."""
    code = CODE.format(module=module, first=first)
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, check=True, capture_output=True)
    return float(done.stdout)


@case
def fresh(run: Run) -> Comparisons:
    del run
    calls = {
        "userstream, after cuda.core and NumPy": lambda: seconds(
            "userstream", ", cuda.core, numpy"
        ),
        "cuda.core": lambda: seconds("cuda.core"),
    }
    limits = (no_more_than(8e-3),)
    yield Comparison("import, fresh processes", calls, limits, rounds=15, returns=True)
