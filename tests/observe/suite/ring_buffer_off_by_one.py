# https://github.com/NVIDIA/TensorRT-LLM/pull/9056
"""A ring of buffers is reused one step before the event of its last reader."""

from cuda.core import launch
from kit import COUNT, ONE, REPAIRED, TWO, device, finish, floats, pinned, scale

compute, copies = device.create_stream(), device.create_stream()
ring = [floats() for _ in range(3)]
source, _ = pinned()
out = floats()
done = []

for step in range(6):
    slot = step % 3
    needed = step - 3 if REPAIRED else step - 4
    if needed >= 0:
        copies.wait(done[needed])
    ring[slot].copy_from(source, stream=copies)  # second
    compute.wait(copies)
    launch(compute, ONE, scale, out, ring[slot], COUNT, TWO)  # first
    done.append(compute.record())
finish()
