# https://github.com/sgl-project/sglang/pull/14214
"""A stream waits for an event that is recorded only later, which waits for nothing."""

from cuda.core import launch
from kit import COUNT, ONE, REPAIRED, TWO, device, finish, floats, scale

main, side = device.create_stream(), device.create_stream()
x, y = floats(), floats()
event = device.create_event()

if not REPAIRED:
    side.wait(event)
x.fill(1, stream=main)  # first
main.record(event)
if REPAIRED:
    side.wait(event)
launch(side, ONE, scale, y, x, COUNT, TWO)  # second
finish()
