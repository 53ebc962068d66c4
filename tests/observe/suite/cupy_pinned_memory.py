# https://github.com/cupy/cupy/issues/8789
# needs: cupy
"""Pinned memory is filled again while CuPy still copies it to the device."""

import sys

import cupy
import cupyx

REPAIRED = "--repaired" in sys.argv
stream = cupy.cuda.Stream(non_blocking=True)
host = cupyx.zeros_pinned(1 << 20, cupy.float32)
x, busy = cupy.zeros(1 << 20, cupy.float32), cupy.zeros(1 << 26, cupy.float32)
cupy.cuda.Device().synchronize()

for step in range(4):
    host[:] = step  # second
    with stream:
        busy += 1
    x.set(host, stream=stream)  # first
    if REPAIRED:
        stream.synchronize()
cupy.cuda.Device().synchronize()
