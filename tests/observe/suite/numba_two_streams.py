# https://github.com/numba/numba/issues/5137
# needs: numba
"""A kernel of numba reads an array that another stream still copies."""

import sys

import numpy as np
from numba import cuda

REPAIRED = "--repaired" in sys.argv
one, other = cuda.stream(), cuda.stream()
host = cuda.pinned_array(1 << 16, dtype=np.float32)
host[:] = 1
x = cuda.to_device(host, stream=one)
y = cuda.device_array_like(x)
cuda.synchronize()


@cuda.jit
def scale(out, source):
    at = cuda.grid(1)
    if at < out.size:
        out[at] = source[at] * 2


for _ in range(4):
    x.copy_to_device(host, stream=one)  # first
    if REPAIRED:
        event = cuda.event()
        event.record(one)
        event.wait(other)
    scale[256, 256, other](y, x)  # second
    cuda.synchronize()
