# https://github.com/pytorch/pytorch/issues/86264
# needs: torch
# not seen: reads of the host make no driver call
"""A tensor copied to the host with non_blocking=True is read immediately."""

import sys

import torch

REPAIRED = "--repaired" in sys.argv
x = torch.zeros(1 << 16, device="cuda")
torch.cuda.synchronize()

for _ in range(4):
    x.add_(1)
    host = x.to("cpu", non_blocking=True)  # first
    if REPAIRED:
        torch.cuda.current_stream().synchronize()
    total = float(host[0])  # second
torch.cuda.synchronize()
