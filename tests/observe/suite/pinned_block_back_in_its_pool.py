# https://github.com/NVIDIA/cudf/issues/22284
"""A pinned staging block goes back to its pool before the copy from it has run."""

from kit import REPAIRED, device, finish, floats, pinned

stream, other = device.create_stream(), device.create_stream()
table, (block, array) = floats(), pinned()
pool = [array]

mine = pool.pop()
mine[:] = 1
table.copy_from(block, stream=stream)  # first
if REPAIRED:
    stream.sync()
pool.append(mine)
theirs = pool.pop()
theirs[:] = 2  # second
finish()
