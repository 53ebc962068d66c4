"""Processes into which the driver loads the recorder: ``CUDA_INJECTION64_PATH``."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import userstream as us
from observed import judge_of

pytestmark = pytest.mark.simulated

PACKAGE = Path(us.__file__).parent
RECORDER = PACKAGE / "_observe/recorder.so"  # as the documentation says

# It has a race, and imports nothing of the recorder.
RACE = """
import os, signal, sys, time
from userstream.testing import simulate
simulate()
from cuda.bindings import driver

def ok(result):
    assert not result[0], result
    return result[1] if len(result) > 1 else None

ok(driver.cuInit(0))
ok(driver.cuCtxSetCurrent(ok(driver.cuDevicePrimaryCtxRetain(0))))
memory = ok(driver.cuMemAlloc(4096))
one, other = ok(driver.cuStreamCreate(1)), ok(driver.cuStreamCreate(1))

def first():
    ok(driver.cuMemsetD8Async(memory, 1, 4096, one))

def second():
    ok(driver.cuMemsetD8Async(memory, 2, 4096, other))

first()
second()
ok(driver.cuCtxSynchronize())
assert not [name for name in sys.modules if name.startswith("userstream._observe")]
{end}
"""


def run(
    end: str = "", *, command: list[str] | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDA_INJECTION64_PATH": str(RECORDER), **variables}
    if command is None:
        command = [sys.executable, "-X", "faulthandler", "-c", RACE.format(end=end)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def the_log(directory: Path) -> Path:
    (path,) = directory.iterdir()
    assert path.suffix == ".uslog"
    return path


def lines_of(judge: Any) -> set[str]:
    """Return the functions in which races are, on both sides."""
    return {
        "" if line is None else line.name
        for race in judge.races()
        for line in (race.first.line, race.second.line)
    }


@pytest.mark.parametrize(
    ("end", "status", "reason"),
    [
        ("", 0, "exit"),
        ("sys.exit(3)", 3, "exit"),
        ("time.sleep(0.2); os._exit(4)", 4, None),
        ("time.sleep(0.2); os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, None),
        ("time.sleep(0.2); import ctypes; ctypes.string_at(0)", -signal.SIGSEGV, None),
    ],
    ids=["end", "exit", "_exit", "killed", "crash"],
)
def test_a_process_is_recorded_from_its_first_call(
    tmp_path: Path, end: str, status: int, reason: str | None
) -> None:
    done = run(end, USERSTREAM_RECORD=str(tmp_path))
    assert done.returncode == status, done.stderr
    judge = judge_of(the_log(tmp_path))
    assert judge.end == reason
    assert lines_of(judge) == {"first", "second"}
    assert judge.calls()["cuMemAlloc_v2"] == 1
    cut = [what for what in judge.not_seen() if "the end of this log" in what]
    assert len(cut) == (reason is None)


def test_the_log_has_the_names_of_its_process(tmp_path: Path) -> None:
    run(USERSTREAM_RECORD=str(tmp_path), RANK="5")
    path = the_log(tmp_path)
    process = judge_of(path).findings().process
    assert process.rank == "5"
    assert process.command[:2] == [sys.executable, "-X"]
    assert process.userstream
    assert path.name.startswith(f"{process.pid}-")
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("variable", ["USERSTREAM_RECORD", "USERSTREAM_RECORD_ONLY"])
def test_a_process_that_is_not_meant_is_not_recorded(tmp_path: Path, variable: str) -> None:
    told = {"USERSTREAM_RECORD": str(tmp_path), variable: "1"}
    assert run(**told).returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_why_a_process_is_not_recorded_is_said(tmp_path: Path) -> None:
    done = run(USERSTREAM_RECORD=str(tmp_path), USERSTREAM_CUPTI="/missing/libcupti.so")
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.iterdir()
    assert path.suffix == ".why"
    assert "/missing/libcupti.so" in path.read_text()


def test_each_process_has_a_log_of_its_own(tmp_path: Path) -> None:
    end = """
if "child" not in os.environ:
    import subprocess
    environment = {**os.environ, "child": "1"}
    subprocess.run([sys.executable, "-c", sys.orig_argv[-1]], env=environment, check=True)
    subprocess.run([sys.executable, "-c", "import ctypes"], check=True)
"""
    done = run(end, USERSTREAM_RECORD=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert len([*tmp_path.iterdir()]) == 2
    for path in tmp_path.iterdir():
        assert lines_of(judge_of(path)) == {"first", "second"}


def test_a_child_that_is_forked_before_cuda_is_used_is_recorded(tmp_path: Path) -> None:
    program = RACE.format(end="os._exit(0) if child == 0 else os.waitpid(child, 0)")
    program = program.replace("ok(driver.cuInit(0))", "child = os.fork(); ok(driver.cuInit(0))")
    program = program.replace("os._exit(0)", "(time.sleep(0.2), os._exit(0))")
    done = run(command=[sys.executable, "-c", program], USERSTREAM_RECORD=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert sorted(judge_of(path).end or "none" for path in tmp_path.iterdir()) == ["exit", "none"]


C_PROGRAM = """
#include <stddef.h>
int cuInit(unsigned);
int cuDevicePrimaryCtxRetain(void **, int);
int cuCtxSetCurrent(void *);
int cuMemAlloc_v2(unsigned long long *, size_t);
int cuStreamCreate(void **, unsigned);
int cuMemsetD8Async(unsigned long long, unsigned char, size_t, void *);
int main(void) {
    void *context, *streams[2];
    unsigned long long memory;
    if (cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context) ||
        cuMemAlloc_v2(&memory, 4096))
        return 1;
    for (int i = 0; i < 2; i++) {
        if (cuStreamCreate(&streams[i], 1) || cuMemsetD8Async(memory, 1, 4096, streams[i]))
            return 2;
    }
    return 0;
}
"""


@pytest.mark.skipif(not shutil.which("gcc"), reason="needs gcc")
def test_a_program_in_c_is_recorded(tmp_path: Path) -> None:
    source, program, logs = tmp_path / "race.c", tmp_path / "race", tmp_path / "logs"
    logs.mkdir()
    source.write_text(C_PROGRAM)
    driver = PACKAGE / "testing/libcuda/libcuda.so.1"
    subprocess.run(
        ["gcc", source, driver, f"-Wl,-rpath,{driver.parent}", "-o", program], check=True
    )
    done = run(command=[str(program)], USERSTREAM_RECORD=str(logs))
    assert done.returncode == 0, done.stderr
    judge = judge_of(the_log(logs))
    (race,) = judge.races()
    assert race.first.line is race.second.line is None
    assert judge.not_seen() == ()
