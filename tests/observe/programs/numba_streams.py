"""Arrays of numba's on two streams, in order by events; a kernel would need a matching NumPy."""

import numpy
from numba import cuda

one, other = cuda.stream(), cuda.stream()
event = cuda.event()
host = cuda.pinned_array(1 << 16, dtype=numpy.float32)
host[:] = numpy.arange(host.size)
first = cuda.to_device(host, stream=one)
second = cuda.device_array_like(first)
for _ in range(5):
    event.record(one)
    event.wait(other)
    second.copy_to_device(first, stream=other)
    event.record(other)
    event.wait(one)
    first.copy_to_device(second, stream=one)
first.copy_to_host(host, stream=one)
one.synchronize()
assert (host == numpy.arange(host.size)).all()
