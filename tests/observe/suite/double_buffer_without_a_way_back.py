# https://github.com/pytorch/pytorch/issues/58385
"""A prefetcher fills the buffer from which the last batch is still read."""

from cuda.core import launch
from kit import COUNT, ONE, REPAIRED, TWO, device, finish, floats, pinned, scale

compute, copies = device.create_stream(), device.create_stream()
buffers = [floats(), floats()]
source, _ = pinned()
out = floats()

for step in range(4):
    batch = buffers[step % 2]
    if REPAIRED:
        copies.wait(compute)
    batch.copy_from(source, stream=copies)  # second
    compute.wait(copies)
    launch(compute, ONE, scale, out, batch, COUNT, TWO)  # first
finish()
