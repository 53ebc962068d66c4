"""Look at a gradient in every step, while the training continues."""

import numpy as np
import torch

import userstream as us

model = torch.nn.Linear(1024, 1024, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
norms = []
copy = None
for _ in range(20):
    optimizer.zero_grad()
    model(torch.randn(64, 1024, device="cuda")).square().mean().backward()
    last, copy = copy, us.asnumpy_async(model.weight.grad)  # queued, and the gradient is kept
    optimizer.step()
    if last is not None:
        norms.append(np.linalg.norm(last.result(timeout=10)))
norms.append(np.linalg.norm(copy.result(timeout=10)))
assert len(norms) == 20
assert all(norm > 0 for norm in norms)
