# https://github.com/NVIDIA/Fuser/pull/4196
"""The flag of a batch of memory operations is written before the data."""

from cuda.core import launch
from kit import COUNT, ONE, REPAIRED, TWO, finish, floats, pinned, scale

import userstream as us

producer, consumer = (us.Stream.create(0) for _ in range(2))
x, y = floats(), floats()
flag, values = pinned()
values[:] = 0
written = [us.WriteValue(int(flag.handle), 1)]

if not REPAIRED:
    producer.batch_mem_op(written)
x.fill(1, stream=producer)  # first
if REPAIRED:
    producer.batch_mem_op(written)
consumer.batch_mem_op([us.WaitValue(int(flag.handle), 1)])
launch(consumer, ONE, scale, y, x, COUNT, TWO)  # second
finish()
