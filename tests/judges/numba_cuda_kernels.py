"""Python functions that stand for the kernels of numba-cuda's own tests.

Numba passes an array as seven parameters and more: the owner of its memory, its parent, the number
and the size of its elements, the address of the first one, and then its shape and its strides.
"""

from __future__ import annotations

import numpy as np

from userstream.testing import Pointer, kernel

BEFORE_SHAPE = 5


def array_of(arguments, dtype=None):
    """The array that is passed as these parameters, of elements that are only copied."""
    dimensions = (len(arguments) - BEFORE_SHAPE) // 2
    numbers = [argument.address for argument in arguments]
    shape = numbers[BEFORE_SHAPE : BEFORE_SHAPE + dimensions]
    strides = numbers[BEFORE_SHAPE + dimensions :]
    itemsize = numbers[3]
    extent = itemsize + sum(
        (size - 1) * stride for size, stride in zip(shape, strides, strict=True) if size
    )
    memory = arguments[4].array(extent if numbers[2] else 0, np.uint8)
    return np.ndarray(shape, dtype or f"V{itemsize}", memory, 0, strides)


def halves(arguments, dtype=None):
    middle = len(arguments) // 2
    return array_of(arguments[:middle], dtype), array_of(arguments[middle:], dtype)


@kernel("_assign_kernel.<locals>.kernel")
def assign(grid, block, *arguments: Pointer):
    target, source = halves(arguments)
    target[...] = source


@kernel("transpose.<locals>.kernel")
def transpose(grid, block, *arguments: Pointer):
    source, target = halves(arguments)
    target[...] = source.T


def add_one(grid, block, *arguments: Pointer):
    result, values = halves(arguments, np.float32)
    result[...] = values + 1


def nothing(grid, block, *arguments: Pointer): ...


for name in ("test_cuda_cache_config", "test_cuda_set_shared_memory_carveout"):
    kernel(f"{name}.<locals>.add_one")(add_one)
for name in (
    "test_api",
    "test_basic",
    "test_decldevice_arg",
    "test_device_arch_specific",
    "test_different_argtypes",
    "test_jitarg",
    "test_two_kernels",
):
    kernel(f"{name}.<locals>.kernel")(nothing)


@kernel("_Z10helloworldPi")
def helloworld(grid, block, array: Pointer):
    values = array.array(grid[0] * block[0], np.int32)
    values[:] = np.arange(len(values))
