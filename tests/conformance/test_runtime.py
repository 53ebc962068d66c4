"""The functions of the CUDA runtime, through cuda.bindings.runtime."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from cuda.bindings import driver, runtime

from conformance.support import elsewhere, no_context, ok
from helpers import run_python

Error = runtime.cudaError_t
SUCCESS = Error.cudaSuccess
INVALID_VALUE = Error.cudaErrorInvalidValue
INVALID_DEVICE = Error.cudaErrorInvalidDevice
INVALID_HANDLE = Error.cudaErrorInvalidResourceHandle
Kind = runtime.cudaMemcpyKind


def right(answer):
    """The values of a runtime call that has to succeed."""
    result, *values = answer
    assert result == SUCCESS, result
    return values[0] if len(values) == 1 else tuple(values)


@pytest.fixture(autouse=True)
def no_error(context):
    runtime.cudaGetLastError()
    yield
    runtime.cudaGetLastError()


@pytest.fixture
def buffer():
    address = right(runtime.cudaMalloc(64))
    yield address
    right(runtime.cudaFree(address))


@pytest.fixture
def runtime_stream():
    stream = right(runtime.cudaStreamCreate())
    yield stream
    runtime.cudaStreamDestroy(stream)


# ---- devices and errors -----------------------------------------------------


def test_it_counts_the_devices_of_the_driver():
    assert right(runtime.cudaGetDeviceCount()) == ok(driver.cuDeviceGetCount())


def test_the_device_is_that_of_the_current_context():
    assert right(runtime.cudaGetDevice()) == 0


def test_the_device_of_another_context(other_context):
    assert elsewhere(runtime.cudaGetDevice, other_context) == (SUCCESS, 1)


def test_a_thread_without_a_context_has_device_0():
    assert elsewhere(runtime.cudaGetDevice) == (SUCCESS, 0)


def test_set_device_makes_the_primary_context_current(contexts):
    def use():
        right(runtime.cudaSetDevice(0))
        return int(ok(driver.cuCtxGetCurrent()))

    assert elsewhere(use) == int(contexts[0])


def test_memory_makes_the_primary_context_current(contexts):
    def use():
        assert int(ok(driver.cuCtxGetCurrent())) == 0
        right(runtime.cudaFree(0))
        return int(ok(driver.cuCtxGetCurrent()))

    assert elsewhere(use) == int(contexts[0])


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(runtime.cudaGetDeviceCount, id="count"),
        pytest.param(runtime.cudaGetDevice, id="device"),
        pytest.param(lambda: runtime.cudaDeviceGetPCIBusId(13, 0), id="bus"),
    ],
)
def test_a_question_makes_no_context_current(call):
    def use():
        right(call())
        return int(ok(driver.cuCtxGetCurrent()))

    assert elsewhere(use) == 0


@pytest.mark.parametrize("device", [-1, 99])
def test_there_is_no_such_device(device):
    with no_context():
        assert runtime.cudaSetDevice(device) == (INVALID_DEVICE,)


def test_the_last_error_is_told_once():
    assert runtime.cudaSetDevice(99) == (INVALID_DEVICE,)
    assert runtime.cudaGetLastError() == (INVALID_DEVICE,)
    assert runtime.cudaGetLastError() == (SUCCESS,)


def test_the_last_error_may_be_looked_at():
    assert runtime.cudaSetDevice(99) == (INVALID_DEVICE,)
    assert runtime.cudaPeekAtLastError() == (INVALID_DEVICE,)
    assert runtime.cudaPeekAtLastError() == (INVALID_DEVICE,)


def test_a_success_keeps_the_last_error():
    runtime.cudaSetDevice(99)
    right(runtime.cudaGetDevice())
    assert runtime.cudaGetLastError() == (INVALID_DEVICE,)


def test_each_thread_has_an_error_of_its_own():
    runtime.cudaSetDevice(99)
    assert elsewhere(runtime.cudaGetLastError) == (SUCCESS,)


def test_the_pci_bus_of_a_device():
    shown = right(runtime.cudaDeviceGetPCIBusId(13, 0))
    assert shown == ok(driver.cuDeviceGetPCIBusId(13, 0))
    assert right(runtime.cudaDeviceGetByPCIBusId(shown)) == 0


@pytest.mark.parametrize(
    "name", ["MultiProcessorCount", "WarpSize", "ComputeCapabilityMajor", "MaxThreadsPerBlock"]
)
def test_an_attribute_is_that_of_the_driver(name):
    attribute = getattr(runtime.cudaDeviceAttr, f"cudaDevAttr{name}")
    same = driver.CUdevice_attribute(int(attribute))
    expected = ok(driver.cuDeviceGetAttribute(same, 0))
    assert right(runtime.cudaDeviceGetAttribute(attribute, 0)) == expected


def test_the_priorities_of_streams():
    assert right(runtime.cudaDeviceGetStreamPriorityRange()) == ok(
        driver.cuCtxGetStreamPriorityRange()
    )


def test_the_version_of_the_driver():
    assert right(runtime.cudaDriverGetVersion()) == ok(driver.cuDriverGetVersion())


def test_the_device_is_waited_for(runtime_stream, buffer):
    right(runtime.cudaMemsetAsync(buffer, 1, 64, runtime_stream))
    right(runtime.cudaDeviceSynchronize())
    right(runtime.cudaStreamQuery(runtime_stream))


def test_free_memory():
    assert right(runtime.cudaMemGetInfo())[1] == ok(driver.cuMemGetInfo())[1]


def test_a_reset_ends_what_the_device_has():
    done = run_python(
        """
        from cuda.bindings import runtime
        address = runtime.cudaMalloc(64)[1]
        assert runtime.cudaDeviceReset()[0] == 0
        assert runtime.cudaMemset(address, 0, 64)[0] == 1
        result, again = runtime.cudaMalloc(64)
        assert result == 0
        assert runtime.cudaMemset(again, 0, 64)[0] == 0
        """
    )
    assert done.returncode == 0, done.stderr


# ---- memory -----------------------------------------------------------------


def test_memory_comes_and_goes():
    address = right(runtime.cudaMalloc(64))
    right(runtime.cudaFree(address))
    assert runtime.cudaFree(address) == (INVALID_VALUE,)


def test_no_bytes_are_at_null():
    assert right(runtime.cudaMalloc(0)) == 0


@pytest.mark.parametrize("free", [runtime.cudaFree, runtime.cudaFreeHost])
def test_null_may_be_freed(free):
    right(free(0))


def test_a_copy_there_and_back(buffer):
    source, target = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    right(runtime.cudaMemcpy(buffer, source, 64, Kind.cudaMemcpyHostToDevice))
    right(runtime.cudaMemcpy(target, buffer, 64, Kind.cudaMemcpyDeviceToHost))
    assert (source == target).all()


def test_a_copy_whose_direction_the_addresses_say(buffer):
    source, target = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    right(runtime.cudaMemcpy(buffer, source, 64, Kind.cudaMemcpyDefault))
    right(runtime.cudaMemcpy(target, buffer, 64, Kind.cudaMemcpyDefault))
    assert (source == target).all()


def test_a_copy_on_a_stream(buffer, runtime_stream):
    target = right(runtime.cudaMallocHost(64))
    right(runtime.cudaMemsetAsync(buffer, 7, 64, runtime_stream))
    kind = Kind.cudaMemcpyDeviceToHost
    right(runtime.cudaMemcpyAsync(target, buffer, 64, kind, runtime_stream))
    right(runtime.cudaStreamSynchronize(runtime_stream))
    assert set(ctypes.string_at(target, 64)) == {7}
    right(runtime.cudaFreeHost(target))


def test_memory_in_the_order_of_a_stream(runtime_stream):
    address = right(runtime.cudaMallocAsync(64, runtime_stream))
    right(runtime.cudaMemsetAsync(address, 1, 64, runtime_stream))
    right(runtime.cudaFreeAsync(address, runtime_stream))
    right(runtime.cudaStreamSynchronize(runtime_stream))


MemoryType = runtime.cudaMemoryType


@pytest.mark.parametrize(
    ("allocate", "free", "expected"),
    [
        (lambda: runtime.cudaMalloc(64), runtime.cudaFree, MemoryType.cudaMemoryTypeDevice),
        (lambda: runtime.cudaMallocHost(64), runtime.cudaFreeHost, MemoryType.cudaMemoryTypeHost),
        (lambda: runtime.cudaHostAlloc(64, 0), runtime.cudaFreeHost, MemoryType.cudaMemoryTypeHost),
        (
            lambda: runtime.cudaMallocManaged(64, 1),
            runtime.cudaFree,
            MemoryType.cudaMemoryTypeManaged,
        ),
    ],
    ids=["device", "pinned", "pinned with flags", "managed"],
)
def test_the_type_of_memory(allocate, free, expected):
    address = right(allocate())
    attributes = right(runtime.cudaPointerGetAttributes(address))
    assert attributes.type == expected
    assert int(attributes.devicePointer) == int(address)
    right(free(address))


def test_memory_that_the_driver_does_not_know():
    array = np.zeros(64, np.uint8)
    attributes = right(runtime.cudaPointerGetAttributes(array.ctypes.data))
    assert attributes.type == MemoryType.cudaMemoryTypeUnregistered
    assert int(attributes.devicePointer) == 0


# ---- streams, events, graphs ------------------------------------------------


def test_a_stream_is_one_of_the_driver(runtime_stream):
    assert ok(driver.cuStreamGetFlags(driver.CUstream(int(runtime_stream)))) == 0


def test_a_stream_with_flags_and_priority():
    flags, priority = runtime.cudaStreamNonBlocking, -1
    stream = right(runtime.cudaStreamCreateWithPriority(flags, priority))
    assert right(runtime.cudaStreamGetFlags(stream)) == flags
    assert right(runtime.cudaStreamGetPriority(stream)) == priority
    right(runtime.cudaStreamDestroy(stream))


def test_an_event_is_recorded_and_waited_for(runtime_stream):
    event = right(runtime.cudaEventCreate())
    right(runtime.cudaEventRecord(event, runtime_stream))
    right(runtime.cudaStreamWaitEvent(runtime_stream, event, 0))
    right(runtime.cudaEventSynchronize(event))
    right(runtime.cudaEventQuery(event))
    right(runtime.cudaEventDestroy(event))


def test_the_time_between_events(runtime_stream):
    first, last = right(runtime.cudaEventCreate()), right(runtime.cudaEventCreate())
    for event in (first, last):
        right(runtime.cudaEventRecord(event, runtime_stream))
    right(runtime.cudaEventSynchronize(last))
    assert right(runtime.cudaEventElapsedTime(first, last)) >= 0
    for event in (first, last):
        right(runtime.cudaEventDestroy(event))


def test_an_event_without_timing_has_no_time(runtime_stream):
    event = right(runtime.cudaEventCreateWithFlags(runtime.cudaEventDisableTiming))
    right(runtime.cudaEventRecord(event, runtime_stream))
    right(runtime.cudaEventSynchronize(event))
    assert runtime.cudaEventElapsedTime(event, event)[0] == INVALID_HANDLE
    right(runtime.cudaEventDestroy(event))


def test_a_captured_graph_is_launched(buffer, runtime_stream):
    mode = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
    right(runtime.cudaStreamBeginCapture(runtime_stream, mode))
    status = right(runtime.cudaStreamIsCapturing(runtime_stream))
    assert status == runtime.cudaStreamCaptureStatus.cudaStreamCaptureStatusActive
    right(runtime.cudaMemsetAsync(buffer, 5, 64, runtime_stream))
    graph = right(runtime.cudaStreamEndCapture(runtime_stream))
    executable = right(runtime.cudaGraphInstantiate(graph, 0))
    right(runtime.cudaGraphLaunch(executable, runtime_stream))
    right(runtime.cudaStreamSynchronize(runtime_stream))
    target = np.zeros(64, np.uint8)
    right(runtime.cudaMemcpy(target, buffer, 64, Kind.cudaMemcpyDeviceToHost))
    assert (target == 5).all()
    right(runtime.cudaGraphExecDestroy(executable))
    right(runtime.cudaGraphDestroy(graph))
