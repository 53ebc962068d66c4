"""Prove that a function orders its work on a buffer with the stream that fills the buffer."""

from cuda.core import Device

import userstream as us
from userstream.testing import latch

Device(0).set_current()
framework = us.Stream.create(0)
buffer = Device(0).allocate(1024, stream=framework)


def waits_for_the_framework(function):
    """Return whether the user stream waits while the framework's stream is held."""
    with latch(framework) as held:
        function()
        too_early = us.get_stream(buffer).is_done
        held.release()
    us.wait(buffer, timeout=10)
    return not too_early


def wrong():
    buffer.fill(1, stream=us.get_stream(buffer))  # get_stream establishes no order


def right():
    with us.borrow(buffer, producer=framework) as stream:
        buffer.fill(1, stream=stream)


for function in (wrong, right):  # once without the latch: a first launch may wait by itself
    function()
us.wait(buffer, timeout=10)
assert waits_for_the_framework(right)
us.wait_for_device(0, timeout=10)
with us.observe() as seen:
    framework.wait(us.get_stream(buffer))
    buffer.fill(2, stream=framework)
    wrong()
assert [race.kind for race in seen.races] == ["write after write"], seen
