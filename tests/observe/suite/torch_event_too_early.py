# https://github.com/pytorch/pytorch/issues/37790
# needs: torch
"""An event is recorded before the backward pass whose end it should mark."""

import sys

import torch

REPAIRED = "--repaired" in sys.argv
main, reduce = torch.cuda.current_stream(), torch.cuda.Stream()
grad = torch.zeros(1 << 16, device="cuda")
total = torch.zeros_like(grad)
torch.cuda.synchronize()

for _ in range(4):
    if not REPAIRED:
        ready = main.record_event()
    grad.add_(1)  # first
    if REPAIRED:
        ready = main.record_event()
    reduce.wait_event(ready)
    with torch.cuda.stream(reduce):
        total.copy_(grad)  # second
    torch.cuda.synchronize()
