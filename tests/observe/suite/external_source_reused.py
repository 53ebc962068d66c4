# https://github.com/NVIDIA/DALI/issues/3487
"""A pipeline still reads the batch that its caller already refills."""

from cuda.core import launch
from kit import COUNT, ONE, REPAIRED, TWO, device, finish, floats, pinned, scale

pipeline, caller = device.create_stream(), device.create_stream()
batch, out = floats(), floats()
source, _ = pinned()

for _ in range(2):
    batch.copy_from(source, stream=caller)  # second
    pipeline.wait(caller)
    launch(pipeline, ONE, scale, out, batch, COUNT, TWO)  # first
    if REPAIRED:
        caller.wait(pipeline)
finish()
