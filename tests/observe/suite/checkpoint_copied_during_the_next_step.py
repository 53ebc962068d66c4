# https://github.com/pytorch/pytorch/pull/180665
"""Weights are copied to the host on a side stream while the next step changes them."""

from cuda.core import launch
from kit import COUNT, ONE, REPAIRED, device, finish, floats, increment, pinned

train, snapshot = device.create_stream(), device.create_stream()
weights = floats()
host, _ = pinned()

launch(train, ONE, increment, weights, COUNT)
snapshot.wait(train)
weights.copy_to(host, stream=snapshot)  # first
if REPAIRED:
    train.wait(snapshot)
launch(train, ONE, increment, weights, COUNT)  # second
finish()
