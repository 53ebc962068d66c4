"""As a loader that forgets to wait for its side stream."""

import torch

batch = torch.randn(1 << 20).pin_memory()
side = torch.cuda.Stream()
torch.zeros(1, device="cuda")
for _ in range(8):
    with torch.cuda.stream(side):
        inputs = batch.cuda(non_blocking=True)
    loss = (inputs * 2).sum()  # nothing says that the copy is over
    torch.cuda.synchronize()
