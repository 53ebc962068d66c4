# https://github.com/sgl-project/sglang/issues/32432
# needs: torch
"""The static input of a graph is filled on a side stream while the graph runs."""

import sys

import torch

REPAIRED = "--repaired" in sys.argv
main, side = torch.cuda.current_stream(), torch.cuda.Stream()
static, host = torch.zeros(1 << 16, device="cuda"), torch.ones(1 << 16, pin_memory=True)
out = torch.zeros_like(static)
torch.mul(static, 2, out=out)
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    torch.mul(static, 2, out=out)

for _ in range(4):
    with torch.cuda.stream(side):
        static.copy_(host, non_blocking=True)  # first
    if REPAIRED:
        main.wait_stream(side)
    graph.replay()  # second
    torch.cuda.synchronize()
