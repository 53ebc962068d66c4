# https://github.com/cupy/cupy/issues/4676
"""Two streams use one library handle, whose workspace is one buffer."""

from cuda.core import launch
from kit import COUNT, ONE, REPAIRED, TWO, device, finish, floats, scale

one, other = device.create_stream(), device.create_stream()
x, y, workspace = floats(), floats(), floats()

launch(one, ONE, scale, workspace, x, COUNT, TWO)  # first
if REPAIRED:
    other.wait(one)
launch(other, ONE, scale, workspace, y, COUNT, TWO)  # second
finish()
