# https://github.com/vllm-project/vllm/pull/46278
"""A batch of copies stores blocks that a kernel is still writing."""

from cuda.bindings import driver
from cuda.core import launch
from kit import COUNT, ONE, REPAIRED, N, device, finish, floats, increment, pinned

compute, store = device.create_stream(), device.create_stream()
cache, (host, _) = floats(), pinned()
half = 2 * N
sources = [driver.CUdeviceptr(int(cache.handle) + at) for at in (0, half)]
targets = [driver.CUdeviceptr(int(host.handle) + at) for at in (0, half)]
attributes = driver.CUmemcpyAttributes()
attributes.srcAccessOrder = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM

launch(compute, ONE, increment, cache, COUNT)  # first
if REPAIRED:
    store.wait(compute)
driver.cuMemcpyBatchAsync(  # second
    targets, sources, [half, half], 2, [attributes], [0], 1, store.handle
)
finish()
