# https://github.com/vllm-project/vllm/issues/13632
"""Two green contexts use one buffer, and nothing orders their streams."""

from cuda.core import launch
from kit import COUNT, ONE, REPAIRED, TWO, finish, floats, scale

import userstream as us

one, other = us.Stream.create(0, sms=16), us.Stream.create(0)
x, y = floats(), floats()

x.fill(1, stream=one)  # first
if REPAIRED:
    other.wait(one)
launch(other, ONE, scale, y, x, COUNT, TWO)  # second
finish()
