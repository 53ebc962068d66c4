# https://github.com/pytorch/pytorch/issues/58385
# needs: torch
"""A tensor goes back to the allocator while a side stream still reads it."""

import sys

import torch

REPAIRED = "--repaired" in sys.argv
side = torch.cuda.Stream()
host = torch.zeros(1 << 20, pin_memory=True)
torch.cuda.synchronize()

for _ in range(4):
    x = torch.ones(1 << 20, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        host.copy_(x, non_blocking=True)  # first
    if REPAIRED:
        x.record_stream(side)
    del x
    y = torch.zeros(1 << 20, device="cuda")  # second
    del y
torch.cuda.synchronize()
