"""A step in a CUDA graph, whose inputs are copied into place."""

import torch

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).cuda()
inputs = torch.randn(32, 64, device="cuda")
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side), torch.no_grad():
    for _ in range(3):
        model(inputs)
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph), torch.no_grad():
    outputs = model(inputs)
for _ in range(10):
    inputs.copy_(torch.randn(32, 64, device="cuda"))
    graph.replay()
    print(outputs.sum().item())
