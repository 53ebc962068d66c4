# https://github.com/ikawrakow/ik_llama.cpp/issues/2083
# needs: cupy
# possible: which part of a block a kernel uses is not known
"""A raw kernel gets the base of a ring buffer, whose slot is copied meanwhile."""

import sys

import cupy

REPAIRED = "--repaired" in sys.argv
write = cupy.RawKernel(
    'extern "C" __global__ void write(float *base, int slot, int n, float value) {'
    "    int i = blockIdx.x * blockDim.x + threadIdx.x;"
    "    if (i < n) base[slot * n + i] = value; }",
    "write",
)
one, other = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
n = 1 << 16
ring, out = cupy.zeros(8 * n, cupy.float32), cupy.zeros(n, cupy.float32)
cupy.cuda.Device().synchronize()

for step in range(1, 5):
    slot = ring, cupy.int32(3), cupy.int32(n), cupy.float32(step)
    with one:
        write((n // 256,), (256,), slot)  # first
    if REPAIRED:
        other.wait_event(one.record())
    with other:
        cupy.copyto(out, ring[3 * n : 4 * n])  # second
    cupy.cuda.Device().synchronize()
