# https://github.com/Genoil/cpp-ethereum/pull/2
"""A counter is set to zero on one stream while another one counts."""

import numpy as np
from cuda.core import launch
from kit import ONE, REPAIRED, device, finish, floats, increment

one, other = device.create_stream(), device.create_stream()
counter = floats(64)
few = np.int32(64)

launch(one, ONE, increment, counter, few)  # first
if REPAIRED:
    other.wait(one)
counter.fill(0, stream=other)  # second
finish()
