# https://github.com/ROCm/clr/issues/133
"""A stream waits for a flag that still has the value of the step before."""

from cuda.bindings import driver
from cuda.core import launch
from kit import COUNT, ONE, REPAIRED, TWO, device, finish, floats, pinned, scale

producer, consumer = device.create_stream(), device.create_stream()
x, y = floats(), floats()
flag, values = pinned()
values[:] = 0
AT_LEAST = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ

for step in (1, 2):
    x.fill(step, stream=producer)  # first
    value = step if REPAIRED else 1
    driver.cuStreamWriteValue32(producer.handle, flag.handle, value, 0)
    driver.cuStreamWaitValue32(consumer.handle, flag.handle, value, AT_LEAST)
    launch(consumer, ONE, scale, y, x, COUNT, TWO)  # second
    producer.wait(consumer)
finish()
