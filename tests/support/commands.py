"""``python -m userstream``, as users run it."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
import subprocess
import sys
from ctypes.util import find_library
from pathlib import Path
from typing import Any, NoReturn

import pytest

from userstream import __main__, _report

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


class _Becomes(BaseException):
    """Another program takes the place of this process."""


def observe(where: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``userstream observe`` from this process, which has loaded what reads the options:

    the supervisor that it becomes then is a process of its own.
    """

    def become(_: str, command: list[str]) -> NoReturn:
        raise _Becomes(command)

    before, said = set(os.environ), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(said):
        patch.chdir(where)
        patch.setattr(os, "execv", become)
        for name, value in environment.items():
            patch.setenv(name, value)
        try:
            __main__.main(["observe", "--simulate", *arguments])
        except SystemExit as end:
            return subprocess.CompletedProcess(arguments, int(end.code or 0), "", said.getvalue())
        except _Becomes as becomes:
            (command,) = becomes.args
            (options,) = map(int, re.findall(r"main\((\d+)\)", command[-1]))
            try:
                return subprocess.run(
                    command, capture_output=True, text=True, check=False, pass_fds=[options]
                )
            finally:
                os.close(options)
        finally:
            for name in set(os.environ) - before - set(environment):
                del os.environ[name]
    raise AssertionError("it has returned")


def document(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.stderr == ""
    found = json.loads(done.stdout)
    assert done.stdout == json.dumps(found, indent=2) + "\n", "nothing else on stdout"
    assert found["ok"] == (done.returncode == 0)
    return found
