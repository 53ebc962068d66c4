# https://github.com/ROCm/pytorch/issues/3194
"""The default stream uses what a transfer stream is still copying."""

from cuda.core import launch
from kit import COUNT, ONE, REPAIRED, TWO, device, finish, floats, pinned, scale

compute, transfer = device.create_stream(), device.create_stream()
source, _ = pinned()
batch, out = floats(), floats()

batch.copy_from(source, stream=transfer)  # first
if REPAIRED:
    compute.wait(transfer)
launch(compute, ONE, scale, out, batch, COUNT, TWO)  # second
finish()
