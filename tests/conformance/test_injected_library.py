"""CUDA_INJECTION64_PATH: a library that cuInit loads and calls."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from helpers import run_python

pytestmark = pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")

# Counts its calls; what it sees of the driver goes into the variable SEEN_BY_INJECTION.
SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

static int calls;

int InitializeInjection(void) {
    typedef int (*Function)(int *);
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    int version = 0, result = -1;
    char text[64];
    if (driver)
        result = ((Function)dlsym(driver, "cuDriverGetVersion"))(&version);
    snprintf(text, sizeof text, "%d calls, result %d, version %d", ++calls, result, version > 0);
    setenv("SEEN_BY_INJECTION", text, 1);
    return ANSWER;
}
"""

PROGRAM = """
import ctypes
from cuda.bindings import driver
before = ctypes.CDLL(None).getenv
before.restype = ctypes.c_char_p
assert driver.cuDriverGetVersion()[0] == 0
print(before(b"SEEN_BY_INJECTION"), end=", ")
print(int(driver.cuInit(0)[0]), end=", ")
print(before(b"SEEN_BY_INJECTION"), end=", ")
print(int(driver.cuInit(0)[0]), int(driver.cuDeviceGet(0)[0]), end=", ")
print(before(b"SEEN_BY_INJECTION"))
"""


@pytest.fixture
def compiled(tmp_path):
    def compile_with(answer):
        (tmp_path / "injected.c").write_text(SOURCE)
        command = [
            "cc",
            f"-DANSWER={answer}",
            "-shared",
            "-fPIC",
            "injected.c",
            "-o",
            "injected.so",
        ]
        subprocess.run([*command, "-o", "injected.so"], cwd=tmp_path, check=True)
        return str(tmp_path / "injected.so")

    return compile_with


def printed(path):
    done = run_python(PROGRAM, CUDA_INJECTION64_PATH=path)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("answer", [1, 0], ids=["it succeeds", "it fails"])
def test_the_library_is_called_once_by_the_first_init(compiled, answer):
    seen = "b'1 calls, result 0, version 1'"
    assert printed(compiled(answer)) == f"None, 0, {seen}, 0 0, {seen}\n"


def test_a_library_that_is_missing_changes_nothing(tmp_path):
    assert printed(str(tmp_path / "none.so")) == "None, 0, None, 0 0, None\n"


def test_an_empty_path_changes_nothing():
    assert printed("") == "None, 0, None, 0 0, None\n"
