"""The functions of the CUDA runtime, through cuda.bindings.runtime."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from cuda.bindings import driver, runtime

from conformance.support import ADD_PTX, CUDA_12, elsewhere, no_context, ok
from helpers import run_python

pytestmark = pytest.mark.usefixtures("no_runtime_error")

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


MAP_HOST = 8


def test_the_flags_of_a_device():
    """Those for core dumps have no effect on a context that is there."""
    for flags, expected in ((4, 4), (1, 1), (16, 16), (MAP_HOST, 0), (32, 0), (0, 0)):
        right(runtime.cudaSetDeviceFlags(flags))
        assert right(runtime.cudaGetDeviceFlags()) == expected | MAP_HOST
        assert ok(driver.cuCtxGetFlags()) == expected | MAP_HOST
    assert runtime.cudaSetDeviceFlags(3) == (INVALID_VALUE,)


def test_flags_are_asked_for_without_a_context():
    def use():
        assert right(runtime.cudaGetDeviceFlags()) & MAP_HOST
        return int(ok(driver.cuCtxGetCurrent()))

    assert elsewhere(use) == 0


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


# ---- properties -------------------------------------------------------------

# Those whose names differ from the attributes'.
PROPERTIES = {
    "accessPolicyMaxWindowSize": ["MaxAccessPolicyWindowSize"],
    "ipcEventSupported": ["IpcEventSupport"],
    "major": ["ComputeCapabilityMajor"],
    "minor": ["ComputeCapabilityMinor"],
    "maxGridSize": ["MaxGridDimX", "MaxGridDimY", "MaxGridDimZ"],
    "maxThreadsDim": ["MaxBlockDimX", "MaxBlockDimY", "MaxBlockDimZ"],
    "maxSurface2D": ["MaxSurface2DWidth", "MaxSurface2DHeight"],
    "maxSurfaceCubemapLayered": ["MaxSurfaceCubemapLayeredWidth", "MaxSurfaceCubemapLayeredLayers"],
    "maxTexture1D": ["MaxTexture1DWidth"],
    "maxTexture1DMipmap": ["MaxTexture1DMipmappedWidth"],
    "maxTexture2DLinear": [
        "MaxTexture2DLinearWidth",
        "MaxTexture2DLinearHeight",
        "MaxTexture2DLinearPitch",
    ],
    "maxTexture2DLayered": [
        "MaxTexture2DLayeredWidth",
        "MaxTexture2DLayeredHeight",
        "MaxTexture2DLayeredLayers",
    ],
    "maxTexture3DAlt": ["MaxTexture3DWidthAlt", "MaxTexture3DHeightAlt", "MaxTexture3DDepthAlt"],
    "maxTextureCubemap": ["MaxTextureCubemapWidth"],
    "memPitch": ["MaxPitch"],
    "memoryBusWidth": ["GlobalMemoryBusWidth"],
    "persistingL2CacheMaxSize": ["MaxPersistingL2CacheSize"],
    "regsPerBlock": ["MaxRegistersPerBlock"],
    "regsPerMultiprocessor": ["MaxRegistersPerMultiprocessor"],
    "reservedSharedMemPerBlock": ["ReservedSharedMemoryPerBlock"],
    "sharedMemPerBlock": ["MaxSharedMemoryPerBlock"],
    "sharedMemPerBlockOptin": ["MaxSharedMemoryPerBlockOptin"],
    "sharedMemPerMultiprocessor": ["MaxSharedMemoryPerMultiprocessor"],
    "totalConstMem": ["TotalConstantMemory"],
}


def attributes_of(name):
    """The attributes that a property of a device should have the values of."""
    named = {attribute.name.lower(): attribute for attribute in runtime.cudaDeviceAttr}
    names = PROPERTIES.get(name, [name])
    return [named.get(f"cudaDevAttr{one}".lower()) for one in names]


def properties():
    names = (name for name in dir(runtime.cudaDeviceProp()) if not name.startswith("_"))
    return [name for name in names if all(attributes_of(name))]


@pytest.mark.parametrize("name", properties())
def test_a_property_is_what_the_attributes_are(name):
    found = getattr(right(runtime.cudaGetDeviceProperties(0)), name)
    expected = [right(runtime.cudaDeviceGetAttribute(one, 0)) for one in attributes_of(name)]
    assert (found if isinstance(found, list) else [found]) == expected


def test_the_name_memory_and_uuid_of_a_device():
    found = right(runtime.cudaGetDeviceProperties(0))
    assert found.name.split(b"\0")[0] == ok(driver.cuDeviceGetName(256, 0)).split(b"\0")[0]
    assert found.totalGlobalMem == ok(driver.cuDeviceTotalMem(0))
    assert bytes(found.uuid.bytes) == bytes(ok(driver.cuDeviceGetUuid(0)).bytes)


@pytest.mark.parametrize("device", [-1, 99])
def test_no_device_has_properties(device):
    assert runtime.cudaGetDeviceProperties(device)[0] == INVALID_DEVICE


# ---- kernels ----------------------------------------------------------------


@pytest.fixture
def kernel():
    library = right(runtime.cudaLibraryLoadData(ADD_PTX, [], [], 0, [], [], 0))
    yield right(runtime.cudaLibraryGetKernel(library, b"conformance_add"))
    right(runtime.cudaLibraryUnload(library))


def test_a_library_is_one_of_the_driver(kernel):
    assert ok(driver.cuKernelGetName(driver.CUkernel(int(kernel)))) == b"conformance_add"


def test_the_occupancy_of_a_kernel(kernel):
    count = runtime.cudaOccupancyMaxActiveBlocksPerMultiprocessor
    same = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor
    expected = ok(same(driver.CUfunction(int(kernel)), 128, 0))
    assert right(count(int(kernel), 128, 0)) == expected > 0


def test_what_a_kernel_may_have(kernel):
    attribute = runtime.cudaFuncAttribute.cudaFuncAttributeMaxDynamicSharedMemorySize
    right(runtime.cudaFuncSetAttribute(int(kernel), attribute, 65536))
    found = right(runtime.cudaFuncGetAttributes(int(kernel)))
    assert (found.maxThreadsPerBlock, found.maxDynamicSharedSizeBytes) == (1024, 65536)


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


def test_rows_that_are_padded():
    address, pitch = right(runtime.cudaMallocPitch(10, 4))
    assert pitch >= 10
    source, target = np.arange(40, dtype=np.uint8), np.zeros(40, np.uint8)
    kind = Kind.cudaMemcpyDefault
    right(runtime.cudaMemcpy2D(address, pitch, source.ctypes.data, 10, 10, 4, kind))
    right(runtime.cudaMemcpy2D(target.ctypes.data, 10, address, pitch, 10, 4, kind))
    assert (source == target).all()
    right(runtime.cudaFree(address))


@pytest.mark.multi_device
def test_a_copy_between_devices(buffer, other_context):
    source, target = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    right(runtime.cudaMemcpy(buffer, source, 64, Kind.cudaMemcpyHostToDevice))
    there = elsewhere(lambda: right(runtime.cudaMalloc(64)), other_context)
    right(runtime.cudaMemcpyPeer(there, 1, buffer, 0, 64))
    right(runtime.cudaMemset(buffer, 0, 64))
    right(runtime.cudaMemcpyPeer(buffer, 0, there, 1, 64))
    right(runtime.cudaMemcpy(target, buffer, 64, Kind.cudaMemcpyDeviceToHost))
    assert (source == target).all()
    right(runtime.cudaFree(there))


def test_a_pool(runtime_stream):
    properties = runtime.cudaMemPoolProps()
    properties.allocType = runtime.cudaMemAllocationType.cudaMemAllocationTypePinned
    properties.location.type = runtime.cudaMemLocationType.cudaMemLocationTypeDevice
    pool = right(runtime.cudaMemPoolCreate(properties))
    address = right(runtime.cudaMallocFromPoolAsync(64, pool, runtime_stream))
    access = right(runtime.cudaMemPoolGetAccess(pool, properties.location))
    assert access == runtime.cudaMemAccessFlags.cudaMemAccessFlagsProtReadWrite
    right(runtime.cudaFreeAsync(address, runtime_stream))
    right(runtime.cudaStreamSynchronize(runtime_stream))
    right(runtime.cudaMemPoolDestroy(pool))


def test_advice_on_managed_memory(runtime_stream):
    address = right(runtime.cudaMallocManaged(4096, 1))
    place = 0
    if not CUDA_12:
        place = runtime.cudaMemLocation()
        place.type = runtime.cudaMemLocationType.cudaMemLocationTypeDevice
    advice = runtime.cudaMemoryAdvise.cudaMemAdviseSetReadMostly
    right(runtime.cudaMemAdvise(address, 4096, advice, place))
    flags = () if CUDA_12 else (0,)
    right(runtime.cudaMemPrefetchAsync(address, 4096, place, *flags, runtime_stream))
    right(runtime.cudaStreamSynchronize(runtime_stream))
    asked = runtime.cudaMemRangeAttribute.cudaMemRangeAttributeReadMostly
    assert right(runtime.cudaMemRangeGetAttribute(4, asked, address, 4096)) == 1
    right(runtime.cudaFree(address))


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


@pytest.fixture
def runtime_graph():
    graph = right(runtime.cudaGraphCreate(0))
    yield graph
    right(runtime.cudaGraphDestroy(graph))


def run_graph(graph, stream):
    executable = right(runtime.cudaGraphInstantiate(graph, 0))
    right(runtime.cudaGraphLaunch(executable, stream))
    right(runtime.cudaStreamSynchronize(stream))
    right(runtime.cudaGraphExecDestroy(executable))


def fill(address, value):
    parameters = runtime.cudaMemsetParams()
    parameters.dst, parameters.value = address, value
    parameters.elementSize, parameters.width, parameters.height = 1, 64, 1
    return parameters


def test_a_fill_and_then_a_copy(buffer, runtime_stream, runtime_graph):
    host = right(runtime.cudaMallocHost(64))
    first = right(runtime.cudaGraphAddMemsetNode(runtime_graph, None, 0, fill(buffer, 5)))
    kind = Kind.cudaMemcpyDefault
    add = runtime.cudaGraphAddMemcpyNode1D
    right(add(runtime_graph, [first], 1, host, buffer, 64, kind))
    run_graph(runtime_graph, runtime_stream)
    assert set(ctypes.string_at(host, 64)) == {5}
    right(runtime.cudaGraphMemsetNodeSetParams(first, fill(buffer, 6)))
    run_graph(runtime_graph, runtime_stream)
    assert set(ctypes.string_at(host, 64)) == {6}
    right(runtime.cudaFreeHost(host))


def test_a_kernel_of_a_graph(kernel, buffer, runtime_stream, runtime_graph):
    right(runtime.cudaMemset(buffer, 0, 64))
    parameters = runtime.cudaKernelNodeParams()
    parameters.func = int(kernel)
    for name, size in {"gridDim": 1, "blockDim": 16}.items():
        whole = getattr(parameters, name)
        whole.x, whole.y, whole.z = size, 1, 1
    types = (ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
    parameters.kernelParams = ((int(buffer), 16, 3), types)
    right(runtime.cudaGraphAddKernelNode(runtime_graph, None, 0, parameters))
    run_graph(runtime_graph, runtime_stream)
    target = np.zeros(16, np.int32)
    right(runtime.cudaMemcpy(target, buffer, 64, Kind.cudaMemcpyDeviceToHost))
    assert target.tolist() == [3] * 16


def test_an_event_of_a_graph(runtime_stream, runtime_graph):
    event = right(runtime.cudaEventCreate())
    first = right(runtime.cudaGraphAddEventRecordNode(runtime_graph, None, 0, event))
    right(runtime.cudaGraphAddEventWaitNode(runtime_graph, [first], 1, event))
    assert int(right(runtime.cudaGraphEventRecordNodeGetEvent(first))) == int(event)
    run_graph(runtime_graph, runtime_stream)
    right(runtime.cudaEventSynchronize(event))
    right(runtime.cudaEventDestroy(event))


def test_edges_and_types(runtime_graph):
    first = right(runtime.cudaGraphAddEmptyNode(runtime_graph, None, 0))
    second = right(runtime.cudaGraphAddEmptyNode(runtime_graph, None, 0))
    no_data = () if CUDA_12 else (None,)
    right(runtime.cudaGraphAddDependencies(runtime_graph, [first], [second], *no_data, 1))
    count = right(runtime.cudaGraphGetEdges(runtime_graph, 0))[-1]
    found = right(runtime.cudaGraphNodeGetDependencies(second, 1))[0]
    assert (count, [int(node) for node in found]) == (1, [int(first)])
    kind = right(runtime.cudaGraphNodeGetType(first))
    assert kind == runtime.cudaGraphNodeType.cudaGraphNodeTypeEmpty
    right(runtime.cudaGraphDestroyNode(second))
    assert right(runtime.cudaGraphGetRootNodes(runtime_graph, 0))[1] == 1


def test_a_node_is_switched_off(buffer, runtime_stream, runtime_graph):
    right(runtime.cudaMemset(buffer, 0, 64))
    node = right(runtime.cudaGraphAddMemsetNode(runtime_graph, None, 0, fill(buffer, 5)))
    executable = right(runtime.cudaGraphInstantiate(runtime_graph, 0))
    right(runtime.cudaGraphNodeSetEnabled(executable, node, 0))
    assert right(runtime.cudaGraphNodeGetEnabled(executable, node)) == 0
    right(runtime.cudaGraphLaunch(executable, runtime_stream))
    right(runtime.cudaStreamSynchronize(runtime_stream))
    target = np.ones(64, np.uint8)
    right(runtime.cudaMemcpy(target, buffer, 64, Kind.cudaMemcpyDeviceToHost))
    assert (target == 0).all()
    right(runtime.cudaGraphExecDestroy(executable))


def test_what_is_captured(buffer, runtime_stream):
    mode = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
    right(runtime.cudaStreamBeginCapture(runtime_stream, mode))
    right(runtime.cudaMemsetAsync(buffer, 5, 64, runtime_stream))
    found = right(runtime.cudaStreamGetCaptureInfo(runtime_stream))
    assert found[0] == runtime.cudaStreamCaptureStatus.cudaStreamCaptureStatusActive
    graph = right(runtime.cudaStreamEndCapture(runtime_stream))
    assert right(runtime.cudaGraphGetNodes(graph, 0))[1] == 1
    right(runtime.cudaGraphDestroy(graph))


def test_memory_and_events_have_handles_for_other_processes(buffer):
    flags = runtime.cudaEventInterprocess | runtime.cudaEventDisableTiming
    event = right(runtime.cudaEventCreateWithFlags(flags))
    handles = (
        right(runtime.cudaIpcGetMemHandle(buffer)),
        right(runtime.cudaIpcGetEventHandle(event)),
    )
    assert all(any(ctypes.string_at(int(handle.getPtr()), 64)) for handle in handles)
    right(runtime.cudaEventDestroy(event))


# ---- nodes of any type ------------------------------------------------------

Type = runtime.cudaGraphNodeType


def node_of(kind, part=None, **fields):
    """Parameters of a node; `part` is the member for its type."""
    made = runtime.cudaGraphNodeParams()
    made.type = kind
    if part:
        described = getattr(made, part)
        for name, value in fields.items():
            setattr(described, name, value)
        setattr(made, part, described)
    return made


def add(graph, parameters, *dependencies):
    edges = () if CUDA_12 else (None,)
    call = runtime.cudaGraphAddNode
    return right(call(graph, list(dependencies), *edges, len(dependencies), parameters))


def filling(address, value):
    fields = {"dst": address, "value": value, "elementSize": 1, "width": 64, "height": 1}
    return node_of(Type.cudaGraphNodeTypeMemset, "memset", **fields)


def to_host(target, address):
    """A copy of 64 bytes."""
    copy = runtime.cudaMemcpy3DParms()
    for name, pointer in {"srcPtr": address, "dstPtr": target}.items():
        rows = runtime.cudaPitchedPtr()
        rows.ptr, rows.pitch, rows.xsize, rows.ysize = pointer, 64, 64, 1
        setattr(copy, name, rows)
    size = runtime.cudaExtent()
    size.width, size.height, size.depth = 64, 1, 1
    copy.extent, copy.kind = size, Kind.cudaMemcpyDefault
    return copy


@pytest.fixture
def host():
    address = int(right(runtime.cudaMallocHost(64)))
    ctypes.memset(address, 0, 64)
    yield address
    right(runtime.cudaFreeHost(address))


def test_nodes_that_fill_launch_and_copy(kernel, buffer, host, runtime_stream, runtime_graph):
    first = add(runtime_graph, filling(buffer, 0))
    parameters = node_of(Type.cudaGraphNodeTypeKernel)
    launch = parameters.kernel
    launch.func = int(kernel)
    for name, size in {"gridDim": 1, "blockDim": 16}.items():
        whole = getattr(launch, name)
        whole.x, whole.y, whole.z = size, 1, 1
    launch.kernelParams = ((int(buffer), 16, 3), (ctypes.c_void_p, ctypes.c_int, ctypes.c_int))
    second = add(runtime_graph, parameters, first)
    copy = to_host(host, int(buffer))
    add(runtime_graph, node_of(Type.cudaGraphNodeTypeMemcpy, "memcpy", copyParams=copy), second)
    run_graph(runtime_graph, runtime_stream)
    assert list((ctypes.c_int * 16).from_address(host)) == [3] * 16


def test_nodes_that_allocate_and_free(host, runtime_stream, runtime_graph):
    properties = runtime.cudaMemPoolProps()
    properties.allocType = runtime.cudaMemAllocationType.cudaMemAllocationTypePinned
    properties.location.type = runtime.cudaMemLocationType.cudaMemLocationTypeDevice
    fields = {"poolProps": properties, "bytesize": 64}
    parameters = node_of(Type.cudaGraphNodeTypeMemAlloc, "alloc", **fields)
    allocated = add(runtime_graph, parameters)
    address = int(parameters.alloc.dptr)
    filled = add(runtime_graph, filling(address, 5), allocated)
    copied = right(
        runtime.cudaGraphAddMemcpyNode(runtime_graph, [filled], 1, to_host(host, address))
    )
    add(runtime_graph, node_of(Type.cudaGraphNodeTypeMemFree, "free", dptr=address), copied)
    run_graph(runtime_graph, runtime_stream)
    assert set(ctypes.string_at(host, 64)) == {5}


def test_nodes_for_events_children_and_nothing(buffer, runtime_stream, runtime_graph):
    event, child = right(runtime.cudaEventCreate()), right(runtime.cudaGraphCreate(0))
    add(child, filling(buffer, 4))
    first = add(runtime_graph, node_of(Type.cudaGraphNodeTypeGraph, "graph", graph=child))
    kind = Type.cudaGraphNodeTypeEventRecord
    second = add(runtime_graph, node_of(kind, "eventRecord", event=event), first)
    kind = Type.cudaGraphNodeTypeWaitEvent
    third = add(runtime_graph, node_of(kind, "eventWait", event=event), second)
    add(runtime_graph, node_of(Type.cudaGraphNodeTypeEmpty), third)
    run_graph(runtime_graph, runtime_stream)
    right(runtime.cudaEventQuery(event))
    target = np.zeros(64, np.uint8)
    right(runtime.cudaMemcpy(target, buffer, 64, Kind.cudaMemcpyDeviceToHost))
    assert (target == 4).all()
    right(runtime.cudaEventDestroy(event))
    right(runtime.cudaGraphDestroy(child))


@pytest.mark.parametrize(("value", "expected"), [(0, 0), (1, 5)])
def test_a_node_with_a_condition(buffer, runtime_stream, runtime_graph, value, expected):
    right(runtime.cudaMemset(buffer, 0, 64))
    assign_default = 1
    handle = right(runtime.cudaGraphConditionalHandleCreate(runtime_graph, value, assign_default))
    kind = runtime.cudaGraphConditionalNodeType.cudaGraphCondTypeIf
    fields = {"handle": handle, "type": kind, "size": 1}
    parameters = node_of(Type.cudaGraphNodeTypeConditional, "conditional", **fields)
    add(runtime_graph, parameters)
    add(parameters.conditional.phGraph_out[0], filling(buffer, 5))
    run_graph(runtime_graph, runtime_stream)
    target = np.ones(64, np.uint8)
    right(runtime.cudaMemcpy(target, buffer, 64, Kind.cudaMemcpyDeviceToHost))
    assert (target == expected).all()


def test_other_parameters_of_a_node_of_any_type(buffer, host, runtime_stream, runtime_graph):
    node = add(runtime_graph, filling(buffer, 1))
    copied = right(
        runtime.cudaGraphAddMemcpyNode(runtime_graph, [node], 1, to_host(host, int(buffer)))
    )
    right(runtime.cudaGraphNodeSetParams(node, filling(buffer, 2)))
    executable = right(runtime.cudaGraphInstantiate(runtime_graph, 0))
    for change, expected in (
        (lambda: (SUCCESS,), {2}),
        (lambda: runtime.cudaGraphExecNodeSetParams(executable, node, filling(buffer, 3)), {3}),
    ):
        right(change())
        right(runtime.cudaGraphLaunch(executable, runtime_stream))
        right(runtime.cudaStreamSynchronize(runtime_stream))
        assert set(ctypes.string_at(host, 64)) == expected
    assert runtime.cudaGraphNodeSetParams(copied, filling(buffer, 2)) == (INVALID_VALUE,)
    right(runtime.cudaGraphExecDestroy(executable))


def test_nodes_that_cannot_be(buffer, host, runtime_graph):
    edges = () if CUDA_12 else (None,)
    nothing = to_host(host, int(buffer))
    size = nothing.extent
    size.height = 0
    nothing.extent = size
    for parameters, expected in (
        (node_of(Type.cudaGraphNodeTypeKernel), Error.cudaErrorInvalidDeviceFunction),
        (node_of(Type.cudaGraphNodeTypeMemcpy, "memcpy", copyParams=nothing), INVALID_VALUE),
    ):
        answer = runtime.cudaGraphAddNode(runtime_graph, [], *edges, 0, parameters)
        assert answer[0] == expected
    node = right(runtime.cudaGraphAddMemcpyNode(runtime_graph, None, 0, to_host(host, int(buffer))))
    assert runtime.cudaGraphMemcpyNodeSetParams(node, nothing) == (INVALID_VALUE,)


def test_an_executable_graph_copies_lines_alone(buffer, host, runtime_graph):
    copy = to_host(host, int(buffer))
    node = right(runtime.cudaGraphAddMemcpyNode(runtime_graph, None, 0, copy))
    executable = right(runtime.cudaGraphInstantiate(runtime_graph, 0))
    size = copy.extent
    size.width, size.height = 32, 2
    copy.extent = size
    for name in ("srcPtr", "dstPtr"):
        rows = getattr(copy, name)
        rows.pitch, rows.ysize = 32, 2
        setattr(copy, name, rows)
    answer = runtime.cudaGraphExecMemcpyNodeSetParams(executable, node, copy)
    assert answer == (INVALID_VALUE,)
    right(runtime.cudaGraphExecDestroy(executable))


def test_the_copy_of_a_node(buffer, host, runtime_stream, runtime_graph):
    copy = to_host(host, int(buffer))
    node = right(runtime.cudaGraphAddMemcpyNode(runtime_graph, None, 0, copy))
    found = right(runtime.cudaGraphMemcpyNodeGetParams(node))
    assert (int(found.srcPtr.ptr), int(found.dstPtr.ptr)) == (int(buffer), host)
    assert (found.extent.width, found.extent.height, found.extent.depth) == (64, 1, 1)
    assert (found.srcPtr.pitch, found.srcPtr.xsize, found.srcPtr.ysize) == (64, 0, 1)
    assert found.kind == Kind.cudaMemcpyDefault
    other = right(runtime.cudaMalloc(64))
    right(runtime.cudaMemset(other, 6, 64))
    right(runtime.cudaGraphMemcpyNodeSetParams(node, to_host(host, int(other))))
    executable = right(runtime.cudaGraphInstantiate(runtime_graph, 0))
    for source, expected in ((None, {6}), (buffer, {7})):
        if source:
            right(runtime.cudaMemset(buffer, 7, 64))
            changed = to_host(host, int(source))
            right(runtime.cudaGraphExecMemcpyNodeSetParams(executable, node, changed))
        right(runtime.cudaGraphLaunch(executable, runtime_stream))
        right(runtime.cudaStreamSynchronize(runtime_stream))
        assert set(ctypes.string_at(host, 64)) == expected
    right(runtime.cudaGraphExecDestroy(executable))
    right(runtime.cudaFree(other))
