# https://github.com/bheisler/RustaCUDA/issues/59
"""A fill without a stream returns early, and a non-blocking stream does not wait for it."""

from cuda.bindings import driver
from cuda.core import launch
from kit import COUNT, ONE, REPAIRED, TWO, N, device, finish, floats, scale

stream = device.create_stream()
x, y = floats(), floats()

driver.cuMemsetD8(x.handle, 7, 4 * N)  # first
if REPAIRED:
    stream.wait(device.default_stream)
launch(stream, ONE, scale, y, x, COUNT, TWO)  # second
finish()
