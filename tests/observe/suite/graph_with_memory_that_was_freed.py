# https://github.com/ggml-org/llama.cpp/pull/26771
"""A graph is replayed after the buffer that it was captured with has been freed."""

from cuda.bindings import driver
from cuda.core import launch
from kit import COUNT, ONE, REPAIRED, TWO, N, device, floats, graph_of, scale

stream = device.create_stream()
scratch, x = device.allocate(4 * N, stream=stream), floats()
stream.sync()
graph = graph_of(lambda gb: launch(gb, ONE, scale, scratch, x, COUNT, TWO))

graph.launch(stream)
if not REPAIRED:
    scratch.close(stream)  # first
graph.launch(stream)  # second
driver.cuCtxSynchronize()
