# https://github.com/jax-ml/jax/issues/28057
# needs: cupy torch
"""CuPy works on a tensor of torch on a stream of its own."""

import sys

import cupy
import torch

REPAIRED = "--repaired" in sys.argv
side = cupy.cuda.Stream(non_blocking=True)
tensor = torch.zeros(1 << 16, device="cuda")
array = cupy.from_dlpack(tensor)
torch.cuda.synchronize()

for _ in range(4):
    tensor.add_(1)  # first
    if REPAIRED:
        side.wait_event(cupy.cuda.ExternalStream(0).record())
    with side:
        array *= 2  # second
    torch.cuda.synchronize()
