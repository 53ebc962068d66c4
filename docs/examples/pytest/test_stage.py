import pytest
from cuda.bindings import driver
from cuda.core import Device

import userstream as us
from userstream import testing


def clear(buffer):
    """Zero a buffer on its user stream: the code under test."""
    buffer.fill(0, stream=us.get_stream(buffer))


@pytest.fixture
def buffer():
    Device(1).set_current()
    return Device(1).allocate(1024, stream=us.get_stream(1))


def test_it_queues_and_does_not_wait(buffer):
    with testing.latch(us.get_stream(1)) as held:
        clear(buffer)  # returns although the stream is held
        with pytest.raises(us.WaitTimeout):
            us.wait(buffer, timeout=0.01)
        held.release()
        us.wait(buffer, timeout=10)


def test_a_failing_gpu_is_an_error_and_not_a_hang(buffer):
    clear(buffer)
    testing.async_error(us.get_stream(1), driver.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS)
    with pytest.raises(us.DriverError, match="ILLEGAL_ADDRESS") as caught:
        us.wait(buffer, timeout=10)
    assert caught.value.device == 1


def test_a_stream_that_cannot_be_made():
    out_of_memory = driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    with us.UserStream() as mine:
        testing.inject("cuStreamCreateWithPriority", out_of_memory)
        with pytest.raises(us.DriverError, match="OUT_OF_MEMORY"):
            mine.get_stream(0)
        mine.get_stream(0)  # the next call works


def test_the_stream_is_there_already(buffer):
    testing.reset()
    us.get_stream(buffer)
    assert testing.calls("cuStreamCreateWithPriority") == 0
