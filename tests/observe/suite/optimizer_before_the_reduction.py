# https://github.com/NVIDIA/Megatron-LM/pull/6187
"""The optimizer uses gradients whose reduction runs on another stream."""

from cuda.core import launch
from kit import COUNT, ONE, REPAIRED, TWO, add, device, finish, floats, scale

compute, reduce = device.create_stream(), device.create_stream()
grad, weights, other = floats(), floats(), floats()

reduce.wait(compute)
launch(reduce, ONE, scale, grad, other, COUNT, TWO)  # first
if REPAIRED:
    compute.wait(reduce)
launch(compute, ONE, add, weights, grad, other, COUNT)  # second
finish()
