# https://github.com/LuisaGroup/LuisaCompute/pull/248
"""A host function that reports a buffer as free is queued before the last use."""

import threading

from cuda.core import launch
from kit import COUNT, ONE, REPAIRED, TWO, device, finish, floats, scale

import userstream as us

compute, copies = device.create_stream(), device.create_stream()
x, y = floats(), floats()
free = threading.Event()
stream = us.Stream.from_handle(compute)

if not REPAIRED:
    stream.launch_host_func(free.set)
launch(compute, ONE, scale, y, x, COUNT, TWO)  # first
if REPAIRED:
    stream.launch_host_func(free.set)
free.wait()
x.fill(0, stream=copies)  # second
finish()
