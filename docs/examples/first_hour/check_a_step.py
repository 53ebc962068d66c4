"""Watch one step, and stop at the first race."""

from cuda.core import Device

import userstream as us

Device(0).set_current()
compute, side = Device(0).create_stream(), Device(0).create_stream()
weights, snapshot = (Device(0).allocate(1 << 20, stream=compute) for _ in range(2))
compute.sync()


def step(number, *, ordered):
    weights.fill(number, stream=compute)  # the optimizer
    if ordered:
        side.wait(compute)
    weights.copy_to(snapshot, stream=side)  # a snapshot on another stream
    compute.wait(side)


with us.observe() as seen:
    for number in range(3):
        step(number, ordered=True)
seen.check()

with us.observe() as seen:
    step(3, ordered=False)
try:
    seen.check()
except us.RaceError as error:
    print(error)
(race,) = seen.races
assert race.kind == "read after write"
