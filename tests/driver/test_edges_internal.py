"""Operations on two lanes that the compiled core performs in one call."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.machinery
import importlib.util
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from cuda.bindings import driver

import userstream as us
from driver.test_core_internal import CALLS, EIGHT
from helpers import (
    another_context,
    current_context,
    device_current,
    eventually,
    fill,
    grown,
    pinned_memory,
)
from userstream import _driver, testing
from userstream._driver import _core, core
from userstream._engine import held_objects, lanes
from userstream._ordering.ordering import Ordering, Rest

NOT_READY = 600
INVALID_HANDLE = 400


class Thing:
    """Something that can be referred to weakly."""


@pytest.fixture
def streams() -> Iterator[tuple[us.Stream, us.Stream]]:
    """Two streams with spare events, on which objects have been held before."""
    with us.Stream.create(0) as one, us.Stream.create(0) as other:
        for stream in (one, other):
            with testing.latch(stream):
                for _ in range(4):
                    us.hold(Thing(), stream=stream)
        us.wait([one, other], timeout=10)
        assert eventually(lambda: (held_objects.sweep(), not held_objects.queues)[1])
        yield one, other
        held_objects.sweep()


def finish(lane: Any, source: Any, objects: object) -> int:
    """Release an ordering between a lane and, perhaps, a producer."""
    producers = () if source is None else (source,)
    ordering = core.OrderingState(None, lane, producers, None, (), False)
    return core.release(ordering, objects)


def is_pending(stream: us.Stream) -> bool:
    return not stream.is_done


def test_a_lane_is_queried(streams):
    stream, _ = streams
    assert core.query(stream._lane) == 0
    with testing.latch(stream):
        assert core.query(stream._lane) & 0xFFFFFFFF == NOT_READY


def test_what_a_query_cannot_answer_in_one_step(streams):
    stream, _ = streams
    lane = stream._lane
    assert core.query(lanes.default(_driver.streams.LEGACY, 0)) == core.CAPTURED
    stream.begin_capture(mode="relaxed")
    assert core.query(lane) == core.CAPTURED
    stream.end_capture()
    stream.close()
    assert core.query(lane) == core.CAPTURED


def test_one_lane_is_ordered_after_another(streams):
    one, other = streams
    spare = len(one._lane.pool.free)
    with testing.latch(one):
        assert core.order(one._lane, other._lane) == 0
        assert is_pending(other)
        assert len(one._lane.pool.free) >= spare
    assert eventually(lambda: not is_pending(other))


@pytest.fixture
def empty_pool(streams, monkeypatch) -> core.EventPool:
    """Replace the first stream's pool by one to which no other thread returns events."""
    lane = streams[0]._lane
    pool = core.make_pool(lane.raw_context, True, True)
    monkeypatch.setattr(lane, "pool", pool)
    return pool


@pytest.mark.parametrize("elsewhere", [False, pytest.param(True, marks=pytest.mark.multi_device)])
def test_without_a_spare_event_one_is_created(streams, empty_pool, elsewhere):
    """In the right context, whichever is current, and the caller's comes back."""
    one, other = streams
    before = current_context()
    with testing.latch(one), device_current(1) if elsewhere else contextlib.nullcontext():
        here = current_context()
        assert core.order(one._lane, other._lane) == 0
        assert current_context() == here
        assert is_pending(other)
        assert len(empty_pool.free) == 1
        assert finish(one._lane, other._lane, ()) in (0, core.DUE)
        assert not empty_pool.free
    assert current_context() == before


@pytest.mark.simulated
def test_an_event_that_cannot_be_created_is_an_error(streams, empty_pool):
    one, other = streams
    out_of_memory = driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    with testing.inject("cuEventCreate", out_of_memory, count=2, this_thread=True):
        with pytest.raises(us.DriverError, match=r"cuEventCreate.* failed") as caught:
            other._lane.add_edge(one._lane, may_join=False)
        assert caught.value.code == 2
        with pytest.raises(us.DriverError, match=r"cuEventCreate.* failed"):
            empty_pool.take()
    assert not empty_pool.free


@pytest.mark.parametrize("captured", [0, 1])
def test_captures_are_left_alone(streams, captured):
    streams[captured].begin_capture(mode="relaxed")
    for source, destination in (streams, streams[::-1]):
        assert core.order(source._lane, destination._lane) == core.CAPTURED
        assert finish(source._lane, destination._lane, ()) == core.CAPTURED
    assert not streams[0]._lane.held
    streams[captured].end_capture()  # it would tell of an invalid capture


def test_a_closed_lane_has_no_order(streams):
    one, other = streams
    closed = other._lane
    other.close()
    assert core.order(one._lane, closed) == core.order(closed, one._lane) == core.CAPTURED
    assert finish(one._lane, closed, ()) == finish(closed, None, ()) == core.CAPTURED


def test_a_default_stream_needs_its_context(streams):
    stream, _ = streams
    legacy = lanes.default(_driver.streams.LEGACY, 0)
    assert core.order(stream._lane, legacy) == core.CAPTURED
    with device_current(0):
        assert core.order(stream._lane, legacy) == 0
        assert core.order(legacy, stream._lane) == 0


@pytest.mark.multi_device
def test_default_streams_of_two_devices_have_no_order_in_one_step(streams):
    here, there = (lanes.default(_driver.streams.LEGACY, device) for device in (0, 1))
    with device_current(0):
        assert core.order(here, there) == core.CAPTURED


@pytest.mark.parametrize("has_source", [True, False])
def test_objects_are_held_up_to_where_a_source_waits(streams, has_source):
    lane, source = streams
    thing = Thing()
    alive = weakref.ref(thing)
    with testing.latch(lane):
        result = finish(lane._lane, source._lane if has_source else None, (thing,))
        assert result == core.DUE, "as it is the first"
        assert lane._lane.held in core.queues
        del thing
        assert is_pending(source) is has_source
        held_objects.sweep()
        assert alive() is not None
    lane.sync(timeout=10)
    assert eventually(lambda: (held_objects.sweep(), alive() is None)[1])


def test_looking_after_what_is_held_is_due_now_and_then(streams):
    lane = streams[0]._lane
    with testing.latch(streams[0]):
        lane.swept = float("inf")
        assert finish(lane, None, ()) == core.DUE
        assert finish(lane, None, ()) == 0
        lane.swept = 0.0
        assert finish(lane, None, ()) == core.DUE


def test_looking_after_it_is_due_where_nobody_does_however_much_is_held(streams):
    """Of two threads that come at the same time, neither may find its own alone there."""
    lane = streams[0]._lane
    assert eventually(lambda: not held_objects._watched), "it would put the queue back"
    with testing.latch(streams[0]):
        lane.swept = float("inf")
        finish(lane, None, ())
        core.queues.discard(lane.held)
        assert finish(lane, None, ()) == core.DUE
        assert lane.held in core.queues
    lane.swept = 0.0


def test_a_ticket_ends_when_its_objects_are_held(streams):
    stream, _ = streams
    thing = Thing()
    alive = weakref.ref(thing)
    with testing.latch(stream):
        use = core.use(stream._lane, None, [thing])
        assert use.ticket in core.in_use
        assert finish(stream._lane, None, use.ticket) in (0, core.DUE)
        assert use.ticket not in core.in_use
        del use, thing
        assert not core.orphans
        assert alive() is not None
    stream.sync(timeout=10)
    assert eventually(lambda: (held_objects.sweep(), alive() is None)[1])


def test_a_ticket_does_not_end_where_nothing_is_held(streams):
    stream, _ = streams
    use = core.use(stream._lane, None, ())
    stream.begin_capture(mode="relaxed")
    assert finish(stream._lane, None, use.ticket) == core.CAPTURED
    stream.end_capture()
    assert use.ticket in core.in_use
    use.ticket.end()


def test_a_use_that_goes_before_its_end_leaves_an_orphan(streams):
    one, other = streams
    with pytest.raises(TypeError, match="has no len"):  # which is on its way meanwhile
        len(core.use(one._lane, other._lane, "objects"))
    (ticket,) = core.orphans
    assert (ticket.lane, ticket.source) == (one._lane, other._lane)
    assert (ticket.objects, ticket.thread) == ("objects", 0)
    assert ticket in core.in_use
    core.orphans.clear()
    ticket.end()
    assert ticket not in core.in_use


def test_a_use_that_has_ended_leaves_none(streams):
    use = core.use(streams[0]._lane, None, ())
    use.ticket.end()
    del use
    gc.collect()
    assert not core.orphans


def ordering_of(consumer: us.Stream, *producers: us.Stream, rest: object = None) -> Ordering:
    lanes = tuple(producer._lane for producer in producers)
    return Ordering(consumer, consumer._lane, lanes, None, (), False, None, rest)


def test_the_source_of_an_orphan_waits(streams):
    """The next call adds the edge that the end of the borrow would have added."""
    one, other = streams
    with testing.latch(one):
        core.use(one._lane, ordering_of(one, other), ())  # which goes at once
        held_objects.sweep()
        assert is_pending(other)
        assert not core.in_use
    other.sync(timeout=10)


class TestOrderings:
    """Orderings of at most two lanes, which the core acquires and releases by itself."""

    def test_the_consumer_waits_and_then_the_producer(self, streams):
        one, other = streams
        ordering = ordering_of(one, other)
        with testing.latch(other):
            assert core.acquire(ordering) == 0
            assert is_pending(one)
        one.sync(timeout=10)
        with testing.latch(one):
            assert core.release(ordering, None) == 0
            assert is_pending(other)
        other.sync(timeout=10)

    def test_without_a_producer_nothing_waits(self, streams):
        one, other = streams
        with testing.latch(one):
            assert core.acquire(ordering_of(one)) == core.release(ordering_of(one), None) == 0
            assert not is_pending(other)

    def test_a_release_holds_objects(self, streams):
        one, _ = streams
        held_objects.keep(one._lane, ())  # from now on the lane has a queue
        thing = Thing()
        alive = weakref.ref(thing)
        with testing.latch(one):
            assert core.release(ordering_of(one), [thing]) in (0, core.DUE)
            del thing
            assert alive() is not None
        one.sync(timeout=10)
        assert eventually(lambda: (held_objects.sweep(), alive() is None)[1])

    def test_a_queued_copy_is_ordered_both_ways_and_holds_its_objects(self, streams, memory):
        one, other = streams
        ordering, thing = ordering_of(one, other), Thing()
        alive = weakref.ref(thing)
        held_objects.keep(one._lane, ())  # from now on the lane has a queue
        with pinned_memory(size=8) as to, device_current(0):
            with testing.latch(one) as of_copy, testing.latch(other) as latch:
                fill(other, memory, 1)
                use = core.use(one._lane, ordering, [thing])
                point, result = core.queue_copy(ordering, use.ticket, EIGHT, to, memory)
                fill(other, memory, 2)  # after the copy
                assert result in (0, core.DUE)
                assert point.target is one._lane
                assert use.ticket not in core.in_use
                del use, thing
                latch.release()
                with pytest.raises(TimeoutError):
                    other.sync(timeout=0.01)
                assert not point.is_done()
                assert alive() is not None
                of_copy.release()
            other.sync(timeout=10)
            assert point.is_done()
            assert ctypes.string_at(to, 8) == b"\1" * 8
            assert eventually(lambda: (held_objects.sweep(), alive() is None)[1])

    def test_a_copy_that_takes_more_is_not_queued(self, streams, memory):
        one, other = streams
        beyond = (0, 0, 8, 0, 1 << 62)
        with pinned_memory(size=8) as to:

            def queue(ordering: Any, move: Any = EIGHT) -> Any:
                use = core.use(one._lane, None, ())
                try:
                    return core.queue_copy(ordering, use.ticket, move, to, memory)
                finally:
                    assert use.ticket in core.in_use
                    use.ticket.end()

            with another_context():
                assert queue(ordering_of(one)) is None
            with device_current(0):
                assert queue(ordering_of(one), beyond) is None
                assert queue(ordering_of(one, other, other)) is None
                other.begin_capture(mode="relaxed")
                assert queue(ordering_of(one, other)) is None
                other.end_capture()
                other.close()
                with pytest.raises(us.ClosedError):
                    queue(ordering_of(one, other))
                one.sync(timeout=10)
                ticket = core.use(one._lane, None, ()).ticket
                ticket.end()
                for arguments in ((), (ordering_of(one), ticket), (ordering_of(one), 1, 2, 3, 4)):
                    with pytest.raises(TypeError):
                        core.queue_copy(*arguments)
                with pytest.raises(TypeError):
                    core.queue_copy(ordering_of(one), ticket, [], to, memory)

    def test_other_orderings_are_declined(self, streams):
        one, other = streams
        for ordering in (ordering_of(one, other, other), ordering_of(one, other, rest=Rest())):
            assert core.acquire(ordering) == core.CAPTURED
            assert core.release(ordering, None) == core.CAPTURED
        one.begin_capture(mode="relaxed")
        assert core.acquire(ordering_of(one, other)) == core.CAPTURED
        one.end_capture()

    def test_one_is_made_for_the_stream_of_the_device(self, streams):
        one, other = streams
        made = core.new_ordering(Ordering, {0: one}, 0, other._lane, "owner", ("buffer",), True)
        assert type(made) is Ordering
        assert (made.consumer, made.lane, made.producers) == (one, one._lane, (other._lane,))
        assert (made.owners, made.buffers, made.may_join) == ("owner", ("buffer",), True)
        assert made.buffer_use is made.rest is None
        same = core.new_ordering(Ordering, {0: one}, 0, one._lane, None, (), False)
        assert same.producers == ()
        for streams_by_device in ({}, {0: us.Stream.legacy_default()}):
            assert (
                core.new_ordering(Ordering, streams_by_device, 0, one._lane, None, (), False)
                is None
            )

    def test_what_is_no_ordering_is_refused(self, streams):
        one, _ = streams
        lane = one._lane
        for call in (
            lambda: core.acquire(lane),
            lambda: core.release(lane, ()),
            lambda: core.release(ordering_of(one)),
            lambda: core.new_ordering(Ordering),
            lambda: core.new_ordering(int, {}, 0, lane, None, (), False),
            lambda: Ordering(one, lane),
            lambda: core.acquire(Ordering(one, "lane", (), None, (), False)),
            lambda: core.acquire(Ordering(one, lane, ("lane",), None, (), False)),
            lambda: Ordering(one, lane, [lane], None, (), False),
        ):
            with pytest.raises(TypeError):
                call()


def test_an_event_is_waited_for_in_the_context_of_the_handle(streams):
    legacy = lanes.default(1, 0)
    with testing.latch(streams[0]):
        event = core.record(streams[0]._lane)
        core.wait_for(legacy, event)
        core.wait_for(streams[1]._lane, event)
        assert is_pending(streams[1])
    streams[1].sync(timeout=10)
    legacy.pool.give_back(event)
    for arguments in ((), (legacy,), ("lane", event), (legacy, "event")):
        with pytest.raises((TypeError, ValueError)):
            core.wait_for(*arguments)


def test_a_mark_is_for_streams_that_are_not_captured(streams):
    one, _ = streams
    assert core.mark(lanes.default(1, 0)) is None
    one.begin_capture(mode="relaxed")
    assert core.mark(one._lane) is None
    assert not core.are_all_free([one._lane])
    one.end_capture()
    event = core.mark(one._lane)
    assert event is not None
    one._lane.pool.give_back(event)
    assert core.are_all_free([one._lane, lanes.default(1, 0)])
    assert core.are_all_free([])
    closed = us.Stream.create(0)
    lane = closed._lane
    closed.close()
    assert not core.are_all_free([lane])
    assert core.mark(lane) is None
    with pytest.raises(us.ClosedError):
        core.wait_for(lane, event)
    for no_lanes in (1, ["lane"]):
        with pytest.raises(TypeError):
            core.are_all_free(no_lanes)


@pytest.mark.simulated
@pytest.mark.parametrize("function", ["cuEventRecord", "cuStreamWaitEvent"])
@pytest.mark.parametrize("step", [core.order, lambda one, other: finish(one, other, ())])
def test_a_failure_names_its_function_and_loses_no_event(streams, function, step):
    one, other = streams[0]._lane, streams[1]._lane
    spare = len(one.pool.free)

    def step_or_raise() -> None:
        raise _driver.core.edge_failure(step(one, other), one, other)

    with (
        testing.inject(function, driver.CUresult.CUDA_ERROR_UNKNOWN),
        pytest.raises(us.DriverError, match=f"{function} on .* failed"),
    ):
        step_or_raise()
    assert len(one.pool.free) >= spare
    assert not one.held


class TestCore:
    def test_what_is_no_lane_is_refused(self, streams):
        lane = streams[0]._lane
        for arguments in ((), (lane,), (lane, None), (lane, 1), (1, lane), (lane, lane, ())):
            with pytest.raises(TypeError, match="it takes lanes"):
                core.order(*arguments)
        for arguments in ((), (lane, lane), (lane, 1, ()), (None, None, ()), (lane,) * 4):
            with pytest.raises(TypeError, match="it takes lanes"):
                core.use(*arguments)

    @pytest.mark.simulated
    def test_what_is_no_event_is_an_error(self, streams):
        lane = streams[0]._lane
        lane.pool.give_back("event")
        with pytest.raises((TypeError, ValueError)):
            core.order(lane, lane)
        lane.pool.give_back(0)
        assert core.order(lane, lane) & 0xFFFFFFFF == INVALID_HANDLE
        assert lane.pool.take() == 0

    def test_what_is_no_pool_is_refused(self, streams):
        class Fake(core.LaneState):
            pass

        lane, fake = streams[0]._lane, Fake()
        with pytest.raises(TypeError, match="it takes lanes"):
            core.order(fake, lane)
        fake.pool = "pool"
        with pytest.raises(TypeError, match="it takes lanes"):
            core.order(fake, lane)
        with pytest.raises(TypeError, match="it takes a lane"):
            core.record(fake)
        with pytest.raises(TypeError, match="sweep"):
            core.sweep([])

    def test_lanes_are_known_by_one_that_is_imported_again(self, streams):
        loader = importlib.machinery.ExtensionFileLoader(_core.__name__, _core.__file__)
        spec = importlib.util.spec_from_loader(_core.__name__, loader)
        again = importlib.util.module_from_spec(spec)
        loader.exec_module(again)
        assert again.in_use is core.in_use
        for module in (core, again):
            assert module.order(streams[0]._lane, streams[1]._lane) == 0

    @pytest.mark.no_races(False)  # the analysis remembers what was called
    def test_no_call_leaks(self, streams):
        one, other = streams[0]._lane, streams[1]._lane
        objects = [Thing()]

        def call_all(times: int) -> None:
            for number in range(times // 4):
                if number % 256 == 0:  # the pool keeps an event for each use that was pending
                    streams[1].sync()
                core.query(one)
                core.order(one, other)
                use = core.use(one, other, objects)
                if finish(one, other, use.ticket):
                    held_objects.sweep()
                use.ticket.end()  # as there may have been no spare event
            streams[1].sync()
            assert eventually(lambda: (held_objects.sweep(), not one.held)[1])

        call_all(2000)  # what is allocated once
        given = [one, other, objects, objects[0]]
        more = grown(lambda: call_all(CALLS), given)
        # Other threads allocate too; what leaks makes five times as many.
        assert more < CALLS // 20
        assert not core.in_use
        assert not core.orphans
