"""Code that must not type-check: an ignore without an error is an error itself."""

from __future__ import annotations

from typing import Any

import numpy as np

import userstream as us
from userstream import testing
from userstream.typing import CUDAArrayInterface, DLPackBuffer, Producer, StreamLike


class Array:
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {}


class Handle:
    """A stream that speaks the protocol wrongly."""

    def __cuda_stream__(self) -> int:
        return 1


def the_user_stream() -> None:
    us.get_stream(0, "copies")  # type: ignore[call-arg]
    us.get_stream(0, name=1)  # type: ignore[arg-type]
    us.get_stream(0, priority="high")  # type: ignore[arg-type]
    us.get_stream(0, sms="half")  # type: ignore[arg-type]
    us.get_stream(0).sms = 16  # type: ignore[misc]
    us.get_stream(0).snyc()  # type: ignore[attr-defined]
    us.get_stream(0).name = "copies"  # type: ignore[misc]
    us.streams()[0, None] = us.get_stream(0)  # type: ignore[index]


def waits() -> None:
    us.wait(0, timeout=10, policy="sleep")  # type: ignore[arg-type]
    us.wait(0, timeout="soon")  # type: ignore[arg-type]
    us.wait(0, policy="block")  # type: ignore[arg-type]
    us.wait_all(0)  # type: ignore[call-arg]
    us.get_stream(0).wait(us.get_stream(1), timeout=10)  # type: ignore[arg-type]
    us.completion(0, timeout=1)  # type: ignore[call-arg]


def order(buffer: Array) -> None:
    us.acquire(buffer, stream="torch")  # type: ignore[arg-type]
    us.acquire(buffer, stream=Handle())  # type: ignore[arg-type]
    us.acquire(buffer, producer="current")  # type: ignore[arg-type]
    us.UserStream(unknown="guess")  # type: ignore[arg-type]
    us.acquire(buffer, stream=1)  # type: ignore[arg-type]
    us.acquire(buffer, producer=1)  # type: ignore[arg-type]
    us.hold(buffer, stream=1)  # type: ignore[call-overload]
    us.release(buffer, producer=1.5)  # type: ignore[arg-type]
    us.borrow(buffer, activate=1.5)  # type: ignore[arg-type]
    us.hold(object())  # type: ignore[call-overload]
    us.hold(buffer, stream=buffer, name="io")  # type: ignore[call-overload]


def buffers(array: Array, thing: object) -> None:
    us.borrow(3)  # type: ignore[arg-type]
    us.borrow(array, None)  # type: ignore[arg-type]
    us.acquire(thing)  # type: ignore[arg-type]
    us.hand_over(1.5)  # type: ignore[arg-type]
    us.asnumpy(3)  # type: ignore[call-overload]
    us.asnumpy(us.get_stream(0))  # type: ignore[call-overload]
    us.asnumpy(array).cpu()  # type: ignore[attr-defined]
    us.copyto(array, [1, 2])  # type: ignore[arg-type]
    us.get_stream(0).memcpy_dtod(array, 1.5, 8)  # type: ignore[arg-type]


def copies(buffer: Array) -> None:
    us.asnumpy(buffer, out=[1, 2])  # type: ignore[call-overload]
    us.asnumpy(buffer, np.empty(4))  # type: ignore[call-overload]
    us.copyto(buffer)  # type: ignore[call-arg]
    us.pinned_empty("2")  # type: ignore[arg-type]
    us.asnumpy_async(buffer, timeout=1)  # type: ignore[call-overload]
    us.describe(buffer).shape = (4,)  # type: ignore[misc]


def protocols() -> None:
    like: StreamLike = 7  # type: ignore[assignment]
    producer: Producer = "current"  # type: ignore[assignment]
    array: DLPackBuffer = [1.0]  # type: ignore[assignment]
    interface: CUDAArrayInterface = Handle()  # type: ignore[assignment]
    print(like, producer, array, interface)


def memory(stream: us.Stream) -> None:
    us.WriteValue(0, 1, bits=16)  # type: ignore[arg-type]
    us.MemoryBarrier("device")  # type: ignore[arg-type]
    stream.batch_mem_op([(0, 1)])  # type: ignore[list-item]
    stream.begin_capture("strict")  # type: ignore[arg-type]


def tests(stream: us.Stream) -> None:
    testing.inject("cuStreamQuery", "CUDA_ERROR_UNKNOWN")  # type: ignore[arg-type]
    testing.latch(stream).hold()  # type: ignore[attr-defined]
    testing.inject(allocations=2)  # type: ignore[call-arg]
    testing.kernel(tests)  # type: ignore[arg-type]
    testing.duration("scale", "1")  # type: ignore[arg-type]
