"""A kernel of numba's, with streams in order by their events."""

import numpy
from numba import cuda


@cuda.jit
def add_one(values):
    place = cuda.grid(1)
    if place < values.size:
        values[place] += 1


one, other = cuda.stream(), cuda.stream()
host = cuda.pinned_array(1 << 16, dtype=numpy.float32)
host[:] = 0
values = cuda.to_device(host, stream=one)
for _ in range(5):
    add_one[256, 256, one](values)
    event = cuda.event()
    event.record(one)
    event.wait(other)
    add_one[256, 256, other](values)
    event.record(other)
    event.wait(one)
values.copy_to_host(host, stream=one)
one.synchronize()
assert (host == 10).all()
