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
    "--ignore=tests/conformance/test_injected_library.py",  # it is loaded into other processes
    "tests/testing/test_conditions.py",
    "tests/testing/test_node_updates.py",
    "tests/testing/test_faults.py",
    "tests/testing/test_latch.py",
    "tests/testing/test_load.py",
    "tests/testing/test_simulated_internal.py",
    "tests/driver/test_bells_internal.py",
    "tests/driver/test_core_internal.py",
    "tests/driver/test_edges_internal.py",
    # Without those that have a race: the thread sanitizer sees it as well.
    "tests/observe/test_cases.py::test_it_is_not_reported",
    "tests/observe/test_captures.py::test_a_capture_goes_on_when_its_stream_is_seen",
    "tests/observe/test_learning.py::test_many_threads_call_while_it_begins_and_ends",
    "tests/observe/test_learning.py::test_many_threads_launch_while_it_begins_and_ends",
    "tests/observe/test_observe.py::test_a_thread_that_python_does_not_know_is_watched_without_the_gil",
    "tests/observe/test_observe.py::test_memory_that_is_unmapped_is_unknown_wherever_it_was_cut",
    "tests/observe/test_recorder.py::test_a_storm_of_observations_harms_no_program",
    "tests/observe/test_recorder.py::test_a_size_that_the_driver_refuses_is_not_read",
    "tests/observe/test_recorder.py::test_memory_that_a_finalizer_frees_on_any_thread_is_forgotten",
]
# A thread that ends may give back the stack, and with it the thread-local variables, of another one
# that has ended before. They agree by a lock of the C library, which the sanitizer cannot see.
HARMLESS = "race:_dl_deallocate_tls\n"
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
    checkout = tmp_path / "checkout"
    ignored = shutil.ignore_patterns(".*", "build", "__pycache__", "*.so", "*.so.1")
    shutil.copytree(ROOT, checkout, ignore=ignored)
    flags = f"-g1 -O1 -fsanitize={kinds} -fno-omit-frame-pointer"
    compiled = {**os.environ, "CC": "gcc", "USERSTREAM_CFLAGS": flags}
    build = "import hatch_build, pathlib; hatch_build.build(pathlib.Path('userstream'))"
    subprocess.run([sys.executable, "-c", build], cwd=checkout, env=compiled, check=True)
    log = f"log_path={tmp_path / 'report'}"
    harmless = tmp_path / "harmless"
    harmless.write_text(HARMLESS, encoding="utf-8")
    environment = {
        **os.environ,
        "PYTHONPATH": str(checkout),  # in the programs that tests start, too
        "USERSTREAM_CALLS": "10000",
        "USERSTREAM_TEST_DRIVER": "simulated",
        "LD_PRELOAD": " ".join(library(library_name) for library_name in libraries),
        # Python itself does not give all of its memory back.
        "ASAN_OPTIONS": f"detect_leaks=0:{log}",
        "UBSAN_OPTIONS": f"print_stacktrace=1:{log}",
        "TSAN_OPTIONS": f"{log}:suppressions={harmless}",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
    done = subprocess.run(
        command, cwd=checkout, env=environment, capture_output=True, text=True, check=False
    )
    reports = [path.read_text() for path in tmp_path.glob("report*")]
    assert reports == []
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
