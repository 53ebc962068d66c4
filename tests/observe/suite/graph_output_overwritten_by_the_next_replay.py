# https://github.com/NVIDIA/TensorRT-LLM/pull/18207
"""The output of a graph is copied out on a side stream while the graph runs again."""

from cuda.core import launch
from kit import COUNT, ONE, REPAIRED, TWO, device, finish, floats, graph_of, pinned, scale

compute, copies = device.create_stream(), device.create_stream()
x, out = floats(), floats()
host, _ = pinned()
graph = graph_of(lambda gb: launch(gb, ONE, scale, out, x, COUNT, TWO))

for step in range(2):
    graph.launch(compute)  # second
    copies.wait(compute)
    out.copy_to(host, stream=copies)  # first
    if REPAIRED:
        compute.wait(copies)
    x.fill(step + 2, stream=compute)
finish()
