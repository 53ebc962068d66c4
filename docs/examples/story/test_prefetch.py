import numpy as np
import pytest
from fixed import Prefetcher
from model import SIZE, train

BATCHES = [np.full(SIZE, number, np.float32) for number in range(10)]


@pytest.mark.no_races
def test_nothing_races(simulated_gpus):
    train(BATCHES, Prefetcher)


@pytest.mark.schedules(20)
def test_the_loss_is_right_in_many_orders(simulated_gpus):
    assert train(BATCHES, Prefetcher) == np.mean(BATCHES)
