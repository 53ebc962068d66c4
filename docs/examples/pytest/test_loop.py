import numpy as np
from cuda.core import Device, LaunchConfig, ObjectCode, launch

import userstream as us
from userstream import testing

PTX = b"..."  # as nvcc or NVRTC made it


def halve_until(builder, buffer, limit):
    """Halve a number until it is below a limit: a loop in a graph, the code under test."""
    kernel = ObjectCode.from_ptx(PTX).get_kernel("halve")
    again = builder.create_condition(default_value=1)
    body = builder.while_loop(again).begin_building()
    launch(body, LaunchConfig(grid=1, block=1), kernel, again, buffer, np.int32(limit))
    body.end_building()


@testing.kernel("halve")
def halve_in_numpy(grid, block, again: testing.Condition, x: testing.Pointer, limit: np.int32):
    assert (grid, block) == ((1, 1, 1), (1, 1, 1)), "one thread halves"
    value = x.array(1, np.int32)
    value //= 2
    again.set(value[0] >= limit)  # cudaGraphSetConditional


def test_the_loop_ends():
    Device(0).set_current()
    stream = us.get_stream(0)
    buffer = Device(0).allocate(4, stream=stream)
    us.copyto(buffer, np.array([100], np.int32).view(np.uint8))
    builder = Device(0).create_graph_builder().begin_building()
    halve_until(builder, buffer, 10)
    graph = builder.end_building().complete()
    graph.launch(stream)
    assert us.asnumpy(buffer, producer=stream).view(np.int32)[0] == 6
