"""The legacy and the per-thread default stream, and the blocking streams around them."""

from __future__ import annotations

import pytest
from cuda.bindings import driver

from conformance.support import (
    BLOCKING,
    INVALID_CONTEXT,
    LEGACY,
    NOT_READY,
    NULL,
    PER_THREAD,
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

TOKENS = {"null": NULL, "legacy": LEGACY, "per-thread": PER_THREAD}
tokens = pytest.mark.parametrize("token", TOKENS.values(), ids=TOKENS.keys())


def not_ready(stream):
    return driver.cuStreamQuery(stream) == (NOT_READY,)


def is_held(stream):
    return stays((NOT_READY,), lambda: driver.cuStreamQuery(stream))


# ---- who waits for whom -----------------------------------------------------


def test_legacy_waits_for_a_blocking_stream(make_stream, word):
    with latch(make_stream(BLOCKING)) as held:
        word.write(LEGACY, 1)
        assert stays(0, lambda: word.value)
        held.release()
        assert finishes(LEGACY)
    assert word.value == 1


def test_legacy_does_not_wait_for_a_non_blocking_stream(stream, word):
    with latch(stream):
        word.write(LEGACY, 1)
        assert finishes(LEGACY)
        assert word.value == 1


def test_legacy_waits_for_every_blocking_stream(make_stream, word):
    first, second = make_stream(BLOCKING), make_stream(BLOCKING)
    with latch(first) as one, latch(second) as two:
        word.write(LEGACY, 1)
        one.release()
        assert finishes(first)
        assert stays(0, lambda: word.value)
        two.release()
        assert finishes(LEGACY)


def test_a_blocking_stream_waits_for_legacy(make_stream, word):
    blocking = make_stream(BLOCKING)
    with latch(LEGACY) as held:
        word.write(blocking, 1)
        assert stays(0, lambda: word.value)
        held.release()
        assert finishes(blocking)
    assert word.value == 1


def test_a_non_blocking_stream_does_not_wait_for_legacy(stream, word):
    with latch(LEGACY):
        word.write(stream, 1)
        assert finishes(stream)
        assert word.value == 1


def test_blocking_streams_do_not_wait_for_each_other(make_stream, word):
    first, second = make_stream(BLOCKING), make_stream(BLOCKING)
    with latch(first):
        word.write(second, 1)
        assert finishes(second)
        assert word.value == 1


def test_blocking_streams_on_both_sides_of_legacy_are_ordered(make_stream, word):
    first, second = make_stream(BLOCKING), make_stream(BLOCKING)
    with latch(first) as held:
        word.write(LEGACY, 1)
        word.write(second, 2)
        assert stays(0, lambda: word.value)
        held.release()
        assert finishes(second)
    assert word.value == 2


def test_the_per_thread_stream_waits_for_legacy(word):
    with latch(LEGACY) as held:
        word.write(PER_THREAD, 1)
        assert stays(0, lambda: word.value)
        held.release()
        assert finishes(PER_THREAD)
    assert word.value == 1


def test_legacy_waits_for_the_per_thread_stream(word):
    with latch(PER_THREAD) as held:
        word.write(LEGACY, 1)
        assert stays(0, lambda: word.value)
        held.release()
        assert finishes(LEGACY)
    assert word.value == 1


def test_the_per_thread_stream_does_not_wait_for_a_blocking_stream(make_stream, word):
    with latch(make_stream(BLOCKING)):
        word.write(PER_THREAD, 1)
        assert finishes(PER_THREAD)
        assert word.value == 1


def test_per_thread_streams_of_two_threads_do_not_wait_for_each_other(context, word):
    def write():
        word.write(PER_THREAD, 1)
        return finishes(PER_THREAD)

    with latch(PER_THREAD):
        assert elsewhere(write, context)
        assert word.value == 1


def test_null_is_the_legacy_stream(make_stream, word):
    with latch(make_stream(BLOCKING)) as held:
        word.write(NULL, 1)
        assert stays(0, lambda: word.value)
        held.release()
        assert finishes(LEGACY)
    assert word.value == 1


# ---- asking and waiting -----------------------------------------------------


def test_a_held_legacy_stream_is_not_ready():
    with latch(LEGACY):
        assert not_ready(LEGACY)
        assert not_ready(NULL)


def test_a_held_blocking_stream_alone_makes_legacy_not_ready(make_stream):
    with latch(make_stream(BLOCKING)):
        assert is_held(LEGACY)


def test_a_held_non_blocking_stream_leaves_legacy_ready(stream):
    assert finishes(LEGACY)
    with latch(stream):
        assert driver.cuStreamQuery(LEGACY) == (SUCCESS,)


def test_a_held_legacy_stream_leaves_an_idle_blocking_stream_ready(make_stream):
    blocking = make_stream(BLOCKING)
    with latch(LEGACY):
        assert driver.cuStreamQuery(blocking) == (SUCCESS,)


def test_synchronizing_legacy_waits_for_blocking_streams(context, make_stream):
    with latch(make_stream(BLOCKING)) as held:
        waiting = Background(lambda: driver.cuStreamSynchronize(LEGACY), context)
        assert waiting.is_blocked
        held.release()
        assert waiting.answer == (SUCCESS,)


def test_synchronizing_legacy_does_not_wait_for_non_blocking_streams(context, stream):
    with latch(stream):
        waiting = Background(lambda: driver.cuStreamSynchronize(LEGACY), context)
        assert waiting.answer == (SUCCESS,)


def test_an_event_on_legacy_covers_blocking_streams(event, make_stream):
    with latch(make_stream(BLOCKING)) as held:
        ok(driver.cuEventRecord(event, LEGACY))
        assert stays((NOT_READY,), lambda: driver.cuEventQuery(event))
        held.release()
        assert completes(event)


def test_an_event_on_legacy_does_not_cover_non_blocking_streams(event, stream):
    with latch(stream):
        ok(driver.cuEventRecord(event, LEGACY))
        assert completes(event)


def test_a_wait_on_legacy_holds_up_blocking_streams(event, make_stream, word):
    producer, blocking = make_stream(), make_stream(BLOCKING)
    with latch(producer) as held:
        ok(driver.cuEventRecord(event, producer))
        ok(driver.cuStreamWaitEvent(LEGACY, event, 0))
        word.write(blocking, 1)
        assert stays(0, lambda: word.value)
        held.release()
        assert finishes(blocking)
    assert word.value == 1


# ---- identity ---------------------------------------------------------------


def test_null_and_legacy_have_one_id():
    assert ok(driver.cuStreamGetId(NULL)) == ok(driver.cuStreamGetId(LEGACY))


def test_legacy_and_per_thread_have_different_ids():
    assert ok(driver.cuStreamGetId(LEGACY)) != ok(driver.cuStreamGetId(PER_THREAD))


def test_the_legacy_stream_is_the_same_in_every_thread(context):
    there = elsewhere(lambda: ok(driver.cuStreamGetId(LEGACY)), context)
    assert there == ok(driver.cuStreamGetId(LEGACY))


def test_the_per_thread_stream_is_another_one_in_each_thread(context):
    there = elsewhere(lambda: ok(driver.cuStreamGetId(PER_THREAD)), context)
    assert there != ok(driver.cuStreamGetId(PER_THREAD))


def test_the_per_thread_stream_of_a_thread_stays_the_same():
    assert ok(driver.cuStreamGetId(PER_THREAD)) == ok(driver.cuStreamGetId(PER_THREAD))


@tokens
@pytest.mark.multi_device
def test_a_default_stream_is_that_of_the_current_context(token, other_context):
    here = ok(driver.cuStreamGetId(token))
    with current(other_context):
        assert ok(driver.cuStreamGetId(token)) != here
        assert int(ok(driver.cuStreamGetCtx(token)[:2])) == int(other_context)


@pytest.mark.multi_device
def test_the_legacy_streams_of_two_devices_are_independent(other_context, word):
    with latch(LEGACY), current(other_context):
        word.write(LEGACY, 1)
        assert finishes(LEGACY)
        assert word.value == 1


# ---- properties -------------------------------------------------------------


@tokens
def test_default_streams_are_blocking(token):
    assert ok(driver.cuStreamGetFlags(token)) == BLOCKING


@tokens
def test_default_streams_have_priority_zero(token):
    assert ok(driver.cuStreamGetPriority(token)) == 0


@tokens
def test_the_context_of_a_default_stream_is_the_current_one(token, context):
    assert int(ok(driver.cuStreamGetCtx(token)[:2])) == int(context)


@tokens
def test_default_streams_do_not_capture(token):
    none = driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
    assert ok(driver.cuStreamIsCapturing(token)) == none


@tokens
@pytest.mark.parametrize(
    "call",
    [
        pytest.param(driver.cuStreamQuery, id="query"),
        pytest.param(driver.cuStreamSynchronize, id="synchronize"),
        pytest.param(driver.cuStreamGetId, id="id"),
        pytest.param(driver.cuStreamGetFlags, id="flags"),
        pytest.param(driver.cuStreamGetPriority, id="priority"),
        pytest.param(driver.cuStreamGetCtx, id="context"),
        pytest.param(driver.cuStreamIsCapturing, id="capturing"),
    ],
)
def test_default_streams_need_a_context(token, call):
    with no_context():
        assert call(token)[0] == INVALID_CONTEXT


@tokens
def test_recording_on_a_default_stream_needs_a_context(event, token):
    with no_context():
        assert driver.cuEventRecord(event, token) == (INVALID_CONTEXT,)


@tokens
def test_default_streams_cannot_be_destroyed(token):
    assert driver.cuStreamDestroy(token)[0] != SUCCESS
