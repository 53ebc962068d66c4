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
from helpers import CAI, content, device_memory, fill, is_blocked, is_held, running
from userstream import testing

SIZE = 256


def warp_array(memory: int, producer: us.Stream) -> Any:
    device = standins.WarpDevice(0, int(producer.handle))
    return standins.WarpArray(device, memory, SIZE // 4)


def tvm_tensor(memory: int, producer: us.Stream) -> Any:
    return standins.TvmTensor(0, Buffer.from_handle(memory, SIZE, owner=object()))


def cv_buffer(memory: int, producer: us.Stream) -> Any:
    return standins.CvBuffer(0, memory, SIZE // 4, stream=int(producer.handle))


def cv_tensor(memory: int, producer: us.Stream) -> Any:
    return standins.CvTensor(cv_buffer(memory, producer))


def cv_image(memory: int, producer: us.Stream) -> Any:
    return standins.CvImage(cv_buffer(memory, producer))


KINDS: dict[str, Callable[[int, us.Stream], Any]] = {
    "warp": warp_array,
    "tvm_ffi": tvm_tensor,
    "cvcuda.ExternalBuffer": cv_buffer,
    "cvcuda.Tensor": cv_tensor,
    "cvcuda.Image": cv_image,
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
    """The stream is known, so no edge with the whole device is added."""
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


def test_warp_works_on_no_stream_that_is_non_blocking(
    warp: types.ModuleType, memory: int, producer: us.Stream
) -> None:
    device = warp.get_device("cuda:0")
    before = device.stream
    before.cuda_stream = int(producer.handle)
    array = standins.WarpArray(device, memory)
    uses: list[Callable[[], object]] = [
        lambda: us.get_stream(0).activate("warp"),
        lambda: us.borrow(array, activate=True).__enter__(),
        lambda: us.borrow(cv_buffer(memory, producer), activate="warp").__enter__(),
    ]
    us.get_stream(0)
    with testing.latch(producer):
        for use in uses:
            with pytest.raises(ValueError, match="nonblocking=False"):
                use()
            assert device.stream is before
        us.wait(0, timeout=10)  # refused before anything was queued
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


# -- CV-CUDA --------------------------------------------------------------------------------------


def test_planes_and_batches_of_cvcuda(memory: int, producer: us.Stream) -> None:
    planes = [standins.CvBuffer(0, memory + n * 16, stream=int(producer.handle)) for n in range(4)]
    nv12 = standins.CvImage(planes[0], planes[1])
    info = us.describe(nv12)
    assert (info.source, info.nbytes, len(info.parts)) == ("cvcuda.Image", 32, 2)
    assert (info.ordering, info.producer) == ("exact", int(producer.handle))
    images = standins.CvImages([nv12, standins.CvImage(planes[2])])
    tensors = standins.CvTensors([standins.CvTensor(plane) for plane in planes])
    with testing.latch(producer) as latch:
        fill(producer, memory, 0, 64)
        for batch, count in ((images, 2), (tensors, 4)):
            assert us.get_stream(batch) is us.get_stream(0)
            assert len(us.describe(batch).parts) == count
            assert us.describe(batch).producer == int(producer.handle)
            assert is_held(us.acquire(batch))
        latch.release()
        us.wait(0, timeout=10)
    assert [len(each) for each in us.asnumpy(images)] == [2, 4], "two planes, and one of 4 elements"
    assert [each.tolist() for each in us.asnumpy(tensors)] == [[0] * 4] * 4
    nothing = standins.CvTensor(standins.CvBuffer(0, memory, shape=(0,), stream=-1))
    assert us.describe(standins.CvTensors([nothing])).nbytes == 0
    for empty in (standins.CvImages(), standins.CvTensors()):
        with pytest.raises(us.UnsupportedBufferError, match="is empty"):
            us.get_stream(empty)


def test_a_batch_of_cvcuda_on_several_streams(memory: int, producer: us.Stream) -> None:
    with us.Stream.create(0) as other:
        mixed = standins.CvTensors(
            standins.CvTensor(standins.CvBuffer(0, memory, stream=int(stream.handle)))
            for stream in (producer, other)
        )
        assert us.describe(mixed).ordering == "device"
        for stream in (producer, other):
            with testing.latch(stream) as latch:
                assert is_held(us.acquire(mixed))
                latch.release()
                us.wait(0, timeout=10)


@pytest.mark.parametrize("told", [1, -1])
def test_what_cvcuda_has_not_used_yet(
    told: int, cvcuda: types.ModuleType, memory: int, producer: us.Stream
) -> None:
    """Its first use waits for nothing, and may be on any stream."""
    tensor = standins.CvTensor(standins.CvBuffer(0, memory, stream=told))
    assert (us.describe(tensor).ordering, us.describe(tensor).producer) == ("current", 1)
    with cvcuda.as_stream(int(producer.handle)):
        assert us.describe(tensor).ordering == "device"
        with testing.latch(us.get_stream(0)) as latch:
            with us.borrow(tensor):
                pass
            fill(producer, memory, 1)
            assert is_held(producer)
            latch.release()
            producer.sync(timeout=10)


def test_activate_cvcuda(cvcuda: types.ModuleType, memory: int, producer: us.Stream) -> None:
    tensor = cv_tensor(memory, producer)
    with us.borrow(tensor, activate=True) as stream:
        assert cvcuda.Stream.current.handle == int(stream.handle)
        us.hand_over(tensor)
    with us.Stream.legacy_default().activate("cvcuda"):
        assert cvcuda.Stream.current is cvcuda.Stream.default
    with cvcuda.as_stream(int(producer.handle)), us.get_stream(0).activate():
        assert cvcuda.Stream.current.handle == int(stream.handle)
    assert cvcuda.Stream.current is cvcuda.Stream.default
    with testing.latch(us.get_stream(0)) as latch, cvcuda.as_stream(int(producer.handle)):
        us.hand_over(tensor)
        assert is_held(producer)
        latch.release()
        producer.sync(timeout=10)


@pytest.mark.multi_device
def test_a_stream_of_cvcuda_on_another_device(cvcuda: types.ModuleType) -> None:
    with us.Stream.create(0) as here, us.Stream.create(1) as there:
        with cvcuda.as_stream(int(there.handle)):
            with here.activate("cvcuda"):
                assert cvcuda.Stream.current.handle == int(here.handle)
            assert cvcuda.Stream.current.handle == int(there.handle)
        for current, device in ((here, 1), (there, 0)):
            with cvcuda.as_stream(int(current.handle)), device_memory(device) as elsewhere:
                tensor = standins.CvTensor(standins.CvBuffer(device, elsewhere))
                with pytest.raises(us.DeviceMismatchError, match="no current stream on device"):
                    us.hand_over(tensor)


def test_a_stream_of_cvcuda(cvcuda: types.ModuleType, memory: int, producer: us.Stream) -> None:
    """It has a handle, and no protocol."""
    theirs = standins.CvStream(int(producer.handle))
    assert us.get_stream(theirs) == us.Stream.from_handle(theirs) == producer
    assert us.get_stream(cvcuda.Stream.default) is us.Stream.legacy_default()
    us.wait(theirs, timeout=10)
    with testing.latch(producer) as latch:
        for stream in (
            us.acquire(CAI(memory), producer=theirs),
            us.acquire(CAI(memory, stream=-1), stream=theirs),
        ):
            assert is_held(stream)
        latch.release()
        us.wait(0, timeout=10)
    us.get_stream(0).wait(theirs)
    with pytest.raises(us.UnsupportedBufferError, match="stream= or producer="):
        us.acquire(theirs)
    with pytest.raises(TypeError, match="__cuda_stream__"):
        us.get_stream(0).wait(CAI(memory))


# -- DALI -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", [True, False], ids=["the stream it names", "another"])
def test_the_next_run_of_dali(known: bool, memory: int, producer: us.Stream) -> None:
    """It writes over its output, which nobody could hold, on a stream of its own.

    That is queued after the block. So it waits for the block without a host wait, by the edge with
    the device on whichever stream it is.
    """
    tensor = standins.DaliTensor(0, memory, SIZE // 4)
    tensor.stream = int(producer.handle)
    batch = standins.DaliList([tensor], tensor.stream)
    with us.Stream.create(0) as other, us.Stream.create(0) as reader:
        us.get_stream(0)
        writer = producer if known else other
        with testing.latch(reader) as latch:
            how: Any = "auto" if known else "device"
            with us.borrow(batch, stream=reader, producer=how) as stream:
                fill(stream, memory, 3)
            fill(writer, memory, 9, 8)
            assert is_held(writer)
            latch.release()
            writer.sync(timeout=10)
    assert content(memory, 8) == {9}
