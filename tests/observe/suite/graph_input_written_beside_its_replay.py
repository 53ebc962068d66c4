# https://github.com/sgl-project/sglang/issues/32432
"""The static input of a graph is filled on another stream than the graph runs on."""

from cuda.core import launch
from kit import COUNT, ONE, REPAIRED, TWO, device, finish, floats, graph_of, pinned, scale

compute, copies = device.create_stream(), device.create_stream()
static, out = floats(), floats()
source, _ = pinned()
graph = graph_of(lambda gb: launch(gb, ONE, scale, out, static, COUNT, TWO))

for _ in range(2):
    static.copy_from(source, stream=copies)  # first
    if REPAIRED:
        compute.wait(copies)
    graph.launch(compute)  # second
    copies.wait(compute)
finish()
