# https://github.com/NVIDIA/cudnn-frontend/issues/483
"""A library launches on stream 0 while its inputs come from a non-blocking stream."""

from cuda.core import launch
from kit import COUNT, ONE, REPAIRED, TWO, device, finish, floats, scale

side = device.create_stream()
x, y = floats(), floats()
default = device.default_stream

x.fill(1, stream=side)  # first
if REPAIRED:
    default.wait(side)
launch(default, ONE, scale, y, x, COUNT, TWO)  # second
finish()
