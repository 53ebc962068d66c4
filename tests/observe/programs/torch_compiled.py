"""A compiled step."""

import torch

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 1)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)


@torch.compile
def loss(inputs):
    return model(inputs).square().mean()


for _ in range(10):
    optimizer.zero_grad()
    loss(torch.randn(32, 64, device="cuda")).backward()
    optimizer.step()
torch.cuda.synchronize()
