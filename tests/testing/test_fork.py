"""fork() before and after the driver was initialized."""

from __future__ import annotations

from testing.programs import check

AFTER_INIT = """
import os, warnings
warnings.simplefilter("ignore")  # a process with threads forks
from userstream import testing
testing.simulate()
from cuda.bindings import driver
driver.cuInit(0)
driver.cuCtxSetCurrent(driver.cuDevicePrimaryCtxRetain(0)[1])
stream = driver.cuStreamCreate(1)[1]
driver.cuMemsetD8Async(driver.cuMemAlloc(64)[1], 1, 64, stream)
"""


def test_the_child_of_an_initialized_process():
    """H200: the query answers SUCCESS, all else NOT_INITIALIZED."""
    check(
        AFTER_INIT
        + """
child = os.fork()
if child == 0:
    answers = [
        driver.cuStreamQuery(stream)[0].name,
        driver.cuInit(0)[0].name,
        driver.cuCtxGetCurrent()[0].name,
        driver.cuStreamSynchronize(stream)[0].name,
        driver.cuStreamCreate(1)[0].name,
        driver.cuEventCreate(2)[0].name,
    ]
    os._exit(0 if answers == ["CUDA_SUCCESS"] + ["CUDA_ERROR_NOT_INITIALIZED"] * 5 else 1)
assert os.waitpid(child, 0)[1] == 0
assert driver.cuStreamSynchronize(stream)[0] == 0
"""
    )


def test_the_parent_goes_on_beside_many_children():
    check(
        AFTER_INIT
        + """
address = driver.cuMemAlloc(64)[1]
for _ in range(20):
    driver.cuMemsetD8Async(address, 1, 64, stream)
    child = os.fork()
    if child == 0:
        os._exit(int(driver.cuInit(0)[0]) != 3)
    assert os.waitpid(child, 0)[1] == 0
assert driver.cuStreamSynchronize(stream)[0] == 0
"""
    )


def test_a_child_can_end_normally():
    """Its finalizers and exit handlers run, in an interpreter whose driver is gone."""
    check(
        AFTER_INIT
        + """
held = testing.latch(stream)
held.__enter__()
child = os.fork()
if child == 0:
    raise SystemExit(0)
assert os.waitpid(child, 0)[1] == 0
held.release()
"""
    )


def test_a_fork_before_the_initialization():
    check(
        """
import os
from userstream import testing
testing.simulate()
child = os.fork()
from cuda.core import Device
device = Device(1)
device.set_current()
device.create_stream().record().sync()
if child == 0:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    )


def test_a_spawned_process_starts_its_own():
    printed = check(
        AFTER_INIT
        + """
import subprocess, sys
code = (
    "from userstream import testing; testing.simulate(5); "
    "from cuda.bindings import driver; driver.cuInit(0); print(driver.cuDeviceGetCount()[1])"
)
subprocess.run([sys.executable, "-c", code], check=True)
"""
    )
    assert printed == "5\n"
