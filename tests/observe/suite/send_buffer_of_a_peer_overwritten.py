# https://github.com/alpaka-group/alpaka/issues/850
"""The next step overwrites a buffer that is still copied to another device."""

from cuda.bindings import driver
from cuda.core import Device, launch
from kit import COUNT, ONE, REPAIRED, N, device, finish, increment

other = Device(1)
compute, send = device.create_stream(), device.create_stream()
error, x = driver.cuMemAlloc(4 * N)
other.set_current()
error, y = driver.cuMemAlloc(4 * N)
device.set_current()
peers = y, other.context.handle, x, device.context.handle
driver.cuMemsetD8Async(x, 0, 4 * N, compute.handle)
send.wait(compute)

driver.cuMemcpyPeerAsync(*peers, 4 * N, send.handle)  # first
if REPAIRED:
    compute.wait(send)
launch(compute, ONE, increment, int(x), COUNT)  # second
finish()
driver.cuMemFree(x)
driver.cuMemFree(y)
