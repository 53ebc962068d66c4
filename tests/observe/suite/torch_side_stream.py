# https://github.com/pytorch/pytorch/issues/197562
# needs: torch
"""A module runs on a side stream that does not wait for its input."""

import sys

import torch

REPAIRED = "--repaired" in sys.argv
main, side = torch.cuda.current_stream(), torch.cuda.Stream()
x = torch.zeros(1 << 16, device="cuda")
y = torch.zeros_like(x)
torch.cuda.synchronize()

for _ in range(4):
    x.add_(1)  # first
    if REPAIRED:
        side.wait_stream(main)
    with torch.cuda.stream(side):
        torch.mul(x, 2, out=y)  # second
    torch.cuda.synchronize()
