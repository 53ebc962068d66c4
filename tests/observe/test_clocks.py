"""What happened before what, as `observe` works it out."""

from __future__ import annotations

from userstream._observe.judge.clocks import Clocks


def test_the_legacy_stream_is_beside_the_blocking_ones_that_there_are() -> None:
    clocks = Clocks()
    legacy = clocks.lane(0, 1, 1)
    first = clocks.seen_stream(10, 1, blocking=True)
    clocks.seen_stream(11, 1, blocking=False)
    elsewhere = clocks.seen_stream(12, 2, blocking=True)
    thread = clocks.lane(2, 1, 7)
    assert list(clocks.beside(legacy)) == [first, thread]
    assert list(clocks.beside(first)) == [legacy]
    assert not list(clocks.beside(elsewhere))
    clocks.drop_stream(10)
    assert list(clocks.beside(legacy)) == [first, thread], "its work may be in flight"
    clocks.host_knows(clocks.of_context(1))
    assert list(clocks.beside(legacy)) == [thread]
    again = clocks.seen_stream(10, 1, blocking=True)
    assert list(clocks.beside(legacy)) == [thread, again]
    newer = clocks.seen_stream(10, 1, blocking=True)  # its end was not seen
    assert list(clocks.beside(legacy)) == [thread, again, newer]
