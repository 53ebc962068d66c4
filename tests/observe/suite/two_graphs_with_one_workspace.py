# https://github.com/pytorch/pytorch/issues/193402
"""Two graphs were captured with the same workspace, and run on two streams."""

from cuda.core import launch
from kit import COUNT, ONE, REPAIRED, TWO, device, finish, floats, graph_of, scale

one, other = device.create_stream(), device.create_stream()
x, workspace = floats(), floats()
graphs = [graph_of(lambda gb: launch(gb, ONE, scale, workspace, x, COUNT, TWO)) for _ in range(2)]

graphs[0].launch(one)  # first
if REPAIRED:
    other.wait(one)
graphs[1].launch(other)  # second
finish()
