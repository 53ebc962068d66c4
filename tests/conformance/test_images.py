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
    finishes,
    ok,
)
from userstream import testing

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


@pytest.mark.parametrize("name", [b"helper", b"inside", b"neither", b"counter", b"Plain"])
def test_what_is_no_kernel_is_not_found(module, library, name):
    assert driver.cuModuleGetFunction(module, name)[0] == NOT_FOUND
    assert driver.cuLibraryGetKernel(library, name)[0] == NOT_FOUND


def test_an_empty_name_is_refused_by_modules_alone(module, library):
    assert driver.cuModuleGetFunction(module, b"")[0] == INVALID_VALUE
    assert driver.cuLibraryGetKernel(library, b"")[0] == NOT_FOUND


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
        (b"exact", MAX_THREADS, 1024),
        (b"nothing", MAX_THREADS, 1024),
        (b"limited", SHARED, 1024),
        (b"nothing", SHARED, 0),
        (b"nothing", DYNAMIC, 49152),
        (b"limited", DYNAMIC, 48128),
        (b"nothing", Attribute.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, 0),
        (b"nothing", Attribute.CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES, 24),
        (b"nothing", Attribute.CU_FUNC_ATTRIBUTE_PTX_VERSION, 70),
        (b"nothing", Attribute.CU_FUNC_ATTRIBUTE_BINARY_VERSION, 90),
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
        (b"limited", (1, 1, 1), (129, 1, 1), 0),
        (b"exact", (1, 1, 1), (128, 1, 1), 0),
        (b"exact", (1, 1, 1), (64, 1, 1), 0),
        (b"exact", (1, 1, 1), (2, 32, 1), 0),
        (b"exact", (1, 1, 1), (32, 1, 1), 0),
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


@testing.kernel("exact")
def exact(grid, block): ...


@pytest.mark.parametrize("block", [(32, 2, 1), (1, 1, 1)])
def test_a_launch_with_the_required_block(module, stream, block):
    function = ok(driver.cuModuleGetFunction(module, b"exact"))
    assert driver.cuLaunchKernel(function, 1, 1, 1, *block, 0, stream, 0, 0) == (SUCCESS,)
    assert finishes(stream)


@pytest.mark.parametrize(
    ("name", "result"),
    [(b"none", NOT_FOUND), (b"helper", NOT_FOUND), (b"plain", INVALID_VALUE), (b"", INVALID_VALUE)],
)
def test_what_is_no_variable(module, library, name, result):
    assert driver.cuModuleGetGlobal(module, name)[0] == result
    assert driver.cuLibraryGetGlobal(library, name)[0] == result


@pytest.mark.parametrize(
    ("name", "result"), [(b"none", NOT_FOUND), (b"counter", NOT_FOUND), (b"", INVALID_VALUE)]
)
def test_nothing_is_managed(library, name, result):
    assert driver.cuLibraryGetManaged(library, name)[0] == result
    assert driver.cuLibraryGetUnifiedFunction(library, name)[0] == INVALID_VALUE


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


def test_what_the_kernel_allows_does_not_limit_the_blocks(module):
    function = ok(driver.cuModuleGetFunction(module, b"limited"))
    assert ok(driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, 129, 0)) == 12


@pytest.mark.parametrize("block", [0, -1])
def test_no_threads_are_refused(module, block):
    function = ok(driver.cuModuleGetFunction(module, b"nothing"))
    result = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, block, 0)[0]
    assert result == INVALID_VALUE


def test_no_function_has_an_occupancy():
    nothing = driver.CUfunction(0)
    result = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(nothing, 32, 0)[0]
    assert result == INVALID_HANDLE


@pytest.mark.parametrize(
    ("name", "blocks", "most"),
    [
        (b"nothing", 1, 49152),
        (b"nothing", 2, 49152),
        (b"nothing", 5, 46592),
        (b"nothing", 8, 29184),
        (b"nothing", 31, 7424),
        (b"nothing", 32, 7296),
        (b"limited", 4, 48128),
        (b"limited", 5, 45568),
        (b"limited", 32, 6272),
    ],
)
def test_dynamic_shared_memory_that_is_available(module, name, blocks, most):
    function = ok(driver.cuModuleGetFunction(module, name))
    assert ok(driver.cuOccupancyAvailableDynamicSMemPerBlock(function, blocks, 32)) == most


@pytest.mark.parametrize(("blocks", "block"), [(0, 32), (-1, 32), (33, 32), (3, 1024), (1, 1025)])
def test_no_shared_memory_for_blocks_that_do_not_fit(module, blocks, block):
    function = ok(driver.cuModuleGetFunction(module, b"nothing"))
    result = driver.cuOccupancyAvailableDynamicSMemPerBlock(function, blocks, block)[0]
    assert result == INVALID_VALUE


@pytest.mark.parametrize(
    ("name", "shared", "limit", "best"),
    [
        (b"nothing", 0, 0, (264, 1024)),
        (b"nothing", 0, 500, (1056, 256)),
        (b"nothing", 20000, 100, (1452, 100)),
        (b"nothing", 0, 100, (4224, 64)),
        (b"limited", 0, 0, (2112, 128)),
        (b"limited", 20000, 1024, (1320, 128)),
    ],
)
def test_the_best_block(module, name, shared, limit, best):
    function = ok(driver.cuModuleGetFunction(module, name))
    found = ok(driver.cuOccupancyMaxPotentialBlockSize(function, None, shared, limit))
    assert found == best


def test_no_block_is_below_nothing(module):
    function = ok(driver.cuModuleGetFunction(module, b"nothing"))
    assert driver.cuOccupancyMaxPotentialBlockSize(function, None, 0, -1)[0] == INVALID_VALUE


def configuration(block=32, cluster=None):
    configured = driver.CUlaunchConfig()
    for name, size in {"gridDimX": 64, "blockDimX": block}.items():
        setattr(configured, name, size)
    configured.gridDimY = configured.gridDimZ = configured.blockDimY = configured.blockDimZ = 1
    if cluster is not None:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        size = attribute.value.clusterDim
        size.x, size.y, size.z = cluster, 1, 1
        configured.attrs, configured.numAttrs = [attribute], 1
    return configured


@pytest.mark.parametrize(
    ("block", "cluster", "clusters"),
    [(32, None, 0), (32, 1, 1056), (32, 2, 528), (256, 2, 528), (1024, 1, 264), (1025, 1, 0)],
)
def test_the_clusters_that_are_active(module, block, cluster, clusters):
    function = ok(driver.cuModuleGetFunction(module, b"nothing"))
    found = ok(driver.cuOccupancyMaxActiveClusters(function, configuration(block, cluster)))
    assert found == clusters


@pytest.mark.parametrize(("cluster", "most"), [(4, 264), (8, 132)])
def test_larger_clusters_do_not_fill_each_gpu(module, cluster, most):
    function = ok(driver.cuModuleGetFunction(module, b"nothing"))
    found = ok(driver.cuOccupancyMaxActiveClusters(function, configuration(32, cluster)))
    assert 0 < found <= most


@pytest.mark.parametrize(("block", "size"), [(32, 8), (1024, 8), (1025, 0)])
def test_the_largest_cluster(module, block, size):
    function = ok(driver.cuModuleGetFunction(module, b"limited"))
    assert ok(driver.cuOccupancyMaxPotentialClusterSize(function, configuration(block))) == size


@pytest.mark.parametrize(
    ("block", "cluster", "result"),
    [
        (0, None, INVALID_VALUE),
        (0, 2, INVALID_VALUE),
        (32, 3, Result.CUDA_ERROR_INVALID_CLUSTER_SIZE),
        (32, 16, Result.CUDA_ERROR_INVALID_CLUSTER_SIZE),
        (0, 32, Result.CUDA_ERROR_INVALID_CLUSTER_SIZE),
    ],
)
def test_a_cluster_that_cannot_be(module, block, cluster, result):
    function = ok(driver.cuModuleGetFunction(module, b"nothing"))
    asked = configuration(block, cluster)
    assert driver.cuOccupancyMaxActiveClusters(function, asked)[0] == result
    assert driver.cuOccupancyMaxPotentialClusterSize(function, asked)[0] == result
