# https://github.com/pytorch/pytorch/issues/127612
# needs: torch
"""A pinned batch is filled again while non_blocking=True still copies it."""

import sys

import torch

REPAIRED = "--repaired" in sys.argv
host = torch.zeros(1 << 20, pin_memory=True)
batch = torch.zeros(1 << 20, device="cuda")
busy = torch.zeros(1 << 26, device="cuda")
torch.cuda.synchronize()

for step in range(4):
    host.fill_(step)  # second
    busy.add_(1)
    batch.copy_(host, non_blocking=True)  # first
    if REPAIRED:
        torch.cuda.current_stream().synchronize()
torch.cuda.synchronize()
