import numpy as np
import pytest
from scale import scale
from tensor import Tensor

import userstream as us
from userstream import testing


class Floats(Tensor):
    """A stand-in for a framework's array: floats, which its own stream has just filled."""

    def __init__(self, values, device=0):
        super().__init__((4 * len(values),), device=device)
        self.__cuda_array_interface__ |= {"shape": (len(values),), "typestr": "<f4"}
        us.copyto(self, np.array(values, np.float32))


@pytest.mark.no_races
@pytest.mark.parametrize("device", [0, 1])
def test_scale(simulated_gpus, device):
    array = Floats([1, 2, 3], device)
    scale(array, 2)
    assert us.asnumpy(array).tolist() == [2, 4, 6]


def test_scale_waits_for_the_framework(simulated_gpus):
    array = Floats([1, 2, 3])
    with testing.latch(array.stream) as held:  # the framework is not done yet
        scale(array, 2)  # does not wait on the host
        held.release()
    assert us.asnumpy(array).tolist() == [2, 4, 6]


def test_scale_refuses_other_types(simulated_gpus):
    with pytest.raises(TypeError, match="not uint8"):
        scale(Tensor(), 2)
