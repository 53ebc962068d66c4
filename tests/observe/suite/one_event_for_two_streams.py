# https://github.com/torch/cutorch/pull/222
"""One event is recorded on two streams; a wait for it covers only the last record."""

from cuda.core import launch
from kit import COUNT, ONE, REPAIRED, add, device, finish, floats

one, other, last = (device.create_stream() for _ in range(3))
x, y, z = floats(), floats(), floats()
events = [device.create_event() for _ in range(2)]

x.fill(1, stream=one)  # first
one.record(events[0])
y.fill(2, stream=other)
other.record(events[1] if REPAIRED else events[0])
for event in events if REPAIRED else events[:1]:
    last.wait(event)
launch(last, ONE, add, z, x, y, COUNT)  # second
finish()
