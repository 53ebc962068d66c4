import numpy as np
import pytest
from cuda.bindings import driver
from cuda.core import Device, LaunchConfig, ObjectCode, launch

import userstream as us
from userstream import testing

PTX = b"..."  # as nvcc or NVRTC made it


def scale(buffer, factor, count=None):
    """Scale a buffer of floats on its user stream: the code under test."""
    kernel = ObjectCode.from_ptx(PTX).get_kernel("scale")
    count = buffer.size // 4 if count is None else count
    with us.borrow(buffer) as stream:
        config = LaunchConfig(grid=-(-count // 256), block=256)
        launch(stream, config, kernel, buffer, np.int32(count), np.float32(factor))


@testing.kernel("scale")  # what the kernel does, in NumPy
def scale_in_numpy(grid, block, x: testing.Pointer, n: np.int32, factor: np.float32):
    assert grid[0] * block[0] >= n, "not every element has a thread"
    x.array(n, np.float32)[:] *= factor


@pytest.fixture
def ones():
    Device(0).set_current()
    buffer = Device(0).allocate(4000, stream=us.get_stream(0))
    us.copyto(buffer, np.ones(1000, np.float32).view(np.uint8))
    return buffer


def test_it_scales(ones):
    scale(ones, 3)
    assert (us.asnumpy(ones).view(np.float32) == 3).all()


def test_it_does_not_wait_for_the_kernel(ones):
    testing.duration("scale", 1)  # second
    scale(ones, 3)
    assert not us.get_stream(0).is_done
    us.wait(ones, timeout=10)


def test_a_kernel_that_leaves_its_buffer(ones):
    with testing.latch(us.get_stream(0)):
        scale(ones, 3, count=1001)
    with pytest.raises(us.DriverError, match="ILLEGAL_ADDRESS") as caught:
        us.wait(ones, timeout=10)
    assert "its allocation of 4000 bytes has 4000 from there" in str(caught.value)


def test_a_launch_that_fails(ones):
    failure = testing.inject(launch=driver.CUresult.CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES)
    with failure, pytest.raises(Exception, match="OUT_OF_RESOURCES"):
        scale(ones, 3)
    scale(ones, 3)  # the buffer is still of use
    assert (us.asnumpy(ones).view(np.float32) == 3).all()
