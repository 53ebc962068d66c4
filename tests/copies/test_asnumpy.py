"""Looking at buffers and changing them, in order with their producers: `asnumpy` and `copyto`."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import time
import types
import weakref
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver
from cuda.core import LegacyPinnedMemoryResource

import layouts
import standins
import userstream as us
from helpers import (
    another_context,
    array,
    checked,
    device_current,
    device_memory,
    eventually,
    fill,
    in_thread,
    is_blocked,
    pinned_memory,
    running,
    write,
)
from internals import (
    PART,
    forget_uses,
    order_by_device,
    pinned_limit,
    place_of,
    wait_in_every_block,
    watch_fetches,
)
from userstream import testing

pytestmark = pytest.mark.usefixtures("no_garbage")


NUMBERS = np.arange(6, dtype="f4").reshape(2, 3)


# -- asnumpy --------------------------------------------------------------------------------------


def test_it_waits_for_the_producer_and_for_nobody_else(producer: us.Stream, memory: int) -> None:
    fill(producer, memory, 1)
    buffer = array(memory, producer, shape=(8,), typestr="|u1")
    us.asnumpy(buffer)  # what is made once cannot always be made beside a held stream
    with us.Stream.create(0) as other, testing.latch(other):
        assert us.asnumpy(buffer).tolist() == [1] * 8
    with testing.latch(producer) as latch:
        fill(producer, memory, 2)
        with running(lambda: us.asnumpy(buffer)) as result:
            assert is_blocked(result)
            latch.release()
            assert result().tolist() == [2] * 8


@pytest.mark.simulated
@pytest.mark.parametrize("into", [False, True])
def test_a_producer_with_nothing_to_do_needs_no_edge(
    into: bool, producer: us.Stream, memory: int
) -> None:
    buffer = array(memory, producer, shape=(8,), typestr="|u1")
    out = np.zeros(8, "u1") if into else None
    us.asnumpy(buffer)
    fill(producer, memory, 1)
    producer.sync(timeout=20)

    def needs_no_edge() -> bool:
        testing.reset()
        assert us.asnumpy(buffer, out=out).tolist() == [1] * 8
        assert testing.calls("cuMemcpyAsync") == 1
        return not testing.calls("cuStreamWaitEvent")

    with device_current(0):
        assert eventually(needs_no_edge)  # the bell of a wait for a late copy makes an edge as well
        with testing.latch(producer) as latch:
            fill(producer, memory, 2)
            with running(lambda: us.asnumpy(buffer, out=out)) as result:
                assert is_blocked(result)
                latch.release()
                assert result().tolist() == [2] * 8


def test_layouts_and_types(memory: int) -> None:
    numbers = np.arange(24, dtype="i2").reshape(2, 3, 4)
    write(memory, numbers)
    for view, offset in layouts.usual(numbers):
        buffer = array(memory + offset, shape=view.shape, typestr="<i2", strides=view.strides)
        result = us.asnumpy(buffer)
        np.testing.assert_array_equal(result, view, strict=True)
        out = np.zeros_like(view, subok=False) if view.ndim else np.zeros((), "i2")
        assert us.asnumpy(buffer, out=out) is out
        np.testing.assert_array_equal(out, view)
    fields = [("a", "<i2"), ("b", "<i2")]
    result = us.asnumpy(array(memory, shape=(3,), typestr="|V4", descr=fields))
    assert result["b"].tolist() == [1, 3, 5]


def test_composites(jax: types.ModuleType, memory: int) -> None:
    write(memory, NUMBERS)
    one = array(memory, shape=(2, 3))
    results = us.asnumpy([one, (one,), {"a": one}, np.ones(2)])
    np.testing.assert_array_equal(results[0], NUMBERS)
    np.testing.assert_array_equal(results[1][0], NUMBERS)
    np.testing.assert_array_equal(results[2]["a"], NUMBERS)
    assert results[3].tolist() == [1, 1]
    assert us.asnumpy([]) == []
    assert list(us.asnumpy({"x": one})) == ["x"]
    tensor = standins.DaliTensor(0, memory, 6, typestr="=f", version=2)
    for batch in (
        standins.DaliList([tensor, tensor]),
        standins.DaliBatch([standins.DaliDynamic(0, memory, 6, version=2)] * 2),
    ):
        assert [each.tolist() for each in us.asnumpy(batch)] == [list(range(6))] * 2
    for composite in ([one], {"a": one}, standins.DaliList([tensor])):
        with pytest.raises(TypeError, match="consists of several"):
            us.asnumpy(composite, out=np.empty((2, 3), "f4"))


def test_a_sharded_array_becomes_one_array(jax: types.ModuleType, memory: int) -> None:
    write(memory, NUMBERS)
    devices = [jax.Device(0), jax.Device(0)]
    whole = jax.Array(*devices)
    whole.is_fully_addressable, whole.shape = True, (2, 3)
    for row, shard in enumerate(whole.addressable_shards):
        shard.index, shard.replica_id = (slice(row, row + 1), slice(None)), 0
        part = shard.data
        part.is_fully_addressable, part.shape, part.nbytes = True, (1, 3), 12
        part.addressable_shards[0].replica_id = 0
        part.addressable_shards[0].index = (slice(None),) * 2
        part.unsafe_buffer_pointer = lambda row=row: memory + 12 * row
    jax.Array.__dlpack__ = lambda self, *, stream: object()
    np.testing.assert_array_equal(us.asnumpy(whole), NUMBERS, strict=True)
    out = np.zeros((2, 3), "f4")
    assert us.asnumpy(whole, out=out) is out
    np.testing.assert_array_equal(out, NUMBERS)
    queued = us.asnumpy_async(whole).result(timeout=20)
    np.testing.assert_array_equal(queued, NUMBERS, strict=True)
    out = us.pinned_empty((2, 3), "f4")
    assert us.asnumpy_async(whole, out=out).result(timeout=20) is out
    np.testing.assert_array_equal(out, NUMBERS)
    with pytest.raises(ValueError, match="out has shape"):
        us.asnumpy(whole, out=np.zeros(6, "f4"))
    with pytest.raises(TypeError, match=r"numpy\.ndarray, not list"):
        us.asnumpy(whole, out=[0])  # type: ignore[call-overload]
    whole.is_fully_addressable = False
    with pytest.raises(us.UnsupportedBufferError, match="other processes"):
        us.asnumpy(whole)


def test_host_buffers(memory: int) -> None:
    numbers = np.arange(3)
    assert us.asnumpy(numbers) is numbers
    out = np.zeros(3, numbers.dtype)
    assert us.asnumpy(numbers, out=out) is out
    assert out.tolist() == [0, 1, 2]
    for out, error, message in (
        (np.zeros(4, numbers.dtype), ValueError, "out has shape"),
        (np.zeros(3, "f4"), TypeError, "does not convert"),
        (np.broadcast_to(numbers[0], (3,)), ValueError, "out is read-only"),
        ([0, 1, 2], TypeError, "numpy.ndarray, not list"),
    ):
        with pytest.raises(error, match=message):
            us.asnumpy(numbers, out=out)
    host = standins.DaliHostList()
    type(host).__len__ = lambda self: 2  # type: ignore[attr-defined]
    type(host).__getitem__ = lambda self, index: np.full(2, index)  # type: ignore[attr-defined]
    assert [each.tolist() for each in us.asnumpy(host)] == [[0, 0], [1, 1]]


def test_what_is_refused(memory: int) -> None:
    buffer = array(memory, shape=(2, 3))
    for out, error in (
        (np.zeros((3, 2), "f4"), ValueError),
        (np.zeros((2, 3), "f8"), TypeError),
        (np.broadcast_to(np.float32(1), (2, 3)), ValueError),
        ([0], TypeError),
    ):
        with pytest.raises(error):
            us.asnumpy(buffer, out=out)
    with pytest.raises(us.UnsupportedBufferError, match=r"(?s)CUdeviceptr has neither.*__cuda_arr"):
        us.asnumpy(driver.CUdeviceptr(memory))
    with pytest.raises(us.UnknownProducerError):
        us.UserStream(unknown="raise").asnumpy(array(memory, shape=(1,), version=2))
    for wrong in (3, object()):
        with pytest.raises(us.UnsupportedBufferError):
            us.asnumpy(wrong)
    with pytest.raises(ValueError, match="timeout"):
        us.asnumpy(buffer, timeout=-1)
    us.close(timeout=10)
    with pytest.raises(us.UnsupportedBufferError):
        us.asnumpy(driver.CUdeviceptr(memory), producer=None)
    assert not us.streams()


def test_a_timeout_leaves_all_in_order(producer: us.Stream, memory: int) -> None:
    buffer = array(memory, producer, shape=(8,), typestr="|u1")
    alive = weakref.ref(buffer)
    stream = us.get_stream(0)
    us.asnumpy(buffer)
    fill(producer, memory, 1)
    with testing.latch(stream) as latch:
        began = time.monotonic()
        with pytest.raises(us.WaitTimeout) as caught:
            us.asnumpy(buffer, timeout=0.2)
        assert time.monotonic() - began > 0.19
        assert caught.value.seconds == 0.2
        with pytest.raises(us.WaitTimeout) as caught:
            us.asnumpy({"a": [np.ones(2), buffer]}, timeout=0.02)  # one timeout for all of them
        assert caught.value.seconds == 0.02
        assert not producer.is_done, "it goes on after the copy, which is still to come"
        del buffer, caught
        gc.collect()
        assert alive() is not None
        latch.release()
    us.wait(stream, timeout=10)
    assert us.asnumpy(array(memory, producer, shape=(2,), typestr="|u1")).tolist() == [1, 1]
    assert eventually(lambda: alive() is None)


def test_captures(producer: us.Stream, memory: int) -> None:
    buffer = array(memory, shape=(2, 3))
    write(memory, NUMBERS)
    with us.Stream.create(0) as mine:
        with mine.capture(), pytest.raises(us.CaptureError, match="asnumpy and copyto cannot be"):
            us.asnumpy(buffer, stream=mine)
        pending = array(memory, producer, shape=(2, 3))
        for copy in (us.asnumpy, us.asnumpy_async, lambda x, **how: us.copyto(x, NUMBERS, **how)):
            with mine.capture(), pytest.raises(us.CaptureError, match="copyto cannot be captured"):
                copy(pending, stream=mine)
        with mine.capture():
            for _ in range(3):
                result = in_thread(lambda: us.asnumpy(buffer))
                np.testing.assert_array_equal(result, NUMBERS)
            in_thread(lambda: us.copyto(buffer, NUMBERS))


def test_nothing_is_released_that_a_capture_refused(producer: us.Stream, memory: int) -> None:
    """Also where there is no event yet, and the copy would have to make one."""
    buffer = array(memory, producer, shape=(8,), typestr="|u1")
    registry = us.UserStream()
    stream = registry.get_stream(0)
    registry.asnumpy(buffer)
    with device_current(0), stream.capture():
        stream._lane.pool.free.clear()
        with pytest.raises(us.CaptureError, match="copyto cannot be captured") as caught:
            registry.asnumpy(buffer)
    assert not hasattr(caught.value, "__notes__")
    registry.close()


def test_the_events_of_a_copy_in_parts_are_free_again_at_once(producer: us.Stream) -> None:
    """Those that are given up keep the next edges from the quick way."""
    size = 4 * PART
    out = np.zeros(size, "u1")

    def copy() -> np.ndarray:
        with device_current(0):
            return us.asnumpy(buffer, out=out)

    with device_memory(0, size) as large:
        buffer = array(large, producer, shape=(size,), typestr="|u1")
        copy()
        pool = us.get_stream(0)._lane.pool
        with testing.latch(producer) as latch:
            fill(producer, large, 3, size)
            events = len(pool.free)
            with running(copy) as result:
                assert is_blocked(result)
                assert len(pool.free) >= events - 1  # the last one may not be the blocking one
                latch.release()
                assert set(result()) == {3}


def test_results_stay_as_they_are(memory: int) -> None:
    """A result that is still there is on memory of its own."""
    results = []
    for number in range(5):
        write(memory, NUMBERS + number)
        results.append(us.asnumpy(array(memory, shape=(2, 3))))
    for number, result in enumerate(results):
        np.testing.assert_array_equal(result, NUMBERS + number)
        result[:] = 0


def test_results_outlive_the_context_of_the_stream(memory: int) -> None:
    write(memory, np.arange(64, dtype="f4"))
    with another_context():
        stream = us.Stream.from_handle(checked(driver.cuStreamCreate(1)))
        result = us.asnumpy(array(memory, shape=(64,)), stream=stream)
    assert place_of(result.ctypes.data) is not None
    assert result.tolist() == list(range(64))


def test_a_framework_packs_what_is_scattered(torch: types.ModuleType, memory: int) -> None:
    write(memory, np.arange(16, dtype="f4"))
    packed = []

    class Tensor(torch.Tensor):  # type: ignore[name-defined]
        layout = "torch.strided"
        lazy = True

        def is_conj(self) -> bool:
            return self.lazy

        def is_neg(self) -> bool:
            return False

        def detach(self) -> Any:
            return self

        resolve_conj = resolve_neg = detach

        def contiguous(self) -> Any:
            packed.append(torch.cuda.current_stream(0).cuda_stream)
            copy = Tensor(self.device, self.address)
            copy.stride = lambda: (3, 1)
            copy.lazy = False
            return copy

    result = us.asnumpy(Tensor(torch.device("cuda", 0), memory))
    assert packed == [int(us.get_stream(0).handle)]
    assert torch.cuda.current_stream(0).cuda_stream == 0
    np.testing.assert_array_equal(result, np.arange(6, dtype="f4").reshape(2, 3))


def test_tensors_without_a_quick_layout(torch: types.ModuleType, memory: int) -> None:
    """One like it was copied just before, so all else is known."""
    write(memory, NUMBERS.T)
    packed = []

    class Tensor(torch.Tensor):  # type: ignore[name-defined]
        def detach(self) -> Any:
            packed.append(self)
            return torch.Tensor(self.device, self.address)

    torch.Tensor.resolve_conj = torch.Tensor.resolve_neg = lambda self: self
    torch.Tensor.contiguous = torch.Tensor.resolve_conj

    def copied(**other: Any) -> Any:
        tensor = Tensor(torch.device("cuda", 0), memory)
        assert us.asnumpy(tensor).tolist() == NUMBERS.tolist()
        for name, value in other.items():
            setattr(tensor, name, value)
        return us.asnumpy(tensor).tolist()

    for flag in ("is_conj", "is_neg"):
        packed.clear()
        assert copied(**{flag: lambda: True}) == NUMBERS.tolist()
        assert len(packed) == 1, flag
    assert copied(shape=(1, 6), stride=lambda: (6, 1)) == [NUMBERS.T.ravel().tolist()]
    assert copied(shape=(2, 1)) == [[0], [3]]
    assert copied(dtype="torch.int32")[0] == NUMBERS.view("i4")[0].tolist()

    def not_told() -> Any:
        raise RuntimeError("sparse tensors have no strides")

    for other, said in (
        ({"is_nested": True}, "is nested"),
        ({"layout": "torch.sparse_coo", "stride": not_told}, r"of layout torch\.sparse_coo"),
        ({"layout": "torch.jagged"}, r"of layout torch\.jagged"),
        ({"data_ptr": lambda: 0}, "no memory"),
        ({"shape": (1 << 20, 1 << 10), "nelement": lambda: 1 << 30}, "extends beyond its memory"),
        ({"data_ptr": lambda: 4096}, "not in memory that the CUDA driver knows"),
        ({"dtype": "torch.quint4x2"}, "quint4x2"),
    ):
        with pytest.raises(us.UnsupportedBufferError, match=said):
            copied(**other)


def test_arrays_without_a_quick_layout(cupy: types.ModuleType, memory: int) -> None:
    write(memory, np.arange(4, dtype="f4"))
    one = cupy.ndarray(0, memory)
    assert us.asnumpy(one).tolist() == [0, 1, 2, 3]
    one.strides = (-4,)
    one.data.ptr += 12
    assert us.asnumpy(one).tolist() == [3, 2, 1, 0]
    one.data.ptr = memory
    with (
        device_current(0),  # or it would not be copied at once
        pytest.raises(us.UnsupportedBufferError, match="extends beyond its memory"),
    ):
        us.asnumpy(one)
    packed: list[Any] = []
    cupy.ascontiguousarray = lambda array: packed.append(array) or array
    one.strides = (16,)
    assert us.asnumpy(one).shape == (4,)
    assert packed == [one]
    one.shape, one.nbytes, one.data.ptr = (0,), 0, 0
    assert us.asnumpy(one).shape == (0,)


@pytest.mark.parametrize("reason", ["sync", "by device", "per thread"])
def test_unusual_orders_take_the_general_path(
    reason: str, torch: types.ModuleType, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = torch.Tensor(torch.device("cuda", 0), memory)
    us.asnumpy(tensor)
    fast = watch_fetches(monkeypatch)
    us.asnumpy(tensor)
    assert fast
    fast.clear()
    if reason == "per thread":  # in the next thread this is another stream
        torch.cuda.set_stream(torch.cuda.ExternalStream(2, 0))
    elif reason == "sync":
        wait_in_every_block(monkeypatch)
    else:
        order_by_device(monkeypatch)
    us.asnumpy(tensor)
    assert not fast


def test_nothing_is_copied_of_a_registry_that_is_closed(
    torch: types.ModuleType, memory: int
) -> None:
    tensor = torch.Tensor(torch.device("cuda", 0), memory)
    with us.UserStream() as registry:
        registry.asnumpy(tensor)
        registry.asnumpy(tensor)
    with pytest.raises(us.ClosedError):
        registry.asnumpy(tensor)


@pytest.mark.multi_device
def test_a_framework_packs_on_the_device_of_the_array(cupy: types.ModuleType) -> None:
    packed = []

    def ascontiguousarray(array: Any) -> Any:
        device = int(checked(driver.cuCtxGetDevice()))
        packed.append((device, cupy.cuda.get_current_stream(device).ptr))
        return array

    cupy.ascontiguousarray = ascontiguousarray
    with device_memory(1, 1024) as there:
        scattered = cupy.ndarray(1, there)
        scattered.strides = (256,)
        with device_current(0):
            us.asnumpy(scattered)
            assert int(checked(driver.cuCtxGetDevice())) == 0
            assert packed == [(1, int(us.get_stream(1).handle))]
            # Its framework would do it on another stream, after which nothing is ordered.
            us.asnumpy(scattered, stream=us.get_stream(0))
            us.copyto(np.zeros(4, "f4"), scattered, stream=us.get_stream(0))
        assert len(packed) == 1


@pytest.mark.multi_device
def test_what_has_to_be_packed_takes_a_stream_of_its_device(torch: types.ModuleType) -> None:
    class Tensor(torch.Tensor):  # type: ignore[name-defined]
        is_conj = is_neg = lambda self: True

    with device_memory(1) as there:
        tensor = Tensor(torch.device("cuda", 1), there)
        with pytest.raises(us.DeviceMismatchError, match=r"only on device 1.*stream=") as caught:
            us.asnumpy(tensor, stream=us.get_stream(0))
    assert caught.value.devices == (0, 1)


# -- copyto ---------------------------------------------------------------------------------------


def test_copyto_of_a_tensor_like_one_that_was_seen(torch: types.ModuleType, memory: int) -> None:
    write(memory, NUMBERS.T)
    tensor = torch.Tensor(torch.device("cuda", 0), memory)
    with device_current(0):
        us.asnumpy(tensor)
        out, rows = np.zeros((2, 3), "f4"), np.zeros((2, 2, 3), "f4")
        assert us.copyto(out, tensor) is us.get_stream(0)
        us.copyto(rows, tensor, timeout=20)
        assert out.tolist() == rows[0].tolist() == rows[1].tolist() == NUMBERS.tolist()
        with pytest.raises(TypeError, match="does not convert"):
            us.copyto(np.zeros((2, 3), "f8"), tensor)
        out.flags.writeable = False
        with pytest.raises(ValueError, match="read-only"):
            us.copyto(out, tensor)
        tensor.is_conj = lambda: True
        tensor.detach = lambda: tensor
        tensor.resolve_conj = lambda: torch.Tensor(tensor.device, memory)
        torch.Tensor.resolve_neg = torch.Tensor.contiguous = lambda self: self
        us.copyto(rows[0], tensor)


def test_copyto_in_all_directions(memory: int) -> None:
    with device_memory(0) as other:
        one, two = array(memory, shape=(2, 3)), array(other, shape=(2, 3))
        numbers = NUMBERS.copy()
        assert us.copyto(one, numbers) is us.get_stream(0)
        numbers[:] = -1  # it may be reused
        assert us.copyto(two, one) is us.get_stream(0)
        out = np.zeros((2, 3), "f4")
        us.copyto(out, two)
        np.testing.assert_array_equal(out, NUMBERS)
        us.copyto(one, np.full((), 7, "f4"))
        np.testing.assert_array_equal(us.asnumpy(one), np.full((2, 3), 7, "f4"))
        us.copyto(one, array(other, shape=(3,)))
        np.testing.assert_array_equal(us.asnumpy(one), np.broadcast_to(NUMBERS[0], (2, 3)))
        with us.Stream.create(0) as mine:
            assert us.copyto(one, two, stream=mine) is mine


@pytest.mark.multi_device
def test_copyto_another_device(memory: int) -> None:
    write(memory, NUMBERS)
    with device_memory(1) as there:
        one, two = array(memory, shape=(2, 3)), array(there, shape=(2, 3))
        assert us.copyto(two, one) is us.get_stream(1)
        np.testing.assert_array_equal(us.asnumpy(two), NUMBERS)
        us.copyto(array(there, shape=(3, 2), strides=(4, 12)), one.__class__(memory, (3, 2)))
        assert us.asnumpy(two).ravel().tolist() == NUMBERS.reshape(3, 2).T.ravel().tolist()


def test_copyto_is_ordered_on_both_sides(producer: us.Stream, memory: int) -> None:
    with device_memory(0) as other, us.Stream.create(0) as reader:
        source = array(memory, producer, shape=(8,), typestr="|u1")
        target = array(other, reader, shape=(8,), typestr="|u1")
        us.copyto(target, source).sync(timeout=10)
        with testing.latch(producer) as latch:
            fill(producer, memory, 1)
            stream = us.copyto(target, source)
            fill(producer, memory, 2)
            assert not stream.is_done
            assert not reader.is_done, "it reads what is copied there"
            latch.release()
        reader.sync(timeout=10)
        assert us.asnumpy(target).tolist() == [1] * 8
        assert us.asnumpy(source).tolist() == [2] * 8


def test_copyto_refuses(jax: types.ModuleType, memory: int) -> None:
    buffer = array(memory, shape=(2, 3))
    read_only = array(memory, shape=(2, 3), data=(memory, True))
    frozen = np.zeros((2, 3), "f4")
    frozen.flags.writeable = False
    for dst, src, error in (
        (read_only, NUMBERS, ValueError),
        (jax.Array(jax.Device(0)), NUMBERS, ValueError),
        (frozen, buffer, ValueError),
        (buffer, NUMBERS.astype("f8"), TypeError),
        (buffer, np.zeros((4, 2, 3), "f4"), ValueError),
        (NUMBERS.copy(), NUMBERS, TypeError),
        (buffer, driver.CUdeviceptr(memory), us.UnsupportedBufferError),
        (buffer, 3, us.UnsupportedBufferError),
        (buffer, [buffer], us.UnsupportedBufferError),
        (buffer, buffer.__class__(memory + 4, (2, 3)), ValueError),
    ):
        with pytest.raises(error):
            us.copyto(dst, src, producer=None)
    with pytest.raises(ValueError, match="timeout"):
        us.copyto(buffer, NUMBERS, producer=None, timeout=-1)


@pytest.mark.simulated
def test_a_copy_that_fails_leaves_the_stream_usable(producer: us.Stream, memory: int) -> None:
    write(memory, NUMBERS)
    buffer = array(memory, producer, shape=(2, 3))
    failures: list[dict[str, Any]] = [
        {"function": "cuMemcpyAsync", "result": 2},
        {"function": "cuEventRecord", "result": 2},
        {"function": "cuStreamWaitEvent", "result": 2},
        {"allocation": 2, "count": 9},
    ]
    for failure in failures:
        us.close(timeout=10)
        with testing.inject(**failure, this_thread=True):
            with contextlib.suppress(us.DriverError):
                us.asnumpy(buffer)
        np.testing.assert_array_equal(us.asnumpy(buffer, timeout=10), NUMBERS)


@pytest.mark.simulated
def test_what_is_copied_is_kept_if_nothing_can_hold_it(producer: us.Stream, memory: int) -> None:
    """The GPU is at it when the release fails."""
    stream = us.get_stream(0)
    with device_memory(0) as other:
        source = array(memory, producer)
        alive = weakref.ref(source)
        us.copyto(array(other), source)
        with testing.latch(stream), testing.inject("cuEventRecord", 2, count=9, skip=1):
            with pytest.raises(us.DriverError):  # the first event is that of the acquire
                us.copyto(array(other), source)
            del source
            gc.collect()
            assert alive() is not None
    forget_uses()


def test_the_limit_of_pinned_memory(memory: int) -> None:
    write(memory, NUMBERS)
    before = pinned_limit()
    try:
        us.UserStream.set_pinned_limit(0)
        np.testing.assert_array_equal(us.asnumpy(array(memory, shape=(2, 3))), NUMBERS)
        with pytest.raises(ValueError, match="limit"):
            us.UserStream.set_pinned_limit(-1)
        with pytest.raises(TypeError, match=r"nbytes must be an integer, not 1\.0"):
            us.UserStream.set_pinned_limit(1.0)  # type: ignore[arg-type]
    finally:
        us.UserStream.set_pinned_limit(before)


class OnHost:
    """An array with nothing but DLPack."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    def __dlpack__(self, **how: Any) -> Any:
        return self.array.__dlpack__(**how)


def test_host_buffers_that_have_nothing_but_dlpack(memory: int) -> None:
    host, buffer = OnHost(NUMBERS.copy()), array(memory, shape=(2, 3))
    np.testing.assert_array_equal(us.asnumpy(host), NUMBERS)
    out = np.zeros_like(NUMBERS)
    assert us.asnumpy(host, out=out) is out
    np.testing.assert_array_equal(out, NUMBERS)
    us.copyto(buffer, host)
    np.testing.assert_array_equal(us.asnumpy(buffer), NUMBERS)


def test_pinned_memory_of_cuda_core(memory: int) -> None:
    with device_current(0):
        pinned = LegacyPinnedMemoryResource().allocate(24)
    shown = us.asnumpy(pinned)
    assert shown.ctypes.data == int(pinned.handle)
    assert shown.dtype == np.uint8, "as of a buffer on the device"
    ctypes.memmove(int(pinned.handle), NUMBERS.ctypes.data, 24)
    buffer = array(memory, shape=(24,), typestr="|u1")
    us.copyto(buffer, pinned)
    np.testing.assert_array_equal(us.asnumpy(array(memory, shape=(2, 3))), NUMBERS)
    shown[:] = 0
    us.copyto(pinned, buffer)
    np.testing.assert_array_equal(shown, NUMBERS.reshape(-1).view(np.uint8))
    with device_current(0):
        pinned.close()
        other = LegacyPinnedMemoryResource().allocate(24)
        kept, address = us.asnumpy(other), int(other.handle)
        del other
        assert place_of(address) is not None, "the array keeps it"
        del kept
        assert place_of(address) is None


def test_host_memory_that_numpy_cannot_read(memory: int) -> None:
    with pinned_memory() as address:
        host, buffer = array(address, shape=(2, 3)), array(memory, shape=(2, 3))
        for use in (
            lambda: us.asnumpy(host),
            lambda: us.copyto(host, buffer),
            lambda: us.copyto(buffer, host),
        ):
            with pytest.raises(us.HostBufferError, match=r"NumPy cannot read it.*NumPy array"):
                use()


def test_masked_arrays(memory: int) -> None:
    masked = array(memory, shape=(2, 3), mask=array(memory, shape=(2, 3), typestr="|b1"))
    whole = array(memory, shape=(2, 3), mask=None)
    for use in (
        lambda: us.asnumpy(masked),
        lambda: us.copyto(masked, whole),
        lambda: us.copyto(NUMBERS.copy(), masked),
    ):
        with pytest.raises(us.UnsupportedBufferError, match=r"CAI is masked.*fill or drop"):
            use()
    us.copyto(whole, NUMBERS)
    assert us.describe(masked).shape == (2, 3)
    with us.borrow(masked):  # its memory is as good as any
        pass
