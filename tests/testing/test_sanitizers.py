"""The simulated driver under the sanitizers of the compiler.

``USERSTREAM_SANITIZERS=1`` runs this: the conformance tests and those of this folder once more, in
a process with the address and undefined-behaviour sanitizers and in one with the thread sanitizer.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from testing.programs import ROOT

pytestmark = [
    pytest.mark.skipif(
        os.environ.get("USERSTREAM_SANITIZERS") != "1", reason="needs USERSTREAM_SANITIZERS=1"
    ),
    pytest.mark.skipif(not shutil.which("gcc"), reason="needs gcc"),
    pytest.mark.timeout(1200),
]

TESTS = [
    "tests/conformance",
    "tests/testing/test_conditions.py",
    "tests/testing/test_faults.py",
    "tests/testing/test_latch.py",
    "tests/testing/test_load.py",
    "tests/testing/test_observer.py",
    # Without those that have a race: the thread sanitizer sees it as well.
    "tests/test_observe_cases.py::test_it_is_not_reported",
    "tests/test_observe.py::test_many_threads_call_while_it_begins_and_ends",
]
SANITIZERS = {
    "address": ("address,undefined", ["libasan.so", "libubsan.so"]),
    "thread": ("thread", ["libtsan.so"]),
}


def library(name):
    """The run-time library of a sanitizer: Python was not compiled with it."""
    found = subprocess.run(
        ["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not os.path.isabs(found):
        pytest.skip(f"{name} is not installed")
    return found


@pytest.mark.parametrize("name", SANITIZERS)
def test_sanitizer(name, tmp_path):
    kinds, libraries = SANITIZERS[name]
    log = f"log_path={tmp_path / 'report'}"
    environment = {
        **os.environ,
        "CC": "gcc",
        "USERSTREAM_CFLAGS": f"-fsanitize={kinds} -fno-omit-frame-pointer",
        "USERSTREAM_CACHE_DIR": str(tmp_path / "cache"),
        "USERSTREAM_TEST_DRIVER": "simulated",
        "LD_PRELOAD": " ".join(library(library_name) for library_name in libraries),
        # Python itself does not give all of its memory back.
        "ASAN_OPTIONS": f"detect_leaks=0:{log}",
        "UBSAN_OPTIONS": f"print_stacktrace=1:{log}",
        "TSAN_OPTIONS": log,
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    reports = [path.read_text() for path in tmp_path.glob("report*")]
    assert reports == []
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
