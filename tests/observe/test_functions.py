"""Each driver function that `observe` follows: a race with what it uses, and an order before it."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver
from cuda.core import ObjectCode

import userstream as us
from helpers import checked, current_context
from internals import followed_functions
from observed import SIZE, Room, a_room, captured, checked_or_busy, copy, fill, handle, until
from userstream.testing import kernel

pytestmark = [
    pytest.mark.simulated,
    pytest.mark.no_races(False),  # these tests observe themselves
]

Use = Callable[[Room], Any]
HALF = SIZE // 2


def pointers(*addresses: int) -> list[Any]:
    return [driver.CUdeviceptr(each) for each in addresses]


def shape_2d(to: int, source: int) -> Any:
    kind = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    shape = driver.CUDA_MEMCPY2D()
    shape.srcMemoryType = shape.dstMemoryType = kind
    shape.srcDevice, shape.dstDevice = source, to
    shape.srcPitch = shape.dstPitch = 64
    shape.WidthInBytes, shape.Height = 16, 8
    return shape


def shape_3d(to: int, source: int, kind: Any = driver.CUDA_MEMCPY3D) -> Any:
    shape = kind()
    shape.srcMemoryType = shape.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    shape.srcDevice, shape.dstDevice = source, to
    shape.srcPitch = shape.dstPitch = 64
    shape.srcHeight = shape.dstHeight = 8
    shape.WidthInBytes, shape.Height, shape.Depth = 16, 4, 2
    if kind is not driver.CUDA_MEMCPY3D:
        shape.srcContext = shape.dstContext = current_context()
    return shape


def batch_attributes() -> Any:
    attributes = driver.CUmemcpyAttributes()
    attributes.srcAccessOrder = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    return attributes


def in_batch(room: Room) -> Any:
    given = pointers(room.y), pointers(room.x), [SIZE], 1, [batch_attributes()], [0], 1
    return driver.cuMemcpyBatchAsync(*given, handle(room.a))


HOST = bytearray(SIZE)

# What uses `room.x` on the stream `room.a`, or on the legacy default stream.
USES: dict[str, Use] = {
    "cuMemcpyAsync": lambda room: driver.cuMemcpyAsync(room.y, room.x, SIZE, handle(room.a)),
    "cuMemcpyDtoDAsync_v2": lambda room: driver.cuMemcpyDtoDAsync(
        room.x, room.y, SIZE, handle(room.a)
    ),
    "cuMemcpyHtoDAsync_v2": lambda room: driver.cuMemcpyHtoDAsync(
        room.x, room.pinned, SIZE, handle(room.a)
    ),
    "cuMemcpyDtoHAsync_v2": lambda room: driver.cuMemcpyDtoHAsync(
        room.pinned, room.x, SIZE, handle(room.a)
    ),
    "cuMemcpyBatchAsync_v2": in_batch,
    "cuMemcpyPeerAsync": lambda room: driver.cuMemcpyPeerAsync(
        room.y, current_context(), room.x, current_context(), SIZE, handle(room.a)
    ),
    "cuMemcpyPeer": lambda room: driver.cuMemcpyPeer(
        room.y, current_context(), room.x, current_context(), SIZE
    ),
    "cuMemcpy": lambda room: driver.cuMemcpy(room.y, room.x, SIZE),
    "cuMemcpyDtoD_v2": lambda room: driver.cuMemcpyDtoD(room.x, room.y, SIZE),
    "cuMemcpyHtoD_v2": lambda room: driver.cuMemcpyHtoD(room.x, HOST, SIZE),
    "cuMemcpyDtoH_v2": lambda room: driver.cuMemcpyDtoH(HOST, room.x, SIZE),
    "cuMemcpy2DAsync_v2": lambda room: driver.cuMemcpy2DAsync(
        shape_2d(room.y, room.x), handle(room.a)
    ),
    "cuMemcpy2D_v2": lambda room: driver.cuMemcpy2D(shape_2d(room.x, room.y)),
    "cuMemcpy2DUnaligned_v2": lambda room: driver.cuMemcpy2DUnaligned(shape_2d(room.x, room.y)),
    "cuMemcpy3DAsync_v2": lambda room: driver.cuMemcpy3DAsync(
        shape_3d(room.y, room.x), handle(room.a)
    ),
    "cuMemcpy3D_v2": lambda room: driver.cuMemcpy3D(shape_3d(room.x, room.y)),
    "cuMemcpy3DPeerAsync": lambda room: driver.cuMemcpy3DPeerAsync(
        shape_3d(room.y, room.x, driver.CUDA_MEMCPY3D_PEER), handle(room.a)
    ),
    "cuMemcpy3DPeer": lambda room: driver.cuMemcpy3DPeer(
        shape_3d(room.x, room.y, driver.CUDA_MEMCPY3D_PEER)
    ),
    "cuMemcpyAtoHAsync_v2": lambda room: with_array(
        lambda array: driver.cuMemcpyAtoHAsync(room.pinned, array, 0, 64, handle(room.a)), room
    ),
    "cuMemcpyHtoAAsync_v2": lambda room: with_array(
        lambda array: driver.cuMemcpyHtoAAsync(array, 0, room.pinned, 64, handle(room.a)), room
    ),
    "cuMemcpyHtoA_v2": lambda room: with_array(
        lambda array: driver.cuMemcpyHtoA(array, 0, HOST, 64), room
    ),
    "cuMemcpyAtoH_v2": lambda room: with_array(
        lambda array: driver.cuMemcpyAtoH(HOST, array, 0, 64), room
    ),
    "cuMemcpyAtoA_v2": lambda room: with_array(
        lambda array: driver.cuMemcpyAtoA(array, 64, array, 0, 64), room
    ),
    "cuMemcpyDtoA_v2": lambda room: with_array(
        lambda array: driver.cuMemcpyDtoA(array, 0, room.x, 64), room
    ),
    "cuMemcpyAtoD_v2": lambda room: with_array(
        lambda array: driver.cuMemcpyAtoD(room.x, array, 0, 64), room
    ),
    **{
        f"cuMemsetD{bits}Async": lambda room, bits=bits: getattr(driver, f"cuMemsetD{bits}Async")(
            room.x, 1, 8, handle(room.a)
        )
        for bits in (8, 16, 32)
    },
    **{
        f"cuMemsetD{bits}_v2": lambda room, bits=bits: getattr(driver, f"cuMemsetD{bits}")(
            room.x, 1, 8
        )
        for bits in (8, 16, 32)
    },
    **{
        f"cuMemsetD2D{bits}Async": lambda room, bits=bits: getattr(
            driver, f"cuMemsetD2D{bits}Async"
        )(room.x, 64, 1, 4, 4, handle(room.a))
        for bits in (8, 16, 32)
    },
    **{
        f"cuMemsetD2D{bits}_v2": lambda room, bits=bits: getattr(driver, f"cuMemsetD2D{bits}")(
            room.x, 64, 1, 4, 4
        )
        for bits in (8, 16, 32)
    },
}
USES |= {
    "cuMemDiscardBatchAsync": lambda room: driver.cuMemDiscardBatchAsync(
        pointers(room.managed), [1 << 16], 1, 0, handle(room.a)
    ),
    "cuMemDiscardAndPrefetchBatchAsync": lambda room: driver.cuMemDiscardAndPrefetchBatchAsync(
        pointers(room.managed), [1 << 16], 1, [device_location()], [0], 1, 0, handle(room.a)
    ),
}


def device_location() -> Any:
    location = driver.CUmemLocation()
    location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    return location


class Array:
    """The array of a test, and its first use on the stream `room.b`."""

    made: Any = None


def with_array(use: Callable[[Any], Any], room: Room) -> Any:
    """Use an array that `room.b` has copied from, so that an order is needed."""
    del room
    return use(Array.made)


def is_there(name: str) -> bool:
    if name == "cuMemcpyBatchAsync_v2" and driver.CUDA_VERSION < 13000:
        return False  # the bindings call what the simulated driver does not have
    python = re.sub(r"_v\d$", "", name)
    return hasattr(driver, python)


@contextmanager
def ready() -> Iterator[Room]:
    """Make a room with an array and with managed memory."""
    with a_room() as room:
        descriptor = driver.CUDA_ARRAY_DESCRIPTOR()
        descriptor.Width, descriptor.Height = 256, 0
        descriptor.Format, descriptor.NumChannels = driver.CUarray_format(1), 1
        Array.made = checked(driver.cuArrayCreate(descriptor))
        flags = driver.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL
        room.managed = int(checked(driver.cuMemAllocManaged(1 << 16, flags)))
        room.a.sync()
        yield room
        checked(driver.cuCtxSynchronize())
        checked(driver.cuMemFree(room.managed))
        checked(driver.cuArrayDestroy(Array.made))


def use_first(name: str, room: Room) -> None:
    """Use on `room.b` what the function of a case uses."""
    if "Ato" in name or "toA" in name:
        checked(driver.cuMemcpyHtoAAsync(Array.made, 0, room.pinned + HALF, 64, handle(room.b)))
    elif name.startswith("cuMemDiscard"):
        fill(room.managed, room.b, 64)
    else:
        fill(room.x, room.b)


@pytest.mark.parametrize("name", [name for name in USES if is_there(name)])
@pytest.mark.parametrize("ordered", [False, True], ids=["unordered", "ordered"])
def test_what_a_function_uses_races_unless_it_is_ordered(name: str, ordered: bool) -> None:
    with ready() as room, us.observe() as seen:
        use_first(name, room)
        if ordered and "Async" in name:
            room.a.wait(room.b)
        elif ordered:
            room.b.sync()
        answer = USES[name](room)
        checked(answer[:1])
        calls, races = seen.as_dict()["calls"], seen.races
    assert name in calls
    assert [race.second.name for race in races] == ([] if ordered else [name])
    assert all(race.second.line is not None for race in races)


# -- order ----------------------------------------------------------------------------------------


def by_event(room: Room, learn: Callable[[Any], object]) -> None:
    event = checked(driver.cuEventCreate(0))
    checked(driver.cuEventRecord(event, handle(room.a)))
    learn(event)
    checked(driver.cuEventDestroy(event))


def by_flags(room: Room) -> None:
    event = checked(driver.cuEventCreate(0))
    checked(driver.cuEventRecordWithFlags(event, handle(room.a), 0))
    checked(driver.cuStreamWaitEvent(handle(room.b), event, 0))


def by_elapsed_time(room: Room) -> None:
    begin, end = (checked(driver.cuEventCreate(0)) for _ in range(2))
    for event in (begin, end):
        checked(driver.cuEventRecord(event, handle(room.a)))
    until(lambda: checked_or_busy(driver.cuEventElapsedTime(begin, end)[:1]))


def by_context(room: Room) -> None:
    event = checked(driver.cuEventCreate(0))
    checked(driver.cuCtxRecordEvent(current_context(), event))
    checked(driver.cuStreamWaitEvent(handle(room.b), event, 0))


def by_waiting_context(room: Room) -> None:
    def wait(event: Any) -> None:
        checked(driver.cuCtxWaitEvent(current_context(), event))

    by_event(room, wait)


def by_value(room: Room, bits: int) -> None:
    ctypes.c_uint64.from_address(room.pinned).value = 0
    write, wait = (getattr(driver, f"cuStream{what}Value{bits}") for what in ("Write", "Wait"))
    checked(write(handle(room.a), room.pinned, 1, 0))
    checked(wait(handle(room.b), room.pinned, 1, 0))


def by_batch(room: Room) -> None:
    ctypes.c_uint64.from_address(room.pinned).value = 0
    room.a.batch_mem_op([us.WriteValue(room.pinned, 1)])
    room.b.batch_mem_op([us.WaitValue(room.pinned, 1)])


def wait_in_stream(room: Room) -> Callable[[Any], object]:
    return lambda event: checked(driver.cuStreamWaitEvent(handle(room.b), event, 0))


# What orders `room.b`, or the host, after `room.a`.
ORDERS: dict[str, Callable[[Room], object]] = {
    "cuEventRecord": lambda room: by_event(room, wait_in_stream(room)),
    "cuStreamWaitEvent": lambda room: by_event(room, wait_in_stream(room)),
    "cuEventRecordWithFlags": by_flags,
    "cuEventSynchronize": lambda room: by_event(room, driver.cuEventSynchronize),
    "cuEventQuery": lambda room: by_event(
        room, lambda event: until(lambda: checked_or_busy(driver.cuEventQuery(event)))
    ),
    "cuStreamQuery": lambda room: until(
        lambda: checked_or_busy(driver.cuStreamQuery(handle(room.a)))
    ),
    "cuStreamSynchronize": lambda room: driver.cuStreamSynchronize(handle(room.a)),
    "cuCtxSynchronize": lambda _: driver.cuCtxSynchronize(),
    "cuCtxRecordEvent": by_context,
    "cuCtxWaitEvent": by_waiting_context,
    "cuStreamWriteValue32_v2": lambda room: by_value(room, 32),
    "cuStreamWaitValue32_v2": lambda room: by_value(room, 32),
    "cuStreamWriteValue64_v2": lambda room: by_value(room, 64),
    "cuStreamWaitValue64_v2": lambda room: by_value(room, 64),
    "cuStreamBatchMemOp_v2": by_batch,
    "cuMemFree_v2": lambda _: driver.cuMemFree(checked(driver.cuMemAlloc(64))),
    "cuMemFreeHost": lambda _: driver.cuMemFreeHost(checked(driver.cuMemAllocHost(64))),
}
ELAPSED = ("cuEventElapsedTime", "cuEventElapsedTime_v2")  # the version depends on the bindings


@pytest.mark.parametrize("name", [*ORDERS, "cuEventElapsedTime"])
def test_what_follows_an_order_is_no_race(name: str) -> None:
    order = ORDERS.get(name, by_elapsed_time)
    with a_room() as room, us.observe(possible=True) as seen:
        fill(room.x, room.a)
        order(room)
        fill(room.x, room.b)
        calls, races = seen.as_dict()["calls"], seen.races
    assert name in calls or (name in ELAPSED and ELAPSED[1] in calls)
    assert races == ()


def by_the_legacy_stream(room: Room, held: us.Stream, executable: Any) -> int:
    fill(room.y, held, 64)
    return 1


def by_an_event_of_the_context(room: Room, held: us.Stream, executable: Any) -> Any:
    by_context(room)
    return room.b


def by_launches_of_a_graph(room: Room, held: us.Stream, executable: Any) -> Any:
    for stream in (held, room.b):
        checked(driver.cuGraphLaunch(executable, handle(stream)))
    return room.b


@pytest.mark.parametrize("written", ["soon", "late", "early"])
@pytest.mark.parametrize(
    "by",
    [
        by_the_legacy_stream,
        by_an_event_of_the_context,
        by_launches_of_a_graph,
    ],
)
def test_what_follows_a_wait_for_a_value_in_any_way_is_behind_the_write(
    by: Callable[[Room, us.Stream, Any], Any], written: str
) -> None:
    with a_room() as room, us.observe() as seen:
        executable = captured(room, lambda: fill(room.y, room.a, 64))
        held = room.stream(nonblocking=False)
        ctypes.c_uint32.from_address(room.pinned).value = 0

        def write() -> None:
            fill(room.x, room.a)
            checked(driver.cuStreamWriteValue32(handle(room.a), room.pinned, 1, 0))

        if written == "early":
            write()
        checked(driver.cuStreamWaitValue32(handle(held), room.pinned, 1, 0))
        follower = by(room, held, executable)
        if written == "soon":
            write()
        fill(room.x, follower)
        if written == "late":
            write()
        us.wait_for_device(0)
    assert seen.races == ()
    assert seen.not_seen == ()


def test_a_source_that_is_read_during_the_call_may_be_overwritten_after_it() -> None:
    now = driver.CUmemcpyAttributes()
    now.srcAccessOrder = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL
    for attributes, races in ((now, 0), (batch_attributes(), 1)):
        with a_room() as room, us.observe() as seen:
            given = pointers(room.x), pointers(room.pinned), [SIZE], 1, [attributes], [0], 1
            checked(driver.cuMemcpyBatchAsync(*given, handle(room.a)))
            copy(room.pinned, room.y, room.b)
        assert len(seen.races) == races


def test_an_order_of_a_green_context_is_that_of_its_streams_alone() -> None:
    with a_room() as room, us.observe() as seen:
        part = room.stream(sms=16)
        event = checked(driver.cuEventCreate(0))
        green = checked(driver.cuStreamGetGreenCtx(handle(part)))
        checked(driver.cuCtxFromGreenCtx(green))
        for address, stream in ((room.x, part), (room.y, room.a)):
            fill(address, stream)
        checked(driver.cuGreenCtxRecordEvent(green, event))
        checked(driver.cuStreamWaitEvent(handle(room.b), event, 0))
        fill(room.x, room.b)
        assert seen.races == ()
        fill(room.y, room.b)
        assert len(seen.races) == 1
        us.wait_for_device(0)
        fill(room.x, room.b)
        checked(driver.cuEventRecord(event, handle(room.b)))
        checked(driver.cuGreenCtxWaitEvent(green, event))
        fill(room.x, part)
        assert len(seen.races) == 1
        us.wait_for_device(0)


def test_what_follows_a_change_of_a_captures_dependencies_is_ordered_behind_all_of_it() -> None:
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    with a_room() as room, us.observe() as seen:
        checked(driver.cuStreamBeginCapture(handle(room.a), relaxed))
        room.b.wait(room.a)
        fill(room.x, room.b)
        answer = checked(driver.cuStreamGetCaptureInfo(handle(room.b)))
        nodes = next(each for each in answer if isinstance(each, list))
        data = [[]] if driver.CUDA_VERSION >= 13000 else []
        add = driver.CUstreamUpdateCaptureDependencies_flags
        flags = add.CU_STREAM_ADD_CAPTURE_DEPENDENCIES
        checked(driver.cuStreamUpdateCaptureDependencies(handle(room.a), nodes, *data, 1, flags))
        copy(room.y, room.x, room.a)
        room.a.wait(room.b)
        checked(driver.cuGraphDestroy(checked(driver.cuStreamEndCapture(handle(room.a)))))
    assert seen.races == ()
    assert seen.not_seen == ("dependencies of captures that the program has set (1)",)


# -- memory ---------------------------------------------------------------------------------------

ALLOCATES: dict[str, Callable[[Room], Any]] = {
    "cuMemAlloc_v2": lambda _: driver.cuMemAlloc(SIZE),
    "cuMemAllocPitch_v2": lambda _: driver.cuMemAllocPitch(64, 64, 4)[:2],
    "cuMemAllocManaged": lambda _: driver.cuMemAllocManaged(
        SIZE, driver.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL
    ),
    "cuMemAllocHost_v2": lambda _: driver.cuMemAllocHost(SIZE),
    "cuMemHostAlloc": lambda _: driver.cuMemHostAlloc(SIZE, 0),
    "cuMemAllocAsync": lambda room: driver.cuMemAllocAsync(SIZE, handle(room.a)),
    "cuMemAllocFromPoolAsync": lambda room: driver.cuMemAllocFromPoolAsync(
        SIZE, checked(driver.cuDeviceGetDefaultMemPool(0)), handle(room.a)
    ),
}


@pytest.mark.parametrize("name", ALLOCATES)
def test_memory_has_the_line_that_allocated_it(name: str) -> None:
    with a_room() as room, us.observe() as seen:
        address = int(checked(ALLOCATES[name](room)))
        room.a.sync()
        fill(address, room.a, 64)
        fill(address, room.b, 64)
        assert name in seen.as_dict()["calls"]
        (race,) = seen.races
        us.wait_for_device(0)
        if "Host" in name:
            checked(driver.cuMemFreeHost(address))
        else:
            checked(driver.cuMemFree(address))
    assert race.allocated[-1].name.endswith("<lambda>")


@pytest.mark.parametrize("exported", ["before", "after", "never"])
@pytest.mark.parametrize("learn", [wait_in_stream, lambda _: driver.cuEventSynchronize])
def test_another_process_may_order_two_streams(
    exported: str, learn: Callable[[Room], Callable[[Any], object]]
) -> None:
    """It waits for an event that is recorded here, and records one that is waited for here."""
    with_interprocess = 6  # CU_EVENT_INTERPROCESS and CU_EVENT_DISABLE_TIMING
    with ready() as room, us.observe(possible=True) as seen:
        ours, theirs = (checked(driver.cuEventCreate(with_interprocess)) for _ in range(2))
        if exported == "before":
            checked(driver.cuIpcGetEventHandle(ours))
            checked(driver.cuIpcGetEventHandle(theirs))
            checked(driver.cuEventRecord(theirs, handle(room.b)))  # and there once more, later
        fill(room.x, room.a)
        checked(driver.cuEventRecord(ours, handle(room.a)))
        if exported == "after":
            checked(driver.cuIpcGetEventHandle(ours))
        learn(room)(theirs)
        fill(room.x, room.b)
    assert [race.possible for race in seen.races] == [exported != "never"]


# -- all of them ----------------------------------------------------------------------------------

ELSEWHERE = {
    "test_begin_and_end.py, test_recorder.py: contexts and modules": (
        "cuDevicePrimaryCtxRetain cuDevicePrimaryCtxRelease_v2 cuDevicePrimaryCtxReset_v2 "
        "cuCtxCreate_v2 cuCtxCreate_v3 cuCtxCreate_v4 cuCtxDestroy_v2 cuModuleLoad "
        "cuModuleLoadData cuModuleLoadDataEx cuModuleUnload cuLibraryLoadData cuLibraryUnload"
    ),
    "test_observe.py, test_learning.py, test_verdicts.py: streams, kernels and memory": (
        "cuStreamCreate cuStreamCreateWithPriority cuGreenCtxStreamCreate cuStreamDestroy_v2 "
        "cuLaunchKernel cuLaunchKernelEx cuLaunchCooperativeKernel cuMemFreeAsync "
        "cuMemHostRegister_v2 cuMemHostUnregister cuMemMap cuMemUnmap "
        "cuIpcCloseMemHandle cuMemPoolDestroy cuLaunchHostFunc cuLaunchHostFunc_v2 "
        "cuStreamAddCallback cuCtxSynchronize_v2"
    ),
    "test_verdicts.py: captures": (
        "cuStreamBeginCapture_v2 cuStreamBeginCaptureToGraph cuStreamEndCapture cuGraphClone "
        "cuGraphInstantiateWithFlags cuGraphInstantiateWithParams cuGraphInstantiate_v2 "
        "cuGraphExecUpdate_v2 cuGraphLaunch cuGraphDestroy cuGraphExecDestroy"
    ),
    "above": (
        "cuCtxFromGreenCtx cuGreenCtxRecordEvent cuGreenCtxWaitEvent cuEventElapsedTime "
        "cuEventElapsedTime_v2 cuEventDestroy_v2 cuIpcGetEventHandle cuGraphCreate "
        "cuStreamUpdateCaptureDependencies cuStreamUpdateCaptureDependencies_v2 "
        "cuArrayCreate_v2 cuArray3DCreate_v2 cuArrayDestroy"
    ),
    "test_external.py": (
        "cuIpcOpenEventHandle cuWaitExternalSemaphoresAsync cuSignalExternalSemaphoresAsync "
        "cuGraphicsMapResources cuGraphicsUnmapResources"
    ),
    "test_judge_internal.py": (
        "cuMemcpy3DWithAttributesAsync cuMemcpy3DBatchAsync cuMemcpy3DBatchAsync_v2 "
        "cuMemcpyBatchAsync cuMemBatchDecompressAsync cuMemcpyWithAttributesAsync "
        "cuTexObjectCreate cuSurfObjectCreate"
    ),
}


def test_every_followed_function_is_tried() -> None:
    followed = followed_functions()
    nodes = {name for name in followed if re.match(r"cuGraph\w*(Node|Dependencies)", name)}
    elsewhere = {name for names in ELSEWHERE.values() for name in names.split()}
    tried = {*USES, *ORDERS, *ALLOCATES, *elsewhere, *nodes}  # of nodes: test_nodes.py
    assert tried == followed


def test_what_kernels_use_through_textures_is_counted_as_not_seen() -> None:
    with ready() as room, us.observe() as seen:
        resource = driver.CUDA_RESOURCE_DESC()
        resource.resType = driver.CUresourcetype.CU_RESOURCE_TYPE_ARRAY
        resource.res.array.hArray = Array.made
        texture = checked(driver.cuTexObjectCreate(resource, driver.CUDA_TEXTURE_DESC(), None))
        assert room
        checked(driver.cuTexObjectDestroy(texture))
    assert seen.not_seen == ("what kernels use through textures and surfaces (1)",)


# As NCCL's: a large structure, of which a launch passes the part that it has filled.
STORAGE = np.dtype([("of", "u8"), ("work", "u8", (511,))])


@kernel("functions_reduce")
def _reduce(grid: Any, block: Any, storage: STORAGE) -> None:  # type: ignore[valid-type]
    """Write nothing: what a launch may use is not known before it has run."""


def test_a_launch_may_pass_the_begin_of_a_structure() -> None:
    function = int(ObjectCode.from_ptx(b"any").get_kernel("functions_reduce").handle)
    with ready() as room, us.observe() as seen:
        room.hold(room.a)
        fill(room.x, room.a)
        passed = np.array((1, room.x), "u8,u8")
        size = ctypes.c_size_t(passed.nbytes)
        extra = (ctypes.c_void_p * 5)(1, passed.ctypes.data, 2, ctypes.addressof(size), 0)
        shape = (1, 1, 1, 1, 1, 1, 0)
        address = ctypes.addressof(extra)
        checked(driver.cuLaunchKernel(function, *shape, handle(room.b), 0, address))
        room.release()
    (race,) = seen.races
    assert race.second.name == "functions_reduce"
