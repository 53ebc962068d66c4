# https://github.com/sony/nnabla-ext-cuda/pull/188
"""A non-blocking stream uses data that the default stream is still producing."""

from cuda.core import launch
from kit import COUNT, ONE, REPAIRED, TWO, device, finish, floats, increment, scale

side = device.create_stream()
x, y = floats(), floats()
default = device.default_stream

launch(default, ONE, increment, x, COUNT)  # first
if REPAIRED:
    side.wait(default)
launch(side, ONE, scale, y, x, COUNT, TWO)  # second
finish()
