# https://github.com/1bit-MONSTER/1bit-MONSTER/pull/2344
"""Keys are staged, then values in the same pinned buffer, with nothing in between."""

from kit import REPAIRED, device, finish, floats, pinned

stream = device.create_stream()
staging, array = pinned()
keys, values = floats(), floats()

array[:] = 1
keys.copy_from(staging, stream=stream)  # first
if REPAIRED:
    stream.sync()
array[:] = 2  # second
values.copy_from(staging, stream=stream)
finish()
