# https://github.com/jax-ml/jax/issues/28057
"""A buffer is acquired, used, and never released to its producer."""

from cuda.core import launch
from kit import COUNT, ONE, REPAIRED, TWO, finish, floats, scale

import userstream as us

theirs, mine = us.Stream.create(0), us.Stream.create(0)
x, y = floats(), floats()

x.fill(1, stream=theirs)
us.acquire(x, producer=theirs, stream=mine)
launch(mine, ONE, scale, y, x, COUNT, TWO)  # first
if REPAIRED:
    us.release(x, producer=theirs, stream=mine)
x.fill(2, stream=theirs)  # second
finish()
