# https://github.com/jax-ml/jax/issues/28057
# needs: jax cupy
# possible: a host function may tell the program that the work is over
"""A separate stream copies a JAX array by its address before the array is computed."""

import sys

import cupy
import jax
import jax.numpy as jnp

REPAIRED = "--repaired" in sys.argv
side = cupy.cuda.Stream(non_blocking=True)
step = jax.jit(lambda value: value @ value * 0.5 + 1)
x = jnp.ones((1024, 1024))
out = cupy.zeros((1024, 1024), cupy.float32)
step(x).block_until_ready()

for _ in range(4):
    x = step(x)  # first
    if REPAIRED:
        x.block_until_ready()
    memory = cupy.cuda.UnownedMemory(x.unsafe_buffer_pointer(), x.nbytes, x)
    pointer = cupy.cuda.MemoryPointer(memory, 0)
    out.data.copy_from_device_async(pointer, x.nbytes, side)  # second
    side.synchronize()
