# https://github.com/alpaka-group/alpaka/issues/850
# possible: which part of a block a kernel uses is not known
"""The rows at the edge of a grid are copied out while a kernel still writes them."""

from cuda.bindings import driver
from cuda.core import launch
from kit import COUNT, ONE, REPAIRED, N, device, finish, floats, increment

compute, copies = device.create_stream(), device.create_stream()
grid, edge = floats(), floats(64)

launch(compute, ONE, increment, grid, COUNT)  # first
if REPAIRED:
    copies.wait(compute)
driver.cuMemcpyDtoDAsync(edge.handle, int(grid.handle) + 4 * (N - 64), 256, copies.handle)  # second
finish()
