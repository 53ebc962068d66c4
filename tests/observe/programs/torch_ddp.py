"""Data parallel training with NCCL; torchrun starts a process for each GPU."""

import os

import torch
from torch import distributed

rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
distributed.init_process_group("nccl", device_id=torch.device("cuda", rank))
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8))).cuda()
model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[rank], bucket_cap_mb=1)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(10):
    optimizer.zero_grad()
    model(torch.randn(64, 256, device="cuda")).square().mean().backward()
    optimizer.step()
torch.cuda.synchronize()
distributed.destroy_process_group()
