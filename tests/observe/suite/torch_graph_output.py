# https://github.com/NVIDIA/TensorRT-LLM/pull/18207
# needs: torch
"""The output of a graph is copied out while the graph runs again."""

import sys

import torch

REPAIRED = "--repaired" in sys.argv
main, side = torch.cuda.current_stream(), torch.cuda.Stream()
x, host = torch.zeros(1 << 16, device="cuda"), torch.zeros(1 << 16, pin_memory=True)
out = torch.zeros_like(x)
for _ in range(3):
    torch.add(x, 1, out=out)
    x.add_(1)
    torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    torch.add(x, 1, out=out)

for _ in range(4):
    graph.replay()  # second
    side.wait_stream(main)
    with torch.cuda.stream(side):
        host.copy_(out, non_blocking=True)  # first
    if REPAIRED:
        main.wait_stream(side)
torch.cuda.synchronize()
