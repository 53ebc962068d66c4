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


def test_a_child_that_ends_does_not_let_go_of_the_streams_of_its_parent():
    """Held over the end of a child, of a with block in one, and of a release in one."""
    check(
        AFTER_INIT
        + """
import time
assert driver.cuStreamSynchronize(stream)[0] == 0
for how in ["exit", "block", "release"]:
    with testing.latch(stream) as held:
        child = os.fork()
        if child == 0:
            if how == "block":
                held.__exit__(None, None, None)
            if how == "release":
                held.release()
            raise SystemExit(0)
        assert os.waitpid(child, 0)[1] == 0
        time.sleep(0.05)
        assert driver.cuStreamQuery(stream)[0].name == "CUDA_ERROR_NOT_READY", how
        assert not held.is_released
    assert driver.cuStreamSynchronize(stream)[0] == 0
"""
    )


def test_a_child_does_not_write_an_old_value_over_a_newer_one():
    """The stream has not yet looked at the word that two latches used when the child ends."""
    check(
        AFTER_INIT
        + """
assert driver.cuStreamSynchronize(stream)[0] == 0
other, event = driver.cuStreamCreate(1)[1], driver.cuEventCreate(2)[1]
read, write = os.pipe()
with testing.latch(other):
    assert driver.cuEventRecord(event, other)[0] == 0
    with testing.latch(stream):
        child = os.fork()
        if child == 0:
            os.read(read, 1)
            raise SystemExit(0)
    assert driver.cuStreamWaitEvent(stream, event, 0)[0] == 0
    with testing.latch(stream):
        pass
    os.write(write, b"x")
    assert os.waitpid(child, 0)[1] == 0
for wait in range(1000):
    if driver.cuStreamQuery(stream)[0] == 0:
        break
    import time; time.sleep(0.005)
else:
    raise AssertionError("the stream is held for good")
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
