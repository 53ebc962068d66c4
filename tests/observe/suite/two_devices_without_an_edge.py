# https://github.com/torch/cutorch/pull/192
"""A copy to another device is queued there, and does not wait for the source."""

from cuda.bindings import driver
from cuda.core import Device
from kit import REPAIRED, N, device

other = Device(1)
here = device.create_stream()
error, x = driver.cuMemAlloc(4 * N)
other.set_current()
there = other.create_stream()
error, y = driver.cuMemAlloc(4 * N)
device.set_current()

driver.cuMemsetD8Async(x, 1, 4 * N, here.handle)  # first
if REPAIRED:
    there.wait(here)
driver.cuMemcpyPeerAsync(  # second
    y, other.context.handle, x, device.context.handle, 4 * N, there.handle
)
there.sync()
driver.cuMemFree(x)
driver.cuMemFree(y)
