# https://github.com/votca/xtp/issues/391
"""The host polls a stream until it is idle, but not the one with its work."""

from cuda.bindings import driver
from cuda.core import launch
from kit import COUNT, ONE, REPAIRED, device, finish, floats, increment

copies, compute = device.create_stream(), device.create_stream()
x, y = floats(), floats()

launch(compute, ONE, increment, x, COUNT)  # first
watched = compute if REPAIRED else copies
while driver.cuStreamQuery(watched.handle)[0]:
    pass
y.copy_from(x, stream=copies)  # second
finish()
