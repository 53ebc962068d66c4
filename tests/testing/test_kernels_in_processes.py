"""Simulated kernels at the end of a process, and in one that forks."""

from __future__ import annotations

import pytest

from testing.programs import check, run

pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("no_garbage")]


# ---- processes --------------------------------------------------------------

START = """
import os, threading, time, warnings
warnings.simplefilter("ignore")  # a process with threads forks
import numpy as np
from userstream import _driver, testing

@testing.kernel("add")
def add(grid, block, x: testing.Pointer, n: np.int32):
    x.array(n, np.float32)[:] += 1

@testing.kernel("sleep")
def sleep(grid, block):
    time.sleep(30)

@testing.kernel("busy")
def busy(grid, block):
    np.sort(np.random.default_rng(0).random(200_000))

"""
USE = """
testing.simulate()
from cuda.bindings import driver
from cuda.core import Device, LaunchConfig, ObjectCode, Program, ProgramOptions, launch
from cuda.core.graph import GraphDefinition
one = LaunchConfig(grid=1, block=1)

def begin():
    global device, stream
    device = Device(0)
    device.set_current()
    stream = device.create_stream()

def kernel(name):
    return ObjectCode.from_ptx(b"any").get_kernel(name)

def try_it():
    begin()
    address = driver.cuMemAlloc(64)[1]
    driver.cuMemsetD8(address, 0, 64)
    launch(stream, one, kernel("add"), int(address), np.int32(16))
    stream.sync()
    host = np.empty(16, np.float32)
    driver.cuMemcpyDtoH(host.ctypes.data, address, 64)
    assert (host == 1).all(), host
"""


def test_kernels_may_be_registered_before_the_driver_is_there():
    check(START + USE + "try_it()")


def test_an_array_that_is_kept_keeps_its_bytes():
    """Else they would be given back to the system, which ends the process."""
    code = """
kept = []

@testing.kernel("keeps")
def keeps(grid, block, x: testing.Pointer):
    kept.append(x.array(1 << 26, np.uint8))

begin()
address = driver.cuMemAlloc(1 << 26)[1]
launch(stream, one, kernel("keeps"), int(address))
stream.sync()
driver.cuMemFree(address)
kept[0][:] = 5
assert kept[0].min() == 5
"""
    check(START + USE + code)


def test_without_the_simulated_driver_nothing_happens():
    code = """
import threading
assert threading.active_count() == 1
assert add.__name__ == "add"
try:
    testing.duration("add", 1)
except RuntimeError as error:
    assert "needs the simulated driver" in str(error)
else:
    raise AssertionError
"""
    check(START + code)


def test_a_fork_before_the_first_use():
    code = """
child = os.fork()
try_it()
if child == 0:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    check(START + USE + code)


def test_a_fork_while_a_kernel_runs():
    code = """
try_it()
for _ in range(20):
    launch(stream, one, kernel("busy"))
    child = os.fork()
    if child == 0:
        assert threading.active_count() == 1
        os._exit(int(driver.cuInit(0)[0]) != 3)
    assert os.waitpid(child, 0)[1] == 0
stream.sync()
"""
    check(START + USE + code)


ENDS = {
    "a kernel that sleeps": "launch(stream, one, kernel('sleep')); time.sleep(0.05)",
    "kernels that are busy": "[launch(stream, one, kernel('busy')) for _ in range(200)]",
    "kernels behind a held stream": """
held = testing.latch(stream)
held.__enter__()
[launch(stream, one, kernel("busy")) for _ in range(200)]
""",
    "a kernel that takes its time": """
testing.duration("busy", 60)
launch(stream, one, kernel("busy"))
""",
    "kernels of many streams": """
streams = [device.create_stream() for _ in range(12)]
[launch(each, one, kernel(name)) for name in ("busy", "sleep") for each in streams]
time.sleep(0.02)
""",
    "a daemon thread that waits": """
launched = threading.Event()
def work():
    device.set_current()
    testing.duration("busy", 60)
    launch(stream, one, kernel("busy"))
    launched.set()
    stream.sync()
threading.Thread(target=work, daemon=True).start()
assert launched.wait(30)
time.sleep(0.05)
""",
    "a kernel that fails": """
launch(stream, one, kernel("add"), 0, np.int32(1))
time.sleep(0.02)
""",
    "os._exit": "launch(stream, one, kernel('busy')); os._exit(0)",
}


@pytest.mark.parametrize("code", ENDS.values(), ids=ENDS.keys())
def test_exit(code):
    """It neither hangs nor crashes, and prints nothing."""
    assert check(START + USE + "begin()\n" + code) == ""


def test_an_uncaught_error_beside_a_kernel_that_runs():
    done = run(
        START + USE + "begin(); launch(stream, one, kernel('sleep')); raise KeyError('mine')"
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "KeyError: 'mine'"
