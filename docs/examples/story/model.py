"""A model that is trained on batches: its loss is their mean."""

import numpy as np
from cuda.core import Device, LaunchConfig, LegacyPinnedMemoryResource, ObjectCode, launch

from userstream import testing

SIZE = 4096

testing.simulate()  # no GPU is needed: a Python function stands for the kernel


@testing.kernel("step")
def step(grid, block, loss: testing.Pointer, batch: testing.Pointer):
    loss.array(1, np.float32)[0] += batch.array(SIZE, np.float32).mean()


testing.duration("step", 0.002)  # seconds


def train(batches, prefetcher_type):
    Device(0).set_current()
    compute = Device(0).create_stream()
    kernel = ObjectCode.from_ptx(b"any").get_kernel("step")
    loss = LegacyPinnedMemoryResource().allocate(4)
    total = np.from_dlpack(loss).view(np.float32)
    total[:] = 0
    prefetcher = prefetcher_type(batches, compute)
    for _ in batches:
        batch = prefetcher.next_batch()
        launch(compute, LaunchConfig(grid=1, block=1), kernel, loss, batch)
    compute.sync()
    return float(total[0]) / len(batches)
