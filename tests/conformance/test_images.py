"""Images: what PTX says of its kernels and variables, and what launches may ask for."""

from __future__ import annotations

import ctypes

import pytest
from cuda.bindings import driver

from conformance.support import (
    INVALID_CONTEXT,
    INVALID_HANDLE,
    INVALID_VALUE,
    SUCCESS,
    Result,
    elsewhere,
    ok,
)

NOT_FOUND = Result.CUDA_ERROR_NOT_FOUND
Attribute = driver.CUfunction_attribute
MAX_THREADS = Attribute.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK
SHARED = Attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
DYNAMIC = Attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES

PTX = b"""
// A comment with .entry inside(.param .u64 a)
.version 7.0
.target sm_70
.address_size 64

.visible .global .align 4 .u32 counter = 7;
.visible .const .align 8 .b8 table[24];
.visible .global .align 16 .v4 .f32 vectors[3];
/* .entry neither */
.func helper(.param .b32 a) { ret; }

.visible .entry plain(
    .param .u64 plain_0,
    .param .u8 plain_1,
    .param .u32 plain_2,
    .param .align 8 .b8 plain_3[24]
)
{
    .reg .b32 r;
    ret;
}
.visible .entry limited(.param .u64 limited_0)
.maxntid 128, 1, 1
{
    .shared .align 4 .b8 s[1024];
    .reg .b32 r;
    mov.u32 r, s;
    st.shared.u32 [r], r;
    ret;
}
.visible .entry exact()
.reqntid 32, 2, 1
{ ret; }
.visible .entry nothing()
{ ret; }
"""


@pytest.fixture
def module():
    loaded = ok(driver.cuModuleLoadData(PTX))
    yield loaded
    ok(driver.cuModuleUnload(loaded))


@pytest.fixture
def library():
    loaded = ok(driver.cuLibraryLoadData(PTX, [], [], 0, [], [], 0))
    yield loaded
    ok(driver.cuLibraryUnload(loaded))


@pytest.mark.parametrize("name", [b"plain", b"limited", b"exact", b"nothing"])
def test_a_kernel_of_the_image_is_found(module, library, name):
    assert int(ok(driver.cuModuleGetFunction(module, name)))
    assert int(ok(driver.cuLibraryGetKernel(library, name)))


@pytest.mark.parametrize("name", [b"helper", b"inside", b"neither", b"counter", b"Plain", b""])
def test_what_is_no_kernel_is_not_found(module, library, name):
    assert driver.cuModuleGetFunction(module, name)[0] == NOT_FOUND
    assert driver.cuLibraryGetKernel(library, name)[0] == NOT_FOUND


def test_the_kernels_are_counted(module, library):
    assert ok(driver.cuModuleGetFunctionCount(module)) == 4
    assert ok(driver.cuLibraryGetKernelCount(library)) == 4


def test_the_kernels_are_listed(module):
    listed = ok(driver.cuModuleEnumerateFunctions(4, module))
    names = {ok(driver.cuFuncGetName(function)) for function in listed}
    assert names == {b"plain", b"limited", b"exact", b"nothing"}


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        (b"plain", [(0, 8), (8, 1), (12, 4), (16, 24)]),
        (b"limited", [(0, 8)]),
        (b"exact", []),
    ],
)
def test_the_parameters_of_a_kernel(module, library, name, parameters):
    function = ok(driver.cuModuleGetFunction(module, name))
    kernel = ok(driver.cuLibraryGetKernel(library, name))
    for index, expected in enumerate(parameters):
        assert ok(driver.cuFuncGetParamInfo(function, index)) == expected
        assert ok(driver.cuKernelGetParamInfo(kernel, index)) == expected
    assert driver.cuFuncGetParamInfo(function, len(parameters))[0] == INVALID_VALUE
    assert driver.cuKernelGetParamInfo(kernel, len(parameters))[0] == INVALID_VALUE


def test_without_a_context_nothing_is_known_of_parameters(library):
    kernel = ok(driver.cuLibraryGetKernel(library, b"plain"))
    assert elsewhere(lambda: driver.cuKernelGetParamInfo(kernel, 0))[0] == INVALID_CONTEXT


@pytest.mark.parametrize(
    ("name", "attribute", "value"),
    [
        (b"limited", MAX_THREADS, 128),
        (b"exact", MAX_THREADS, 64),
        (b"nothing", MAX_THREADS, 1024),
        (b"limited", SHARED, 1024),
        (b"nothing", SHARED, 0),
        (b"nothing", DYNAMIC, 49152),
        (b"limited", DYNAMIC, 48128),
        (b"nothing", Attribute.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, 0),
    ],
)
def test_an_attribute_of_a_kernel(module, name, attribute, value):
    function = ok(driver.cuModuleGetFunction(module, name))
    assert ok(driver.cuFuncGetAttribute(attribute, function)) == value


@pytest.mark.parametrize(
    ("size", "result"), [(232448, SUCCESS), (232449, INVALID_VALUE), (0, SUCCESS)]
)
def test_dynamic_shared_memory_may_be_raised(module, size, result):
    function = ok(driver.cuModuleGetFunction(module, b"nothing"))
    assert driver.cuFuncSetAttribute(function, DYNAMIC, size) == (result,)


def test_static_shared_memory_takes_part_of_it(module):
    function = ok(driver.cuModuleGetFunction(module, b"limited"))
    assert driver.cuFuncSetAttribute(function, DYNAMIC, 232448 - 1024) == (SUCCESS,)
    assert driver.cuFuncSetAttribute(function, DYNAMIC, 232448 - 1023) == (INVALID_VALUE,)


@pytest.mark.parametrize(
    ("name", "grid", "block", "shared"),
    [
        (b"nothing", (0, 1, 1), (1, 1, 1), 0),
        (b"nothing", (1, 1, 1), (0, 1, 1), 0),
        (b"nothing", (1, 1, 1), (1025, 1, 1), 0),
        (b"nothing", (1, 1, 1), (64, 32, 1), 0),
        (b"nothing", (1, 1, 1), (1, 1, 65), 0),
        (b"nothing", (1, 65536, 1), (1, 1, 1), 0),
        (b"nothing", (1, 1, 65536), (1, 1, 1), 0),
        (b"nothing", (1, 1, 1), (1, 1, 1), 49153),
        (b"exact", (1, 1, 1), (128, 1, 1), 0),
    ],
)
def test_a_launch_that_asks_for_too_much(module, stream, name, grid, block, shared):
    function = ok(driver.cuModuleGetFunction(module, name))
    assert driver.cuLaunchKernel(function, *grid, *block, shared, stream, 0, 0) == (INVALID_VALUE,)


@pytest.mark.parametrize(("name", "size"), [(b"counter", 4), (b"table", 24), (b"vectors", 48)])
def test_a_variable_of_the_image(module, library, name, size):
    address, found = ok(driver.cuModuleGetGlobal(module, name))
    assert found == size
    source = (ctypes.c_ubyte * size)(*range(size))
    ok(driver.cuMemcpyHtoD(address, source, size))
    target = (ctypes.c_ubyte * size)()
    ok(driver.cuMemcpyDtoH(target, address, size))
    assert list(target) == list(range(size))
    assert ok(driver.cuLibraryGetGlobal(library, name))[1] == size


@pytest.mark.parametrize("name", [b"none", b"plain", b""])
def test_what_is_no_variable(module, name):
    assert driver.cuModuleGetGlobal(module, name)[0] == NOT_FOUND


# ---- occupancy --------------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "blocks"),
    [(32, 32), (64, 32), (128, 16), (256, 8), (512, 4), (1000, 2), (1024, 2), (1025, 0)],
)
def test_threads_limit_the_blocks(module, block, blocks):
    function = ok(driver.cuModuleGetFunction(module, b"nothing"))
    assert ok(driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, block, 0)) == blocks


@pytest.mark.parametrize(
    ("shared", "blocks"), [(0, 32), (6 << 10, 32), (8 << 10, 25), (48 << 10, 4), (49153, 0)]
)
def test_shared_memory_limits_the_blocks(module, shared, blocks):
    function = ok(driver.cuModuleGetFunction(module, b"nothing"))
    assert ok(driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, 32, shared)) == blocks


def test_more_threads_than_the_kernel_allows_do_not_fit(module):
    function = ok(driver.cuModuleGetFunction(module, b"limited"))
    assert ok(driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, 129, 0)) == 0


@pytest.mark.parametrize("block", [0, -1])
def test_no_threads_are_refused(module, block):
    function = ok(driver.cuModuleGetFunction(module, b"nothing"))
    result = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, block, 0)[0]
    assert result == INVALID_VALUE


def test_no_function_has_an_occupancy():
    nothing = driver.CUfunction(0)
    result = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(nothing, 32, 0)[0]
    assert result == INVALID_HANDLE


@pytest.mark.parametrize(("blocks", "most"), [(1, 49152), (2, 49152), (8, 28160), (32, 6272)])
def test_dynamic_shared_memory_that_is_available(module, blocks, most):
    function = ok(driver.cuModuleGetFunction(module, b"nothing"))
    assert ok(driver.cuOccupancyAvailableDynamicSMemPerBlock(function, blocks, 32)) == most
