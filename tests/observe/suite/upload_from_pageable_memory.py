# https://github.com/Rust-GPU/rust-cuda/issues/15
"""A synchronous upload from pageable memory may return before the device has the data."""

import numpy as np
from cuda.bindings import driver
from cuda.core import launch
from kit import COUNT, ONE, REPAIRED, TWO, N, device, finish, floats, scale

stream = device.create_stream()
x, y = floats(), floats()
data = np.ones(N, np.float32)

driver.cuMemcpyHtoD(x.handle, data, data.nbytes)  # first
if REPAIRED:
    stream.wait(device.default_stream)
launch(stream, ONE, scale, y, x, COUNT, TWO)  # second
finish()
