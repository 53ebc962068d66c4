"""``python -m userstream``, as users run it."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from ctypes.util import find_library
from pathlib import Path
from typing import Any

import pytest

from userstream import _report

STEPS = [
    "get_stream",
    "one_stream",
    "allocate",
    "resolve",
    "copy",
    "wait",
    "bytes",
    "wait_for_device",
    "free",
    "unchanged",
]

# Not by loading the driver: the simulated one has its name.
bare = pytest.mark.skipif(
    any(Path(node).exists() for node in _report.DEVICE_NODES) or find_library("cuda") is not None,
    reason="this machine has a device node or a driver",
)


@functools.cache
def run_bare(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command once for all tests that ask for the same."""
    return subprocess.run(
        [sys.executable, "-m", "userstream", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **environment},
    )


def document(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.stderr == ""
    found = json.loads(done.stdout)
    assert done.stdout == json.dumps(found, indent=2) + "\n", "nothing else on stdout"
    assert found["ok"] == (done.returncode == 0)
    return found
