# https://github.com/ROCm/rocm-systems/issues/11605
"""A stream waits for a flag that the host has left set."""

import numpy as np
from cuda.bindings import driver
from cuda.core import launch
from kit import COUNT, ONE, REPAIRED, TWO, device, finish, floats, pinned, scale

producer, consumer = device.create_stream(), device.create_stream()
x, y = floats(), floats()
flag, values = pinned()
values.view(np.uint32)[:] = 0 if REPAIRED else 1
AT_LEAST = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ

x.fill(1, stream=producer)  # first
driver.cuStreamWriteValue32(producer.handle, flag.handle, 1, 0)
driver.cuStreamWaitValue32(consumer.handle, flag.handle, 1, AT_LEAST)
launch(consumer, ONE, scale, y, x, COUNT, TWO)  # second
finish()
