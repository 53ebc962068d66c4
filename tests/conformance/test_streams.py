"""Streams: creation, properties, order, asking and waiting, destruction."""

from __future__ import annotations

import ctypes

import pytest
from cuda.bindings import driver

from conformance.support import (
    BLOCKING,
    INVALID_CONTEXT,
    INVALID_HANDLE,
    INVALID_VALUE,
    NON_BLOCKING,
    NOT_READY,
    SUCCESS,
    Background,
    becomes,
    current,
    elsewhere,
    finishes,
    no_context,
    ok,
    stays,
)
from conftest import SIMULATED
from userstream.testing import latch

Attribute = driver.CUstreamAttrID


def test_priorities_fall_from_zero():
    least, greatest = ok(driver.cuCtxGetStreamPriorityRange())
    assert (least, greatest) == (0, -5)


@pytest.mark.parametrize(("flags", "expected"), [(0, SUCCESS), (1, SUCCESS), (2, INVALID_VALUE)])
def test_flags_of_creation(flags, expected):
    result, stream = driver.cuStreamCreate(flags)
    if result == SUCCESS:
        ok(driver.cuStreamDestroy(stream))
    assert result == expected


@pytest.mark.parametrize(
    "create",
    [
        pytest.param(lambda: driver.cuStreamCreate(1), id="plain"),
        pytest.param(lambda: driver.cuStreamCreateWithPriority(1, 0), id="priority"),
    ],
)
def test_creation_needs_a_context(create):
    with no_context():
        assert create()[0] == INVALID_CONTEXT


@pytest.mark.parametrize("flags", [BLOCKING, NON_BLOCKING])
def test_flags_are_kept(make_stream, flags):
    assert ok(driver.cuStreamGetFlags(make_stream(flags))) == flags


@pytest.mark.parametrize(
    ("wanted", "given"),
    [(0, 0), (-1, -1), (-3, -3), (-5, -5), (-6, -5), (-100, -5), (1, 0), (7, 0)],
)
def test_priorities_are_clamped(make_stream, wanted, given):
    assert ok(driver.cuStreamGetPriority(make_stream(priority=wanted))) == given


def test_a_plain_stream_has_priority_zero():
    stream = ok(driver.cuStreamCreate(1))
    assert ok(driver.cuStreamGetPriority(stream)) == 0
    ok(driver.cuStreamDestroy(stream))


def test_the_context_of_a_stream(stream, context):
    assert int(ok(driver.cuStreamGetCtx(stream)[:2])) == int(context)


def test_the_device_of_a_stream(stream):
    assert int(ok(driver.cuStreamGetDevice(stream))) == 0


@pytest.mark.multi_device
def test_the_device_of_a_stream_of_another_device(make_stream, other_context):
    assert int(ok(driver.cuStreamGetDevice(make_stream(context=other_context)))) == 1


def test_ids_differ(make_stream):
    ids = [ok(driver.cuStreamGetId(make_stream())) for _ in range(8)]
    assert len(set(ids)) == 8


def test_an_id_stays(stream):
    assert ok(driver.cuStreamGetId(stream)) == ok(driver.cuStreamGetId(stream))


def test_an_id_is_not_used_again():
    ids = set()
    for _ in range(20):
        stream = ok(driver.cuStreamCreate(1))
        ids.add(ok(driver.cuStreamGetId(stream)))
        ok(driver.cuStreamDestroy(stream))
    assert len(ids) == 20


def test_a_handle_may_be_used_again():
    """Nothing learned from a handle may outlive its stream."""
    handles = set()
    tries = 50 if SIMULATED else 5000  # an H200 gave 50 others once
    for _ in range(tries):
        stream = ok(driver.cuStreamCreate(1))
        handle = int(stream)
        ok(driver.cuStreamDestroy(stream))
        if handle in handles:
            return
        handles.add(handle)
    pytest.fail(f"none of {tries} was used again")


# ---- order, asking, waiting -------------------------------------------------


def test_a_new_stream_is_ready(stream):
    assert driver.cuStreamQuery(stream) == (SUCCESS,)


def test_a_new_stream_needs_no_wait(stream):
    assert driver.cuStreamSynchronize(stream) == (SUCCESS,)


def test_a_stream_with_work_is_not_ready(stream):
    with latch(stream) as held:
        assert stays((NOT_READY,), lambda: driver.cuStreamQuery(stream))
        held.release()
        assert finishes(stream)


def test_a_query_leaves_nothing_behind(stream):
    """NOT_READY is an answer, no error that a later call would report."""
    with latch(stream):
        assert driver.cuStreamQuery(stream) == (NOT_READY,)
    assert driver.cuStreamSynchronize(stream) == (SUCCESS,)


def test_synchronize_waits(stream):
    with latch(stream) as held:
        waiting = Background(lambda: driver.cuStreamSynchronize(stream))
        assert waiting.is_blocked
        held.release()
        assert waiting.answer == (SUCCESS,)


def test_two_threads_may_wait_for_one_stream(stream):
    with latch(stream) as held:
        waiting = [Background(lambda: driver.cuStreamSynchronize(stream)) for _ in range(2)]
        assert all(one.is_blocked for one in waiting)
        held.release()
        assert [one.answer for one in waiting] == [(SUCCESS,), (SUCCESS,)]


def test_work_runs_in_order(stream, word):
    with latch(stream) as held:
        for value in (1, 2, 3):
            word.write(stream, value)
        assert stays(0, lambda: word.value)
        held.release()
        assert finishes(stream)
    assert word.value == 3


def test_streams_do_not_wait_for_each_other(make_stream, word):
    with latch(make_stream()):
        free = make_stream()
        word.write(free, 1)
        assert finishes(free)
        assert word.value == 1


def test_priority_does_not_change_the_order_within_a_stream(make_stream, word):
    stream = make_stream(priority=-5)
    for value in range(1, 20):
        word.write(stream, value)
    assert finishes(stream)
    assert word.value == 19


@pytest.mark.parametrize(
    "call",
    [
        driver.cuStreamQuery,
        driver.cuStreamSynchronize,
        driver.cuStreamGetId,
        driver.cuStreamGetFlags,
        driver.cuStreamGetPriority,
        driver.cuStreamGetDevice,
        driver.cuStreamGetCtx,
        driver.cuStreamIsCapturing,
    ],
    ids=lambda call: call.__name__,
)
def test_a_stream_works_without_a_context(stream, call):
    assert elsewhere(lambda: call(stream))[0] == SUCCESS


def test_memory_operations_work_without_a_context(stream, word):
    answer = elsewhere(lambda: driver.cuStreamWriteValue32(stream, word.address, 1, 0))
    assert answer == (SUCCESS,)
    assert finishes(stream)
    assert word.value == 1


@pytest.mark.multi_device
def test_a_stream_works_while_another_context_is_current(stream, word, other_context):
    with current(other_context):
        word.write(stream, 1)
        assert finishes(stream)
        assert int(ok(driver.cuStreamGetDevice(stream))) == 0
    assert word.value == 1


# ---- the end of a stream ----------------------------------------------------


def test_work_of_a_destroyed_stream_still_runs(word):
    stream = ok(driver.cuStreamCreate(1))
    with latch(stream) as held:
        word.write(stream, 1)
        assert Background(lambda: driver.cuStreamDestroy(stream)).answer == (SUCCESS,)
        assert stays(0, lambda: word.value)
        held.release()
        assert becomes(1, lambda: word.value)


def test_destroying_a_held_stream_does_not_block():
    stream = ok(driver.cuStreamCreate(1))
    with latch(stream):
        assert Background(lambda: driver.cuStreamDestroy(stream)).answer == (SUCCESS,)


def test_an_event_of_a_destroyed_stream_completes(event):
    stream = ok(driver.cuStreamCreate(1))
    with latch(stream) as held:
        ok(driver.cuEventRecord(event, stream))
        ok(Background(lambda: driver.cuStreamDestroy(stream)).answer)
        assert driver.cuEventQuery(event) == (NOT_READY,)
        held.release()
        assert becomes((SUCCESS,), lambda: driver.cuEventQuery(event))


@pytest.mark.simulated
def test_a_destroyed_stream_is_an_invalid_handle():
    """A real driver may crash instead."""
    stream = ok(driver.cuStreamCreate(1))
    ok(driver.cuStreamDestroy(stream))
    assert driver.cuStreamQuery(stream) == (INVALID_HANDLE,)


# ---- attributes -------------------------------------------------------------


def get(stream, attribute):
    return ok(driver.cuStreamGetAttribute(stream, attribute))


def test_there_is_no_synchronization_policy_at_first(stream):
    value = get(stream, Attribute.CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY)
    assert ctypes.c_int.from_address(value.getPtr()).value == -1, "which has no name"


def test_the_synchronization_policy_can_be_set(stream):
    policy = Attribute.CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY
    value = driver.CUstreamAttrValue()
    value.syncPolicy = driver.CUsynchronizationPolicy.CU_SYNC_POLICY_BLOCKING_SYNC
    assert driver.cuStreamSetAttribute(stream, policy, value) == (SUCCESS,)
    assert get(stream, policy).syncPolicy == value.syncPolicy


def test_attributes_can_be_copied(make_stream):
    policy = Attribute.CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY
    source, destination = make_stream(), make_stream()
    value = driver.CUstreamAttrValue()
    value.syncPolicy = driver.CUsynchronizationPolicy.CU_SYNC_POLICY_YIELD
    ok(driver.cuStreamSetAttribute(source, policy, value))
    assert driver.cuStreamCopyAttributes(destination, source) == (SUCCESS,)
    assert get(destination, policy).syncPolicy == value.syncPolicy


def test_the_priority_is_an_attribute(make_stream):
    stream = make_stream(priority=-2)
    assert get(stream, Attribute.CU_LAUNCH_ATTRIBUTE_PRIORITY).priority == -2


def test_an_attribute_that_streams_do_not_have(stream):
    cooperative = Attribute.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
    assert driver.cuStreamGetAttribute(stream, cooperative)[0] == INVALID_VALUE
