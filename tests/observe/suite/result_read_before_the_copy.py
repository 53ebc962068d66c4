# https://github.com/pytorch/pytorch/issues/86264
# not seen: reads of the host make no driver call
"""The host reads a pinned result while the copy to it is still queued."""

from cuda.core import launch
from kit import COUNT, ONE, REPAIRED, device, finish, floats, increment, pinned

stream = device.create_stream()
host, array = pinned()
x = floats()

launch(stream, ONE, increment, x, COUNT)
x.copy_to(host, stream=stream)  # first
if REPAIRED:
    stream.sync()
total = float(array.sum())  # second
finish()
