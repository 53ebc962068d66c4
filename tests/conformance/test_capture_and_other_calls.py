"""What calls do to a capture, and it to them. Measured on an H200, call by call."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import pytest
from cuda.bindings import driver

from conformance.support import (
    ACTIVE,
    GLOBAL,
    INVALIDATED,
    LEGACY,
    RELAXED,
    SUCCESS,
    THREAD_LOCAL,
    UNSUPPORTED,
    Capture,
    capture_mode,
    elsewhere,
    finishes,
    ok,
)


@dataclass
class Things:
    """What the calls work with; none of it takes part in the capture."""

    context: driver.CUcontext
    stream: driver.CUstream
    event: driver.CUevent
    recorded: driver.CUevent
    memory: int
    host: Any

    @property
    def host_address(self) -> int:
        return ctypes.addressof(self.host)


@pytest.fixture
def things(context, make_stream, make_event, memory):
    stream, recorded = make_stream(), make_event()
    ok(driver.cuEventRecord(recorded, stream))
    assert finishes(stream)
    ok(driver.cuEventRecord(make_event(), LEGACY))
    assert finishes(LEGACY)
    return Things(context, stream, make_event(), recorded, memory, ctypes.create_string_buffer(64))


def create_and_destroy_event(_):
    result, event = driver.cuEventCreate(2)
    if result == SUCCESS:
        return driver.cuEventDestroy(event)
    return (result,)


def create_and_destroy_stream(_):
    result, stream = driver.cuStreamCreateWithPriority(1, 0)
    if result == SUCCESS:
        return driver.cuStreamDestroy(stream)
    return (result,)


def push_and_pop(things):
    result = driver.cuCtxPushCurrent(things.context)[0]
    if result == SUCCESS:
        driver.cuCtxPopCurrent()
    return (result,)


def pinned_memory(_):
    result, address = driver.cuMemAllocHost(64)
    if result == SUCCESS:
        with capture_mode(RELAXED):
            driver.cuMemFreeHost(address)
    return (result,)


def device_memory(_):
    result, address = driver.cuMemAlloc(64)
    if result == SUCCESS:
        with capture_mode(RELAXED):
            driver.cuMemFree(address)
    return (result,)


def stream_ordered_allocation(things):
    result, address = driver.cuMemAllocAsync(64, things.stream)
    if result == SUCCESS:
        with capture_mode(RELAXED):
            driver.cuMemFreeAsync(address, things.stream)
    return (result,)


def stream_ordered_free(things):
    with capture_mode(RELAXED):
        address = ok(driver.cuMemAllocAsync(64, things.stream))
    result = driver.cuMemFreeAsync(address, things.stream)
    if result != (SUCCESS,):
        with capture_mode(RELAXED):
            driver.cuMemFreeAsync(address, things.stream)
    return result


def registration(things):
    page = things.host_address & ~4095
    result = driver.cuMemHostRegister(page, 4096, 0)
    if result == (SUCCESS,):
        with capture_mode(RELAXED):
            driver.cuMemHostUnregister(page)
    return result


def copy_async(things):
    return driver.cuMemcpyHtoDAsync(things.memory, things.host_address, 64, things.stream)


def copy_now(things):
    return driver.cuMemcpyHtoD(things.memory, things.host_address, 64)


def pointer_attribute(things):
    attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    return driver.cuPointerGetAttribute(attribute, things.memory)


HARMLESS = {
    "record": lambda t: driver.cuEventRecord(t.event, t.stream),
    "wait": lambda t: driver.cuStreamWaitEvent(t.stream, t.recorded, 0),
    "record on legacy": lambda t: driver.cuEventRecord(t.event, LEGACY),
    "event creation": create_and_destroy_event,
    "stream creation": create_and_destroy_stream,
    "push and pop": push_and_pop,
    "pointer attribute": pointer_attribute,
    "is capturing": lambda t: driver.cuStreamIsCapturing(t.stream),
    "stream id": lambda t: driver.cuStreamGetId(t.stream),
    "stream context": lambda t: driver.cuStreamGetCtx(t.stream),
    "stream flags": lambda t: driver.cuStreamGetFlags(t.stream),
    "write value": lambda t: driver.cuStreamWriteValue32(t.stream, t.memory, 1, 0),
    "copy of pageable memory": copy_async,
    "fill": lambda t: driver.cuMemsetD8Async(t.memory, 1, 64, t.stream),
    "copy": copy_now,
    "priority range": lambda _: driver.cuCtxGetStreamPriorityRange(),
}

UNSAFE = {
    "stream query": lambda t: driver.cuStreamQuery(t.stream),
    "stream synchronize": lambda t: driver.cuStreamSynchronize(t.stream),
    "event query": lambda t: driver.cuEventQuery(t.recorded),
    "event synchronize": lambda t: driver.cuEventSynchronize(t.recorded),
    "pinned memory": pinned_memory,
    "device memory": device_memory,
    "stream-ordered allocation": stream_ordered_allocation,
    "stream-ordered free": stream_ordered_free,
    "registration": registration,
}

FORBIDDEN = {
    "context synchronize": lambda _: driver.cuCtxSynchronize(),
    "context event": lambda t: driver.cuCtxRecordEvent(t.context, t.event),
    "context wait": lambda t: driver.cuCtxWaitEvent(t.context, t.event),
}


def table(calls):
    return pytest.mark.parametrize("call", calls.values(), ids=calls.keys())


def relaxed(call, things):
    with capture_mode(RELAXED):
        return call(things)


def thread_local(call, things):
    with capture_mode(THREAD_LOCAL):
        return call(things)


# ---- another thread of the process, a global capture ------------------------


@table(HARMLESS)
def test_harmless_calls_of_another_thread(stream, things, call):
    with Capture(stream) as capture:
        assert elsewhere(lambda: call(things), things.context)[0] == SUCCESS
        assert capture.status == ACTIVE


@table(HARMLESS)
def test_harmless_calls_of_another_relaxed_thread(stream, things, call):
    with Capture(stream) as capture:
        assert elsewhere(lambda: relaxed(call, things), things.context)[0] == SUCCESS
        assert capture.status == ACTIVE


@table(UNSAFE)
def test_unsafe_calls_of_another_thread(stream, things, call):
    with Capture(stream) as capture:
        assert elsewhere(lambda: call(things), things.context)[0] == UNSUPPORTED
        assert capture.status == INVALIDATED


@table(UNSAFE)
def test_unsafe_calls_of_another_relaxed_thread(stream, things, call):
    with Capture(stream) as capture:
        assert elsewhere(lambda: relaxed(call, things), things.context)[0] == SUCCESS
        assert capture.status == ACTIVE


@table(UNSAFE)
def test_unsafe_calls_of_another_thread_local_thread(stream, things, call):
    with Capture(stream) as capture:
        assert elsewhere(lambda: thread_local(call, things), things.context)[0] == SUCCESS
        assert capture.status == ACTIVE


@table(FORBIDDEN)
@pytest.mark.parametrize("mode", [GLOBAL, RELAXED], ids=["global", "relaxed"])
def test_calls_on_the_context_of_another_thread(stream, things, call, mode):
    def with_mode():
        with capture_mode(mode):
            return call(things)

    with Capture(stream) as capture:
        assert elsewhere(with_mode, things.context)[0] == UNSUPPORTED
        assert capture.status == INVALIDATED


# ---- the capturing thread itself --------------------------------------------


@table(HARMLESS)
def test_harmless_calls_of_the_capturing_thread(stream, things, call):
    with Capture(stream) as capture:
        assert call(things)[0] == SUCCESS
        assert capture.status == ACTIVE


@table(UNSAFE)
@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL], ids=["global", "thread-local"])
def test_unsafe_calls_of_the_capturing_thread(stream, things, call, mode):
    with Capture(stream, mode) as capture:
        assert call(things)[0] == UNSUPPORTED
        assert capture.status == INVALIDATED


@table(UNSAFE)
@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL], ids=["global", "thread-local"])
def test_unsafe_calls_of_the_capturing_thread_when_relaxed(stream, things, call, mode):
    with Capture(stream, mode) as capture:
        assert relaxed(call, things)[0] == SUCCESS
        assert capture.status == ACTIVE


# ---- captures of other modes ------------------------------------------------


@table(UNSAFE)
@pytest.mark.parametrize("mode", [THREAD_LOCAL, RELAXED], ids=["thread-local", "relaxed"])
def test_unsafe_calls_of_another_thread_beside_a_capture_that_is_not_global(
    stream, things, call, mode
):
    with Capture(stream, mode) as capture:
        assert elsewhere(lambda: call(things), things.context)[0] == SUCCESS
        assert capture.status == ACTIVE


@table(UNSAFE)
def test_unsafe_calls_of_the_thread_of_a_relaxed_capture(stream, things, call):
    with Capture(stream, RELAXED) as capture:
        assert call(things)[0] == SUCCESS
        assert capture.status == ACTIVE


@table(FORBIDDEN)
@pytest.mark.parametrize("mode", [THREAD_LOCAL, RELAXED], ids=["thread-local", "relaxed"])
def test_calls_on_the_context_beside_a_capture_that_is_not_global(stream, things, call, mode):
    with Capture(stream, mode) as capture:
        assert call(things)[0] == UNSUPPORTED
        assert capture.status == INVALIDATED


# ---- another device ---------------------------------------------------------


@pytest.mark.multi_device
def test_a_capture_on_another_device_survives_context_synchronize(make_stream, other_context):
    with Capture(make_stream(context=other_context), RELAXED) as capture:
        assert driver.cuCtxSynchronize() == (SUCCESS,)
        assert capture.status == ACTIVE


@pytest.mark.multi_device
def test_a_global_capture_on_another_device_forbids_unsafe_calls(
    make_stream, other_context, things
):
    with Capture(make_stream(context=other_context)) as capture:
        assert elsewhere(lambda: driver.cuStreamQuery(things.stream))[0] == UNSUPPORTED
        assert capture.status == INVALIDATED
