# https://github.com/facebookresearch/fairscale/issues/780
"""A bucket is reduced before its last gradient is written."""

from cuda.core import launch
from kit import COUNT, ONE, REPAIRED, N, device, finish, floats, increment

compute, reduce = device.create_stream(), device.create_stream()
bucket, total = floats(2 * N), floats(2 * N)
halves = [int(bucket.handle), int(bucket.handle) + 4 * N]

launch(compute, ONE, increment, halves[0], COUNT)
if not REPAIRED:
    reduce.wait(compute)
launch(compute, ONE, increment, halves[1], COUNT)  # first
if REPAIRED:
    reduce.wait(compute)
total.copy_from(bucket, stream=reduce)  # second
finish()
