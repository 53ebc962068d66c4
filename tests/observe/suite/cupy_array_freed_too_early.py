# https://github.com/cupy/cupy/issues/8068
# needs: cupy
"""An array goes back to the pool of its stream while another stream still reads it."""

import sys

import cupy

REPAIRED = "--repaired" in sys.argv
one, other = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
out = cupy.zeros(1 << 14, cupy.float32)
cupy.cuda.Device().synchronize()

for step in range(4):
    with one:
        array = cupy.full(1 << 14, step, cupy.float32)
    other.wait_event(one.record())
    with other:
        cupy.copyto(out, array)  # first
    if REPAIRED:
        one.wait_event(other.record())
    del array  # second
    with one:
        cupy.empty(1 << 8, cupy.float32)
    cupy.cuda.Device().synchronize()
