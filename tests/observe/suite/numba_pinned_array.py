# https://github.com/numba/numba/issues/2989
# needs: numba
"""A pinned array is filled again while numba still copies it."""

import sys

import numpy as np
from numba import cuda

REPAIRED = "--repaired" in sys.argv
stream = cuda.stream()
host = cuda.pinned_array(1 << 20, dtype=np.float32)
x = cuda.device_array(1 << 20, dtype=np.float32)
cuda.synchronize()

for step in range(4):
    host[:] = step  # second
    x.copy_to_device(host, stream=stream)  # first
    if REPAIRED:
        stream.synchronize()
cuda.synchronize()
