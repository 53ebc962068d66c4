from pathlib import Path

import numpy as np
from cuda.core import Device, LaunchConfig, ObjectCode, launch

import userstream as us
from userstream import testing


@testing.kernel("add_one")  # stands for it where there is no GPU, and does nothing on one
def add_one(grid, block, x: testing.Pointer, n: np.int32):
    assert grid[0] * block[0] >= n  # a thread for each element
    x.array(n, np.float32)[:] += 1


PTX = Path(__file__).with_name("add_one.ptx")
COUNT = 1 << 16
Device(0).set_current()
kernel = ObjectCode.from_ptx(str(PTX)).get_kernel("add_one")
theirs = Device(0).create_stream()  # the stream of a framework
buffer = Device(0).allocate(4 * COUNT, stream=theirs)
buffer.fill(0, stream=theirs)

with us.borrow(buffer, producer=theirs) as stream:  # after the fill
    launch(stream, LaunchConfig(grid=COUNT // 256, block=256), kernel, buffer, np.int32(COUNT))

with us.Stream.create(0) as mine, mine.capture() as graph:  # the same, to be launched often
    launch(mine, LaunchConfig(grid=COUNT // 256, block=256), kernel, buffer, np.int32(COUNT))
executable = graph.instantiate()
for _ in range(3):
    executable.launch(us.get_stream(0))

assert (us.asnumpy(buffer, producer=us.get_stream(0)).view(np.float32) == 4).all()
