import fixed
import numpy as np
import prefetch
import pytest
from model import SIZE, train

BATCHES = [np.full(SIZE, number, np.float32) for number in range(4)]


@pytest.mark.parametrize("program", [prefetch, fixed])
def test_the_loss_is_right(simulated_gpus, program):
    assert train(BATCHES, program.Prefetcher) == np.mean(BATCHES)
