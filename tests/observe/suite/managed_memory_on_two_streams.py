# https://github.com/llnl/CHAI/pull/277
"""A kernel and a copy on two streams use the same managed memory."""

from cuda.bindings import driver
from cuda.core import launch
from kit import COUNT, ONE, REPAIRED, N, device, finish, floats, increment

one, other = device.create_stream(), device.create_stream()
error, x = driver.cuMemAllocManaged(4 * N, driver.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL)
y = floats()
driver.cuMemsetD8Async(x, 0, 4 * N, one.handle)

launch(one, ONE, increment, int(x), COUNT)  # first
if REPAIRED:
    other.wait(one)
driver.cuMemcpyAsync(y.handle, x, 4 * N, other.handle)  # second
finish()
driver.cuMemFree(x)
