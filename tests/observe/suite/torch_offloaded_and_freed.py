# https://github.com/meta-pytorch/torchrec/pull/4231
# needs: torch
"""Activations are freed while they are copied to the host; their memory is not reused yet."""

import sys

import torch

REPAIRED = "--repaired" in sys.argv
main, side = torch.cuda.current_stream(), torch.cuda.Stream()
host = torch.zeros(1 << 16, pin_memory=True)
torch.cuda.synchronize()

for step in range(4):
    activations = torch.full((1 << 16,), float(step), device="cuda")
    side.wait_stream(main)
    with torch.cuda.stream(side):
        host.copy_(activations, non_blocking=True)  # first
    if REPAIRED:
        activations.record_stream(side)
    del activations  # second
    loss = torch.empty(1 << 8, device="cuda")
    torch.cuda.synchronize()
