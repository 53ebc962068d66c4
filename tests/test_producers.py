"""Frameworks that tell their stream, each in its own way: order with it in both directions.

Their arrays are stand-ins that say what the real ones do.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cuda.core import Buffer

import standins
import userstream as us
from helpers import CAI, content, eventually, fill, is_blocked, running
from userstream import testing

SIZE = 256


def warp_array(memory: int, producer: us.Stream) -> Any:
    device = standins.WarpDevice(0, int(producer.handle))
    return standins.WarpArray(device, memory, SIZE // 4)


def tvm_tensor(memory: int, producer: us.Stream) -> Any:
    return standins.TvmTensor(0, Buffer.from_handle(memory, SIZE, owner=object()))


KINDS: dict[str, Callable[[int, us.Stream], Any]] = {
    "warp": warp_array,
    "tvm_ffi": tvm_tensor,
}


@pytest.fixture(params=KINDS)
def array(
    request: pytest.FixtureRequest, memory: int, producer: us.Stream, tvm_ffi: types.ModuleType
) -> Any:
    us.get_stream(0)
    fill(producer, memory, 1)
    us.asnumpy(CAI(memory, stream=int(producer.handle)))  # page-locked memory is there
    with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", 0), int(producer.handle)):
        yield KINDS[request.param](memory, producer)


def is_held(stream: us.Stream) -> bool:
    return not eventually(lambda: stream.is_done, 0.03)


def test_it_comes_before(array: Any, memory: int, producer: us.Stream) -> None:
    with testing.latch(producer) as latch:
        fill(producer, memory, 2)
        stream = us.acquire(array)
        assert is_held(stream)
        with running(lambda: us.asnumpy(array, timeout=10)) as result:
            assert is_blocked(result)
            latch.release()
            assert set(result().view("u1").ravel().tolist()) == {2}


def test_it_comes_after(array: Any, memory: int, producer: us.Stream) -> None:
    values = np.full(us.describe(array).shape or (SIZE,), 3, us.describe(array).dtype)

    def borrow() -> None:
        with us.borrow(array) as stream:
            fill(stream, memory, 3)

    for use in (borrow, lambda: us.copyto(array, values)):
        with testing.latch(us.get_stream(0)) as latch:
            use()
            fill(producer, memory, 9, 8)
            assert is_held(producer)
            latch.release()
            producer.sync(timeout=10)
        assert content(memory, 8) == {9}


def test_nobody_else_is_ordered(array: Any, memory: int, producer: us.Stream) -> None:
    """As the stream is known, no edge is made with everything on the device."""
    assert us.describe(array).producer == int(producer.handle)
    with us.Stream.create(0) as other, testing.latch(other):
        with us.borrow(array) as stream:
            pass
        stream.sync(timeout=10)
        producer.sync(timeout=10)


# -- Warp -----------------------------------------------------------------------------------------


def test_activate_warp(warp: types.ModuleType, memory: int) -> None:
    """On a blocking stream: Warp frees memory on the legacy default stream."""
    device = warp.get_device("cuda:0")
    before = device.stream
    array = standins.WarpArray(device, memory)
    with us.Stream.create(0, nonblocking=False) as blocking:
        with us.borrow(array, stream=blocking, activate=True) as stream:
            assert device.stream.cuda_stream == int(stream.handle)
        assert device.stream is before
        for name in ("warp", ["warp"]):
            with us.borrow(CAI(memory), stream=blocking, activate=name):
                assert device.stream.cuda_stream == int(blocking.handle)
        assert device.stream is before
        with us.Stream.legacy_default().activate("warp"):
            assert device.stream is device.null_stream
        assert device.stream is before
        with blocking.activate():
            assert device.stream is before, "only if it is named"


def test_warp_works_on_no_stream_that_is_non_blocking(warp: types.ModuleType, memory: int) -> None:
    device = warp.get_device("cuda:0")
    before = device.stream
    array = standins.WarpArray(device, memory)
    for block in (
        us.get_stream(0).activate("warp"),
        us.borrow(array, activate=True),
        us.borrow(CAI(memory), activate="warp"),
    ):
        with pytest.raises(ValueError, match="nonblocking=False"):
            block.__enter__()
        assert device.stream is before
    with us.get_stream(0).activate():
        assert device.stream is before


def test_activation_of_warp_orders_its_streams(warp: types.ModuleType, producer: us.Stream) -> None:
    warp.get_device("cuda:0").stream.cuda_stream = int(producer.handle)
    with us.Stream.create(0, nonblocking=False) as blocking:
        with testing.latch(producer) as latch:
            with blocking.activate("warp"):
                assert is_held(blocking)
            latch.release()
            blocking.sync(timeout=10)
        with testing.latch(blocking) as latch:
            with blocking.activate("warp"):
                pass
            assert is_held(producer)
            latch.release()
            producer.sync(timeout=10)


# -- TVM FFI --------------------------------------------------------------------------------------


def test_tvm_ffi_without_a_current_stream(
    tvm_ffi: types.ModuleType, memory: int, producer: us.Stream
) -> None:
    tensor = tvm_tensor(memory, producer)
    info = us.describe(tensor)
    assert (info.source, info.ordering, info.producer) == ("tvm_ffi.Tensor", "device", None)
    with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", 0), 4711):
        info = us.describe(tensor)
        assert (info.ordering, info.producer) == ("current", 4711)
    host = standins.TvmTensor(0, None)
    host.__class__ = type("Tensor", (type(host),), {"__dlpack_device__": lambda _: (1, 0)})
    for function in (us.get_stream, us.describe):
        with pytest.raises(us.HostBufferError):
            function(host)


def test_activate_tvm_ffi(tvm_ffi: types.ModuleType, memory: int, producer: us.Stream) -> None:
    tensor, device = tvm_tensor(memory, producer), tvm_ffi.device("cuda", 0)
    with us.borrow(tensor, activate=True) as stream:
        assert tvm_ffi.get_raw_stream(device) == int(stream.handle)
        us.hand_over(tensor)
    assert tvm_ffi.get_raw_stream(device) == 0
    with us.get_stream(0).activate(), us.get_stream(0).activate("tvm_ffi"):
        assert tvm_ffi.get_raw_stream(device) == int(stream.handle)
    assert tvm_ffi.get_raw_stream(device) == 0
