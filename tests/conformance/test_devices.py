"""What a device says of itself, and which devices there are."""

from __future__ import annotations

import uuid

import pytest
from cuda.bindings import driver

from conformance.support import INVALID_DEVICE, INVALID_VALUE, SUCCESS, ok, program
from helpers import device_count

Attribute = driver.CUdevice_attribute

# Of an H100 and an H200 alike; what depends on the machine is left out.
ATTRIBUTES = {
    "MAX_THREADS_PER_BLOCK": 1024,
    "MAX_BLOCK_DIM_Z": 64,
    "MAX_GRID_DIM_X": 2147483647,
    "MAX_GRID_DIM_Y": 65535,
    "MAX_SHARED_MEMORY_PER_BLOCK": 49152,
    "TOTAL_CONSTANT_MEMORY": 65536,
    "WARP_SIZE": 32,
    "MAX_PITCH": 2147483647,
    "MAX_REGISTERS_PER_BLOCK": 65536,
    "TEXTURE_ALIGNMENT": 512,
    "MULTIPROCESSOR_COUNT": 132,
    "KERNEL_EXEC_TIMEOUT": 0,
    "INTEGRATED": 0,
    "CAN_MAP_HOST_MEMORY": 1,
    "COMPUTE_MODE": 0,
    "MAXIMUM_TEXTURE1D_WIDTH": 131072,
    "MAXIMUM_TEXTURE2D_WIDTH": 131072,
    "MAXIMUM_TEXTURE2D_HEIGHT": 65536,
    "MAXIMUM_TEXTURE3D_WIDTH": 16384,
    "MAXIMUM_TEXTURE2D_LAYERED_LAYERS": 2048,
    "SURFACE_ALIGNMENT": 512,
    "CONCURRENT_KERNELS": 1,
    "TCC_DRIVER": 0,
    "MAX_THREADS_PER_MULTIPROCESSOR": 2048,
    "UNIFIED_ADDRESSING": 1,
    "TEXTURE_PITCH_ALIGNMENT": 32,
    "MAXIMUM_SURFACE2D_WIDTH": 131072,
    "MAXIMUM_TEXTURE1D_LINEAR_WIDTH": 268435456,
    "MAXIMUM_TEXTURE2D_LINEAR_PITCH": 2097120,
    "COMPUTE_CAPABILITY_MAJOR": 9,
    "COMPUTE_CAPABILITY_MINOR": 0,
    "STREAM_PRIORITIES_SUPPORTED": 1,
    "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": 233472,
    "MAX_REGISTERS_PER_MULTIPROCESSOR": 65536,
    "MANAGED_MEMORY": 1,
    "CONCURRENT_MANAGED_ACCESS": 1,
    "COOPERATIVE_LAUNCH": 1,
    "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 232448,
    "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": 1,
    "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED": 1,
    "HANDLE_TYPE_WIN32_HANDLE_SUPPORTED": 0,
    "MAX_BLOCKS_PER_MULTIPROCESSOR": 32,
    "RESERVED_SHARED_MEMORY_PER_BLOCK": 1024,
    "MEMORY_POOLS_SUPPORTED": 1,
    "CLUSTER_LAUNCH": 1,
    "CAN_USE_64_BIT_STREAM_MEM_OPS": 1,
    "CAN_USE_STREAM_WAIT_VALUE_NOR": 1,
    "IPC_EVENT_SUPPORTED": 1,
    "MEM_SYNC_DOMAIN_COUNT": 4,
    "TENSOR_MAP_ACCESS_SUPPORTED": 1,
}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_an_attribute(name):
    attribute = getattr(Attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    assert ok(driver.cuDeviceGetAttribute(attribute, 0)) == ATTRIBUTES[name]


@pytest.mark.parametrize("device", [-1, 99])
@pytest.mark.parametrize(
    "call",
    [
        pytest.param(driver.cuDeviceGet, id="get"),
        pytest.param(lambda device: driver.cuDeviceGetName(16, device), id="name"),
        pytest.param(driver.cuDeviceGetUuid, id="uuid"),
        pytest.param(driver.cuDeviceTotalMem, id="memory"),
        pytest.param(lambda device: driver.cuDeviceGetPCIBusId(13, device), id="bus"),
        pytest.param(driver.cuDeviceComputeCapability, id="capability"),
    ],
)
def test_there_is_no_such_device(call, device):
    assert call(device)[0] == INVALID_DEVICE


def test_the_compute_capability():
    assert ok(driver.cuDeviceComputeCapability(0)) == (9, 0)


def test_the_properties_of_a_device():
    found = ok(driver.cuDeviceGetProperties(0))
    names = ("maxThreadsPerBlock", "maxThreadsDim", "maxGridSize", "SIMDWidth", "regsPerBlock")
    expected = [1024, [1024, 1024, 64], [2147483647, 65535, 65535], 32, 65536]
    assert [getattr(found, name) for name in names] == expected


Limit = driver.CUlimit


@pytest.mark.parametrize(
    ("limit", "value"),
    [
        (Limit.CU_LIMIT_STACK_SIZE, 1024),
        (Limit.CU_LIMIT_MALLOC_HEAP_SIZE, 8 << 20),
        (Limit.CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT, 2048),
        (Limit.CU_LIMIT_MAX_L2_FETCH_GRANULARITY, 64),
        (Limit.CU_LIMIT_SHMEM_SIZE, 232448),
    ],
)
def test_a_limit(limit, value):
    assert ok(driver.cuCtxGetLimit(limit)) == value


@pytest.mark.parametrize(
    ("limit", "least"),
    [
        (Limit.CU_LIMIT_STACK_SIZE, {16}),
        (Limit.CU_LIMIT_PRINTF_FIFO_SIZE, {512 << 10}),
        (Limit.CU_LIMIT_MALLOC_HEAP_SIZE, {4 << 20}),
        (Limit.CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT, {32}),
        (Limit.CU_LIMIT_MAX_L2_FETCH_GRANULARITY, {3}),
        (Limit.CU_LIMIT_PERSISTING_L2_CACHE_SIZE, {3276800, 3932160}),  # of two H100
    ],
)
def test_a_small_limit_is_raised(limit, least):
    before = ok(driver.cuCtxGetLimit(limit))
    try:
        ok(driver.cuCtxSetLimit(limit, 3))
        assert ok(driver.cuCtxGetLimit(limit)) in least
    finally:
        ok(driver.cuCtxSetLimit(limit, before))
    assert ok(driver.cuCtxGetLimit(limit)) == before


@pytest.mark.parametrize("limit", [Limit.CU_LIMIT_SHMEM_SIZE, Limit.CU_LIMIT_CIG_ENABLED])
def test_a_limit_that_is_not_set(limit):
    before = ok(driver.cuCtxGetLimit(limit))
    assert driver.cuCtxSetLimit(limit, before) == (driver.CUresult.CUDA_ERROR_NOT_PERMITTED,)
    assert driver.cuCtxSetLimit(limit, 3) == (driver.CUresult.CUDA_ERROR_NOT_PERMITTED,)
    assert ok(driver.cuCtxGetLimit(limit)) == before


def test_a_limit_of_other_devices():
    unsupported = driver.CUresult.CUDA_ERROR_UNSUPPORTED_LIMIT
    assert driver.cuCtxGetLimit(Limit.CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH)[0] == unsupported
    assert driver.cuCtxSetLimit(Limit.CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH, 2) == (unsupported,)


def test_a_device_is_found_by_its_bus():
    shown = ok(driver.cuDeviceGetPCIBusId(13, 0))
    assert int(ok(driver.cuDeviceGetByPCIBusId(shown))) == 0


@pytest.mark.parametrize(("bus", "result"), [(b"nonsense", INVALID_VALUE), (b"", INVALID_VALUE)])
def test_no_device_is_found_by_nonsense(bus, result):
    assert driver.cuDeviceGetByPCIBusId(bus)[0] == result


def test_no_device_is_found_by_a_bus_that_is_not_there():
    assert driver.cuDeviceGetByPCIBusId(b"ffff:ff:1f.0")[0] == INVALID_DEVICE


def test_the_profiler_may_be_started_and_stopped():
    assert driver.cuProfilerStart() == (SUCCESS,)
    assert driver.cuProfilerStop() == (SUCCESS,)


# ---- CUDA_VISIBLE_DEVICES ---------------------------------------------------

# Without the bindings, which take long to import.
UUIDS = """
import ctypes
driver = ctypes.CDLL("libcuda.so.1")
result, count, uuid = driver.cuInit(0), ctypes.c_int(), ctypes.create_string_buffer(16)
if result == 0:
    driver.cuDeviceGetCount(ctypes.byref(count))
print(result)
for device in range(count.value):
    driver.cuDeviceGetUuid_v2(uuid, device)
    print(uuid.raw.hex())
"""
NO_DEVICE = "100"


def visible(devices: str) -> list[str]:
    """The result of cuInit, and the UUIDs of the devices."""
    return program(UUIDS, CUDA_VISIBLE_DEVICES=devices).split()


def uuid_of(device: int) -> str:
    return bytes(ok(driver.cuDeviceGetUuid(device)).bytes).hex()


@pytest.mark.parametrize("devices", ["", "-1", "99", "nonsense", "-1,0", "GPU-"])
def test_no_device_is_visible(devices):
    assert visible(devices) == [NO_DEVICE]


@pytest.mark.parametrize("devices", ["0", "0,99", "0,-1", "0,nonsense,0", " 0"])
def test_what_comes_before_an_invalid_entry_is_visible(devices):
    assert visible(devices) == ["0", uuid_of(0)]


@pytest.mark.parametrize("length", [36, 13], ids=["all of it", "its beginning"])
def test_a_device_is_visible_by_its_uuid(length):
    name = f"GPU-{uuid.UUID(uuid_of(0))}"
    beginning = name[: len("GPU-") + length]
    if length < 36 and device_count() > 1:
        pytest.skip("the beginning may be that of several devices")
    assert visible(beginning) == ["0", uuid_of(0)]


def test_no_device_is_named_twice():
    assert visible("0,0") == [str(int(INVALID_DEVICE))]


@pytest.mark.multi_device
def test_visible_devices_are_numbered_anew():
    assert visible("1,0") == ["0", uuid_of(1), uuid_of(0)]
