"""Memory that graphs allocate: one address, anew in each launch, there until it is freed."""

from __future__ import annotations

import ctypes

import pytest
from cuda.bindings import driver

from conformance.support import (
    INVALID_VALUE,
    SUCCESS,
    Capture,
    finishes,
    node_types,
    ok,
)
from userstream.testing import latch

SIZE = 256
AUTO_FREE = int(driver.CUgraphInstantiate_flags.CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH)
Type = driver.CUgraphNodeType
ALLOC, FREE = int(Type.CU_GRAPH_NODE_TYPE_MEM_ALLOC), int(Type.CU_GRAPH_NODE_TYPE_MEM_FREE)
Attribute = driver.CUgraphMem_attribute
USED = Attribute.CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT
USED_HIGH = Attribute.CU_GRAPH_MEM_ATTR_USED_MEM_HIGH
RESERVED = Attribute.CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT
RESERVED_HIGH = Attribute.CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH


def contents(address, size=SIZE):
    host = ctypes.create_string_buffer(size)
    ok(driver.cuMemcpyDtoH(ctypes.addressof(host), address, size))
    return host.raw


class Allocating:
    """A graph that allocates, fills, and perhaps frees."""

    def __init__(self, graphs, stream, value=1, free=False, flags=0):
        with Capture(stream) as capture:
            self.address = int(ok(driver.cuMemAllocAsync(SIZE, stream)))
            ok(driver.cuMemsetD8Async(self.address, value, SIZE, stream))
            if free:
                ok(driver.cuMemFreeAsync(self.address, stream))
            self.graph = graphs.keep(ok(capture.end()))
        self.executable = graphs.instantiate(self.graph, flags)

    def launch(self, stream):
        return driver.cuGraphLaunch(self.executable, stream)


def test_the_nodes_of_an_allocation_and_of_a_free(graphs, stream):
    graph = Allocating(graphs, stream, free=True).graph
    assert {ALLOC, FREE} < set(node_types(graph))


def test_a_launch_makes_the_memory(graphs, stream):
    allocating = Allocating(graphs, stream, value=7)
    ok(allocating.launch(stream))
    assert finishes(stream)
    assert contents(allocating.address) == b"\7" * SIZE
    ok(driver.cuMemFreeAsync(allocating.address, stream))
    assert finishes(stream)


def test_the_memory_may_be_used_by_what_is_queued_after_the_launch(graphs, stream, memory):
    allocating = Allocating(graphs, stream, value=7)
    with latch(stream):
        ok(allocating.launch(stream))
        ok(driver.cuMemcpyDtoDAsync(memory, allocating.address, SIZE, stream))
        ok(driver.cuMemFreeAsync(allocating.address, stream))
    assert finishes(stream)
    assert contents(memory) == b"\7" * SIZE


def test_the_memory_outlives_the_graph(graphs, stream):
    allocating = Allocating(graphs, stream, value=7)
    ok(allocating.launch(stream))
    assert finishes(stream)
    graphs.destroy()
    assert contents(allocating.address) == b"\7" * SIZE
    ok(driver.cuMemsetD8Async(allocating.address, 8, SIZE, stream))
    assert finishes(stream)
    assert contents(allocating.address) == b"\x08" * SIZE
    assert driver.cuMemFreeAsync(allocating.address, stream) == (SUCCESS,)
    assert finishes(stream)


def test_the_memory_can_be_freed_at_once(graphs, stream):
    allocating = Allocating(graphs, stream)
    ok(allocating.launch(stream))
    assert finishes(stream)
    assert driver.cuMemFree(allocating.address) == (SUCCESS,)
    assert driver.cuMemFree(allocating.address) == (INVALID_VALUE,)


def test_a_graph_that_frees_can_be_launched_again(graphs, stream):
    allocating = Allocating(graphs, stream, free=True)
    with latch(stream):
        for _ in range(3):
            ok(allocating.launch(stream))
    assert finishes(stream)


def test_a_graph_whose_memory_is_not_freed_cannot_be_launched_again(graphs, stream):
    allocating = Allocating(graphs, stream)
    ok(allocating.launch(stream))
    assert allocating.launch(stream) == (INVALID_VALUE,)
    ok(driver.cuMemFreeAsync(allocating.address, stream))
    assert allocating.launch(stream) == (SUCCESS,)
    ok(driver.cuMemFreeAsync(allocating.address, stream))
    assert finishes(stream)


def test_each_launch_has_the_same_address(graphs, stream, memory):
    """The free of the first and the second launch are queued before either has run."""
    allocating = Allocating(graphs, stream, value=7)
    with latch(stream):
        for _ in range(2):
            ok(allocating.launch(stream))
            ok(driver.cuMemcpyDtoDAsync(memory, allocating.address, SIZE, stream))
            ok(driver.cuMemFreeAsync(allocating.address, stream))
    assert finishes(stream)
    assert contents(memory) == b"\7" * SIZE


@pytest.mark.simulated
def test_each_launch_makes_the_memory_anew(graphs, stream):
    """A real device leaves there what was there."""
    with Capture(stream) as capture:
        address = int(ok(driver.cuMemAllocAsync(SIZE, stream)))
        graph = graphs.keep(ok(capture.end()))
    executable = graphs.instantiate(graph)
    for _ in range(2):
        ok(driver.cuGraphLaunch(executable, stream))
        assert finishes(stream)
        assert contents(address) == b"\xcd" * SIZE
        ok(driver.cuMemsetD8Async(address, 7, SIZE, stream))
        ok(driver.cuMemFreeAsync(address, stream))
        assert finishes(stream)


def test_what_is_left_is_freed_by_the_next_launch_if_the_graph_is_told_to(graphs, stream):
    allocating = Allocating(graphs, stream, value=7, flags=AUTO_FREE)
    with latch(stream):
        for _ in range(3):
            assert allocating.launch(stream) == (SUCCESS,)
    assert finishes(stream)
    assert contents(allocating.address) == b"\7" * SIZE
    ok(driver.cuMemFreeAsync(allocating.address, stream))
    assert finishes(stream)


def test_a_graph_frees_what_another_allocated(graphs, stream):
    allocating = Allocating(graphs, stream)
    freeing = graphs.instantiate(
        graphs.capture(stream, lambda: ok(driver.cuMemFreeAsync(allocating.address, stream)))
    )
    for _ in range(2):
        ok(allocating.launch(stream))
        ok(driver.cuGraphLaunch(freeing, stream))
    assert finishes(stream)
    assert driver.cuMemFreeAsync(allocating.address, stream) == (INVALID_VALUE,)


def test_a_graph_frees_memory_once(graphs, stream):
    with Capture(stream) as capture:
        address = ok(driver.cuMemAllocAsync(SIZE, stream))
        ok(driver.cuMemFreeAsync(address, stream))
        assert driver.cuMemFreeAsync(address, stream) == (INVALID_VALUE,)
        graphs.keep(ok(capture.end()))


def test_a_graph_frees_only_memory_of_graphs(graphs, stream):
    address = ok(driver.cuMemAllocAsync(SIZE, stream))
    with Capture(stream):
        assert driver.cuMemFreeAsync(address, stream) == (INVALID_VALUE,)
    ok(driver.cuMemFreeAsync(address, stream))
    assert finishes(stream)


def test_memory_that_no_launch_has_made_cannot_be_freed(graphs, stream):
    allocating = Allocating(graphs, stream)
    assert driver.cuMemFreeAsync(allocating.address, stream) == (INVALID_VALUE,)
    assert driver.cuMemFree(allocating.address) == (INVALID_VALUE,)


@pytest.mark.simulated
def test_the_end_of_a_graph_frees_nobody_elses_memory(graphs, stream):
    """The memory that it allocated was freed, and others have got the address since."""
    allocating = Allocating(graphs, stream)
    ok(allocating.launch(stream))
    ok(driver.cuMemFreeAsync(allocating.address, stream))
    assert finishes(stream)
    others = [int(ok(driver.cuMemAlloc(SIZE))) for _ in range(64)]
    graphs.destroy()
    others += [int(ok(driver.cuMemAlloc(SIZE))) for _ in range(64)]
    for other in others:
        assert driver.cuMemsetD8(other, 1, SIZE) == (SUCCESS,)
        assert driver.cuMemFree(other) == (SUCCESS,)


@pytest.mark.simulated
def test_memory_that_is_not_there_yet_is_refused(graphs, stream):
    allocating = Allocating(graphs, stream)
    assert driver.cuMemsetD8Async(allocating.address, 1, SIZE, stream) == (INVALID_VALUE,)


@pytest.mark.simulated
def test_the_memory_of_a_device_is_limited_for_graphs_too(graphs, stream):
    free, _ = ok(driver.cuMemGetInfo())
    with Capture(stream) as capture:
        ok(driver.cuMemAllocAsync(free + 1, stream))
        graph = graphs.keep(ok(capture.end()))
    executable = graphs.instantiate(graph)
    out_of_memory = driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    assert driver.cuGraphLaunch(executable, stream) == (out_of_memory,)


# ---- nodes ------------------------------------------------------------------


def allocation_node(graph):
    parameters = driver.CUDA_MEM_ALLOC_NODE_PARAMS()
    parameters.poolProps.allocType = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    parameters.poolProps.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    parameters.poolProps.location.id = 0
    parameters.bytesize = SIZE
    node = ok(driver.cuGraphAddMemAllocNode(graph, None, 0, parameters))
    return node, int(parameters.dptr)


def test_nodes_that_allocate_and_free(context, graphs, stream, memory):
    graph = graphs.create()
    first, address = allocation_node(graph)
    fill = driver.CUDA_MEMSET_NODE_PARAMS()
    fill.dst, fill.value, fill.elementSize, fill.width, fill.height = address, 9, 1, SIZE, 1
    filling = ok(driver.cuGraphAddMemsetNode(graph, [first], 1, fill, context))
    copy = driver.CUDA_MEMCPY3D()
    copy.srcMemoryType = copy.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    copy.srcDevice, copy.dstDevice = address, memory
    copy.WidthInBytes, copy.Height, copy.Depth = SIZE, 1, 1
    copying = ok(driver.cuGraphAddMemcpyNode(graph, [filling], 1, copy, context))
    freeing = ok(driver.cuGraphAddMemFreeNode(graph, [copying], 1, address))
    assert int(ok(driver.cuGraphMemAllocNodeGetParams(first)).dptr) == address
    assert int(ok(driver.cuGraphMemFreeNodeGetParams(freeing))) == address
    assert int(ok(driver.cuGraphMemsetNodeGetParams(filling)).value) == 9
    executable = graphs.instantiate(graph)
    for _ in range(2):
        ok(driver.cuMemsetD8(memory, 0, SIZE))
        ok(driver.cuCtxSynchronize())  # a fill does not wait for itself
        ok(driver.cuGraphLaunch(executable, stream))
        assert finishes(stream)
        assert contents(memory) == b"\x09" * SIZE


# ---- attributes -------------------------------------------------------------


def attribute(which):
    return int(ok(driver.cuDeviceGetGraphMemAttribute(0, which)))


def reset_mark(which):
    ok(driver.cuDeviceSetGraphMemAttribute(0, which, driver.cuuint64_t(0)))


def test_memory_of_graphs_is_accounted(graphs, stream):
    ok(driver.cuDeviceGraphMemTrim(0))
    allocating = Allocating(graphs, stream)
    ok(allocating.launch(stream))
    assert finishes(stream)
    assert attribute(USED) >= SIZE
    assert attribute(RESERVED) >= attribute(USED)
    assert attribute(USED_HIGH) >= attribute(USED)
    assert attribute(RESERVED_HIGH) >= attribute(RESERVED)
    ok(driver.cuMemFreeAsync(allocating.address, stream))
    assert finishes(stream)


def test_memory_of_graphs_is_given_back_by_a_trim(graphs, stream):
    allocating = Allocating(graphs, stream)
    ok(allocating.launch(stream))
    ok(driver.cuMemFreeAsync(allocating.address, stream))
    assert finishes(stream)
    graphs.destroy()
    before = attribute(RESERVED)
    ok(driver.cuDeviceGraphMemTrim(0))
    assert attribute(RESERVED) < before
    reset_mark(USED_HIGH)
    reset_mark(RESERVED_HIGH)
    assert attribute(RESERVED_HIGH) <= before


@pytest.mark.parametrize("which", [USED, RESERVED], ids=["used", "reserved"])
def test_only_marks_can_be_set(which):
    value = driver.cuuint64_t(0)
    assert driver.cuDeviceSetGraphMemAttribute(0, which, value) == (INVALID_VALUE,)
