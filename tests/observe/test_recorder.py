"""What the recorder reads and keeps, in programs that end it, reuse addresses and free memory."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cuda.bindings import driver

import userstream as us
from conformance.support import CUDA_12
from helpers import UNTRACED, checked, device_memory, pinned_memory, run_python
from observed import SIZE, a_room, captured, copy, fill, handle
from userstream.testing import latch

pytestmark = [
    pytest.mark.simulated,
    pytest.mark.no_races(False),  # these tests observe themselves
]

STORM = Path(__file__).with_name("storm.py")
OVERWRITTEN = "host overwrote the source of a copy"

# What the programs that run in a process of their own begin with: a crash would end these tests.
START = """
import ctypes, gc, threading, time
from cuda.bindings import driver
import userstream as us

def ok(result):
    assert not result[0], result
    return result[1] if len(result) > 1 else None

SIZE = 4096
us.get_stream(0)
ok(driver.cuCtxSetCurrent(ok(driver.cuDevicePrimaryCtxRetain(0))))
stream = us.Stream.create(0)
handle = int(stream.handle)
x = int(ok(driver.cuMemAlloc(SIZE)))
"""


def run(program: str) -> None:
    done = run_python(START + program)
    assert done.returncode == 0, done.stderr


@pytest.mark.timeout(900)
def test_a_storm_of_observations_harms_no_program() -> None:
    seconds = os.environ.get("USERSTREAM_STORM", "5")
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", str(STORM), seconds],
        capture_output=True,
        text=True,
        timeout=float(seconds) + 120,
        check=False,
        env={**os.environ, **UNTRACED},
    )
    assert done.returncode == 0, done.stderr[-4000:]


def test_a_size_that_the_driver_refuses_is_not_read() -> None:
    run("""
pinned = int(ok(driver.cuMemHostAlloc(SIZE, 0)))
with us.observe() as seen:
    for size in (1 << 40, 1 << 63, (1 << 64) - 1):
        refused, = driver.cuMemcpyHtoDAsync(x, pinned, size, handle)
        assert refused == driver.CUresult.CUDA_ERROR_INVALID_VALUE, refused
    stream.sync()
assert seen.races == (), seen
""")


def test_memory_that_is_gone_unseen_is_not_read() -> None:
    """`munmap` stands for what gives memory back without a call that is watched."""
    run("""
import mmap
memory = mmap.mmap(-1, SIZE)
array = (ctypes.c_char * SIZE).from_buffer(memory)
pinned = ctypes.addressof(array)
ok(driver.cuMemHostRegister(pinned, SIZE, 0))
with us.observe() as seen:
    ok(driver.cuMemcpyHtoDAsync(x, pinned, SIZE, handle))
    stream.sync()
    libc = ctypes.CDLL(None)
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    assert libc.munmap(pinned, SIZE) == 0
    ok(driver.cuMemcpyDtoDAsync(x, x, 0, handle))
    stream.sync()
    ok(driver.cuMemFree(x))
import os
print(seen, flush=True)
os._exit(len(seen.races))
""")


def test_a_released_context_takes_its_sources_along() -> None:
    run(
        """
us.close()
del stream
context = ok(driver.cuCtxGetCurrent())
pinned = int(ok(driver.cuMemHostAlloc(SIZE, 0)))
other = ok(driver.cuStreamCreate(1))
with us.observe() as seen:
    ok(driver.cuMemcpyHtoDAsync(x, pinned, SIZE, other))
    ok(driver.cuStreamSynchronize(other))
    while driver.cuDevicePrimaryCtxRelease(0)[0] == 0:
        if not ok(driver.cuDevicePrimaryCtxGetState(0))[0:1][0]:
            break
    ok(driver.cuCtxSetCurrent(ok(driver.cuDevicePrimaryCtxRetain(0))))
    ok(driver.cuCtxSynchronize())
assert seen.races == (), seen
import os
os._exit(0)
""".replace(
            "ok(driver.cuDevicePrimaryCtxGetState(0))[0:1][0]",
            "driver.cuDevicePrimaryCtxGetState(0)[2]",
        )
    )


@pytest.mark.parametrize("current", [True, False])
def test_memory_that_a_finalizer_frees_on_any_thread_is_forgotten(current: bool) -> None:
    """The garbage collector runs finalizers on any thread that allocates, also the observer."""
    leave = "" if current else "ok(driver.cuCtxPopCurrent())"
    run(f"""
class Pinned:
    def __init__(self):
        self.address = int(ok(driver.cuMemHostAlloc(1 << 22, 0)))  # unmapped when freed
        self.cycle = self
    def __del__(self, thread=threading.get_ident()):
        freed_on.append(threading.get_ident())
        ok(driver.cuCtxPushCurrent(context))
        {leave}
        ok(driver.cuMemFreeHost(self.address))

freed_on = []
context = ok(driver.cuCtxGetCurrent())
with us.observe() as seen:
    for _ in range(20):
        pinned = Pinned()
        ok(driver.cuMemcpyHtoDAsync(x, pinned.address, SIZE, handle))
        stream.sync()
        gc.disable()
        del pinned
        gc.set_threshold(1)
        gc.enable()
        time.sleep(0.05)  # the observer's thread reads the log, and collects
        gc.disable()
        gc.set_threshold(700)
        ok(driver.cuMemAlloc(SIZE))
        stream.sync()
assert seen.races == (), seen
assert len(freed_on) == 20, freed_on
assert set(freed_on) - {{threading.get_ident()}}, "no finalizer ran on the observer's thread"
""")


def test_unloaded_modules_leave_nothing_behind() -> None:
    run("""
from pathlib import Path
from cuda.core import LaunchConfig, ObjectCode, launch
from userstream.testing import Pointer, kernel
import numpy as np

names = [f"recorder_{number}" for number in range(64)]
for name in names:
    @kernel(name)
    def nothing(grid, block, to: Pointer): pass

def resident():
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

def rounds(count):
    for _ in range(count):
        code = ObjectCode.from_ptx(b"any")
        for name in names:
            launch(stream, LaunchConfig(grid=1, block=1), code.get_kernel(name), x)
        stream.sync()
        other = ok(driver.cuModuleLoadData(b"any\\0"))
        ok(driver.cuModuleUnload(other))

with us.observe(timeline=0) as seen:
    rounds(40)
    str(seen)
    before = resident()
    rounds(160)
    str(seen)
    grown = resident() - before
assert grown < 4 << 20, grown
""")


# -- lines ----------------------------------------------------------------------------------------


def test_lines_of_generated_code_are_its_own() -> None:
    """Code objects of one name and file come and go at the same address."""
    with a_room() as room, us.observe() as seen:
        wanted = set()
        for number in range(60):
            space: dict[str, object] = {"fill": driver.cuMemsetD8Async}
            padding = "\n" * (number % 7 + 1)
            text = (
                f"def generated(x, a, b):{padding}    fill(x, 1, 64, a)"
                f"{padding}    fill(x, 2, 64, b)\n"
            )
            exec(compile(text, "<generated>", "exec"), space)
            generated = space.pop("generated")
            assert callable(generated)
            generated(room.x, handle(room.a), handle(room.b))
            room.a.sync()
            room.b.sync()
            first = 1 + len(padding)
            wanted.add((first, first + len(padding)))
            del generated, space
    found = {
        (race.first.line.lineno, race.second.line.lineno)
        for race in seen.races
        if race.first.line is not None and race.second.line is not None
    }
    assert found == wanted


def test_later_calls_have_lines_however_many_stacks_came_before() -> None:
    """70,000 different stacks, and 17,000 code objects."""
    run("""
def left(path):
    return walk(path >> 1, path.bit_length())

def walk(path, depth):
    if depth <= 1:
        driver.cuStreamQuery(handle)
    elif path & 1:
        walk(path >> 1, depth - 1)
    else:
        walk(path >> 1, depth - 1)

with us.observe(timeline=0) as seen:
    for path in range(1 << 16, (1 << 16) + 70_000):
        walk(path, 17)
    for number in range(17_000):
        space = {}
        exec(compile("def f(query, handle): query(handle)", f"<{number}>", "exec"), space)
        space["f"](driver.cuStreamQuery, handle)
    other = us.Stream.create(0)
    ok(driver.cuMemsetD8Async(x, 1, SIZE, handle))
    ok(driver.cuMemsetD8Async(x, 2, SIZE, int(other.handle)))
    (race,) = seen.races
assert race.first.line is not None and race.second.line is not None, seen
assert seen.not_seen == (), seen.not_seen
""")


def test_the_key_of_a_race_is_one_line_whatever_the_file_is_called(tmp_path: Path) -> None:
    space: dict[str, Any] = {"fill": driver.cuMemsetD8Async}
    exec(compile("def f(x, s): fill(x, 1, 64, s)", "a\nb\u2028c.py", "exec"), space)
    file = tmp_path / "suppressions.txt"
    with a_room() as room:
        with us.observe() as seen:
            for stream in (room.a, room.b):
                space["f"](room.x, handle(stream))
            (race,) = seen.races
        assert len(race.key.splitlines()) == 1
        assert "c.py:f" in race.key
        file.write_text(race.key + "\n", encoding="utf-8")
        with us.observe(suppress=file) as seen:
            for stream in (room.a, room.b):
                space["f"](room.x, handle(stream))
            assert seen.races == ()


@pytest.mark.parametrize("stream", [0, 1])
def test_a_copy_into_the_source_may_be_pending_on_the_default_stream(stream: int) -> None:
    """It was queued before the observation, and explains why the source changes."""
    with a_room() as room:
        with latch(us.Stream.legacy_default()) as held:
            copy(room.pinned, room.x, stream)
            with us.observe() as seen:
                copy(room.y, room.pinned, stream)
                held.release()
                ctypes.memset(room.pinned, 0x5A, SIZE)  # stands for what the pending copy writes
                copy(room.x, room.pinned, room.b)
                assert OVERWRITTEN not in [race.kind for race in seen.races]


# -- sources of copies ----------------------------------------------------------------------------


needs_batches = pytest.mark.skipif(
    CUDA_12, reason="the simulated driver has cuMemcpyBatchAsync as CUDA 13 declares it"
)


def batch(to: list[int], source: list[int], stream: us.Stream) -> None:
    attributes = driver.CUmemcpyAttributes()
    attributes.srcAccessOrder = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    addresses = ([driver.CUdeviceptr(each) for each in some] for some in (to, source))
    sizes, count = [SIZE] * len(to), len(to)
    checked(
        driver.cuMemcpyBatchAsync(*addresses, sizes, count, [attributes], [0], 1, handle(stream))
    )


@needs_batches
def test_a_batch_uses_memory_that_was_allocated_before_the_observation() -> None:
    with a_room() as room, us.observe() as seen:
        batch([room.y], [room.x], room.a)
        fill(room.x, room.b)
        assert [race.kind for race in seen.races] == ["write after read"]


@needs_batches
def test_the_host_overwrites_the_source_of_one_copy_of_a_batch() -> None:
    with a_room() as room, pinned_memory(0, SIZE) as other, us.observe() as seen:
        batch([room.x, room.y], [room.pinned, other], room.a)
        ctypes.memset(other, 0x5A, SIZE)
        copy(room.x, other, room.b)  # the next call that looks at this memory
        (race, *_) = [race for race in seen.races if race.kind == OVERWRITTEN]
        assert race.address == other


@pytest.mark.parametrize("changed", [8_000, 65_000])
def test_any_byte_of_a_source_up_to_64_kib_counts(changed: int) -> None:
    size = 1 << 16
    with a_room() as room, pinned_memory(0, size) as pinned, device_memory(0, size) as to:
        with us.observe() as seen:
            copy(to, pinned, room.a, size)
            ctypes.memset(pinned + changed, 0x5A, 1)
            copy(to, pinned, room.a, size)
            assert [race.kind for race in seen.races] == [OVERWRITTEN]
            assert not any("samples" in what for what in seen.not_seen)


def test_sources_that_are_not_compared_are_counted() -> None:
    size = 1 << 20
    with a_room() as room, pinned_memory(0, size) as pinned, device_memory(0, size) as to:
        with us.observe() as seen:
            copy(to, pinned, room.a, size)
        assert any("between the samples" in what for what in seen.not_seen), seen.not_seen
        with us.observe() as seen:
            for number in range(300):
                copy(to, pinned + number * 64, room.a, 64)
        assert any("too many at once" in what for what in seen.not_seen), seen.not_seen
        with us.observe() as seen:
            captured(room, lambda: copy(room.x, room.pinned, room.a))
        assert any("in a graph" in what for what in seen.not_seen), seen.not_seen
