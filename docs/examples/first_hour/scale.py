"""A library function: it scales an array of floats in place, whichever framework made it."""

import numpy as np
from cuda.core import LaunchConfig, ObjectCode, launch

import userstream as us
from userstream import testing

_streams = us.UserStream()  # of this library alone


@testing.kernel("scale_floats")  # without a GPU this function stands for the kernel
def _scale(grid, block, array: testing.Pointer, count: np.int32, factor: np.float32):
    array.array(count, np.float32)[:] *= factor


def scale(array, factor):
    """Multiply an array; its framework's next work on it comes after that."""
    info = us.describe(array)
    if info.dtype != np.float32:
        raise TypeError(f"scale() takes float32, not {info.dtype}")
    count = info.nbytes // 4
    kernel = ObjectCode.from_ptx(b"any").get_kernel("scale_floats")
    with _streams.borrow(array) as stream:
        stream.device.set_current()
        config = LaunchConfig(grid=-(-count // 256), block=256)
        launch(stream, config, kernel, info.address, np.int32(count), np.float32(factor))
