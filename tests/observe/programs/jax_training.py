"""Gradient descent."""

import jax
import jax.numpy as jnp


@jax.jit
def step(weights, inputs, wanted):
    return weights - 0.1 * jax.grad(lambda w: jnp.mean((inputs @ w - wanted) ** 2))(weights)


key = jax.random.PRNGKey(0)
inputs = jax.random.normal(key, (256, 64))
wanted = inputs @ jnp.arange(64.0)
weights = jnp.zeros(64)
for _ in range(20):
    weights = step(weights, inputs, wanted)
print(weights.block_until_ready()[:4])
