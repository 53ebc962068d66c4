"""Calls of all functions with drawn arguments: no crash, no hang, always a result of the driver.

Two seeds are the same in every run; for ``USERSTREAM_FUZZ`` seconds others follow. A failure tells
its seed, and ``USERSTREAM_FUZZ_SEED`` draws those calls alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import seeds
from testing.programs import PATIENCE, ROOT, check

FUZZ = Path(__file__).with_name("fuzz.py")

pytestmark = pytest.mark.simulated


def test_no_call_crashes_or_hangs(tmp_path: Path) -> None:
    log = tmp_path / "last calls"
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONFAULTHANDLER": "1"}
    for seed in seeds(2):
        threads = 1 + seed % 3
        done = subprocess.run(
            [sys.executable, str(FUZZ), str(seed), str(log), str(threads)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=2 * PATIENCE,
            check=False,
        )
        last = log.read_text(errors="replace") if log.exists() else ""
        assert done.returncode == 0, f"USERSTREAM_FUZZ_SEED={seed}: {last}\n{done.stderr[-4000:]}"


def test_a_stale_handle_names_nothing_of_the_drivers_own() -> None:
    """The streams that a context has for itself get handles that were freed, and so do plans."""
    check("""
from userstream import testing
testing.simulate(1)
from cuda.bindings import driver
invalid = driver.CUresult.CUDA_ERROR_INVALID_HANDLE
driver.cuInit(0)
driver.cuCtxSetCurrent(driver.cuDevicePrimaryCtxRetain(0)[1])
streams = [driver.cuStreamCreate(1)[1] for _ in range(8)]
graphs = [driver.cuGraphCreate(0)[1] for _ in range(8)]
for graph in graphs[1:]:
    assert driver.cuGraphDestroy(graph) == (0,)
executable = driver.cuGraphInstantiate(graphs[0], 0)[1]
for graph in graphs[1:]:
    assert driver.cuGraphDestroy(graph) != (0,)
driver.cuDevicePrimaryCtxReset(0)
for stream in streams:
    assert driver.cuStreamDestroy(stream) == (invalid,)
assert driver.cuGraphLaunch(executable, 0) == (0,)
assert driver.cuStreamSynchronize(0) == (0,)
""")
