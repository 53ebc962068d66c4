"""CuPy works on a tensor of PyTorch's inside of a borrow, and PyTorch goes on with it."""

import cupy
import torch

import userstream as us

tensor = torch.zeros(1 << 20, device="cuda")
for _ in range(10):
    tensor += 1
    with us.borrow(tensor, activate=True):
        cupy.asarray(tensor)[:] *= 2
    tensor -= 1
assert us.asnumpy(tensor).max() == 1023
