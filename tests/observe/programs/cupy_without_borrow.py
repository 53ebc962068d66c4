"""CuPy works on a tensor of PyTorch's on a stream of its own."""

import cupy
import torch

tensor = torch.zeros(1 << 20, device="cuda")
mine = cupy.cuda.Stream(non_blocking=True)
with mine:
    array = cupy.asarray(tensor)
    array *= 2
torch.cuda.synchronize()
for _ in range(8):
    tensor += 1
    with mine:
        array *= 2
    torch.cuda.synchronize()
