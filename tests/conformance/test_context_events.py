"""Events of a whole context: what all its streams have done, and what all of them wait for."""

from __future__ import annotations

import pytest
from cuda.bindings import driver

from conformance.support import (
    BLOCKING,
    INVALID_CONTEXT,
    INVALID_HANDLE,
    INVALIDATED,
    LEGACY,
    MODES,
    NOT_READY,
    PER_THREAD,
    UNSUPPORTED,
    Capture,
    Word,
    completes,
    finishes,
    ok,
    stays,
)
from userstream.testing import latch

NO_CONTEXT = driver.CUcontext(0)
NO_EVENT = driver.CUevent(0)
KINDS = pytest.mark.parametrize("kind", ["non-blocking", "blocking", "legacy", "per-thread"])


@pytest.fixture
def streams(make_stream):
    """A stream of each kind."""
    return {
        "non-blocking": make_stream(),
        "blocking": make_stream(BLOCKING),
        "legacy": LEGACY,
        "per-thread": PER_THREAD,
    }


# ---- what the streams of a context have done --------------------------------


@KINDS
def test_a_context_event_covers_every_stream(context, event, streams, kind):
    with latch(streams[kind]) as held:
        ok(driver.cuCtxRecordEvent(context, event))
        assert stays((NOT_READY,), lambda: driver.cuEventQuery(event))
        held.release()
        assert completes(event)


def test_a_context_event_does_not_hold_up_streams(context, event, make_stream, word):
    busy, free = make_stream(), make_stream()
    with latch(busy):
        ok(driver.cuCtxRecordEvent(context, event))
        word.write(free, 1)
        assert finishes(free)
    assert word.value == 1
    assert completes(event)


def test_a_context_event_does_not_cover_later_work(context, event, stream):
    ok(driver.cuCtxRecordEvent(context, event))
    with latch(stream):
        assert completes(event)


def test_a_context_event_of_an_idle_context_completes(context, event):
    ok(driver.cuCtxRecordEvent(context, event))
    assert completes(event)


@pytest.mark.multi_device
def test_a_context_event_needs_an_event_of_the_context(context, make_event, other_context):
    foreign = make_event(context=other_context)
    assert driver.cuCtxRecordEvent(context, foreign) == (INVALID_HANDLE,)


def test_a_context_event_that_is_recorded_again_forgets_the_first_record(context, event, stream):
    with latch(stream):
        ok(driver.cuCtxRecordEvent(context, event))
    assert finishes(stream)
    ok(driver.cuCtxRecordEvent(context, event))
    with latch(stream):
        assert completes(event)


def test_a_stream_can_wait_for_a_context_event(context, event, make_stream, word):
    busy, waiting = make_stream(), make_stream()
    with latch(busy) as held:
        ok(driver.cuCtxRecordEvent(context, event))
        ok(driver.cuStreamWaitEvent(waiting, event, 0))
        word.write(waiting, 1)
        assert stays(0, lambda: word.value)
        held.release()
        assert finishes(waiting)
    assert word.value == 1


# ---- what all streams of a context wait for ---------------------------------


@KINDS
def test_every_stream_waits_for_what_its_context_waits_for(
    context, event, stream, streams, kind, word
):
    with latch(stream) as held:
        ok(driver.cuEventRecord(event, stream))
        ok(driver.cuCtxWaitEvent(context, event))
        word.write(streams[kind], 1)
        assert stays(0, lambda: word.value)
        held.release()
        assert finishes(streams[kind])
    assert word.value == 1


@pytest.mark.parametrize("flags", [1, BLOCKING], ids=["non-blocking", "blocking"])
def test_a_stream_that_is_made_later_waits_too(context, event, stream, make_stream, word, flags):
    with latch(stream) as held:
        ok(driver.cuEventRecord(event, stream))
        ok(driver.cuCtxWaitEvent(context, event))
        later = make_stream(flags)
        word.write(later, 1)
        assert stays(0, lambda: word.value)
        held.release()
        assert finishes(later)
    assert word.value == 1


def test_all_later_work_of_a_stream_waits(context, event, make_event, make_stream, pinned):
    words = [Word(pinned), Word(pinned + 8)]
    busy, other, after = make_stream(), make_stream(), make_event()
    with latch(busy) as held:
        ok(driver.cuEventRecord(event, busy))
        ok(driver.cuCtxWaitEvent(context, event))
        for word in words:
            word.write(other, 1)
        ok(driver.cuEventRecord(after, other))
        assert stays((NOT_READY,), lambda: driver.cuEventQuery(after))
        held.release()
        assert completes(after)
    assert [word.value for word in words] == [1, 1]


def test_what_was_queued_before_is_not_held(context, event, make_stream, pinned):
    before, after = Word(pinned), Word(pinned + 8)
    busy, other = make_stream(), make_stream()
    with latch(busy) as slow, latch(other) as queued:
        before.write(other, 1)
        ok(driver.cuEventRecord(event, busy))
        ok(driver.cuCtxWaitEvent(context, event))
        after.write(other, 1)
        queued.release()
        assert stays(0, lambda: after.value)
        assert before.value == 1
        slow.release()
        assert finishes(other)
    assert after.value == 1


def test_a_context_waits_for_several_events(context, make_event, make_stream, word):
    streams, events = [make_stream(), make_stream()], [make_event(), make_event()]
    last = make_stream()
    with latch(streams[0]) as first, latch(streams[1]) as second:
        for event, stream in zip(events, streams, strict=True):
            ok(driver.cuEventRecord(event, stream))
        for event in events:
            ok(driver.cuCtxWaitEvent(context, event))
        word.write(last, 1)
        first.release()
        assert stays(0, lambda: word.value)
        second.release()
        assert finishes(last)
    assert word.value == 1


def test_the_stream_that_recorded_does_not_wait_for_itself(context, event, stream, word):
    with latch(stream) as held:
        ok(driver.cuEventRecord(event, stream))
        ok(driver.cuCtxWaitEvent(context, event))
        word.write(stream, 1)
        held.release()
        assert finishes(stream)
    assert word.value == 1


def test_a_context_can_wait_for_its_own_event(context, event, make_stream, word):
    busy, other = make_stream(), make_stream()
    with latch(busy) as held:
        ok(driver.cuCtxRecordEvent(context, event))
        ok(driver.cuCtxWaitEvent(context, event))
        word.write(other, 1)
        assert stays(0, lambda: word.value)
        held.release()
        assert finishes(other)
    assert word.value == 1


@pytest.mark.parametrize("recorded", [False, True], ids=["never recorded", "complete"])
def test_a_context_goes_on_after_an_event_that_is_complete(
    context, event, make_stream, word, recorded
):
    other = make_stream()
    if recorded:
        ok(driver.cuEventRecord(event, other))
        assert completes(event)
    ok(driver.cuCtxWaitEvent(context, event))
    word.write(other, 1)
    assert finishes(other)
    assert word.value == 1


def test_the_wait_keeps_the_record_that_it_saw(context, make_event, make_stream, word):
    event, first, second, other = make_event(), make_stream(), make_stream(), make_stream()
    with latch(second):
        with latch(first):
            ok(driver.cuEventRecord(event, first))
            ok(driver.cuCtxWaitEvent(context, event))
        assert finishes(first)
        word.write(other, 1)
        ok(driver.cuEventRecord(event, second))
        assert finishes(other)
    assert word.value == 1


def test_the_wait_outlives_its_event(context, stream, make_stream, word):
    other = make_stream()
    with latch(stream) as held:
        event = ok(driver.cuEventCreate(2))
        ok(driver.cuEventRecord(event, stream))
        ok(driver.cuCtxWaitEvent(context, event))
        ok(driver.cuEventDestroy(event))
        word.write(other, 1)
        assert stays(0, lambda: word.value)
        held.release()
        assert finishes(other)
    assert word.value == 1


@pytest.mark.multi_device
def test_a_context_waits_for_an_event_of_another_device(
    context, make_event, make_stream, other_context, word
):
    event, busy, other = (
        make_event(context=other_context),
        make_stream(context=other_context),
        make_stream(),
    )
    with latch(busy) as held:
        ok(driver.cuEventRecord(event, busy))
        ok(driver.cuCtxWaitEvent(context, event))
        word.write(other, 1)
        assert stays(0, lambda: word.value)
        held.release()
        assert finishes(other)
    assert word.value == 1


@pytest.mark.multi_device
def test_other_contexts_do_not_wait(context, event, stream, make_stream, other_context, word):
    foreign = make_stream(context=other_context)
    with latch(stream):
        ok(driver.cuEventRecord(event, stream))
        ok(driver.cuCtxWaitEvent(context, event))
        word.write(foreign, 1)
        assert finishes(foreign)
    assert word.value == 1


# ---- what is refused --------------------------------------------------------


CALLS = pytest.mark.parametrize(
    "call", [driver.cuCtxRecordEvent, driver.cuCtxWaitEvent], ids=lambda call: call.__name__
)


@CALLS
def test_no_context(event, call):
    assert call(NO_CONTEXT, event) == (INVALID_CONTEXT,)


@CALLS
def test_no_event(context, call):
    assert call(context, NO_EVENT) == (INVALID_HANDLE,)


@CALLS
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())
def test_a_capture_in_the_context_is_invalidated(context, event, stream, call, mode):
    with Capture(stream, mode) as capture:
        assert call(context, event) == (UNSUPPORTED,)
        assert capture.status == INVALIDATED


@CALLS
@pytest.mark.multi_device
def test_a_capture_that_a_stream_of_the_context_joined_is_invalidated(
    context, make_event, make_stream, other_context, call
):
    forked = make_event(context=other_context)
    with Capture(make_stream(context=other_context), MODES["relaxed"]) as capture:
        ok(driver.cuEventRecord(forked, capture.stream))
        ok(driver.cuStreamWaitEvent(make_stream(), forked, 0))
        assert call(context, make_event()) == (UNSUPPORTED,)
        assert capture.status == INVALIDATED


@pytest.mark.multi_device
def test_an_event_of_a_capture_elsewhere_invalidates_it(
    context, make_event, make_stream, other_context
):
    event = make_event(context=other_context)
    with Capture(make_stream(context=other_context), MODES["relaxed"]) as capture:
        ok(driver.cuEventRecord(event, capture.stream))
        assert driver.cuCtxWaitEvent(context, event) == (driver.CUresult.CUDA_ERROR_CAPTURED_EVENT,)
        assert capture.status == INVALIDATED
