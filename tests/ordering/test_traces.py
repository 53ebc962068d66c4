"""The lines in the log for edges, and the ranges for profilers."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

import userstream as us
from helpers import run_python

SUPPORT = Path(__file__).parents[1] / "support"

PROGRAM = """
import contextlib, logging, sys
import numpy as np
import userstream as us
from cuda.core import Device

if sys.argv[1:] != ["silent"]:
    logging.basicConfig(level=logging.DEBUG, format="%(message)s", stream=sys.stdout)
Device(0).set_current()
theirs = us.Stream.create(0)
buffer = Device(0).allocate(16, stream=theirs)
with us.borrow(buffer, producer=theirs) as stream:
    pass
with us.borrow(buffer):
    us.wait(stream, timeout=10)
stream.wait(theirs)
stream.wait(theirs.record())
us.asnumpy(buffer, producer=theirs)
us.copyto(buffer, np.zeros(16, "u1"), producer=theirs)
us.acquire(buffer, producer=theirs)
us.release(buffer, producer=theirs)
with contextlib.suppress(us.ClosedError):
    closed = us.Stream.create(0)
    closed.close()
    us.borrow(buffer, stream=closed).__enter__()
us.wait_all(timeout=10)
us.wait_for_device(0, timeout=10)
print("done", theirs.stream_id, stream.stream_id)
"""

NVTX = '''
"""Stands for the package: tells what it is asked."""
import functools

def annotate(message, domain):
    def around(function):
        @functools.wraps(function)
        def inside(*arguments, **more):
            print("begin", domain, message)
            try:
                return function(*arguments, **more)
            finally:
                print("end", domain, message)
        return inside
    return around

def start_range(message, domain):
    print("begin", domain, message)
    return message, domain

def end_range(range_id):
    print("end", range_id[1], range_id[0])
'''


def test_a_line_for_each_edge() -> None:
    done = run_python(PROGRAM, USERSTREAM_LOG_EDGES="1")
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    theirs, ours = (f"id={number} " for number in last.split()[1:])
    edges = [line.split(", at ")[0].split(" waits for ") for line in lines if ", at " in line]
    there = [(ours in a or a, theirs in b or b) for a, b in edges]
    back = [(theirs in a or a, ours in b or b) for a, b in edges]
    assert there[0] == back[1] == (True, True), "of the first borrow"
    assert edges[2][1] == edges[3][0] == "everything on device 0", "of the second"
    assert there.count((True, True)) >= 5
    assert any("<Event" in b for _, b in edges)
    assert not any("userstream/_" in line.split(", at ")[1] for line in lines if ", at " in line)


def test_a_line_for_the_edge_of_a_small_copy() -> None:
    """Such a copy is one call of the compiled core, which makes the edge itself."""
    done = run_python(
        """
        import logging, sys, types
        import userstream as us
        from cuda.core import Device

        Device(0).set_current()
        theirs = us.Stream.create(0)
        us.get_stream(0)
        memory = Device(0).allocate(16, stream=theirs)
        buffer = types.SimpleNamespace(__cuda_array_interface__={
            "version": 3, "shape": (16,), "typestr": "|u1", "strides": None,
            "data": (int(memory.handle), False), "stream": int(theirs.handle)})
        us.asnumpy(buffer)  # what is made at the first use is there
        logging.basicConfig(level=logging.DEBUG, format="%(message)s", stream=sys.stdout)
        us.asnumpy(buffer)
        """,
        USERSTREAM_LOG_EDGES="1",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" waits for ") == 1


@pytest.mark.parametrize("copy", ["us.asnumpy(x)", "us.asnumpy(x, out=out)", "us.copyto(out, x)"])
def test_a_line_for_the_edge_of_a_copy_of_a_tensor(copy: str) -> None:
    """The fast path of copies adds that edge with the copy, in one call of the compiled core."""
    done = run_python(
        f"""
        import logging, sys
        import numpy as np
        import userstream as us
        from cuda.core import Device
        import standins

        Device(0).set_current()
        theirs = us.Stream.create(0)
        memory = Device(0).allocate(4096, stream=theirs)
        torch = sys.modules["torch"] = standins.torch(int(theirs.handle))
        x = torch.Tensor(torch.device("cuda", 0), int(memory.handle))
        out = np.empty((2, 3), "f4")
        us.get_stream(x)
        {copy}  # what is made at the first use is there
        logging.basicConfig(level=logging.DEBUG, format="%(message)s", stream=sys.stdout)
        {copy}
        """,
        USERSTREAM_LOG_EDGES="1",
        PYTHONPATH=os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")]),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" waits for ") == 1


def test_a_line_for_the_edge_that_an_export_adds() -> None:
    """The type orders the consumer's stream itself, so the producer's stream is not known."""
    done = run_python(
        """
        import logging, sys
        import userstream as us
        from cuda.core import Device
        import standins

        class Array(standins.DrJitArray):
            def __dlpack_device__(self): return (2, 0)
            def __dlpack__(self, *, stream): return object()

        Device(0).set_current()
        logging.basicConfig(level=logging.DEBUG, format="%(message)s", stream=sys.stdout)
        us.acquire(Array())
        """,
        USERSTREAM_LOG_EDGES="1",
        PYTHONPATH=os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")]),
    )
    assert done.returncode == 0, done.stderr
    assert "waits for what __dlpack__ of a " in done.stdout


def test_no_line_without_the_variable() -> None:
    done = run_python(PROGRAM)
    assert done.returncode == 0, done.stderr
    assert " waits for " not in done.stdout


def test_ranges_for_profilers(tmp_path: Path) -> None:
    (tmp_path / "nvtx.py").write_text(NVTX)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = run_python(PROGRAM, "silent", USERSTREAM_NVTX="1", PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    begun = [line.removeprefix("begin userstream userstream.") for line in lines]
    for name in ("acquire", "release", "asnumpy", "copyto", "wait_all", "wait_for_device"):
        assert begun.count(name) == 1
    assert begun.count("borrow") == 2, "the third was refused"
    inside = lines.index("begin userstream userstream.wait")
    assert lines[inside - 1] == "begin userstream userstream.borrow"
    assert lines[inside + 1 : inside + 3] == [
        "end userstream userstream.wait",
        "end userstream userstream.borrow",
    ]
    assert sum("begin" in line for line in lines) == sum("end " in line for line in lines)


def test_no_package_for_ranges() -> None:
    done = run_python(
        "import sys; sys.modules['nvtx'] = None; import userstream",
        simulate=None,
        USERSTREAM_NVTX="1",
    )
    assert "ImportError: USERSTREAM_NVTX=1 needs the package nvtx" in done.stderr
    done = run_python("import sys, userstream; assert 'nvtx' not in sys.modules")
    assert done.returncode == 0, done.stderr


def test_a_priority_that_the_device_does_not_have(caplog: pytest.LogCaptureFixture) -> None:
    least, greatest = us.Stream.priority_range(0)
    with caplog.at_level(logging.DEBUG, "userstream"):
        us.Stream.create(0, priority=greatest).close()
        assert not caplog.messages
        us.Stream.create(0, priority=-100).close()
        us.get_stream(0, name="slow", priority=100)
    assert caplog.messages == [
        f"priority {asked} is clamped to {got}: device 0 has priorities from {greatest} to {least}"
        for asked, got in ((-100, greatest), (100, least))
    ]
