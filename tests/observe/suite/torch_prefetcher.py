# https://github.com/pytorch/pytorch/issues/58385
# needs: torch
"""A prefetcher fills the batch that the model still reads."""

import sys

import torch

REPAIRED = "--repaired" in sys.argv
main, side = torch.cuda.current_stream(), torch.cuda.Stream()
host = torch.ones(1 << 20, pin_memory=True)
batch = torch.zeros(1 << 20, device="cuda")
out = torch.zeros_like(batch)
torch.cuda.synchronize()

for _ in range(4):
    if REPAIRED:
        side.wait_stream(main)
    with torch.cuda.stream(side):
        batch.copy_(host, non_blocking=True)  # second
    main.wait_stream(side)
    torch.mul(batch, 2, out=out)  # first
torch.cuda.synchronize()
