"""The end of a process: with work queued, streams held, threads that wait, captures that go on."""

from __future__ import annotations

import pytest

from testing.programs import check, run

START = """
import ctypes, os, threading, time
from userstream import testing
from userstream.testing import _simulated
testing.simulate()
from cuda.bindings import driver
from cuda.core import Device
device = Device(0)
device.set_current()
stream = device.create_stream()
handle = stream.handle

HostFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

def host_function(function):
    callback = HostFunction(lambda _: function())
    keep.append(callback)
    address = ctypes.cast(callback, ctypes.c_void_p).value
    assert driver.cuLaunchHostFunc(handle, driver.CUhostFn(address), 0)[0] == 0

keep = []

def hold():
    held = testing.latch(stream)
    held.__enter__()
    keep.append(held)

def daemon(function):
    threading.Thread(target=function, daemon=True).start()
    time.sleep(0.05)
"""

SCENARIOS = {
    "nothing to do": "",
    "a finished stream": "stream.sync()",
    "queued copies": """
address = driver.cuMemAlloc(1 << 20)[1]
for _ in range(200):
    driver.cuMemsetD8Async(address, 1, 1 << 20, handle)
""",
    "a queued host function": "host_function(lambda: None)",
    "many queued host functions": """
for _ in range(200):
    host_function(lambda: sum(range(1000)))
""",
    "a host function that runs": "host_function(lambda: time.sleep(30)); time.sleep(0.05)",
    "a host function behind a held stream": "hold(); host_function(lambda: print('never'))",
    "a held stream": "hold()",
    "a held stream and its memory": "hold(); device.allocate(64, stream=stream)",
    "a daemon thread in a stream's synchronize": "hold(); daemon(stream.sync)",
    "a daemon thread in an event's synchronize": """
hold()
event = stream.record()
daemon(event.sync)
""",
    "a daemon thread in a context's synchronize": "hold(); daemon(driver.cuCtxSynchronize)",
    "a daemon thread that polls": """
def poll():
    while True:
        driver.cuStreamQuery(handle)
hold(); daemon(poll)
""",
    "a daemon thread that queues work": """
def work():
    while True:
        driver.cuMemsetD8Async(address, 1, 64, handle)
        driver.cuStreamSynchronize(handle)
address = driver.cuMemAlloc(64)[1]
daemon(work)
""",
    "memory that is freed at exit": """
import atexit
address = driver.cuMemAlloc(64)[1]
hold()
atexit.register(keep.clear)
class Finalizer:
    def __del__(self):
        driver.cuMemFree(address)
finalizer = Finalizer()
""",
    "a synchronize at exit": """
class Finalizer:
    def __init__(self): self.call = driver.cuStreamSynchronize
    def __del__(self): self.call(handle)
hold(); finalizer = Finalizer()
""",
    "an unfinished capture": "driver.cuStreamBeginCapture(handle, driver.CUstreamCaptureMode(0))",
    "a failed context": "testing.async_error(stream, 700); time.sleep(0.02)",
    "a graph that runs": """
driver.cuStreamBeginCapture(handle, driver.CUstreamCaptureMode(0))
host_function(lambda: None)
graph = driver.cuStreamEndCapture(handle)[1]
executable = driver.cuGraphInstantiate(graph, 0)[1]
driver.cuGraphLaunch(executable, handle)
""",
    "per-thread streams of ended threads": """
def use():
    device = Device(0)
    device.set_current()
    driver.cuEventRecord(driver.cuEventCreate(2)[1], driver.CUstream(2))
threads = [threading.Thread(target=use) for _ in range(20)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
""",
    "os._exit with work queued": """
hold(); host_function(lambda: None)
os._exit(0)
""",
    "a released primary context": "hold(); driver.cuDevicePrimaryCtxReset(0)",
}


@pytest.mark.parametrize("code", SCENARIOS.values(), ids=SCENARIOS.keys())
def test_exit(code):
    """It neither hangs nor crashes, and prints nothing."""
    assert check(START + code) == ""


def test_threads_that_are_in_the_driver_when_python_ends():
    """Python up to 3.13 ends them by force when they come back, and C++ of cuda.core with them."""
    code = """
begun = threading.Semaphore(0)

def work():
    device.set_current()
    begun.release()
    while True:
        device.create_stream().sync()

for _ in range(8):
    threading.Thread(target=work, daemon=True).start()
    begun.acquire()
"""
    for _ in range(3):
        assert check(START + code) == ""


def test_a_thread_that_an_exit_handler_waits_for_can_end():
    """What was registered before userstream was imported is called when all of that has ended."""
    code = """
import atexit, threading, time
end, held = threading.Event(), []

def last():
    end.set()
    held[0].join()
    print("joined")

atexit.register(last)
"""
    work = """
def work():
    end.wait()
    driver.cuStreamQuery(handle)

held.append(threading.Thread(target=work, daemon=True))
held[0].start()
"""
    assert check(code + START + work, fresh=True) == "joined\n"


def test_python_functions_are_not_called_after_exit_began():
    """The latch is let go at exit, when Python goes down: what is queued behind it is dropped."""
    linger = """
import atexit, time
atexit.register(time.sleep, 0.3)  # comes last: what would be called has the time
"""
    code = """
hold()
host_function(lambda: print("called", flush=True))
"""
    assert check(linger + START + code, fresh=True) == ""


def test_an_exit_handler_can_still_use_the_driver():
    code = """
import atexit
def finish():
    keep[0].release()
    stream.sync()
    print("finished")
hold()
atexit.register(finish)
"""
    assert check(START + code) == "finished\n"


def test_an_uncaught_error_is_reported_and_the_process_ends():
    done = run(START + "hold(); host_function(lambda: None); raise KeyError('mine')")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "KeyError: 'mine'"
