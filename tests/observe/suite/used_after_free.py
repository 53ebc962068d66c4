# https://github.com/rapidsai/rmm/issues/2156
"""A kernel is given the address of memory that was freed on its stream."""

from cuda.bindings import driver
from cuda.core import launch
from kit import COUNT, ONE, REPAIRED, TWO, N, device, floats, scale

stream = device.create_stream()
x = device.allocate(4 * N, stream=stream)
address, out = int(x.handle), floats()
x.fill(1, stream=stream)

if not REPAIRED:
    x.close(stream)  # first
launch(stream, ONE, scale, out, address, COUNT, TWO)  # second
if REPAIRED:
    x.close(stream)
driver.cuCtxSynchronize()
