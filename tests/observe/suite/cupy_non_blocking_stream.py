# https://github.com/cupy/cupy/pull/5155
# needs: cupy
"""An array is overwritten on the default stream while another one still reads it."""

import sys

import cupy

REPAIRED = "--repaired" in sys.argv
side = cupy.cuda.Stream(non_blocking=True)
x, y = cupy.zeros(1 << 16, cupy.float32), cupy.zeros(1 << 16, cupy.float32)
cupy.cuda.Device().synchronize()

for _ in range(4):
    with side:
        cupy.copyto(y, x)  # first
    if REPAIRED:
        cupy.cuda.get_current_stream().wait_event(side.record())
    x += 1  # second
    cupy.cuda.Device().synchronize()
