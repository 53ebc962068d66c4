"""Kernels: libraries, modules, launches. On a GPU the PTX runs, else what stands for it here."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver

from conformance.support import (
    ADD_PTX,
    INVALID_HANDLE,
    INVALID_VALUE,
    SUCCESS,
    Capture,
    current,
    finishes,
    no_context,
    ok,
    stays,
)
from userstream import testing

NOT_FOUND = driver.CUresult.CUDA_ERROR_NOT_FOUND
ILLEGAL = driver.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS


@pytest.fixture
def library(context):
    loaded = ok(driver.cuLibraryLoadData(ADD_PTX, [], [], 0, [], [], 0))
    yield loaded
    driver.cuLibraryUnload(loaded)


@pytest.fixture
def kernel(library):
    return ok(driver.cuLibraryGetKernel(library, b"conformance_add"))


@pytest.fixture
def module(context):
    loaded = ok(driver.cuModuleLoadData(ADD_PTX))
    yield loaded
    driver.cuModuleUnload(loaded)


@pytest.fixture
def numbers(memory):
    """The address of 64 zeros."""
    ok(driver.cuMemsetD32(memory, 0, 64))
    return memory


def read(address: int, count: int = 64) -> list[int]:
    host = np.empty(count, np.int32)
    ok(driver.cuMemcpyDtoH(host.ctypes.data, address, host.nbytes))
    return host.tolist()


def arguments(address: int, count: int, value: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    return (address, count, value), (ctypes.c_void_p, ctypes.c_int, ctypes.c_int)


def as_function(kernel: driver.CUkernel) -> driver.CUfunction:
    return driver.CUfunction(int(kernel))


def launch(
    function: driver.CUfunction,
    stream: driver.CUstream,
    address: int,
    *,
    count: int = 64,
    value: int = 1,
    grid: tuple[int, int, int] = (1, 1, 1),
    block: tuple[int, int, int] = (64, 1, 1),
    shared: int = 0,
) -> driver.CUresult:
    values = arguments(address, count, value)
    return driver.cuLaunchKernel(function, *grid, *block, shared, stream, values, 0)[0]


# ---- libraries and modules --------------------------------------------------


def test_a_kernel_of_a_library_has_one_handle(library, kernel):
    assert int(ok(driver.cuLibraryGetKernel(library, b"conformance_add"))) == int(kernel)


def test_what_a_library_does_not_have(library):
    assert driver.cuLibraryGetKernel(library, b"nobody_has_this")[0] == NOT_FOUND


def test_what_a_module_does_not_have(module):
    assert driver.cuModuleGetFunction(module, b"nobody_has_this")[0] == NOT_FOUND


def test_a_library_needs_no_context():
    with no_context():
        library = ok(driver.cuLibraryLoadData(ADD_PTX, [], [], 0, [], [], 0))
        ok(driver.cuLibraryGetKernel(library, b"conformance_add"))
        ok(driver.cuLibraryUnload(library))


def test_a_module_needs_a_context():
    with no_context():
        result = driver.cuModuleLoadData(ADD_PTX)[0]
    assert result == driver.CUresult.CUDA_ERROR_INVALID_CONTEXT


def test_a_file_that_is_not_there():
    missing = driver.CUresult.CUDA_ERROR_FILE_NOT_FOUND
    assert driver.cuModuleLoad(b"/nowhere/kernel.ptx")[0] == missing
    assert driver.cuLibraryLoadFromFile(b"/nowhere/k.ptx", [], [], 0, [], [], 0)[0] == missing


def test_a_file(tmp_path, stream, numbers):
    (tmp_path / "kernel.ptx").write_bytes(ADD_PTX.rstrip(b"\0"))
    module = ok(driver.cuModuleLoad(str(tmp_path / "kernel.ptx").encode()))
    function = ok(driver.cuModuleGetFunction(module, b"conformance_add"))
    assert launch(function, stream, numbers) == SUCCESS
    assert finishes(stream)
    ok(driver.cuModuleUnload(module))
    assert read(numbers) == [1] * 64


def test_a_module_of_a_library(library, kernel):
    module = ok(driver.cuLibraryGetModule(library))
    assert int(ok(driver.cuLibraryGetModule(library))) == int(module)
    function = ok(driver.cuModuleGetFunction(module, b"conformance_add"))
    assert int(ok(driver.cuKernelGetFunction(kernel))) == int(function)
    assert int(ok(driver.cuFuncGetModule(function))) == int(module)


def test_names(kernel):
    assert ok(driver.cuKernelGetName(kernel)) == b"conformance_add"
    assert ok(driver.cuFuncGetName(ok(driver.cuKernelGetFunction(kernel)))) == b"conformance_add"


def test_the_library_of_a_kernel(library, kernel):
    assert int(ok(driver.cuKernelGetLibrary(kernel))) == int(library)


def test_parameters(kernel):
    found = [driver.cuKernelGetParamInfo(kernel, index) for index in range(4)]
    assert [answer[1:3] for answer in found[:3]] == [(0, 8), (8, 4), (12, 4)]
    assert found[3][0] == INVALID_VALUE
    function = ok(driver.cuKernelGetFunction(kernel))
    assert driver.cuFuncGetParamInfo(function, 1)[1:3] == (8, 4)
    assert driver.cuFuncGetParamInfo(function, 3)[0] == INVALID_VALUE


def test_attributes(kernel, contexts):
    most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK
    shared = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    assert ok(driver.cuKernelGetAttribute(most, kernel, 0)) == 1024
    assert ok(driver.cuFuncGetAttribute(most, ok(driver.cuKernelGetFunction(kernel)))) == 1024
    assert ok(driver.cuKernelGetAttribute(shared, kernel, 0)) == 49152
    ok(driver.cuKernelSetAttribute(shared, 65536, kernel, 0))
    assert ok(driver.cuKernelGetAttribute(shared, kernel, 0)) == 65536
    assert driver.cuKernelSetAttribute(shared, 1 << 30, kernel, 0)[0] == INVALID_VALUE
    assert driver.cuKernelSetAttribute(most, 512, kernel, 0)[0] == INVALID_VALUE


# ---- launches ---------------------------------------------------------------


@pytest.fixture(params=["kernel", "function of a kernel", "function of a module"])
def function(request, kernel) -> driver.CUfunction:
    if request.param == "kernel":
        return as_function(kernel)
    if request.param == "function of a kernel":
        return ok(driver.cuKernelGetFunction(kernel))
    module = request.getfixturevalue("module")
    return ok(driver.cuModuleGetFunction(module, b"conformance_add"))


def test_a_launch(function, stream, numbers):
    assert launch(function, stream, numbers, count=10, value=3) == SUCCESS
    assert finishes(stream)
    assert read(numbers) == [3] * 10 + [0] * 54


def test_only_the_threads_of_the_grid_run(function, stream, numbers):
    assert launch(function, stream, numbers, grid=(2, 1, 1), block=(8, 1, 1)) == SUCCESS
    assert finishes(stream)
    assert read(numbers) == [1] * 16 + [0] * 48


def test_a_launch_by_a_configuration(function, stream, numbers):
    config = driver.CUlaunchConfig()
    config.gridDimX = config.gridDimY = config.gridDimZ = 1
    config.blockDimX, config.blockDimY, config.blockDimZ = 64, 1, 1
    config.sharedMemBytes = 0
    config.hStream = stream
    config.numAttrs = 0
    ok(driver.cuLaunchKernelEx(config, function, arguments(numbers, 64, 2), 0))
    assert finishes(stream)
    assert read(numbers) == [2] * 64


def test_a_cooperative_launch(function, stream, numbers):
    values = arguments(numbers, 64, 2)
    shape = 1, 1, 1, 64, 1, 1, 0
    ok(driver.cuLaunchCooperativeKernel(function, *shape, stream, values))
    assert finishes(stream)
    assert read(numbers) == [2] * 64


def test_parameters_in_one_buffer(function, stream, numbers):
    packed = np.array((int(numbers), 64, 5), np.dtype([("x", "u8"), ("n", "i4"), ("v", "i4")]))
    size = ctypes.c_size_t(packed.nbytes)
    extra = (ctypes.c_void_p * 5)(1, packed.ctypes.data, 2, ctypes.addressof(size), 0)
    shape = 1, 1, 1, 64, 1, 1, 0
    ok(driver.cuLaunchKernel(function, *shape, stream, 0, ctypes.addressof(extra)))
    assert finishes(stream)
    assert read(numbers) == [5] * 64


def test_a_buffer_may_end_within_the_parameters(function, stream, numbers):
    packed = np.array((int(numbers), 64, 5), np.dtype([("x", "u8"), ("n", "i4"), ("v", "i4")]))
    size = ctypes.c_size_t(packed.nbytes - 4)
    extra = (ctypes.c_void_p * 5)(1, packed.ctypes.data, 2, ctypes.addressof(size), 0)
    ok(driver.cuLaunchKernel(function, 1, 1, 1, 64, 1, 1, 0, stream, 0, ctypes.addressof(extra)))
    assert finishes(stream)  # what the kernel gets behind the end is not said


def test_a_launch_has_its_turn(function, stream, numbers):
    # The first launch may load the kernel, which waits for the whole context.
    assert launch(function, stream, numbers) == SUCCESS
    ok(driver.cuMemsetD32Async(numbers, 0, 64, stream))
    with testing.latch(stream) as held:
        assert launch(function, stream, numbers) == SUCCESS
        assert stays((driver.CUresult.CUDA_ERROR_NOT_READY,), lambda: driver.cuStreamQuery(stream))
        held.release()
        assert finishes(stream)
    assert read(numbers) == [1] * 64


def test_a_null_stream(function, numbers):
    assert launch(function, driver.CUstream(0), numbers) == SUCCESS
    assert read(numbers) == [1] * 64, "a synchronous copy waits for it"


def test_a_kernel_runs_in_the_context_of_the_stream(kernel, make_stream, other_context, contexts):
    with current(other_context):
        there = ok(driver.cuMemAlloc(256))
    stream = make_stream(context=other_context)
    ok(driver.cuMemsetD32Async(there, 0, 64, stream))
    assert launch(as_function(kernel), stream, int(there)) == SUCCESS
    assert finishes(stream)
    with current(other_context):
        assert read(int(there)) == [1] * 64
        ok(driver.cuMemFree(there))


def test_a_function_is_of_one_context(kernel, make_stream, other_context, numbers):
    function = ok(driver.cuKernelGetFunction(kernel))
    stream = make_stream(context=other_context)
    assert launch(function, stream, numbers) == INVALID_HANDLE


@pytest.mark.parametrize(
    "shape",
    [
        {"grid": (0, 1, 1)},
        {"grid": (1, 65536, 1)},
        {"grid": (1, 1, 65536)},
        {"block": (0, 1, 1)},
        {"block": (1025, 1, 1)},
        {"block": (1, 1, 65)},
        {"block": (32, 32, 2)},
        {"shared": 49153},
    ],
    ids=str,
)
def test_shapes_that_are_too_large(function, stream, numbers, shape):
    assert launch(function, stream, numbers, **shape) == INVALID_VALUE
    assert finishes(stream)


def test_shared_memory_that_was_asked_for(kernel, stream, numbers):
    shared = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    ok(driver.cuKernelSetAttribute(shared, 65536, kernel, 0))
    assert launch(as_function(kernel), stream, numbers, shared=65536) == SUCCESS
    assert finishes(stream)


def test_a_captured_launch(function, stream, numbers):
    with Capture(stream) as capture:
        assert launch(function, stream, numbers) == SUCCESS
        graph = ok(capture.end())
    _, count = ok(driver.cuGraphGetNodes(graph))
    nodes, _ = ok(driver.cuGraphGetNodes(graph, count))
    kernel_node = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
    assert [ok(driver.cuGraphNodeGetType(node)) for node in nodes] == [kernel_node]
    executable = ok(driver.cuGraphInstantiate(graph, 0))
    assert read(numbers) == [0] * 64
    for _ in range(3):
        ok(driver.cuGraphLaunch(executable, stream))
    assert finishes(stream)
    assert read(numbers) == [3] * 64
    ok(driver.cuGraphExecDestroy(executable))
    ok(driver.cuGraphDestroy(graph))


def node_parameters(kernel: driver.CUkernel, address: int, value: int = 1) -> Any:
    parameters = driver.CUDA_KERNEL_NODE_PARAMS()
    parameters.kern = kernel
    parameters.gridDimX = parameters.gridDimY = parameters.gridDimZ = 1
    parameters.blockDimX, parameters.blockDimY, parameters.blockDimZ = 64, 1, 1
    parameters.kernelParams = arguments(address, 64, value)
    return parameters


@pytest.fixture
def graph(context):
    made = ok(driver.cuGraphCreate(0))
    yield made
    driver.cuGraphDestroy(made)


def test_a_node(kernel, stream, graph, numbers):
    first = ok(driver.cuGraphAddKernelNode(graph, None, 0, node_parameters(kernel, numbers, 3)))
    ok(driver.cuGraphAddKernelNode(graph, [first], 1, node_parameters(kernel, numbers, 4)))
    executable = ok(driver.cuGraphInstantiate(graph, 0))
    ok(driver.cuGraphLaunch(executable, stream))
    assert finishes(stream)
    assert read(numbers) == [7] * 64
    ok(driver.cuGraphExecDestroy(executable))


def test_what_a_node_launches(kernel, graph, numbers):
    node = ok(driver.cuGraphAddKernelNode(graph, None, 0, node_parameters(kernel, numbers)))
    assert ok(driver.cuGraphNodeGetType(node)) == driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
    found = ok(driver.cuGraphKernelNodeGetParams(node))
    assert int(found.kern) == int(kernel)
    assert (found.gridDimX, found.blockDimX, found.sharedMemBytes) == (1, 64, 0)


def test_other_parameters_of_a_node(kernel, stream, graph, numbers):
    node = ok(driver.cuGraphAddKernelNode(graph, None, 0, node_parameters(kernel, numbers, 1)))
    old = ok(driver.cuGraphInstantiate(graph, 0))
    ok(driver.cuGraphKernelNodeSetParams(node, node_parameters(kernel, numbers, 10)))
    new = ok(driver.cuGraphInstantiate(graph, 0))
    for executable in (old, new):
        ok(driver.cuGraphLaunch(executable, stream))
    assert finishes(stream)
    assert read(numbers) == [11] * 64, "what was instantiated before stays"
    ok(driver.cuGraphExecDestroy(old))
    ok(driver.cuGraphExecDestroy(new))


def test_other_parameters_of_an_executable_graph(kernel, stream, graph, numbers):
    node = ok(driver.cuGraphAddKernelNode(graph, None, 0, node_parameters(kernel, numbers, 1)))
    executable = ok(driver.cuGraphInstantiate(graph, 0))
    with testing.latch(stream) as held:
        ok(driver.cuGraphLaunch(executable, stream))
        for value in (10, 100):
            changed = node_parameters(kernel, numbers, value)
            ok(driver.cuGraphExecKernelNodeSetParams(executable, node, changed))
        held.release()
    ok(driver.cuGraphLaunch(executable, stream))
    assert finishes(stream)
    assert read(numbers) == [101] * 64, "a launch that is queued is not affected"
    ok(driver.cuGraphExecDestroy(executable))


def test_an_update_by_another_graph(kernel, stream, graph, numbers):
    ok(driver.cuGraphAddKernelNode(graph, None, 0, node_parameters(kernel, numbers, 1)))
    executable = ok(driver.cuGraphInstantiate(graph, 0))
    other = ok(driver.cuGraphCreate(0))
    ok(driver.cuGraphAddKernelNode(other, None, 0, node_parameters(kernel, numbers, 10)))
    ok(driver.cuGraphExecUpdate(executable, other))
    ok(driver.cuGraphDestroy(other))
    ok(driver.cuGraphLaunch(executable, stream))
    assert finishes(stream)
    assert read(numbers) == [10] * 64
    ok(driver.cuGraphExecDestroy(executable))


def test_nodes_that_cannot_be(kernel, graph, numbers):
    too_large = node_parameters(kernel, numbers)
    too_large.blockDimX = 2048
    assert driver.cuGraphAddKernelNode(graph, None, 0, too_large)[0] == INVALID_VALUE
    empty = ok(driver.cuGraphAddEmptyNode(graph, None, 0))
    assert driver.cuGraphKernelNodeGetParams(empty)[0] == INVALID_VALUE
    parameters = node_parameters(kernel, numbers)
    assert driver.cuGraphKernelNodeSetParams(empty, parameters)[0] == INVALID_VALUE


def test_memory_that_is_pinned(function, stream, pinned):
    assert launch(function, stream, pinned) == SUCCESS
    assert finishes(stream)
    assert list((ctypes.c_int * 64).from_address(pinned)) == [1] * 64


@pytest.mark.simulated
def test_an_address_outside_of_every_allocation(function, stream):
    """On a GPU the process is lost: seen there by a program of its own."""
    assert launch(function, stream, 1 << 46) == SUCCESS
    assert driver.cuStreamSynchronize(stream)[0] == ILLEGAL
    assert driver.cuCtxSynchronize()[0] == ILLEGAL
    testing.reset()
