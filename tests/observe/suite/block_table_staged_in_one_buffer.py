# https://github.com/NVIDIA/TensorRT-LLM/pull/15546
"""The staging buffer of a page table is overwritten while the last copy is pending."""

from cuda.core import launch
from kit import COUNT, ONE, REPAIRED, TWO, device, finish, floats, pinned, scale

stream = device.create_stream()
staging, table = pinned()
device_table, out = floats(), floats()
copied = None

for step in range(3):
    if REPAIRED and copied is not None:
        copied.sync()
    table[: step + 2] += 1  # second
    device_table.copy_from(staging, stream=stream)  # first
    copied = stream.record()
    launch(stream, ONE, scale, out, device_table, COUNT, TWO)
finish()
