"""Programs of their own, for what needs a fresh process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from helpers import UNTRACED

ROOT = Path(__file__).parents[2]
PATIENCE = 60


def run(
    code: str,
    *,
    environment: dict[str, str | None] | None = None,
    arguments: tuple[str, ...] = (),
    timeout: float = PATIENCE,
) -> subprocess.CompletedProcess[str]:
    """Run a program; None removes a variable from its environment. A hang is an error.

    The programs test the simulated driver, whose Python the other tests cover: no coverage here.
    """
    variables = {**os.environ, **UNTRACED, "PYTHONPATH": str(ROOT), "PYTHONFAULTHANDLER": "1"}
    for name, value in (environment or {}).items():
        variables.pop(name, None)
        if value is not None:
            variables[name] = value
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=variables,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def check(
    code: str, *, environment: dict[str, str | None] | None = None, timeout: float = PATIENCE
) -> str:
    """What a program prints; it has to succeed and to leave stderr empty."""
    done = run(code, environment=environment, timeout=timeout)
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    assert done.stderr == "", done.stderr
    return done.stdout
