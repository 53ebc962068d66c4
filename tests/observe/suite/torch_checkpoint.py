# https://github.com/pytorch/pytorch/pull/180665
# needs: torch
"""Weights are copied to the host on a side stream while the optimizer changes them."""

import sys

import torch

REPAIRED = "--repaired" in sys.argv
main, side = torch.cuda.current_stream(), torch.cuda.Stream()
weights = torch.zeros(1 << 20, device="cuda")
host = torch.zeros(1 << 20, pin_memory=True)
torch.cuda.synchronize()

for _ in range(4):
    side.wait_stream(main)
    with torch.cuda.stream(side):
        host.copy_(weights, non_blocking=True)  # first
    if REPAIRED:
        main.wait_stream(side)
    weights.add_(0.1)  # second
torch.cuda.synchronize()
