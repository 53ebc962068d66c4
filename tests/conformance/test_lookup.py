"""cuGetProcAddress: which functions there are, in which versions."""

from __future__ import annotations

import ctypes

import pytest
from cuda.bindings import driver

from conformance.support import INVALID_VALUE, SUCCESS, Result, ok

NOT_FOUND = Result.CUDA_ERROR_NOT_FOUND
FOUND, UNKNOWN, TOO_OLD = 0, 1, 2  # CUdriverProcAddressQueryResult


BEFORE = 77  # the address before a function is looked up


def look_up(name, version, flags=0):
    """The result, the address and the status, which the bindings do not tell of a failure."""
    address, status = ctypes.c_void_p(BEFORE), ctypes.c_int(-1)
    result = ctypes.CDLL("libcuda.so.1").cuGetProcAddress_v2(
        name.encode(),
        ctypes.byref(address),
        version,
        ctypes.c_uint64(flags),
        ctypes.byref(status),
    )
    return Result(result), address.value or 0, status.value


def look_up_untold(name, version, flags=0):
    """The result and the address that the first version of the function answers."""
    address = ctypes.c_void_p(BEFORE)
    look_up = ctypes.CDLL("libcuda.so.1").cuGetProcAddress
    result = look_up(name.encode(), ctypes.byref(address), version, ctypes.c_uint64(flags))
    return Result(result), address.value or 0


@pytest.fixture(scope="module")
def newest():
    ok(driver.cuInit(0))
    return ok(driver.cuDriverGetVersion())


# The versions that introduced a signature, from the driver's headers.
VERSIONS = {
    "cuInit": [2000],
    "cuCtxCreate": [2000, 3020, 11040, 12050],
    "cuCtxSynchronize": [2000, 13000],
    "cuStreamGetCtx": [9020, 12050],
    "cuStreamGetId": [12000],
    "cuStreamGetDevice": [12080],
    "cuStreamBeginCapture": [10000, 10010],
    "cuStreamGetCaptureInfo": [10010, 11030, 12030],
    "cuStreamWaitValue32": [8000, 11070],
    "cuMemAlloc": [2000, 3020],
    "cuMemAllocAsync": [11020],
    "cuMemAdvise": [8000, 12020],
    "cuMemPrefetchAsync": [8000, 12020],
    "cuMemFree": [2000, 3020],
    "cuMemcpyBatchAsync": [12080, 13000],
    "cuGraphInstantiate": [10000, 11000],
    "cuGraphInstantiateWithFlags": [11040],
    "cuGraphAddKernelNode": [10000, 12000],
    "cuGraphAddNode": [12020, 12030, 13040],
    "cuGraphExecUpdate": [10020, 12000],
    "cuGraphKernelNodeSetParams": [10000, 12000],
    "cuGraphNodeSetParams": [12020, 13040],
    "cuGreenCtxCreate": [12040],
    "cuCtxRecordEvent": [12050],
    "cuEventElapsedTime": [2000, 12080],
    "cuDeviceGetUuid": [9020, 11040],
    "cuLibraryLoadData": [12000],
    "cuKernelGetLibrary": [12050],
    "cuDevicePrimaryCtxRelease": [7000, 11000],
    "cuIpcOpenMemHandle": [4010, 11000],
    "cuProfilerStart": [4000],
    "cuGetProcAddress": [11030, 12000],
}
SIGNATURES = [(name, version) for name, versions in VERSIONS.items() for version in versions]


@pytest.mark.parametrize(("name", "version"), SIGNATURES)
def test_a_version_is_found(name, version, newest):
    if version > newest:
        pytest.skip(f"needs CUDA {version}")
    result, address, status = look_up(name, version)
    assert (result, status) == (SUCCESS, FOUND)
    assert address


@pytest.mark.parametrize(
    "name", ["cuStreamGetCtx", "cuCtxSynchronize", "cuDeviceGetUuid", "cuGraphAddKernelNode"]
)
def test_each_version_has_a_function_of_its_own(name, newest):
    addresses = [look_up(name, version)[1] for version in VERSIONS[name] if version <= newest]
    assert len(set(addresses)) == len(addresses)


@pytest.mark.parametrize(
    "name", [name for name, versions in VERSIONS.items() if versions[0] > 2000]
)
def test_a_version_before_the_first_does_not_suffice(name, newest):
    assert look_up(name, VERSIONS[name][0] - 10) == (SUCCESS, 0, TOO_OLD)
    assert look_up_untold(name, VERSIONS[name][0] - 10) == (NOT_FOUND, BEFORE)


@pytest.mark.parametrize("name", ["cuStreamGetCtx", "cuMemAlloc", "cuCtxSynchronize"])
def test_between_two_versions_the_earlier_one_is_found(name):
    first, second = VERSIONS[name][-2:]
    assert look_up(name, second - 10) == look_up(name, first)


@pytest.mark.parametrize(
    "name", ["cuNothing", "cuStreamGetCtx_v2", "cuMemAlloc_v2", "cudaMalloc", ""]
)
def test_there_is_no_such_function(name, newest):
    assert look_up(name, newest) == (SUCCESS, 0, UNKNOWN)
    assert look_up_untold(name, newest) == (NOT_FOUND, BEFORE)


@pytest.mark.parametrize(
    ("name", "version"), [("cuDevSmResourceSplit", 13010), ("cuKernelGetParamCount", 13020)]
)
def test_a_function_that_is_newer_than_the_driver_is_unknown(name, version, newest):
    if version <= newest:
        pytest.skip(f"needs a driver older than {version}")
    assert look_up(name, newest) == (SUCCESS, 0, UNKNOWN)


@pytest.mark.parametrize("name", ["cuInit", "cuNothing"])
def test_a_version_after_the_drivers_own(name, newest):
    assert look_up(name, newest + 10) == (INVALID_VALUE, BEFORE, -1)
    assert look_up_untold(name, newest + 10) == (INVALID_VALUE, BEFORE)


def test_a_negative_version_is_the_newest(newest):
    assert look_up("cuStreamGetCtx", -1) == look_up("cuStreamGetCtx", newest)


@pytest.mark.parametrize("flags", [0, 1, 2, 3])
def test_flags_choose_the_default_stream(flags, newest):
    result, address, status = look_up("cuStreamQuery", newest, flags)
    assert (result, status) == (SUCCESS, FOUND)
    assert address
