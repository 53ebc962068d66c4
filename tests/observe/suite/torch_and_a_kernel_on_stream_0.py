# https://github.com/pytorch/pytorch/issues/182770
# needs: torch
"""A copy on the legacy stream follows torch's work on a side stream."""

import sys

import torch
from cuda.bindings import driver

REPAIRED = "--repaired" in sys.argv
side = torch.cuda.Stream()
x, y = (torch.zeros(1 << 16, device="cuda") for _ in range(2))
torch.cuda.synchronize()

for _ in range(4):
    with torch.cuda.stream(side):
        x.add_(1)  # first
    if REPAIRED:
        torch.cuda.default_stream().wait_stream(side)
    driver.cuMemcpyDtoDAsync(y.data_ptr(), x.data_ptr(), 4 << 16, 0)  # second
    torch.cuda.synchronize()
