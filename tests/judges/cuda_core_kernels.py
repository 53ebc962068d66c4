"""Python functions that stand for the kernels of cuda.core's own tests, and names that moved."""

from __future__ import annotations

import time

import cuda.core._memory
import numpy as np
from cuda.core._memory import _ipc

from userstream.testing import Condition, Pointer, kernel

# The tests are of a revision that imports it from here.
cuda.core._memory.IPCBufferDescriptor = _ipc.IPCBufferDescriptor

SCALARS = {
    "f": np.float32,
    "d": np.float64,
    "b": np.bool_,
    "a": np.int8,
    "s": np.int16,
    "i": np.int32,
    "x": np.int64,
    "h": np.uint8,
    "t": np.uint16,
    "j": np.uint32,
    "y": np.uint64,
}


def nothing(name, *types):
    """A kernel that does nothing, with parameters of these types."""
    names = [f"argument_{number}" for number in range(len(types))]
    scope = {}
    exec(f"def function(grid, block, {', '.join(names)}): ...", scope)
    scope["function"].__annotations__ = dict(zip(names, types, strict=True))
    kernel(name)(scope["function"])


for empty in ("ABC", "k", "my_kernel", "test_kernel", "test_kernel_alt", "test_grid_sync", "A"):
    nothing(empty)
nothing("_Z12empty_kernelv")
nothing("linked_kernel", np.float32, np.float32, np.float32, Pointer)


@kernel("_Z7add_onePi")
def add_one(grid, block, a: Pointer):
    a.array(1, np.int32)[:] += 1


@kernel("_Z7add_onePcm")
def add_one_to_each(grid, block, a: Pointer, count: np.uint64):
    a.array(count, np.int8)[:] += 1


@kernel("_Z8set_zeroPcm")
def set_zero(grid, block, a: Pointer, count: np.uint64):
    a.array(count, np.int8)[:] = 0


@kernel("_Z10set_handleyb")
def set_handle_bool(grid, block, handle: Condition, value: np.bool_):
    handle.set(int(value))


@kernel("_Z10set_handleyj")
def set_handle(grid, block, handle: Condition, value: np.uint32):
    handle.set(int(value))


rounds = {"left": 10}


@kernel("_Z11loop_kernely")
def loop_kernel(grid, block, handle: Condition):
    rounds["left"] -= 1
    handle.set(rounds["left"] > 0)
    rounds["left"] = rounds["left"] or 10  # each compilation has a counter of its own


@kernel("_Z6affinePiii")
def affine(grid, block, a: Pointer, m: np.int32, b: np.int32):
    values = a.array(1, np.int32)
    values[:] = values * m + b


@kernel("_Z7combinePiS_S_")
def combine(grid, block, s: Pointer, a: Pointer, b: Pointer):
    low, high = b.array(1, np.int32), a.array(1, np.int32)
    s.array(1, np.int32)[:] = (high << 16) | (low & 0xFFFF)


@kernel("_Z6reducePiS_m")
def reduce(grid, block, out: Pointer, values: Pointer, count: np.uint64):
    out.array(1, np.int32)[:] += values.array(count, np.int32).sum(dtype=np.int32)


@kernel("heat_step")
def heat_step(grid, block, after: Pointer, before: Pointer, n: np.int32, alpha: np.float32):
    u = before.array(n, np.float32).copy()
    new = u.copy()
    new[1:-1] += alpha * (u[:-2] - np.float32(2) * u[1:-1] + u[2:])
    after.array(n, np.float32)[:] = new


@kernel("countdown")
def countdown(grid, block, handle: Condition, counter: Pointer):
    value = counter.array(1, np.int32)
    handle.set(value[0] > 1)
    value -= 1


def middle(a, b):
    return (a.array(1, np.float32)[0] + b.array(1, np.float32)[0]) * np.float32(0.5)


@kernel("bisect_eval")
def bisect_eval(grid, block, a: Pointer, b: Pointer, handle: Condition):
    handle.set(middle(a, b) ** 2 - 2 > 0)


@kernel("update_hi")
def update_hi(grid, block, a: Pointer, b: Pointer):
    b.array(1, np.float32)[:] = middle(a, b)


@kernel("update_lo")
def update_lo(grid, block, a: Pointer, b: Pointer):
    a.array(1, np.float32)[:] = middle(a, b)


@kernel("check_refine")
def check_refine(grid, block, a: Pointer, b: Pointer, handle: Condition):
    handle.set(abs(middle(a, b) ** 2 - 2) > 1e-10)


@kernel("newton_refine")
def newton_refine(grid, block, a: Pointer, b: Pointer):
    found = middle(a, b)
    found -= (found * found - 2) / (2 * found)
    a.array(1, np.float32)[:] = found
    b.array(1, np.float32)[:] = found


@kernel("negate_it")
def negate_it(grid, block, x: Pointer):
    x.array(1, np.int32)[:] *= -1


@kernel("double_it")
def double_it(grid, block, x: Pointer):
    x.array(1, np.int32)[:] *= 2


@kernel("square_it")
def square_it(grid, block, x: Pointer):
    x.array(1, np.int32)[:] **= 2


@kernel("increment")
def increment(grid, block, value: Pointer):
    value.array(1, np.int32)[:] += 1


@kernel("write_value")
def write_value(grid, block, out: Pointer):
    out.array(1, np.int32)[:] = 42


@kernel("fill")
def fill(grid, block, out: Pointer, value: np.int32, count: np.int32):
    out.array(count, np.int32)[:] = value


@kernel("memory_ops")
def memory_ops(grid, block, data: Pointer, count: np.uint64):
    data.array(count, np.float32)[:] *= 3


@kernel("latch")
def latch(grid, block, value: Pointer, timeout_cycles: np.uint64):
    end = time.monotonic() + int(timeout_cycles) / 1.98e9
    while not value.array(1, np.int32)[0] and time.monotonic() < end:
        time.sleep(0.001)


@kernel("nanosleep_kernel")
def nanosleep_kernel(grid, block):
    time.sleep(0.02)


def saxpy(dtype):
    def function(grid, block, a, x, y, out, count):
        sum_of_both = a * x.array(count, dtype) + y.array(count, dtype)
        out.array(count, dtype)[:] = sum_of_both

    function.__annotations__ = {
        "a": dtype,
        "x": Pointer,
        "y": Pointer,
        "out": Pointer,
        "count": np.uint64,
    }
    return function


def write_scalar(dtype):
    def function(grid, block, out, value):
        out.array(1, dtype)[:] = value

    function.__annotations__ = {"out": Pointer, "value": dtype}
    return function


kernel("_Z5saxpyIfEvT_PKS0_S2_PS0_m")(saxpy(np.float32))
kernel("_Z5saxpyIdEvT_PKS0_S2_PS0_m")(saxpy(np.float64))
for letter, scalar in SCALARS.items():
    kernel(f"_Z12write_scalarI{letter}EvPT_S0_")(write_scalar(scalar))
