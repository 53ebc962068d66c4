# https://github.com/pytorch/pytorch/issues/197562
"""An event is recorded before the kernel whose end it should mark."""

from cuda.core import launch
from kit import COUNT, ONE, REPAIRED, TWO, device, finish, floats, scale

main, side = device.create_stream(), device.create_stream()
x, y = floats(), floats()

if not REPAIRED:
    ready = main.record()
x.fill(1, stream=main)  # first
if REPAIRED:
    ready = main.record()
side.wait(ready)
launch(side, ONE, scale, y, x, COUNT, TWO)  # second
finish()
