# https://github.com/cupy/cupy/pull/4537
"""A stream is closed after its work is queued, which waits for nothing."""

from cuda.core import launch
from kit import COUNT, ONE, REPAIRED, TWO, device, finish, floats, scale

mine = device.create_stream()
x, y = floats(), floats()

helper = device.create_stream()
x.fill(1, stream=helper)  # first
if REPAIRED:
    helper.sync()
helper.close()
launch(mine, ONE, scale, y, x, COUNT, TWO)  # second
finish()
