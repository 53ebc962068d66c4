# https://github.com/beehive-lab/TornadoVM/pull/986
"""The host polls an event, which was recorded before the work that it should cover."""

from cuda.core import launch
from kit import COUNT, ONE, REPAIRED, device, finish, floats, increment

copies, compute = device.create_stream(), device.create_stream()
x, y = floats(), floats()

if not REPAIRED:
    done = compute.record()
launch(compute, ONE, increment, x, COUNT)  # first
if REPAIRED:
    done = compute.record()
while not done.is_done:
    pass
y.copy_from(x, stream=copies)  # second
finish()
