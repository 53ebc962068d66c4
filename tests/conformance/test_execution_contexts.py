"""Functions of the driver and execution contexts, through cuda.bindings.runtime."""

from __future__ import annotations

import ctypes

import pytest
from cuda.bindings import runtime

from conformance.test_runtime import Error, right


def test_a_function_of_the_driver(context):
    """Of CUDA 11.2: it takes and answers what the runtime's does."""
    address, status = right(
        runtime.cudaGetDriverEntryPointByVersion(b"cuDriverGetVersion", 11020, 0)
    )
    assert status == runtime.cudaDriverEntryPointQueryResult.cudaDriverEntryPointSuccess
    version = ctypes.c_int()
    assert ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(int(address))(ctypes.byref(version)) == 0
    assert version.value == right(runtime.cudaDriverGetVersion())


@pytest.mark.parametrize(
    ("name", "version", "expected"),
    [
        (b"cuNothing", 12000, "SymbolNotFound"),
        (b"cuStreamGetDevice", 12000, "VersionNotSufficent"),
    ],
)
def test_functions_that_the_driver_does_not_have(name, version, expected):
    address, status = right(runtime.cudaGetDriverEntryPointByVersion(name, version, 0))
    assert (int(address or 0), status.name) == (0, f"cudaDriverEntryPoint{expected}")


@pytest.fixture
def execution_context():
    if not hasattr(runtime, "cudaGreenCtxCreate"):
        pytest.skip("needs cuda-bindings 13.1")
    kind = runtime.cudaDevResourceType.cudaDevResourceTypeSm
    answer = runtime.cudaDeviceGetDevResource(0, kind)
    if answer[0] == Error.cudaErrorCallRequiresNewerDriver:
        pytest.skip("needs a newer driver")
    (part, *_), count, _ = right(runtime.cudaDevSmResourceSplitByCount(1, right(answer), 0, 16))
    assert (count, part.sm.smCount) == (1, 16)
    description = right(runtime.cudaDevResourceGenerateDesc([part], 1))
    made = right(runtime.cudaGreenCtxCreate(description, 0, 0))
    yield made
    right(runtime.cudaExecutionCtxDestroy(made))


def test_streams_and_events_of_a_part_of_a_device(execution_context):
    part = execution_context
    kind = runtime.cudaDevResourceType.cudaDevResourceTypeSm
    assert right(runtime.cudaExecutionCtxGetDevice(part)) == 0
    assert right(runtime.cudaExecutionCtxGetDevResource(part, kind)).sm.smCount == 16
    stream = right(runtime.cudaExecutionCtxStreamCreate(part, 0, 0))
    assert right(runtime.cudaStreamGetFlags(stream)) == runtime.cudaStreamNonBlocking
    event = right(runtime.cudaEventCreate())
    right(runtime.cudaExecutionCtxRecordEvent(part, event))
    right(runtime.cudaExecutionCtxWaitEvent(part, event))
    right(runtime.cudaEventSynchronize(event))
    right(runtime.cudaExecutionCtxSynchronize(part))
    right(runtime.cudaEventDestroy(event))
    right(runtime.cudaStreamDestroy(stream))


def test_the_execution_context_of_a_device(execution_context):
    whole = right(runtime.cudaDeviceGetExecutionCtx(0))
    ids = {right(runtime.cudaExecutionCtxGetId(each)) for each in (whole, execution_context)}
    assert len(ids) == 2
    stream = right(runtime.cudaExecutionCtxStreamCreate(whole, runtime.cudaStreamNonBlocking, 0))
    assert right(runtime.cudaStreamGetDevice(stream)) == 0
    right(runtime.cudaStreamDestroy(stream))
