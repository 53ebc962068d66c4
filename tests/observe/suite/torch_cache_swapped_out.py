# https://github.com/vllm-project/vllm/issues/45704
# needs: torch
# possible: which part of a block a kernel uses is not known
"""A block of a KV cache is copied out while a kernel still writes it through an index."""

import sys

import torch

REPAIRED = "--repaired" in sys.argv
main, side = torch.cuda.current_stream(), torch.cuda.Stream()
cache = torch.zeros(64, 1 << 16, device="cuda")
host = torch.zeros(1 << 16, pin_memory=True)
rows = torch.arange(1, 5, device="cuda")
new = torch.ones(4, 1 << 16, device="cuda")
torch.cuda.synchronize()

for _ in range(4):
    new.add_(1)
    cache.index_copy_(0, rows, new)  # first
    if REPAIRED:
        side.wait_stream(main)
    with torch.cuda.stream(side):
        host.copy_(cache[2], non_blocking=True)  # second
    torch.cuda.synchronize()
