"""The simulated driver and the compiled core under the sanitizers of the compiler.

``USERSTREAM_SANITIZERS=1`` runs this: the conformance tests, those of this folder and those of the
core once more, in a process with the address and undefined-behaviour sanitizers and in one with the
thread sanitizer.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig

import pytest

from testing.programs import ROOT
from userstream import _built

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
    "tests/testing/test_node_updates.py",
    "tests/testing/test_faults.py",
    "tests/testing/test_latch.py",
    "tests/testing/test_load.py",
    "tests/testing/test_observer.py",
    "tests/driver/test_native.py",
    "tests/driver/test_fused.py",
    # Without those that have a race: the thread sanitizer sees it as well.
    "tests/observe/test_cases.py::test_it_is_not_reported",
    "tests/observe/test_captures.py::test_a_capture_goes_on_when_its_stream_is_seen",
    "tests/observe/test_observe.py::test_many_threads_call_while_it_begins_and_ends",
    "tests/observe/test_observe.py::test_many_threads_launch_while_it_begins_and_ends",
    "tests/observe/test_observe.py::test_a_thread_that_python_does_not_know_is_watched_without_the_gil",
    "tests/observe/test_observe.py::test_memory_that_is_unmapped_is_unknown_wherever_it_was_cut",
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


# Instead of the one that is installed, whichever that is.
TAKE_CORE = """
import importlib.util, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "userstream._driver._core":
            return importlib.util.spec_from_file_location(name, {library!r})
sys.meta_path.insert(0, Finder())
"""


def sanitized_core(directory, flags):
    """Compile the core; return the directory that makes every Python take it."""
    sources = ROOT / "userstream/_driver/native"
    core = directory / "_core.so"
    checksum = directory / "checksum.c"
    checksum.write_text(
        f'const char userstream_core_source[] = "{_built.checksum(str(sources))}";\n'
    )
    include = sysconfig.get_path("include")
    command = ["gcc", "-std=c11", "-O1", "-g", "-shared", "-fPIC", *flags, f"-I{include}"]
    subprocess.run([*command, *sources.glob("*.c"), checksum, "-o", core], check=True)
    (directory / "sitecustomize.py").write_text(TAKE_CORE.format(library=str(core)))
    return directory


@pytest.mark.parametrize("name", SANITIZERS)
def test_sanitizer(name, tmp_path):
    kinds, libraries = SANITIZERS[name]
    flags = [f"-fsanitize={kinds}", "-fno-omit-frame-pointer"]
    log = f"log_path={tmp_path / 'report'}"
    (tmp_path / "core").mkdir()
    paths = [str(sanitized_core(tmp_path / "core", flags)), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "CC": "gcc",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "USERSTREAM_CALLS": "10000",
        "USERSTREAM_CFLAGS": " ".join(flags),
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
