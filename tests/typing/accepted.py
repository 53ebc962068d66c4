"""Code that must type-check, with its types. mypy and pyright read it; it is never run."""

# cuda.core hides its names from pyright:
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, assert_type

import cuda.core
import numpy as np
from cuda.bindings import driver

import userstream as us
from userstream import testing
from userstream.typing import (
    AccessMode,
    Buffer,
    CaptureMode,
    CUDAArrayInterface,
    DLPackBuffer,
    Producer,
    StreamLike,
    Target,
    WaitPolicy,
)


class Array:
    """An array type of a user's own."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {}


class Exporter:
    def __dlpack__(self, *, stream: int | None = None, max_version: Any = None) -> object: ...

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)


class TensorList:
    """A list of tensors of DALI."""

    def device_id(self) -> int:
        return 0


class Batch:
    """A batch of DALI's dynamic mode."""

    @property
    def tensors(self) -> list[object]:
        return []


class TheirStream:
    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, 1)


class Ordinal:
    def __index__(self) -> int:
        return 0


def the_user_stream(array: Array, device: cuda.core.Device) -> None:
    assert_type(us.get_stream(), us.Stream)
    assert_type(us.get_stream(array, name="copies", priority=-1), us.Stream)
    assert_type(us.get_stream(array, name="part", sms=16), us.Stream)
    us.get_stream(0, name="framework", sms="rest")
    us.get_stream([array, {"nested": (array,)}])
    us.get_stream(device)
    us.get_stream(Ordinal())
    us.get_stream(TheirStream())
    assert_type(us.UserStream().get_stream(0), us.Stream)
    us.UserStream(unknown="raise").unknown = "device"
    assert_type(us.streams(), Mapping[tuple[int, str | None], us.Stream])


def a_stream_of_ours_is_theirs(stream: us.Stream, device: cuda.core.Device) -> None:
    theirs: cuda.core.Stream = stream
    like: StreamLike = stream
    theirs.wait(like)
    device.allocate(1024, stream=stream)
    assert_type(stream.is_done, bool)
    assert_type(stream.stream_id, int)
    assert_type(stream.name, str | None)
    assert_type(stream.sms, int | None)
    assert_type(stream.is_closed, bool)  # cuda.core's
    stream.record()
    stream.sync(timeout=1, policy="spin")
    with us.Stream.create(0, sms=16) as mine:
        assert_type(mine, us.Stream)
    assert_type(us.Stream.from_handle(TheirStream()), us.Stream)
    assert_type(us.Stream.priority_range(0), tuple[int, int])
    with stream.activate("torch", "cupy") as active:
        assert_type(active, us.Stream)


def waits(array: Array) -> None:
    us.wait()
    us.wait(array, name="copies", timeout=0.5, policy="spin")
    us.wait([array, array], timeout=1)
    us.wait(array, array, name="copies", timeout=1)
    us.wait("cuda:1")
    us.wait({"theirs": TheirStream()}, timeout=1)
    us.wait_for_device(0, timeout=None)
    us.wait_all(timeout=1)
    assert_type(us.completion(array), us.Completion[None])
    future: Future[None] = us.completion(array)
    assert_type(future.result(timeout=1), None)
    asyncio.run(us.wait_async(array, timeout=1))


def order(array: Array, pointer: driver.CUdeviceptr, theirs: TheirStream) -> None:
    assert_type(us.acquire(array, pointer, stream=theirs, producer=theirs), us.Stream)
    us.release(array, producer=None)
    us.release(array, producer="device")
    borrow: us.Borrow = us.borrow([array], {"nested": (Exporter(), TensorList(), Batch())})
    with borrow as stream:
        assert_type(stream, us.Stream)
    with us.borrow(array, producer=theirs, activate=["torch", "cupy"], keep=False) as stream:
        assert_type(stream, us.Stream)
    with us.borrow(array, producer="auto", activate=True):
        us.hold(object(), stream=theirs)
        us.hold(array, [array])
        us.hold(array, name="copies")
    us.hand_over(array, stream=theirs)


def copies(array: Array) -> None:
    out = np.empty(4)
    assert_type(us.asnumpy(array, out=out), np.ndarray)
    assert_type(us.asnumpy(array), np.ndarray)
    assert_type(us.asnumpy(Exporter()), np.ndarray)
    assert_type(us.asnumpy(out), np.ndarray)
    assert_type(us.asnumpy([array, array]), list[np.ndarray])
    assert_type(us.asnumpy(TensorList()), list[np.ndarray])
    assert_type(us.asnumpy({"a": array}), dict[str, np.ndarray])
    assert_type(us.asnumpy([{"a": array}]), Any)
    assert_type(us.copyto(array, out, timeout=1), us.Stream)
    assert_type(us.pinned_empty((2, 3)), np.ndarray)
    assert_type(us.pinned_empty(3, np.float32), np.ndarray)
    assert_type(us.pinned_like(array, dtype="u1"), np.ndarray)
    us.copyto(array, np.float32(1))
    info = us.describe(array)
    assert_type(info, us.BufferInfo)
    assert_type(info.shape, tuple[int, ...] | None)
    assert_type(info.parts, tuple[us.BufferInfo, ...])


async def queued(array: Array) -> None:
    out = us.pinned_empty(4)
    assert_type(us.asnumpy_async(array, out=out), us.Completion[np.ndarray])
    assert_type(await us.asnumpy_async(array), np.ndarray)
    assert_type(await us.asnumpy_async([array, array]), list[np.ndarray])
    assert_type(await us.asnumpy_async({"x": array}), dict[str, np.ndarray])
    assert_type(await us.completion(array), None)
    assert_type(us.copyto(array, out, wait=False), us.Stream)


def protocols() -> None:
    dlpack: DLPackBuffer = Exporter()
    interface: CUDAArrayInterface = Array()
    buffer: Buffer = interface
    producer: Producer = TheirStream()
    target: Target = {"a": [dlpack, buffer]}
    us.acquire(buffer, producer=producer)
    us.wait(target)


def callbacks(stream: us.Stream, done: Callable[[str], None]) -> None:
    stream.launch_host_func(done, "epoch 1")


def memory(stream: us.Stream, word: Array) -> None:
    stream.write_value_32(word, 1)
    stream.batch_mem_op([us.WaitValue(word, 1, us.WaitFlags.EQ), us.MemoryBarrier("gpu")])
    several = [us.WriteValue(word, 1), us.WaitValue(word, 1)]
    stream.batch_mem_op(several)
    stream.set_attribute("priority", -1)


def named_choices(stream: us.Stream, policy: WaitPolicy, mode: CaptureMode) -> None:
    stream.sync(policy=policy)
    with stream.capture(mode):
        pass


def modes_of_use(tensor: Buffer, mode: AccessMode) -> None:
    with us.borrow(tensor, mode=mode), us.borrow(tensor, mode="write"):
        us.acquire(tensor, mode="read")


def failures() -> None:
    try:
        us.wait(0)
    except us.WaitTimeout as error:
        assert_type(error.seconds, float | None)
        assert_type(error.devices, tuple[int, ...])
        late: TimeoutError = error
        raise late from None
    except us.DriverError as error:
        assert_type(error.code, int | None)


def tests(stream: us.Stream) -> None:
    testing.simulate(devices=1)
    with testing.inject("cuStreamQuery", driver.CUresult.CUDA_ERROR_UNKNOWN, count=2):
        us.wait(0)
    with testing.latch(stream) as held:
        held.release()
    assert_type(testing.calls("cuStreamQuery"), int)
    assert_type(testing.calls(), dict[str, int])
    with testing.inject(allocation=driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY, strict=False):
        us.wait(0)


@testing.kernel("scale")
def scale(
    grid: tuple[int, int, int], block: tuple[int, int, int], x: testing.Pointer, n: np.int32
) -> None:
    values = x.array((int(n), 2), np.float32)
    values *= grid[0] * block[0]


def kernels() -> None:
    testing.duration(scale, 0.5)
    testing.duration("scale", 1)
    assert_type(scale.__name__, str)
