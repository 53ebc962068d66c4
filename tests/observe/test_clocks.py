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


def test_a_stream_with_the_handle_of_another_has_its_number_if_the_same_line_created_it() -> None:
    clocks = Clocks()
    numbers = []
    for stack in (7, 7, 8, 7):
        clocks.created_stream(0x50, stack)
        lane = clocks.seen_stream(0x50, 1, blocking=False)
        numbers.append((lane.number, lane.created))
        clocks.drop_stream(0x50)
    assert numbers == [(1, 7), (1, 7), (2, 8), (1, 7)]
    assert clocks.seen_stream(0x50, 1, blocking=False).created == -1
