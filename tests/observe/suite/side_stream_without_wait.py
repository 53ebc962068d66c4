# https://github.com/pytorch/pytorch/issues/197562
"""A side stream reads an array that the main stream is still writing."""

from cuda.core import launch
from kit import COUNT, ONE, REPAIRED, TWO, device, finish, floats, scale

main, side = device.create_stream(), device.create_stream()
x, y = floats(), floats()

x.fill(1, stream=main)  # first
if REPAIRED:
    side.wait(main)
launch(side, ONE, scale, y, x, COUNT, TWO)  # second
finish()
