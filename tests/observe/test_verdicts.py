"""Verdicts of `observe` on short programs: what counts as ordered, and what does not."""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver
from cuda.core import LaunchConfig, ObjectCode, PinnedMemoryResource, launch

import userstream as us
from conformance.support import CUDA_12
from helpers import checked, current_context, device_current, device_memory
from observed import (
    LEGACY,
    SIZE,
    Room,
    a_room,
    captured,
    checked_or_busy,
    copy,
    fill,
    handle,
    overwrite,
    until,
)
from userstream.testing import Pointer, kernel, latch, reset

pytestmark = [
    pytest.mark.simulated,
    pytest.mark.no_races(False),  # these tests observe themselves
]

OVERWRITTEN = "host overwrote the source of a copy"
RELAXED = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
EXTERNAL = 1
NEEDS_CORE_POOLS = pytest.mark.skipif(CUDA_12, reason="cuda.core asks for pools as CUDA 13 does")


def kinds(seen: us.Observation) -> list[str]:
    return [race.kind for race in seen.races]


@kernel("verdict_use")
def _use(grid: Any, block: Any, to: Pointer) -> None:
    """Change nothing: that takes several launches to be learned."""


def use(stream: us.Stream, to: int) -> None:
    """Launch a kernel that is assumed to write, because nothing has been learned yet."""
    made = ObjectCode.from_ptx(b"any").get_kernel("verdict_use")
    launch(stream, LaunchConfig(grid=1, block=1), made, to)


# -- destroyed streams ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wait",
    [
        lambda: checked(driver.cuCtxSynchronize()),
        lambda: checked(driver.cuMemFree(checked(driver.cuMemAlloc(SIZE)))),
        lambda: us.wait_for_device(0),
    ],
    ids=["cuCtxSynchronize", "cuMemFree", "wait_for_device"],
)
def test_a_wait_for_the_device_includes_destroyed_streams(wait: Callable[[], object]) -> None:
    with a_room() as room, us.observe() as seen:
        with us.Stream.create(0) as stream:
            fill(room.x, stream)
        wait()
        fill(room.x, room.b)
    assert kinds(seen) == []


def test_an_edge_from_the_context_includes_destroyed_streams() -> None:
    with a_room() as room, us.observe() as seen:
        event = checked(driver.cuEventCreate(0))
        with us.Stream.create(0) as stream:
            fill(room.x, stream)
        checked(driver.cuCtxRecordEvent(current_context(), event))
        checked(driver.cuStreamWaitEvent(handle(room.b), event, 0))
        fill(room.x, room.b)
        checked(driver.cuEventDestroy(event))
    assert kinds(seen) == []


def test_the_legacy_stream_waits_for_destroyed_blocking_streams() -> None:
    with a_room() as room, us.observe() as seen:
        with us.Stream.create(0, nonblocking=False) as stream:
            fill(room.x, stream)
        copy(room.y, room.x, LEGACY)
    assert kinds(seen) == []


def test_destroying_a_stream_orders_nothing() -> None:
    with a_room() as room, us.observe() as seen:
        with us.Stream.create(0) as stream:
            fill(room.x, stream)
        fill(room.x, room.b)
    assert kinds(seen) == ["write after write"]


# -- sources of copies ----------------------------------------------------------------------------


def test_a_staging_buffer_in_both_directions_is_watched() -> None:
    """The GPU has written the buffer before, which does not explain what changes it now."""
    with a_room() as room, us.observe() as seen:
        copy(room.pinned, room.x, room.a)
        room.a.sync()
        overwrite(room.pinned, 1)
        with latch(room.a) as held:
            copy(room.x, room.pinned, room.a)
            overwrite(room.pinned, 2)
            held.release()
            room.a.sync()
    assert kinds(seen) == [OVERWRITTEN]


def test_pinned_memory_of_a_pool_is_watched() -> None:
    properties = driver.CUmemPoolProps()
    properties.allocType = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_HOST
    with a_room() as room:
        pool = checked(driver.cuMemPoolCreate(properties))
        with us.observe() as seen:
            source = int(checked(driver.cuMemAllocFromPoolAsync(SIZE, pool, handle(room.a))))
            room.a.sync()
            overwrite(source, 1)
            with latch(room.a) as held:
                copy(room.x, source, room.a)
                overwrite(source, 2)
                held.release()
                room.a.sync()
            checked(driver.cuMemFreeAsync(source, handle(room.a)))
            room.a.sync()
        checked(driver.cuMemPoolDestroy(pool))
    assert kinds(seen) == [OVERWRITTEN]


def _of_userstream(_: Room) -> Any:
    return us.pinned_empty(SIZE, np.uint8)


def _of_core(room: Room) -> Any:
    buffer = PinnedMemoryResource().allocate(SIZE, stream=room.a)
    room.a.sync()
    return np.from_dlpack(buffer)


@pytest.mark.parametrize("allocated", ["before", "meanwhile", "again"])
@pytest.mark.parametrize("make", [_of_userstream, pytest.param(_of_core, marks=NEEDS_CORE_POOLS)])
def test_pinned_arrays_are_watched(make: Callable[[Room], Any], allocated: str) -> None:
    with a_room() as room:
        array = make(room)
        with us.observe() as seen:
            if allocated == "again":
                copy(room.x, array.ctypes.data, room.a)
                room.a.sync()
                del array
                gc.collect()
            if allocated != "before":
                array = make(room)
            array[:] = 1
            with latch(room.a) as held:
                copy(room.x, array.ctypes.data, room.a)
                array[:] = 2
                held.release()
                room.a.sync()
        assert kinds(seen) == [OVERWRITTEN]


def test_a_copy_into_the_source_that_was_in_flight_at_the_begin_explains_its_change() -> None:
    with a_room() as room:
        fill(room.x, room.a)
        overwrite(room.pinned, 1)
        room.a.sync()
        with latch(room.a) as held:
            copy(room.pinned, room.x, room.a)
            with us.observe() as seen:
                copy(room.y, room.pinned, room.a)
                held.release()
                room.a.sync()
    assert kinds(seen) == []


def test_an_event_from_before_the_observation_stands_for_unseen_work() -> None:
    with a_room() as room:
        fill(room.x, room.a)
        overwrite(room.pinned, 1)
        room.a.sync()
        with latch(room.a) as held:
            copy(room.pinned, room.x, room.a)
            event = checked(driver.cuEventCreate(0))
            checked(driver.cuEventRecord(event, handle(room.a)))
            with us.observe() as seen:
                checked(driver.cuStreamWaitEvent(handle(room.b), event, 0))
                copy(room.y, room.pinned, room.b)
                held.release()
                room.b.sync()
        checked(driver.cuEventDestroy(event))
    assert kinds(seen) == []


def test_once_the_host_has_waited_no_work_from_before_explains_a_change() -> None:
    with a_room() as room, latch(room.a) as before:
        fill(room.x, room.a)
        with us.observe() as seen:
            fill(room.y, room.a)
            before.release()
            room.a.sync()
            overwrite(room.pinned, 1)
            with latch(room.a) as held:
                copy(room.x, room.pinned, room.a)
                overwrite(room.pinned, 2)
                held.release()
                room.a.sync()
    assert kinds(seen) == [OVERWRITTEN]


# -- memory that is freed -------------------------------------------------------------------------


def test_an_address_that_numpy_uses_again_is_not_used_after_free() -> None:
    size = 1 << 21
    met = 0
    with a_room() as room, us.observe() as seen:
        pool = checked(driver.cuDeviceGetDefaultMemPool(0))
        for _ in range(20):
            freed = int(checked(driver.cuMemAllocAsync(size, handle(room.a))))
            checked(driver.cuMemFreeAsync(freed, handle(room.a)))
            room.a.sync()
            checked(driver.cuMemPoolTrimTo(pool, 0))
            arrays = [np.empty(size, np.uint8) for _ in range(8)]
            begins = [array.ctypes.data for array in arrays]
            for begin in begins:
                if begin <= freed <= begin + size - SIZE:
                    met += 1
                    copy(freed, room.x, room.a)
                    room.a.sync()
    if not met:
        pytest.skip("the allocator of the host has not used the address again")
    assert kinds(seen) == []


def test_an_address_that_a_graph_uses_again_is_not_used_after_free() -> None:
    with a_room() as room, us.observe() as seen:
        for _ in range(3):
            freed = int(checked(driver.cuMemAllocAsync(SIZE, handle(room.a))))
            checked(driver.cuMemFreeAsync(freed, handle(room.a)))
            room.a.sync()

            def work() -> None:
                made = int(checked(driver.cuMemAllocAsync(SIZE, handle(room.a))))
                fill(made, room.a)
                checked(driver.cuMemFreeAsync(made, handle(room.a)))

            graph = captured(room, work)
            for stream in (room.a, room.b):
                checked(driver.cuGraphLaunch(graph, handle(stream)))
            room.b.sync()
    assert kinds(seen) == []


def test_advice_on_one_stream_is_not_to_wait_for_itself() -> None:
    with a_room() as room:
        address = int(checked(driver.cuMemAllocAsync(SIZE, handle(room.a))))
        with us.observe() as seen:
            with latch(room.a):
                checked(driver.cuMemFreeAsync(address, handle(room.a)))
                fill(address, room.a)
            driver.cuStreamSynchronize(handle(room.a))
        reset()  # the GPU fails
    (race,) = seen.races
    assert race.kind == "use after free"
    assert "wait for" not in race.advice
    assert "test_verdicts.py" in race.advice


# -- accesses -------------------------------------------------------------------------------------


def test_an_ordered_read_does_not_hide_an_assumed_write() -> None:
    with a_room() as room:
        with us.observe(possible=True) as seen:
            use(room.a, room.x)
            copy(room.y, room.x, room.a)
            copy(room.pinned, room.x, room.b)
            room.a.sync()
            room.b.sync()
    (race,) = seen.races
    assert race.possible
    assert race.first.known == "assumed"


@kernel("verdict_add")
def _add(grid: Any, block: Any, to: Pointer, source: Pointer) -> None:
    to.array(8, np.uint8)[:] += source.array(8, np.uint8) + 1


def races_of_kernel(
    before: Callable[[Room, Callable[[us.Stream], None]], None], *suppress: str
) -> tuple[us.Race, ...]:
    """Return the races of a fill with a kernel that is learned before it, or is not."""
    made = ObjectCode.from_ptx(b"any").get_kernel("verdict_add")
    with a_room() as room:

        def add(stream: us.Stream) -> None:
            launch(stream, LaunchConfig(grid=1, block=1), made, room.y, room.x)

        with us.observe(possible=True, suppress=suppress) as seen:
            before(room, add)
            add(room.a)
            fill(room.y, room.b)
            us.wait_for_device(0)
    return seen.races


def learn(room: Room, add: Callable[[us.Stream], None]) -> None:
    for value in range(6):
        fill(room.x, room.a)
        fill(room.y, room.a, value + 1)
        add(room.a)
        us.wait_for_device(0)


def test_kind_and_key_of_a_race_are_the_same_whether_or_not_a_kernel_is_learned() -> None:
    (assumed,), (learned,) = races_of_kernel(lambda *_: None), races_of_kernel(learn)
    assert (assumed.first.known, learned.first.known) == ("assumed", "learned")
    assert assumed.kind == learned.kind == "write after use"
    assert assumed.key == learned.key


@pytest.mark.parametrize(
    "line",
    [
        "race=use-write",
        "race=read-write",  # of a run that has learned something else
        "race=write-write",
        "race=*-write",
    ],
)
@pytest.mark.parametrize("before", [lambda *_: None, learn], ids=["assumed", "learned"])
def test_a_suppression_of_any_run_holds_in_every_run(
    line: str, before: Callable[..., None]
) -> None:
    lines = "line=test_verdicts.py:* line=observed.py:fill"
    assert races_of_kernel(before, f"{line} {lines}") == ()
    for other in ("race=use-after-free", "memory=pinned"):
        assert len(races_of_kernel(before, f"{other} {lines}")) == 1


# -- contexts and events --------------------------------------------------------------------------


@pytest.mark.parametrize("device", [0, 1])
def test_a_device_wide_edge_orders_its_device_alone(device: int) -> None:
    with a_room() as room, us.observe() as seen:
        fill(room.x, room.a)
        with device_current(device):
            event = checked(driver.cuEventCreate(0))
            context = current_context()
            checked(driver.cuCtxRecordEvent(context, event))
            checked(driver.cuCtxWaitEvent(context, event))
        fill(room.x, room.b)
        checked(driver.cuEventDestroy(event))
    assert kinds(seen) == ([] if device == 0 else ["write after write"])


def test_device_wide_edges_of_two_devices_keep_apart() -> None:
    """The wait of device 1 is for the work of device 0, and orders nothing on device 0."""
    with a_room() as room, us.Stream.create(1) as far, device_memory(1, SIZE) as there:
        event = checked(driver.cuEventCreate(0))
        mine = current_context()
        with us.observe() as seen:
            fill(room.x, room.a)
            checked(driver.cuCtxRecordEvent(mine, event))
            with device_current(1):
                checked(driver.cuCtxWaitEvent(current_context(), event))
            copy(there, room.x, far)
            assert kinds(seen) == []
            copy(room.y, room.x, room.b)
            assert kinds(seen) == ["read after write"]
            far.sync()
        checked(driver.cuEventDestroy(event))


def test_elapsed_time_is_a_wait_for_both_events() -> None:
    with a_room() as room:
        begin, end = (checked(driver.cuEventCreate(0)) for _ in range(2))
        with us.observe() as seen:
            checked(driver.cuEventRecord(begin, handle(room.a)))
            fill(room.x, room.a)
            checked(driver.cuEventRecord(end, handle(room.a)))
            until(lambda: elapsed(begin, end))
            fill(room.x, room.b)
        for event in (begin, end):
            checked(driver.cuEventDestroy(event))
    assert kinds(seen) == []


def elapsed(begin: Any, end: Any) -> bool:
    return checked_or_busy(driver.cuEventElapsedTime(begin, end)[:1])


@pytest.mark.skipif(not hasattr(driver, "cuCtxSynchronize_v2"), reason="needs CUDA 13")
@pytest.mark.parametrize("device", [0, 1])
def test_a_wait_for_a_context_that_is_named(device: int) -> None:
    with device_current(device):
        context = current_context()
    with a_room() as room, us.observe() as seen:
        fill(room.x, room.a)
        checked(driver.cuCtxSynchronize_v2(context))
        fill(room.x, room.b)
    assert kinds(seen) == ([] if device == 0 else ["write after write"])


# -- words in memory ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "waits_for", "found"),
    [
        ([1], 1, []),
        ([1, 1], 1, ["read after write"]),  # the first write ends the wait
        ([1, 2], 1, ["read after write"]),
        ([1, 2], 2, []),
        ([1, 0, 1], 1, ["read after write"]),  # so may the first of these
    ],
)
def test_a_value_that_was_there_before_orders_nothing(
    values: list[int], waits_for: int, found: list[str]
) -> None:
    """All but the last value are written before the work that the wait should be for."""
    with a_room() as room:
        ctypes.c_uint32.from_address(room.pinned).value = 0
        with us.observe(possible=True) as seen:
            for value in values[:-1]:
                room.a.write_value_32(room.pinned, value)
            fill(room.x, room.a)
            room.a.write_value_32(room.pinned, values[-1])
            room.b.wait_value_32(room.pinned, waits_for, us.WaitFlags.GEQ)
            copy(room.y, room.x, room.b)
            room.a.sync()
            room.b.sync()
    assert kinds(seen) == found


def test_a_value_that_was_surely_replaced_before_the_wait_ends_nothing() -> None:
    with a_room() as room, us.observe(possible=True) as seen:
        ctypes.c_uint32.from_address(room.pinned).value = 0
        room.a.write_value_32(room.pinned, 1)
        room.a.write_value_32(room.pinned, 0)
        room.b.wait(room.a)
        fill(room.x, room.a)
        room.a.write_value_32(room.pinned, 1)
        room.b.wait_value_32(room.pinned, 1, us.WaitFlags.GEQ)
        copy(room.y, room.x, room.b)
        us.wait_for_device(0)
    assert kinds(seen) == []


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("before", [5, 6])
def test_a_value_that_was_there_when_the_wait_was_queued_is_no_order(
    before: int, batch: bool
) -> None:
    """The write that follows is not what the wait needed."""
    with a_room() as room:
        ctypes.c_uint32.from_address(room.pinned).value = before
        with us.observe(possible=True) as seen:
            wait_for_value(room, 5, batch=batch)
            fill(room.x, room.a)
            room.a.write_value_32(room.pinned, 5)
            copy(room.y, room.x, room.b)
            us.wait_for_device(0)
    assert kinds(seen) == ["read after write"]


def wait_for_value(room: Room, value: int, *, batch: bool = False) -> None:
    if not batch:
        room.b.wait_value_32(room.pinned, value, us.WaitFlags.GEQ)
        return
    wait = us.WaitValue(room.pinned, value, us.WaitFlags.GEQ)
    room.b.batch_mem_op([wait])


@pytest.mark.parametrize("knows", [True, False])
@pytest.mark.parametrize("batch", [False, True])
def test_a_wait_that_the_host_ends_is_ordered_after_what_the_host_knew(
    knows: bool, batch: bool
) -> None:
    with a_room() as room:
        ctypes.c_uint32.from_address(room.pinned).value = 0
        with us.observe() as seen:
            wait_for_value(room, 1, batch=batch)
            copy(room.y, room.x, room.b)
            fill(room.x, room.a)
            if knows:
                room.a.sync()
            ctypes.c_uint32.from_address(room.pinned).value = 1
            us.wait_for_device(0)
    assert kinds(seen) == ([] if knows else ["write after read"])


def test_an_event_behind_a_wait_is_ordered_after_what_ended_the_wait() -> None:
    with a_room() as room, us.observe() as seen:
        ctypes.c_uint32.from_address(room.pinned).value = 0
        wait_for_value(room, 1)
        event = room.b.record()
        fill(room.x, room.a)
        room.a.write_value_32(room.pinned, 1)
        other = room.stream()
        other.wait(event)
        fill(room.x, other)
        us.wait_for_device(0)
    assert kinds(seen) == []


def test_a_value_in_device_memory_tells_the_host_nothing() -> None:
    """Only a kernel that gets its address, or a copy of it, can pass the news on."""
    for passes_on in (None, "kernel", "copy"):
        with a_room() as room, us.observe() as seen:
            fill(room.x, room.a)
            room.a.write_value_32(room.y, 1)
            if passes_on == "kernel":
                use(room.b, room.y)
            elif passes_on == "copy":
                copy(room.pinned, room.y, room.b)
            fill(room.x, room.b)
            us.wait_for_device(0)
        found = [] if passes_on else ["write after write"]
        assert [kind for kind in kinds(seen) if kind == "write after write"] == found


@pytest.mark.parametrize("before", [0, 1, 5])
def test_a_value_that_the_host_has_put_there_orders_nothing(before: int) -> None:
    with a_room() as room:
        ctypes.c_uint32.from_address(room.pinned).value = before
        with us.observe(possible=True) as seen:
            fill(room.x, room.a)
            room.a.write_value_32(room.pinned, 5)
            room.b.wait_value_32(room.pinned, 5, us.WaitFlags.GEQ)
            copy(room.y, room.x, room.b)
            room.a.sync()
            room.b.sync()
    assert kinds(seen) == (["read after write"] if before == 5 else [])


@pytest.mark.parametrize("by", ["fill", "copy", "kernel"])
def test_a_value_that_is_not_written_as_one_may_order(by: str) -> None:
    """Who waits for a flag that a kernel sets is in order, and it is not known behind what."""
    with a_room() as room, us.observe(possible=True) as seen:
        word = room.y + SIZE // 2
        fill(room.x, room.a)
        if by == "fill":
            checked(driver.cuMemsetD32Async(word, 1, 1, handle(room.a)))
        elif by == "copy":
            ctypes.c_uint32.from_address(room.pinned).value = 1
            copy(word, room.pinned, room.a, 4)
        else:
            launch(room.a, LaunchConfig(grid=1, block=1), *kernel_that_sets(word))
        room.b.wait_value_32(word, 1, us.WaitFlags.GEQ)
        copy(room.y, room.x, room.b, SIZE // 4)
        us.wait_for_device(0)
    assert [(race.kind, race.possible) for race in seen.races] == [("read after write", True)]
    assert "writes of values in memory that streams waited for (1)" in seen.not_seen


@kernel("verdict_set")
def _set(grid: Any, block: Any, to: Pointer) -> None:
    to.array(1, np.uint32)[0] = 1


def kernel_that_sets(word: int) -> tuple[Any, int]:
    return ObjectCode.from_ptx(b"any").get_kernel("verdict_set"), word


@pytest.mark.parametrize("is_graph", [True, False])
@pytest.mark.parametrize("is_written_last", [True, False])
def test_what_waits_for_a_value_is_ordered_behind_its_write(
    is_written_last: bool, is_graph: bool
) -> None:
    def work() -> None:
        room.a.wait_value_32(room.pinned, 1, us.WaitFlags.GEQ)
        copy(room.y, room.x, room.a)

    with a_room() as room:
        ctypes.c_uint32.from_address(room.pinned).value = 0
        with us.observe() as seen:
            if is_graph:
                checked(driver.cuGraphLaunch(captured(room, work), handle(room.a)))
            else:
                work()
            if is_written_last:
                fill(room.x, room.b)
            room.b.write_value_32(room.pinned, 1)
            if not is_written_last:
                fill(room.x, room.b)
            us.wait_for_device(0)
    assert kinds(seen) == ([] if is_written_last else ["write after read"])


def test_a_wait_for_any_value_orders_nothing() -> None:
    with a_room() as room, us.observe(possible=True) as seen:
        fill(room.x, room.a)
        room.a.write_value_32(room.y, 1)
        room.b.wait_value_32(room.y, 0, us.WaitFlags.GEQ)
        fill(room.x, room.b)
        assert kinds(seen) == ["write after write"]


# -- graphs ---------------------------------------------------------------------------------------


def graph_of(room: Room, work: Callable[[], None]) -> Any:
    """Return a graph that is not executable yet."""
    checked(driver.cuStreamBeginCapture(handle(room.a), RELAXED))
    work()
    return checked(driver.cuStreamEndCapture(handle(room.a)))


def test_a_clone_does_what_its_graph_does() -> None:
    with a_room() as room, us.observe() as seen:
        graph = graph_of(room, lambda: fill(room.x, room.a))
        clone = checked(driver.cuGraphClone(graph))
        checked(driver.cuGraphDestroy(graph))
        made = checked(driver.cuGraphInstantiate(clone, 0))
        checked(driver.cuGraphLaunch(made, handle(room.a)))
        fill(room.x, room.b)
        us.wait_for_device(0)
        checked(driver.cuGraphExecDestroy(made))
        checked(driver.cuGraphDestroy(clone))
    assert kinds(seen) == ["write after write"]
    assert seen.not_seen == ()


def test_an_updated_graph_does_what_the_new_one_does() -> None:
    with a_room() as room, us.observe() as seen:
        before = graph_of(room, lambda: fill(room.x, room.a))
        after = graph_of(room, lambda: fill(room.y, room.a))
        made = checked(driver.cuGraphInstantiate(before, 0))
        checked(driver.cuGraphExecUpdate(made, after))
        checked(driver.cuGraphLaunch(made, handle(room.a)))
        fill(room.x, room.b)
        assert kinds(seen) == []
        fill(room.y, room.b)
        us.wait_for_device(0)
        checked(driver.cuGraphExecDestroy(made))
        for graph in (before, after):
            checked(driver.cuGraphDestroy(graph))
    assert kinds(seen) == ["write after write"]


def test_a_graph_from_before_is_counted_as_not_seen() -> None:
    with a_room() as room:
        graph = captured(room, lambda: fill(room.x, room.a))
        with us.observe() as seen:
            checked(driver.cuGraphLaunch(graph, handle(room.a)))
            fill(room.x, room.b)
            room.a.sync()
    assert kinds(seen) == []
    assert any("graphs that were not captured while watching" in each for each in seen.not_seen)


def test_a_capture_that_runs_as_the_observation_begins_is_counted_as_not_seen() -> None:
    with a_room() as room:
        checked(driver.cuStreamBeginCapture(handle(room.a), RELAXED))
        fill(room.x, room.a)
        with us.observe() as seen:
            fill(room.y, room.a)
            graph = checked(driver.cuStreamEndCapture(handle(room.a)))
            made = checked(driver.cuGraphInstantiate(graph, 0))
            fill(room.y, room.b)
            assert kinds(seen) == [], "captured work is no work"
            checked(driver.cuGraphLaunch(made, handle(room.a)))
            us.wait_for_device(0)
            checked(driver.cuGraphExecDestroy(made))
            checked(driver.cuGraphDestroy(graph))
    assert kinds(seen) == ["write after write"], "the part that was seen"
    assert any("graphs that were not captured while watching" in each for each in seen.not_seen)


def test_events_of_a_graph_order_work_outside_of_it() -> None:
    """A graph waits for one event at each launch, and records another one."""
    with a_room() as room, us.observe() as seen:
        begin, end = (checked(driver.cuEventCreate(0)) for _ in range(2))

        def work() -> None:
            checked(driver.cuStreamWaitEvent(handle(room.a), begin, EXTERNAL))
            fill(room.x, room.a)
            checked(driver.cuEventRecordWithFlags(end, handle(room.a), EXTERNAL))

        graph = captured(room, work)
        fill(room.x, room.b)
        checked(driver.cuEventRecord(begin, handle(room.b)))
        checked(driver.cuGraphLaunch(graph, handle(room.a)))
        checked(driver.cuStreamWaitEvent(handle(room.b), end, 0))
        fill(room.x, room.b)
        room.b.sync()
        for event in (begin, end):
            checked(driver.cuEventDestroy(event))
    assert kinds(seen) == []


def test_a_graph_without_such_events_is_not_ordered() -> None:
    with a_room() as room, us.observe() as seen:
        graph = captured(room, lambda: fill(room.x, room.a))
        fill(room.x, room.b)
        checked(driver.cuGraphLaunch(graph, handle(room.a)))
        us.wait_for_device(0)
    assert kinds(seen) == ["write after write"]


def test_a_function_that_is_not_followed_is_counted_with_its_first_line() -> None:
    with a_room() as room, us.observe() as seen:
        graph = checked(driver.cuGraphCreate(0))
        parameters = driver.CUDA_BATCH_MEM_OP_NODE_PARAMS()
        write = driver.CUstreamBatchMemOpParams()
        write.operation = driver.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WRITE_VALUE_32
        write.writeValue.operation = write.operation
        write.writeValue.address = room.pinned
        parameters.ctx, parameters.count = current_context(), 1
        parameters.paramArray = [write]
        node = checked(driver.cuGraphAddBatchMemOpNode(graph, [], 0, parameters))
        for _ in range(2):
            checked(driver.cuGraphBatchMemOpNodeSetParams(node, parameters))
        checked(driver.cuGraphDestroy(graph))
    (said,) = seen.not_seen
    assert re.fullmatch(
        r"cuGraphBatchMemOpNodeSetParams: nodes of graphs that are not followed, first at "
        r".*test_verdicts\.py:\d+ \(2\)",
        said,
    )
