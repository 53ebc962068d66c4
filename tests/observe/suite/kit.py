"""Device, memory and kernels of the programs of this suite, on either driver."""

from __future__ import annotations

import ctypes
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
from cuda.bindings import driver
from cuda.core import (
    Buffer,
    Device,
    LaunchConfig,
    LegacyPinnedMemoryResource,
    ObjectCode,
    Program,
    ProgramOptions,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from cuda.core import Graph, GraphBuilder, Stream

from userstream.testing import Pointer, _simulated, kernel

REPAIRED = "--repaired" in sys.argv  # the program without its mistake

N = 1024  # elements of an array
ONE = LaunchConfig(grid=N // 256, block=256)
COUNT = np.int32(N)
TWO = np.float32(2)

device = Device(0)
device.set_current()

SOURCE = """
__device__ int index() { return blockIdx.x * blockDim.x + threadIdx.x; }
__global__ void scale(float *out, const float *in, int n, float factor) {
    if (index() < n) out[index()] = in[index()] * factor + 1;
}
__global__ void add(float *out, const float *one, const float *other, int n) {
    if (index() < n) out[index()] = one[index()] + other[index()] + 1;
}
__global__ void increment(float *values, int n) {
    if (index() < n) values[index()] += 1;
}
__global__ void write_slot(float *base, int slot, int n, float value) {
    if (index() < n) base[slot * n + index()] = value;
}
__global__ void read_slot(float *out, const float *base, int slot, int n) {
    if (index() < n) out[index()] = base[slot * n + index()] + 1;
}
"""
NAMES = {
    "scale": "_Z5scalePfPKfif",
    "add": "_Z3addPfPKfS1_i",
    "increment": "_Z9incrementPfi",
    "write_slot": "_Z10write_slotPfiif",
    "read_slot": "_Z9read_slotPfPKfii",
}


@kernel(NAMES["scale"])
def _scale(
    grid: Any, block: Any, out: Pointer, source: Pointer, n: np.int32, factor: np.float32
) -> None:
    out.array(n, np.float32)[:] = source.array(n, np.float32) * factor + 1


@kernel(NAMES["add"])
def _add(grid: Any, block: Any, out: Pointer, one: Pointer, other: Pointer, n: np.int32) -> None:
    out.array(n, np.float32)[:] = one.array(n, np.float32) + other.array(n, np.float32) + 1


@kernel(NAMES["increment"])
def _increment(grid: Any, block: Any, values: Pointer, n: np.int32) -> None:
    values.array(n, np.float32)[:] += 1


@kernel(NAMES["write_slot"])
def _write_slot(
    grid: Any, block: Any, base: Pointer, slot: np.int32, n: np.int32, value: np.float32
) -> None:
    base.array((slot + 1) * n, np.float32)[slot * n :] = value


@kernel(NAMES["read_slot"])
def _read_slot(
    grid: Any, block: Any, out: Pointer, base: Pointer, slot: np.int32, n: np.int32
) -> None:
    out.array(n, np.float32)[:] = base.array((slot + 1) * n, np.float32)[slot * n :] + 1


def _load() -> ObjectCode:
    if _simulated.is_simulated():
        symbols = {name: symbol.encode() for name, symbol in NAMES.items()}
        return ObjectCode.from_ptx(b"any", symbol_mapping=symbols)
    options = ProgramOptions(arch=f"sm_{device.arch}")
    return Program(SOURCE, "c++", options).compile("cubin", name_expressions=tuple(NAMES))


_code = _load()
scale, add, increment, write_slot, read_slot = map(_code.get_kernel, NAMES)


def finish() -> None:
    """Wait for everything, at the end of a program."""
    (error,) = driver.cuCtxSynchronize()
    assert not error, error


def pinned(count: int = N) -> tuple[Buffer, np.ndarray]:
    """Return page-locked memory for floats, and the array in it."""
    buffer = LegacyPinnedMemoryResource().allocate(4 * count)
    memory = (ctypes.c_float * count).from_address(int(buffer.handle))
    array = np.frombuffer(memory, np.float32)  # NumPy 1 makes read-only arrays of DLPack
    array[:] = 1
    return buffer, array


def graph_of(work: Callable[[Stream | GraphBuilder], object]) -> Graph:
    """Return the graph of a piece of work, which has run once to warm up."""
    stream = device.create_stream()
    work(stream)
    stream.sync()
    builder = stream.create_graph_builder().begin_building()
    work(builder)
    return builder.end_building().complete()


def floats(count: int = N, value: int = 0) -> Buffer:
    """Return device memory for floats, filled, and nothing pending on it."""
    stream = device.create_stream()
    buffer = device.allocate(4 * count, stream=stream)
    buffer.fill(value, stream=stream)
    stream.sync()
    return buffer
