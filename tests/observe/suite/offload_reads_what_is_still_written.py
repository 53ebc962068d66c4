# https://github.com/vllm-project/vllm/issues/45704
# possible: which part of a block a kernel uses is not known
"""The store of a KV cache to the host does not wait for the kernel that writes it."""

import numpy as np
from cuda.bindings import driver
from cuda.core import launch
from kit import COUNT, ONE, REPAIRED, N, device, finish, floats, pinned, write_slot

compute, store = device.create_stream(), device.create_stream()
cache, (host, _) = floats(8 * N), pinned(8 * N)

for step in range(4):
    launch(compute, ONE, write_slot, cache, np.int32(step), COUNT, np.float32(step + 1))  # first
    if REPAIRED:
        store.wait(compute)
    start = 4 * N * step
    driver.cuMemcpyAsync(  # second
        int(host.handle) + start, int(cache.handle) + start, 4 * N, store.handle
    )
    store.sync()
finish()
