"""Programs of their own, for what needs a fresh process."""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from helpers import UNTRACED

ROOT = Path(__file__).parents[2]
PATIENCE = 60

# Imports what most programs import, which takes longer than what they do, and becomes each of them
# by a fork: of a process that has not called CUDA, and in which no other thread runs.
_SERVER = """
import json, os, sys
os.environ["OPENBLAS_NUM_THREADS"] = "1"  # or NumPy starts threads
import numpy, cuda.core, userstream.testing
del os.environ["OPENBLAS_NUM_THREADS"]
answers = os.dup(1)
for line in iter(sys.stdin.readline, ""):
    child = os.fork()
    if not child:
        break
    os.write(answers, b"%d " % child)
    os.write(answers, b"%d\\n" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
else:
    os._exit(0)
os.close(answers)
code, sys.argv[1:], environment, *files = json.loads(line)
os.environ.clear()
os.environ.update(environment)
for number, (file, flags) in enumerate(zip(files, (os.O_RDONLY, os.O_WRONLY, os.O_WRONLY))):
    opened = os.open(file, flags)
    os.dup2(opened, number)
    os.close(opened)
[globals().pop(each) for each in [*globals()] if each[:2] != "__" and each != "code"]
exec(compile(globals().pop("code"), "<string>", "exec"))
"""


def _variables() -> dict[str, str]:
    # The programs test the simulated driver, whose Python the other tests cover: no coverage here.
    return {**os.environ, **UNTRACED, "PYTHONPATH": str(ROOT), "PYTHONFAULTHANDLER": "1"}


@functools.cache
def _server() -> subprocess.Popen[bytes]:
    server = subprocess.Popen(
        [sys.executable, "-c", _SERVER],
        env=_variables(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
    )
    atexit.register(server.wait)
    atexit.register(server.kill)
    return server


def _answer(timeout: float) -> int:
    """Return the next number of the server."""
    said = b""
    while not said.endswith((b" ", b"\n")):
        if not select.select([_server().stdout], (), (), timeout)[0]:
            raise TimeoutError
        byte = _server().stdout.read(1)
        assert byte, "the server of programs has ended"
        said += byte
    return int(said)


def _fork(code: str, arguments: tuple[str, ...], timeout: float) -> tuple[int, str, str]:
    with tempfile.TemporaryDirectory() as directory:
        files = [Path(directory, name) for name in ("out", "err")]
        for file in files:
            file.touch()
        request = json.dumps([code, arguments, _variables(), os.devnull, *map(str, files)])
        _server().stdin.write(f"{request}\n".encode())
        child = _answer(PATIENCE)
        try:
            status = _answer(timeout)
        except TimeoutError:
            os.kill(child, signal.SIGABRT)  # it says where it hangs
            _answer(PATIENCE)
            raise AssertionError(
                "\n".join(["the program hangs:", *(each.read_text() for each in files)])
            ) from None
        return status, *(each.read_text() for each in files)


def run(
    code: str,
    *,
    environment: dict[str, str | None] | None = None,
    arguments: tuple[str, ...] = (),
    timeout: float = PATIENCE,
    fresh: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a program; None removes a variable from its environment. A hang is an error.

    A program that is `fresh`, or has an environment of its own, has imported nothing before.
    """
    if not (fresh or environment or "LD_PRELOAD" in os.environ):  # sanitizers do not like forks
        return subprocess.CompletedProcess(code, *_fork(code, arguments, timeout))
    variables = _variables()
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
    code: str,
    *,
    environment: dict[str, str | None] | None = None,
    timeout: float = PATIENCE,
    fresh: bool = False,
) -> str:
    """What a program prints; it has to succeed and to leave stderr empty."""
    done = run(code, environment=environment, timeout=timeout, fresh=fresh)
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    assert done.stderr == "", done.stderr
    return done.stdout
