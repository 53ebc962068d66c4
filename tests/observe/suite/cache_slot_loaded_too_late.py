# https://github.com/ikawrakow/ik_llama.cpp/issues/2083
# possible: which part of a block a kernel uses is not known
"""Attention reads a block of the cache that is still being loaded from the host."""

import numpy as np
from cuda.bindings import driver
from cuda.core import launch
from kit import COUNT, ONE, REPAIRED, N, device, finish, floats, pinned, read_slot

compute, load = device.create_stream(), device.create_stream()
cache, (host, _), out = floats(4 * N), pinned(4 * N), floats()
block = 4 * N * 3

driver.cuMemcpyAsync(  # first
    int(cache.handle) + block, int(host.handle) + block, 4 * N, load.handle
)
if REPAIRED:
    compute.wait(load)
launch(compute, ONE, read_slot, out, cache, np.int32(3), COUNT)  # second
finish()
