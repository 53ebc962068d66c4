# https://github.com/JuliaGPU/CUDA.jl/issues/780
"""A finalizer frees memory on the default stream while a side stream still uses it."""

from cuda.core import launch
from kit import COUNT, ONE, REPAIRED, TWO, N, device, finish, floats, scale

side = device.create_stream()
out = floats()
x = device.allocate(4 * N, stream=side)
x.fill(1, stream=side)

launch(side, ONE, scale, out, x, COUNT, TWO)  # first
if REPAIRED:
    device.default_stream.wait(side)
x.close(device.default_stream)  # second
finish()
