# https://github.com/mitsuba-renderer/drjit/issues/198
"""A block borrows the buffer that it writes, and not the one that it reads."""

from cuda.core import launch
from kit import COUNT, ONE, REPAIRED, TWO, finish, floats, scale

import userstream as us

theirs, mine = us.Stream.create(0), us.Stream.create(0)
x, y = floats(), floats()

x.fill(1, stream=theirs)  # first
buffers = (x, y) if REPAIRED else (y,)
with us.borrow(*buffers, producer=theirs if REPAIRED else None, stream=mine):
    launch(mine, ONE, scale, y, x, COUNT, TWO)  # second
finish()
