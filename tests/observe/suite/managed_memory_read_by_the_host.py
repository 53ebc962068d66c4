# https://github.com/alicevision/popsift/pull/157
# not seen: reads of the host make no driver call
"""The host reads managed memory while a kernel still writes it."""

import ctypes

from cuda.bindings import driver
from cuda.core import launch
from kit import COUNT, ONE, REPAIRED, N, device, finish, increment

stream = device.create_stream()
error, x = driver.cuMemAllocManaged(4 * N, driver.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL)

launch(stream, ONE, increment, int(x), COUNT)  # first
if REPAIRED:
    stream.sync()
total = ctypes.c_float.from_address(int(x)).value  # second
finish()
driver.cuMemFree(x)
