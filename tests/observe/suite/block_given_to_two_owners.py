# https://github.com/openxla/openxla-pjrt-plugin/issues/191
"""A pool gets the same block back twice, and gives it to two users."""

from kit import REPAIRED, device, finish, floats

one, other = device.create_stream(), device.create_stream()
blocks = [floats(), floats()]
pool = list(blocks)

block = pool.pop()
pool.append(block)
if not REPAIRED:
    pool.append(block)  # closed twice
mine, theirs = pool.pop(), pool.pop()

mine.fill(1, stream=one)  # first
theirs.fill(2, stream=other)  # second
finish()
