"""What cuda.core makes of the driver: its graphs, as its own tests use them."""

from __future__ import annotations

import ctypes

import pytest
from cuda.bindings import driver
from cuda.core import (
    ContextOptions,
    Device,
    DeviceMemoryResource,
    GraphMemoryResource,
    SMResourceOptions,
    StreamOptions,
)
from cuda.core.graph import GraphCompleteOptions, GraphDefinition

from conformance.support import finishes, ok
from userstream.testing import latch

SIZE = 64


@pytest.fixture
def device(context):
    """The current context is the primary one, which cuda.core uses."""
    device = Device(0)
    device.set_current()
    return device


@pytest.fixture
def core_stream(device):
    stream = device.create_stream()
    yield stream
    stream.close()


@pytest.fixture
def buffer(device, core_stream):
    buffer = DeviceMemoryResource(device).allocate(SIZE, stream=core_stream)
    yield buffer
    buffer.close(stream=core_stream)
    core_stream.sync()


def contents(buffer, stream):
    host = bytearray(SIZE)
    ok(driver.cuMemcpyDtoHAsync(host_address(host), int(buffer.handle), SIZE, stream.handle))
    stream.sync()
    return bytes(host)


def host_address(host):

    return ctypes.addressof((ctypes.c_char * len(host)).from_buffer(host))


def launched(graph, stream):
    graph.upload(stream)
    graph.launch(stream)
    stream.sync()


def test_a_builder_splits_and_joins(device, core_stream, buffer):
    builder = device.create_graph_builder().begin_building()
    left, right = builder.split(2)
    buffer.fill(1, stream=left)
    builder = type(builder).join(left, right)
    assert builder.is_building
    graph = builder.end_building().complete()
    launched(graph, core_stream)
    assert contents(buffer, core_stream) == b"\1" * SIZE


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_memory_that_a_graph_allocates_and_frees(device, core_stream, buffer, mode):
    builder = device.create_graph_builder().begin_building(mode)
    inside = GraphMemoryResource(device).allocate(SIZE, stream=builder)
    inside.fill(3, stream=builder)
    buffer.copy_from(inside, stream=builder)
    inside.close()
    graph = builder.end_building().complete()
    for _ in range(2):
        buffer.fill(0, stream=core_stream)
        launched(graph, core_stream)
        assert contents(buffer, core_stream) == b"\3" * SIZE


def test_memory_that_a_graph_gives_out(device, core_stream, buffer):
    builder = device.create_graph_builder().begin_building()
    out = GraphMemoryResource(device).allocate(SIZE, stream=builder)
    out.copy_from(buffer, stream=builder)
    graph = builder.end_building().complete(GraphCompleteOptions(auto_free_on_launch=True))
    for value in (1, 2):
        buffer.fill(value, stream=core_stream)
        launched(graph, core_stream)
        assert contents(out, core_stream) == bytes([value]) * SIZE
    del graph, builder
    assert contents(out, core_stream) == b"\2" * SIZE
    out.close(stream=core_stream)
    core_stream.sync()


def test_graph_memory_has_attributes(device, core_stream):
    resource = GraphMemoryResource(device)
    builder = device.create_graph_builder().begin_building()
    out = resource.allocate(1024, stream=builder)
    graph = builder.end_building().complete()
    launched(graph, core_stream)
    assert resource.attributes.reserved_mem_current > 0
    assert resource.attributes.used_mem_high > 0
    out.close(stream=core_stream)
    core_stream.sync()
    resource.trim()
    assert resource.attributes.reserved_mem_high > 0
    resource.attributes.reserved_mem_high = 0
    resource.attributes.used_mem_high = 0


def test_a_definition_of_a_graph(device, core_stream, buffer):
    definition = GraphDefinition()
    node = definition.allocate(SIZE)
    filled = node.memset(node.dptr, 5, SIZE)
    copied = filled.memcpy(int(buffer.handle), node.dptr, SIZE)
    copied.deallocate(node.dptr)
    launched(definition.instantiate(), core_stream)
    assert contents(buffer, core_stream) == b"\5" * SIZE
    assert len(definition.nodes()) == 4
    assert len(definition.edges()) == 3


def test_an_embedded_definition(device, core_stream):
    called = []
    child, definition = GraphDefinition(), GraphDefinition()
    child.callback(lambda: called.append("child"))
    definition.embed(child)
    launched(definition.instantiate(), core_stream)
    assert called == ["child"]


def test_an_update(device, core_stream):
    called = []
    old, new = GraphDefinition(), GraphDefinition()
    old.callback(lambda: called.append("old"))
    new.callback(lambda: called.append("new"))
    graph = old.instantiate()
    with latch(core_stream):
        graph.launch(core_stream)
        graph.update(new)
    launched(graph, core_stream)
    assert called == ["old", "new"]


def test_an_update_to_another_topology(device, core_stream):
    one, two = GraphDefinition(), GraphDefinition()
    one.empty()
    two.empty()
    two.empty()
    with pytest.raises(Exception, match="CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED"):
        one.instantiate().update(two)


def test_a_stream_of_a_builder_can_be_closed_after_the_join(device, core_stream):
    origin, event = device.create_stream(), device.create_event()
    pulled_in = device.create_stream()
    ok(driver.cuStreamBeginCapture(origin.handle, driver.CUstreamCaptureMode(2)))
    origin.record(event)
    pulled_in.wait(event)
    pulled_in.record(event)
    origin.wait(event)
    pulled_in.close()
    ok(driver.cuGraphDestroy(ok(driver.cuStreamEndCapture(origin.handle))))
    assert finishes(origin.handle)
    origin.close()


# ---- green contexts ---------------------------------------------------------


@pytest.fixture
def green(device):
    groups, _ = device.resources.sm.split(SMResourceOptions(count=16))
    context = device.create_context(ContextOptions(resources=[groups[0]]))
    yield context
    context.close()


def test_the_multiprocessors_of_a_device(device):
    resource = device.resources.sm
    assert resource.sm_count > 0
    assert resource.min_partition_size > 0
    assert resource.coscheduled_alignment > 0


def test_a_split(device):
    resource = device.resources.sm
    groups, rest = resource.split(SMResourceOptions(count=None))
    assert len(groups) == 1
    assert groups[0].sm_count % resource.coscheduled_alignment == 0
    assert groups[0].sm_count + rest.sm_count == resource.sm_count


def test_a_green_context(green, buffer, core_stream):
    assert green.is_green
    assert green.resources.sm.sm_count == 16
    stream = green.create_stream()
    assert stream.context == green
    core_stream.sync()  # the allocation
    buffer.fill(7, stream=stream)
    event = stream.record()
    assert event.context == green
    core_stream.wait(event)
    assert contents(buffer, core_stream) == b"\7" * SIZE
    stream.close()


def test_a_green_context_can_be_current(device, green):
    before = device.set_current(green)
    try:
        assert int(ok(driver.cuCtxGetCurrent())) == int(green.handle)
        with pytest.raises(RuntimeError, match="while it is current"):
            green.close()
    finally:
        assert device.set_current(before) is green


def test_a_green_stream_outlives_the_wrapper_of_its_context(device):
    groups, _ = device.resources.sm.split(SMResourceOptions(count=16))
    green = device.create_context(ContextOptions(resources=[groups[0]]))
    stream = green.create_stream()
    green.close()
    stream.record().sync()
    stream.sync()
    stream.close()


def test_green_streams_do_not_block(green):
    with pytest.raises(ValueError, match="non-blocking"):
        green.create_stream(StreamOptions(nonblocking=False))
