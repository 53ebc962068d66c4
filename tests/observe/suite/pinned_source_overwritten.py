# https://github.com/pytorch/pytorch/issues/127612
"""A pinned buffer is filled again before the copy from it has run."""

from kit import REPAIRED, device, finish, floats, pinned

stream = device.create_stream()
source, array = pinned()
batch = floats()

for step in range(3):
    array[:] = step  # second
    batch.copy_from(source, stream=stream)  # first
    if REPAIRED:
        stream.sync()
finish()
