# https://github.com/ROCm/pytorch/issues/3194
# needs: torch
"""The default stream uses a batch that a transfer stream still copies."""

import sys

import torch

REPAIRED = "--repaired" in sys.argv
main, transfer = torch.cuda.current_stream(), torch.cuda.Stream()
host = torch.ones(1 << 20, pin_memory=True)
batch = torch.zeros(1 << 20, device="cuda")
out = torch.zeros_like(batch)
torch.cuda.synchronize()

for _ in range(4):
    with torch.cuda.stream(transfer):
        batch.copy_(host, non_blocking=True)  # first
    if REPAIRED:
        main.wait_stream(transfer)
    torch.mul(batch, 2, out=out)  # second
    torch.cuda.synchronize()
