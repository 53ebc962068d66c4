# https://github.com/cp2k/dbcsr/pull/400
# needs: torch
"""Two streams multiply into one output."""

import sys

import torch

REPAIRED = "--repaired" in sys.argv
one, other = torch.cuda.Stream(), torch.cuda.Stream()
a, b = (torch.rand(512, 512, device="cuda") for _ in range(2))
out = torch.zeros(512, 512, device="cuda")
torch.cuda.synchronize()

for _ in range(4):
    a.add_(1)
    torch.cuda.synchronize()
    with torch.cuda.stream(one):
        torch.mm(a, b, out=out)  # first
    if REPAIRED:
        other.wait_stream(one)
    with torch.cuda.stream(other):
        torch.mm(b, a, out=out)  # second
    torch.cuda.synchronize()
