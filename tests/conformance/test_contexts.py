"""Devices, contexts, and the current one."""

from __future__ import annotations

import pytest
from cuda.bindings import driver

from conformance.support import (
    INVALID_CONTEXT,
    INVALID_DEVICE,
    INVALID_VALUE,
    NOT_READY,
    SUCCESS,
    Background,
    Result,
    current,
    elsewhere,
    finishes,
    no_context,
    ok,
)
from userstream.testing import latch

Attribute = driver.CUdevice_attribute


def attribute(name, device=0):
    return ok(
        driver.cuDeviceGetAttribute(getattr(Attribute, f"CU_DEVICE_ATTRIBUTE_{name}"), device)
    )


# ---- devices ----------------------------------------------------------------


def test_initializing_again_does_nothing():
    assert driver.cuInit(0) == (SUCCESS,)


def test_initializing_has_no_flags():
    assert driver.cuInit(1) == (INVALID_VALUE,)


def test_the_version_is_that_of_a_cuda_release():
    version = ok(driver.cuDriverGetVersion())
    assert version >= 12000
    assert version % 10 == 0


@pytest.mark.parametrize("ordinal", [-1, 1000])
def test_devices_that_do_not_exist(ordinal):
    assert driver.cuDeviceGet(ordinal)[0] == INVALID_DEVICE


def test_the_handle_of_a_device_is_its_ordinal(contexts):
    handles = [int(ok(driver.cuDeviceGet(ordinal))) for ordinal in range(len(contexts))]
    assert handles == list(range(len(contexts)))


@pytest.mark.multi_device
def test_devices_have_different_uuids(contexts):
    uuids = {bytes(ok(driver.cuDeviceGetUuid(device)).bytes) for device in range(len(contexts))}
    assert len(uuids) == len(contexts)


def test_the_name_of_a_device():
    assert ok(driver.cuDeviceGetName(100, 0)).rstrip(b"\0")


def test_the_memory_of_a_device():
    assert ok(driver.cuDeviceTotalMem(0)) > 0


@pytest.mark.parametrize(
    "name",
    [
        "UNIFIED_ADDRESSING",
        "STREAM_PRIORITIES_SUPPORTED",
        "MANAGED_MEMORY",
        "CONCURRENT_MANAGED_ACCESS",
        "MEMORY_POOLS_SUPPORTED",
        "HOST_REGISTER_SUPPORTED",
        "CAN_MAP_HOST_MEMORY",
        "CAN_USE_64_BIT_STREAM_MEM_OPS",
        "CAN_USE_STREAM_WAIT_VALUE_NOR",
    ],
)
def test_what_devices_can_do(name):
    assert attribute(name) == 1


def test_attributes_of_a_device_that_does_not_exist():
    warp_size = Attribute.CU_DEVICE_ATTRIBUTE_WARP_SIZE
    assert driver.cuDeviceGetAttribute(warp_size, 1000)[0] == INVALID_DEVICE


@pytest.mark.multi_device
def test_a_device_is_not_its_own_peer():
    assert ok(driver.cuDeviceCanAccessPeer(0, 0)) == 0


# ---- the current context ----------------------------------------------------


def test_a_new_thread_has_no_context():
    assert int(elsewhere(lambda: ok(driver.cuCtxGetCurrent()))) == 0


def test_the_context_of_a_thread_is_its_own(context):
    elsewhere(lambda: driver.cuCtxSetCurrent(driver.CUcontext(0)))
    assert int(ok(driver.cuCtxGetCurrent())) == int(context)


@pytest.mark.multi_device
def test_push_and_pop(context, other_context):
    ok(driver.cuCtxPushCurrent(other_context))
    assert int(ok(driver.cuCtxGetCurrent())) == int(other_context)
    assert int(ok(driver.cuCtxPopCurrent())) == int(other_context)
    assert int(ok(driver.cuCtxGetCurrent())) == int(context)


def test_a_context_can_be_pushed_twice(context):
    ok(driver.cuCtxPushCurrent(context))
    ok(driver.cuCtxPopCurrent())
    assert int(ok(driver.cuCtxGetCurrent())) == int(context)


def test_nothing_to_pop():
    with no_context():
        assert driver.cuCtxPopCurrent()[0] == INVALID_CONTEXT


def test_null_cannot_be_pushed():
    assert driver.cuCtxPushCurrent(driver.CUcontext(0)) == (INVALID_VALUE,)


@pytest.mark.multi_device
def test_setting_replaces_the_top_of_the_stack(context, other_context):
    def stack():
        ok(driver.cuCtxPushCurrent(context))
        ok(driver.cuCtxPushCurrent(context))
        ok(driver.cuCtxSetCurrent(other_context))
        return [int(ok(driver.cuCtxPopCurrent())) for _ in range(2)]

    assert elsewhere(stack) == [int(other_context), int(context)]


def test_setting_on_an_empty_stack_pushes(context):
    def stack():
        ok(driver.cuCtxSetCurrent(context))
        popped = int(ok(driver.cuCtxPopCurrent()))
        return popped, driver.cuCtxPopCurrent()[0]

    assert elsewhere(stack) == (int(context), INVALID_CONTEXT)


@pytest.mark.multi_device
def test_setting_null_pops(context, other_context):
    def stack():
        ok(driver.cuCtxPushCurrent(context))
        ok(driver.cuCtxPushCurrent(other_context))
        ok(driver.cuCtxSetCurrent(driver.CUcontext(0)))
        return int(ok(driver.cuCtxPopCurrent()))

    assert elsewhere(stack) == int(context)


def test_the_device_of_the_current_context():
    assert int(ok(driver.cuCtxGetDevice())) == 0


@pytest.mark.multi_device
def test_the_device_of_another_current_context(other_context):
    with current(other_context):
        assert int(ok(driver.cuCtxGetDevice())) == 1


@pytest.mark.parametrize(
    "call",
    [
        driver.cuCtxGetDevice,
        driver.cuCtxSynchronize,
        driver.cuCtxGetStreamPriorityRange,
        driver.cuCtxGetFlags,
        driver.cuMemGetInfo,
    ],
    ids=lambda call: call.__name__,
)
def test_what_needs_a_context(call):
    with no_context():
        assert call()[0] == INVALID_CONTEXT


# ---- primary contexts -------------------------------------------------------


def test_the_primary_context_is_one(context):
    assert int(ok(driver.cuDevicePrimaryCtxRetain(0))) == int(context)
    assert driver.cuDevicePrimaryCtxRelease(0) == (SUCCESS,)


def test_a_retained_primary_context_is_active():
    _, active = ok(driver.cuDevicePrimaryCtxGetState(0))
    assert active == 1


def test_a_primary_context_maps_memory_of_the_host():
    map_host = int(driver.CUctx_flags.CU_CTX_MAP_HOST)
    assert ok(driver.cuCtxGetFlags()) & map_host == map_host


def test_primary_contexts_of_devices_that_do_not_exist():
    assert driver.cuDevicePrimaryCtxRetain(1000)[0] == INVALID_DEVICE


def test_the_ids_of_contexts(context):
    assert ok(driver.cuCtxGetId(context)) == ok(driver.cuCtxGetId(context))


# ---- waiting for a context --------------------------------------------------


@pytest.mark.parametrize("flags", [0, 1], ids=["blocking", "non-blocking"])
def test_synchronize_waits_for_every_stream(context, make_stream, flags):
    with latch(make_stream(flags)) as held:
        waiting = Background(driver.cuCtxSynchronize, context)
        assert waiting.is_blocked
        held.release()
        assert waiting.answer == (SUCCESS,)


def test_synchronize_of_an_idle_context():
    assert driver.cuCtxSynchronize() == (SUCCESS,)


@pytest.mark.multi_device
def test_synchronize_does_not_wait_for_other_devices(make_stream, other_context):
    with latch(make_stream(context=other_context)):
        assert Background(driver.cuCtxSynchronize, ok(driver.cuCtxGetCurrent())).answer == (
            SUCCESS,
        )


# ---- several contexts of one device -----------------------------------------


@pytest.fixture
def second_context():
    """A context of device 0 beside the primary one; current nowhere."""
    try:
        answer = driver.cuCtxCreate(None, 0, 0)
    except TypeError:  # bindings of CUDA 12
        answer = driver.cuCtxCreate(0, 0)
    made = ok(answer)
    ok(driver.cuCtxPopCurrent())
    yield made
    ok(driver.cuCtxDestroy(made))


def test_a_second_context_of_a_device(context, second_context):
    assert int(second_context) != int(context)
    with current(second_context):
        assert int(ok(driver.cuCtxGetDevice())) == 0


def test_a_stream_of_a_second_context(second_context, make_stream, word):
    stream = make_stream(context=second_context)
    assert int(ok(driver.cuStreamGetCtx(stream)[:2])) == int(second_context)
    assert finishes(stream)


def test_an_event_of_a_second_context_cannot_be_recorded_here(second_context, stream):
    with current(second_context):
        event = ok(driver.cuEventCreate(2))
    assert driver.cuEventRecord(event, stream) == (Result.CUDA_ERROR_INVALID_HANDLE,)
    ok(driver.cuEventDestroy(event))


def test_contexts_of_a_device_do_not_wait_for_each_other(context, second_context, make_stream):
    with latch(make_stream(context=context)) as held:
        assert Background(driver.cuCtxSynchronize, second_context).answer == (SUCCESS,)
        assert not held.is_released


def test_an_event_crosses_contexts_of_a_device(second_context, stream, make_stream):
    producer = make_stream(context=second_context)
    with current(second_context):
        event = ok(driver.cuEventCreate(2))
    with latch(producer) as held:
        ok(driver.cuEventRecord(event, producer))
        ok(driver.cuStreamWaitEvent(stream, event, 0))
        assert driver.cuStreamQuery(stream) == (NOT_READY,)
        held.release()
        assert finishes(stream)
    ok(driver.cuEventDestroy(event))


# ---- names of results -------------------------------------------------------


@pytest.mark.parametrize(
    "result",
    [
        Result.CUDA_SUCCESS,
        Result.CUDA_ERROR_INVALID_VALUE,
        Result.CUDA_ERROR_NOT_READY,
        Result.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
        Result.CUDA_ERROR_UNKNOWN,
    ],
    ids=lambda result: result.name,
)
def test_results_have_names(result):
    assert ok(driver.cuGetErrorName(result)) == result.name.encode()
    assert ok(driver.cuGetErrorString(result))
