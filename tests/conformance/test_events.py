"""Events: creation, recording, waiting, asking."""

from __future__ import annotations

import pytest
from cuda.bindings import driver

from conformance.support import (
    ILLEGAL_STATE,
    INVALID_CONTEXT,
    INVALID_HANDLE,
    INVALID_VALUE,
    NOT_READY,
    SUCCESS,
    Background,
    completes,
    current,
    elsewhere,
    finishes,
    no_context,
    ok,
    stays,
)
from userstream.testing import latch

NO_EVENT = driver.CUevent(0)
INTERPROCESS = 4


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (0, SUCCESS),
        (1, SUCCESS),
        (2, SUCCESS),
        (3, SUCCESS),
        (2 | INTERPROCESS, SUCCESS),
        (INTERPROCESS, INVALID_VALUE),
        (8, INVALID_VALUE),
    ],
)
def test_flags_of_creation(flags, expected):
    result, event = driver.cuEventCreate(flags)
    if result == SUCCESS:
        ok(driver.cuEventDestroy(event))
    assert result == expected


def test_creation_needs_a_context():
    with no_context():
        assert driver.cuEventCreate(2)[0] == INVALID_CONTEXT


@pytest.mark.parametrize("call", ["cuEventQuery", "cuEventSynchronize"])
def test_an_event_that_was_never_recorded_is_complete(event, call):
    assert getattr(driver, call)(event) == (SUCCESS,)


def test_a_wait_for_an_event_that_was_never_recorded_does_nothing(event, stream):
    assert driver.cuStreamWaitEvent(stream, event, 0) == (SUCCESS,)
    assert finishes(stream)


def test_a_record_is_not_ready_before_the_work_in_front_of_it(event, stream):
    with latch(stream) as held:
        ok(driver.cuEventRecord(event, stream))
        assert driver.cuEventQuery(event) == (NOT_READY,)
        held.release()
        assert completes(event)


def test_a_record_does_not_cover_later_work(event, stream):
    ok(driver.cuEventRecord(event, stream))
    with latch(stream):
        assert completes(event)
        assert driver.cuStreamQuery(stream) == (NOT_READY,)


def test_synchronize_waits_for_the_record(event, stream):
    with latch(stream) as held:
        ok(driver.cuEventRecord(event, stream))
        waiting = Background(lambda: driver.cuEventSynchronize(event))
        assert waiting.is_blocked
        held.release()
        assert waiting.answer == (SUCCESS,)


def test_a_second_record_replaces_the_first(event, make_stream):
    held_stream, free_stream = make_stream(), make_stream()
    with latch(held_stream):
        ok(driver.cuEventRecord(event, held_stream))
        ok(driver.cuEventRecord(event, free_stream))
        assert completes(event)


def test_a_second_record_makes_a_complete_event_pending(event, stream):
    ok(driver.cuEventRecord(event, stream))
    assert completes(event)
    with latch(stream):
        ok(driver.cuEventRecord(event, stream))
        assert driver.cuEventQuery(event) == (NOT_READY,)


def test_a_wait_orders_one_stream_after_another(event, make_stream, word):
    producer, consumer = make_stream(), make_stream()
    with latch(producer) as held:
        ok(driver.cuEventRecord(event, producer))
        ok(driver.cuStreamWaitEvent(consumer, event, 0))
        word.write(consumer, 1)
        assert stays((NOT_READY, 0), lambda: (driver.cuStreamQuery(consumer)[0], word.value))
        held.release()
        assert finishes(consumer)
    assert word.value == 1


def test_a_wait_does_not_hold_up_work_in_front_of_it(event, make_stream, word):
    producer, consumer = make_stream(), make_stream()
    with latch(producer):
        ok(driver.cuEventRecord(event, producer))
        word.write(consumer, 1)
        marker = ok(driver.cuEventCreate(2))
        ok(driver.cuEventRecord(marker, consumer))
        ok(driver.cuStreamWaitEvent(consumer, event, 0))
        assert completes(marker)
        assert word.value == 1
    ok(driver.cuEventDestroy(marker))


def test_a_pending_wait_keeps_the_record_that_it_saw(event, make_stream):
    producer, consumer = make_stream(), make_stream()
    ok(driver.cuEventRecord(event, producer))
    ok(driver.cuStreamWaitEvent(consumer, event, 0))
    with latch(producer):
        ok(driver.cuEventRecord(event, producer))
        assert finishes(consumer)


def test_a_wait_is_not_released_by_a_later_record(event, make_stream):
    producer, other, consumer = make_stream(), make_stream(), make_stream()
    with latch(producer) as held:
        ok(driver.cuEventRecord(event, producer))
        ok(driver.cuStreamWaitEvent(consumer, event, 0))
        ok(driver.cuEventRecord(event, other))
        assert completes(event)
        assert stays((NOT_READY,), lambda: driver.cuStreamQuery(consumer))
        held.release()
        assert finishes(consumer)


def test_a_wait_on_the_stream_of_the_record_does_nothing(event, stream):
    with latch(stream) as held:
        ok(driver.cuEventRecord(event, stream))
        ok(driver.cuStreamWaitEvent(stream, event, 0))
        held.release()
        assert finishes(stream)


def test_two_streams_may_wait_for_one_record(event, make_stream):
    producer, first, second = make_stream(), make_stream(), make_stream()
    with latch(producer) as held:
        ok(driver.cuEventRecord(event, producer))
        ok(driver.cuStreamWaitEvent(first, event, 0))
        ok(driver.cuStreamWaitEvent(second, event, 0))
        assert driver.cuStreamQuery(first) == driver.cuStreamQuery(second) == (NOT_READY,)
        held.release()
        assert finishes(first)
        assert finishes(second)


def test_a_pending_event_can_be_destroyed_and_its_waits_stay(make_stream):
    producer, consumer = make_stream(), make_stream()
    event = ok(driver.cuEventCreate(2))
    with latch(producer) as held:
        ok(driver.cuEventRecord(event, producer))
        ok(driver.cuStreamWaitEvent(consumer, event, 0))
        assert Background(lambda: driver.cuEventDestroy(event)).answer == (SUCCESS,)
        assert stays((NOT_READY,), lambda: driver.cuStreamQuery(consumer))
        held.release()
        assert finishes(consumer)


@pytest.mark.parametrize(
    ("flags", "answer"), [(1, ILLEGAL_STATE), (2, INVALID_VALUE), (3, INVALID_VALUE)]
)
def test_a_record_knows_no_flags_outside_a_capture(event, stream, flags, answer):
    assert driver.cuEventRecordWithFlags(event, stream, flags) == (answer,)


def test_a_record_with_no_flags_is_a_record(event, stream):
    with latch(stream):
        assert driver.cuEventRecordWithFlags(event, stream, 0) == (SUCCESS,)
        assert driver.cuEventQuery(event) == (NOT_READY,)


@pytest.mark.parametrize(
    ("flags", "answer"), [(1, ILLEGAL_STATE), (2, INVALID_VALUE), (3, INVALID_VALUE)]
)
def test_a_wait_knows_no_flags_outside_a_capture(event, stream, flags, answer):
    ok(driver.cuEventRecord(event, stream))
    assert driver.cuStreamWaitEvent(stream, event, flags) == (answer,)


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda stream: driver.cuEventRecord(NO_EVENT, stream), id="record"),
        pytest.param(lambda stream: driver.cuStreamWaitEvent(stream, NO_EVENT, 0), id="wait"),
        pytest.param(lambda stream: driver.cuEventQuery(NO_EVENT), id="query"),
        pytest.param(lambda stream: driver.cuEventSynchronize(NO_EVENT), id="synchronize"),
        pytest.param(lambda stream: driver.cuEventDestroy(NO_EVENT), id="destroy"),
    ],
)
def test_null_is_no_event(stream, call):
    assert call(stream) == (INVALID_HANDLE,)


# ---- without a current context ----------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(driver.cuEventRecord, id="record"),
        pytest.param(lambda event, stream: driver.cuStreamWaitEvent(stream, event, 0), id="wait"),
        pytest.param(lambda event, stream: driver.cuEventQuery(event), id="query"),
        pytest.param(lambda event, stream: driver.cuEventSynchronize(event), id="synchronize"),
    ],
)
def test_all_but_creation_works_without_a_context(event, stream, call):
    assert elsewhere(lambda: call(event, stream)) == (SUCCESS,)


def test_destruction_works_without_a_context():
    event = ok(driver.cuEventCreate(2))
    assert elsewhere(lambda: driver.cuEventDestroy(event)) == (SUCCESS,)


# ---- several contexts -------------------------------------------------------


@pytest.mark.multi_device
def test_a_record_needs_the_context_of_the_stream(event, make_stream, other_context):
    assert driver.cuEventRecord(event, make_stream(context=other_context)) == (INVALID_HANDLE,)


@pytest.mark.multi_device
def test_a_wait_may_cross_devices(make_stream, make_event, other_context):
    producer, consumer = make_stream(context=other_context), make_stream()
    event = make_event(context=other_context)
    with latch(producer) as held:
        ok(driver.cuEventRecord(event, producer))
        ok(driver.cuStreamWaitEvent(consumer, event, 0))
        assert stays((NOT_READY,), lambda: driver.cuStreamQuery(consumer))
        held.release()
        assert finishes(consumer)


@pytest.mark.multi_device
def test_an_event_belongs_to_the_context_that_was_current(make_stream, other_context):
    with current(other_context):
        event = ok(driver.cuEventCreate(2))
    assert driver.cuEventRecord(event, make_stream(context=other_context)) == (SUCCESS,)
    ok(driver.cuEventDestroy(event))


# ---- times ------------------------------------------------------------------


def test_the_time_between_two_events(make_event, stream):
    start, end = make_event(0), make_event(0)
    ok(driver.cuEventRecord(start, stream))
    with latch(stream):
        assert stays(True, lambda: True)  # lets time pass
    ok(driver.cuEventRecord(end, stream))
    assert completes(end)
    assert 10 < ok(driver.cuEventElapsedTime(start, end)) < 10_000
    assert ok(driver.cuEventElapsedTime(end, start)) < 0


def test_no_time_before_the_events_are_complete(make_event, stream):
    start, end = make_event(0), make_event(0)
    ok(driver.cuEventRecord(start, stream))
    with latch(stream):
        ok(driver.cuEventRecord(end, stream))
        assert driver.cuEventElapsedTime(start, end)[0] == NOT_READY


def test_no_time_of_events_without_timing(make_event, stream):
    start, end = make_event(2), make_event(0)
    ok(driver.cuEventRecord(start, stream))
    ok(driver.cuEventRecord(end, stream))
    assert completes(end)
    assert driver.cuEventElapsedTime(start, end)[0] == INVALID_HANDLE


def test_no_time_of_events_that_were_not_recorded(make_event, stream):
    start, end = make_event(0), make_event(0)
    ok(driver.cuEventRecord(start, stream))
    assert completes(start)
    assert driver.cuEventElapsedTime(start, end)[0] == INVALID_HANDLE
