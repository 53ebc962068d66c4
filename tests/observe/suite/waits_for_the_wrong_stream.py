# https://github.com/pytorch/pytorch/issues/37790
"""Gradients are averaged after a wait for a stream that did not produce them."""

from cuda.core import launch
from kit import COUNT, ONE, REPAIRED, TWO, device, finish, floats, increment, scale

backward, reduce, main = (device.create_stream() for _ in range(3))
grad, total = floats(), floats()

launch(backward, ONE, increment, grad, COUNT)  # first
reduce.wait(backward if REPAIRED else main)
launch(reduce, ONE, scale, total, grad, COUNT, TWO)  # second
finish()
