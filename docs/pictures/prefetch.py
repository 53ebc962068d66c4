"""A loop that copies the next batch while the GPU works on the last one, and has a race."""

from __future__ import annotations

from typing import Any

import numpy as np
from cuda.bindings import driver
from cuda.core import Device, LaunchConfig, ObjectCode, launch

import userstream as us
from userstream.testing import Pointer, kernel

SIZE = 1 << 16


@kernel("forward")
def forward(grid: Any, block: Any, to: Pointer, source: Pointer) -> None:
    """Stand for a kernel."""
    del grid, block
    to.array(SIZE, np.uint8)[:] = source.array(SIZE, np.uint8) // 2 + 1


@kernel("update")
def update(grid: Any, block: Any, to: Pointer, source: Pointer) -> None:
    """Stand for another one."""
    del grid, block
    to.array(SIZE, np.uint8)[:] += source.array(SIZE, np.uint8)


def train(steps: int) -> None:
    """Forget in the last step that the batch is read before it is written again."""
    loader, compute = us.get_stream(0, name="loader"), us.get_stream(0, name="compute")
    code = ObjectCode.from_ptx(b"any")
    kernels = [code.get_kernel(name) for name in ("forward", "update")]
    batch, output, weights = (Device(0).allocate(SIZE, stream=compute) for _ in range(3))
    pinned = us.pinned_empty((SIZE,), np.uint8)
    compute.sync()
    for step in range(steps):
        if step < steps - 1:
            loader.wait(compute)
        driver.cuMemcpyAsync(int(batch.handle), pinned.ctypes.data, SIZE, int(loader.handle))
        compute.wait(loader)
        for each, to, source in zip(kernels, (output, weights), (batch, output), strict=True):
            launch(compute, LaunchConfig(grid=1, block=1), each, to, source)
        if step % 4 == 1:
            us.wait(compute)
