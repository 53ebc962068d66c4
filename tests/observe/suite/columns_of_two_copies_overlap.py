# https://github.com/CHIP-SPV/chipStar/issues/152
"""Two tiles of a matrix are filled on two streams, and share a column."""

from cuda.bindings import driver
from kit import REPAIRED, device, finish, floats

one, other = device.create_stream(), device.create_stream()
matrix = floats()
start = 16 if REPAIRED else 15

driver.cuMemsetD2D8Async(matrix.handle, 64, 1, 16, 8, one.handle)  # first
driver.cuMemsetD2D8Async(int(matrix.handle) + start, 64, 2, 16, 8, other.handle)  # second
finish()
