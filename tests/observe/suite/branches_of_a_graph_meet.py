# https://github.com/pytorch/pytorch/issues/153025
"""Two branches of a captured graph write the same scratch buffer."""

from cuda.core import launch
from kit import COUNT, ONE, REPAIRED, TWO, device, finish, floats, scale

x, y, scratch = floats(), floats(), floats()
stream = device.create_stream()
launch(stream, ONE, scale, scratch, x, COUNT, TWO)  # warms up
stream.sync()
gb = stream.create_graph_builder().begin_building()
left, right = gb.split(2)

launch(left, ONE, scale, scratch, x, COUNT, TWO)  # first
launch(right, ONE, scale, y if REPAIRED else scratch, x, COUNT, TWO)  # second
gb = type(gb).join(left, right)
graph = gb.end_building().complete()
graph.launch(stream)
finish()
