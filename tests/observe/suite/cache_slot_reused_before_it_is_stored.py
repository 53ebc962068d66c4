# https://github.com/NVIDIA/TensorRT-LLM/pull/9056
# possible: which part of a block a kernel uses is not known
"""A block of a cache is given to the next request while it is still copied out."""

import numpy as np
from cuda.bindings import driver
from cuda.core import launch
from kit import COUNT, ONE, REPAIRED, N, device, finish, floats, pinned, write_slot

compute, store = device.create_stream(), device.create_stream()
cache, (host, _) = floats(4 * N), pinned(4 * N)
block = 4 * N * 2

store.wait(compute)
driver.cuMemcpyAsync(  # first
    int(host.handle) + block, int(cache.handle) + block, 4 * N, store.handle
)
if REPAIRED:
    compute.wait(store)
launch(compute, ONE, write_slot, cache, np.int32(2), COUNT, np.float32(5))  # second
finish()
