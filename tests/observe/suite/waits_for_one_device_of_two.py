# https://github.com/pytorch/pytorch/issues/182770
"""The host waits for the current device, which is not the one that works."""

from cuda.bindings import driver
from cuda.core import Device, launch
from kit import COUNT, ONE, REPAIRED, device, finish, floats, increment

other, copies = Device(1), device.create_stream()
compute = device.create_stream()
x, y = floats(), floats()

launch(compute, ONE, increment, x, COUNT)  # first
(device if REPAIRED else other).set_current()
driver.cuCtxSynchronize()
device.set_current()
y.copy_from(x, stream=copies)  # second
finish()
