"""The device of a buffer, and its description. Real frameworks: `tests/buffers/real`."""

from __future__ import annotations

import ast
import sys
import types
from collections.abc import Iterator

import numpy as np
import pytest
from cuda.bindings import driver
from cuda.core import Device
from cuda.core.utils import StridedMemoryView

import standins
import userstream as us
from helpers import (
    CAI,
    DLPack,
    another_context,
    checked,
    device_count,
    device_current,
    device_memory,
    device_uuid,
    managed_memory,
    on,
    pinned_memory,
)
from userstream import testing


def resolves(buffer: object, device: int = 0) -> bool:
    """Every way to the device of a buffer gives the same, the first time and the second."""
    stream = us.get_stream(device)
    return all(
        us.get_stream(buffer) is stream
        and us.get_stream([buffer]) is stream
        and us.device_of(buffer).device_id == device
        and us.describe(buffer).device_id == device
        for _ in range(2)
    )


# -- PyTorch ----------------------------------------------------------------------------------


def test_torch(torch: types.ModuleType, memory: int) -> None:
    tensor = torch.Tensor(torch.device("cuda", 0), memory)
    assert resolves(tensor)
    assert us.describe(tensor) == us.BufferInfo(
        device_id=0,
        device_uuid=device_uuid(0),
        source="torch.Tensor",
        ordering="current",
        address=memory,
        nbytes=24,
        shape=(2, 3),
        strides=(4, 8),
        dtype=np.dtype("f4"),
        memory="device",
        producer=1,
    )
    assert resolves(torch.Tensor(torch.device("cuda", 0), 0)), "an empty one"
    subclass = type("Parameter", (torch.Tensor,), {})
    assert resolves(subclass(torch.device("cuda", 0), memory))
    assert us.describe(torch.Tensor(torch.device("cuda", 0), memory, dtype="odd")).dtype == "odd"


def test_a_description_shows_addresses_and_handles_as_streams_show_theirs(
    torch: types.ModuleType, memory: int
) -> None:
    shown = repr(us.describe(torch.Tensor(torch.device("cuda", 0), memory)))
    assert f"address={memory:#x}, nbytes=24, shape=(2, 3)" in shown
    assert "memory='device', producer=0x1, device_uuid='" in shown
    assert "parts" not in shown, "what is not known, or not there, is left out"
    tensor = torch.Tensor(torch.device("cuda", 0), memory, dtype="float64")
    assert "dtype=dtype('float64')" in repr(us.describe(tensor))
    assert "device_id=0, source='torch.Tensor'" in shown
    nothing = us.BufferInfo(device_id=None, source="none", ordering="device")
    assert eval(repr(nothing), {"BufferInfo": us.BufferInfo}) == nothing


def test_torch_streams(monkeypatch: pytest.MonkeyPatch, memory: int) -> None:
    module = standins.torch(stream=4711)
    monkeypatch.setitem(sys.modules, "torch", module)
    tensor = module.Tensor(module.device("cuda", 0), memory)
    assert us.describe(tensor).producer == 4711
    del module._C._cuda_getCurrentRawStream
    assert us.describe(tensor).producer == 4711, "by the public function"


@pytest.mark.parametrize("kind", ["cpu", "meta"])
def test_torch_elsewhere(torch: types.ModuleType, kind: str) -> None:
    for function in (us.get_stream, us.device_of, us.describe):
        with pytest.raises(us.HostBufferError, match=f"torch device '{kind}'"):
            function(torch.Tensor(torch.device(kind)))


def test_torch_of_another_accelerator_is_not_taken_for_cuda(torch: types.ModuleType) -> None:
    us.get_stream(0)
    with pytest.raises(us.HostBufferError, match="torch device 'xla:0'"):
        us.get_stream(torch.Tensor(torch.device("xla", 0)))


def test_torch_strides_count_elements(torch: types.ModuleType, memory: int) -> None:
    tensor = torch.Tensor(torch.device("cuda", 0), memory)
    for add in (0, 10):  # the second copy uses the cached form
        numbers = np.arange(6, dtype=np.float32) + add
        us.copyto(CAI(memory, (6,)), numbers)
        expected = numbers.reshape(3, 2).T.tolist()
        with device_current(0):  # which the fast path needs for a default stream
            assert us.asnumpy(tensor).tolist() == expected
        assert us.asnumpy(tensor, producer=us.get_stream(0)).tolist() == expected


def test_torch_pinned(torch: types.ModuleType) -> None:
    with pinned_memory() as address:
        tensor = torch.Tensor(torch.device("cpu"), address)
        assert us.describe(tensor).memory == "pinned"
        with pytest.raises(us.HostBufferError):
            us.get_stream(tensor)


# -- CuPy -------------------------------------------------------------------------------------


def test_cupy(cupy: types.ModuleType, memory: int) -> None:
    array = cupy.ndarray(0, memory)
    assert resolves(array)
    info = us.describe(array)
    assert (info.source, info.ordering, info.producer) == ("cupy.ndarray", "current", 1)
    assert (info.address, info.nbytes, info.shape, info.strides) == (memory, 16, (4,), (4,))
    assert (info.dtype, info.memory) == (np.dtype("f4"), "device")
    for address in (0, memory + 256):  # a slice of nothing may begin where the allocation ends
        empty = cupy.ndarray(0, address)
        empty.shape, empty.nbytes = (0,), 0
        assert resolves(empty)
        assert us.asnumpy(empty).shape == (0,)
    cupy.cuda.get_current_stream = lambda device: types.SimpleNamespace(ptr=2)
    assert us.describe(array).producer == 2


def test_cupy_pointers(cupy: types.ModuleType, memory: int) -> None:
    pointer = cupy.cuda.MemoryPointer(0, memory, 256, 16)
    assert resolves(pointer)
    info = us.describe(pointer)
    assert (info.source, info.ordering, info.producer) == ("cupy.cuda.MemoryPointer", "current", 1)
    assert (info.address, info.nbytes, info.memory) == (memory + 16, 240, "device")


def test_cupy_sparse(cupy: types.ModuleType, memory: int) -> None:
    matrix = cupy.csr_matrix(*(cupy.ndarray(0, memory + offset) for offset in (0, 16, 32)))
    assert resolves(matrix)
    info = us.describe(matrix)
    assert (info.source, info.ordering, info.producer) == ("cupyx.scipy.sparse", "current", 1)
    assert (info.shape, info.nbytes, len(info.parts)) == ((3, 5), 48, 3)
    assert [array.shape for array in us.asnumpy(matrix)] == [(4,)] * 3
    with us.borrow(matrix, activate=True) as stream:
        assert cupy.cuda.get_current_stream(0).ptr == int(stream.handle)


# -- JAX --------------------------------------------------------------------------------------


def test_jax(jax: types.ModuleType) -> None:
    array = jax.Array(jax.Device(0))
    assert resolves(array)
    info = us.describe(array)
    assert (info.source, info.ordering, info.producer) == ("jax.Array", "dlpack", None)
    assert (info.shape, info.strides, info.nbytes) == ((2, 4), (16, 4), 32)


def test_jax_on_the_host(jax: types.ModuleType) -> None:
    with pytest.raises(us.HostBufferError, match="cpu:0"):
        us.get_stream(jax.Array(jax.Device(0, "cpu")))


def test_jax_sharded(jax: types.ModuleType) -> None:
    array = jax.Array(jax.Device(0), jax.Device(1))
    with pytest.raises(us.DeviceMismatchError, match=r"sharded over devices \[0, 1\]") as caught:
        us.get_stream(array)
    assert caught.value.devices == (0, 1)
    info = us.describe(array)
    assert info.device_id is None
    assert [part.device_id for part in info.parts] == [0, 1]
    same = jax.Array(jax.Device(0), jax.Device(0))
    assert resolves(same)
    assert len(us.describe(same).parts) == 2
    assert len(us.describe(jax.Array(*[jax.Device(0)] * 3)).parts) == 3


def test_jax_traced(jax: types.ModuleType) -> None:
    for function in (us.get_stream, us.describe):
        with pytest.raises(us.UnsupportedBufferError, match="traced"):
            function(jax.core.Tracer())


# -- numba, RMM -------------------------------------------------------------------------------


def test_numba(memory: int) -> None:
    array = standins.NumbaArray(0, memory, stream=None)
    assert resolves(array)
    info = us.describe(array)
    assert (info.source, info.ordering, info.producer) == ("numba DeviceNDArray", "current", 1)
    bound = us.describe(standins.NumbaArray(0, memory, stream=4711))
    assert (bound.ordering, bound.producer) == ("exact", 4711)
    for address in (0, memory + 256):  # as of CuPy
        empty = standins.NumbaArray(0, address, count=0)
        assert resolves(empty)
        assert us.asnumpy(empty).shape == (0,)


def test_numba_orders_by_the_stream_that_it_is_bound_to(memory: int, producer: us.Stream) -> None:
    array = standins.NumbaArray(0, memory, stream=int(producer.handle))
    us.get_stream(0)
    with testing.latch(producer):
        assert not us.acquire(array).is_done
    us.wait(0, timeout=10)
    unbound = standins.NumbaArray(0, memory, stream=None)
    with device_current(0):
        legacy = us.Stream.legacy_default()
        with testing.latch(legacy):
            assert not us.acquire(unbound).is_done
        us.wait(0, timeout=10)


def test_numba_with_per_thread_default_streams(
    monkeypatch: pytest.MonkeyPatch, memory: int
) -> None:
    config = types.SimpleNamespace(CUDA_PER_THREAD_DEFAULT_STREAM=1)
    monkeypatch.setitem(sys.modules, "numba", types.SimpleNamespace(config=config))
    assert us.describe(standins.NumbaArray(0, memory)).producer == 2


@pytest.mark.parametrize("default", [1, 2])
def test_numba_means_a_default_stream_that_an_array_is_bound_to(
    default: int, monkeypatch: pytest.MonkeyPatch, memory: int, producer: us.Stream
) -> None:
    """Unlike those who say one of an unknown type: nothing else on the device is ordered."""
    config = types.SimpleNamespace(CUDA_PER_THREAD_DEFAULT_STREAM=default == 1)
    monkeypatch.setitem(sys.modules, "numba", types.SimpleNamespace(config=config))
    array = standins.NumbaArray(0, memory, stream=default)
    info = us.describe(array)
    assert (info.ordering, info.producer) == ("exact", default)
    us.get_stream(array)
    with testing.latch(producer):
        for _ in range(2):  # in the way of the first one of a type as well
            us.acquire(array).sync(timeout=10)
            us.asnumpy(array, timeout=10)


def test_numba_says_0_of_its_default_stream(monkeypatch: pytest.MonkeyPatch, memory: int) -> None:
    """Of an array that is bound to `numba.cuda.default_stream()`; nobody else may."""
    array = standins.NumbaArray(0, memory, stream=0)
    stream = standins.NumbaStream(0)
    for per_thread, handle in ((0, 1), (1, 2)):
        config = types.SimpleNamespace(CUDA_PER_THREAD_DEFAULT_STREAM=per_thread)
        monkeypatch.setitem(sys.modules, "numba", types.SimpleNamespace(config=config))
        info = us.describe(array)
        assert (info.ordering, info.producer) == ("current", handle)
        assert int(us.get_stream(stream).handle) == handle
    monkeypatch.delitem(sys.modules, "numba")
    us.get_stream(array)
    with device_current(0), testing.latch(us.Stream.legacy_default()):
        assert not us.acquire(array).is_done
    us.wait(array, timeout=10)
    assert us.asnumpy(array).shape == (4,)
    with pytest.raises(us.UnsupportedBufferError, match="its stream is 0, which"):
        us.acquire(CAI(memory, stream=0))


def test_numba_mapped_memory_is_on_the_host() -> None:
    with pinned_memory() as address:
        array = standins.NumbaArray(0, address)
        with pytest.raises(us.HostBufferError, match="pinned"):
            us.get_stream(array)
        assert us.describe(array).memory == "pinned"


def test_rmm(memory: int) -> None:
    buffer = standins.RmmBuffer(0, memory, typestr="|u1", version=0)
    assert resolves(buffer)
    info = us.describe(buffer)
    assert (info.ordering, info.producer, info.dtype) == ("device", None, np.dtype("u1"))


# -- Warp -------------------------------------------------------------------------------------


def test_warp(memory: int) -> None:
    device = standins.WarpDevice(0, 4711)
    array = standins.WarpArray(device, memory)
    assert resolves(array)
    info = us.describe(array)
    assert (info.source, info.ordering, info.producer) == ("warp.array", "current", 4711)
    assert (info.address, info.shape, info.memory) == (memory, (4,), "device")
    device.stream.cuda_stream = None
    assert us.describe(array).producer == 1, "the null stream"
    assert resolves(standins.WarpArray(device, 0, count=0)), "an empty one"
    host = standins.WarpArray(standins.WarpDevice(-1, None), 4096)
    for function in (us.get_stream, us.describe):
        with pytest.raises(us.HostBufferError):
            function(host)


def test_warp_indexed(memory: int) -> None:
    indexed = standins.WarpIndexed(standins.WarpArray(standins.WarpDevice(0, 4711), memory))
    assert resolves(indexed)
    info = us.describe(indexed)
    assert (info.address, info.shape, info.producer) == (None, (2,), 4711)
    with pytest.raises(us.UnsupportedBufferError, match="not a single array"):
        us.asnumpy(indexed)


# -- DALI -------------------------------------------------------------------------------------


def test_dali_tensors(memory: int) -> None:
    tensor = standins.DaliTensor(0, memory, typestr="=f", version=2)
    assert resolves(tensor)
    info = us.describe(tensor)
    assert (info.source, info.ordering, info.producer) == ("dali TensorGPU", "exact", 1)
    assert info.dtype == np.dtype("f4")
    tensor.stream = 4711
    assert us.describe(tensor).producer == 4711


def test_dali_lists(memory: int) -> None:
    tensors = [standins.DaliTensor(0, memory) for _ in range(3)]
    batch = standins.DaliList(tensors, stream=4711)
    assert resolves(batch)
    info = us.describe(batch)
    assert (info.producer, info.ordering, info.nbytes) == (4711, "exact", 48)
    assert len(info.parts) == 3


def test_dali_dynamic(memory: int) -> None:
    tensor = standins.DaliDynamic(0, memory)
    assert resolves(tensor)
    assert us.describe(tensor).producer == 1
    batch = standins.DaliBatch([tensor, tensor])
    assert resolves(batch)
    info = us.describe(batch)
    assert (info.producer, info.ordering, len(info.parts)) == (1, "exact", 2)
    other = standins.DaliDynamic(0, memory)
    other.stream = 4711
    mixed = us.describe(standins.DaliBatch([tensor, other]))
    assert (mixed.producer, mixed.ordering) == (None, "device")


def test_dali_on_the_host() -> None:
    host = standins.DaliDynamic(0, 0)
    host.kind = "cpu"
    for thing in (standins.DaliHostTensor(), standins.DaliHostList(), host):
        for function in (us.get_stream, us.describe):
            with pytest.raises(us.HostBufferError):
                function(thing)


# -- cuda.core --------------------------------------------------------------------------------


@pytest.fixture
def device() -> Iterator[Device]:
    device = Device(0)
    with device_current(0):
        device.set_current()
        yield device


def test_cuda_core_buffers(device: Device) -> None:
    stream = us.get_stream(0)
    buffer = device.allocate(64, stream=stream)
    assert resolves(buffer)
    info = us.describe(buffer)
    assert (info.source, info.nbytes, info.memory) == ("cuda.core.Buffer", 64, "device")
    assert (info.address, info.ordering) == (int(buffer.handle), "device")
    view = StridedMemoryView.from_buffer(buffer, shape=(4, 4), dtype=np.dtype("f4"))
    assert resolves(view)
    info = us.describe(view)
    assert (info.shape, info.strides, info.nbytes) == ((4, 4), (16, 4), 64)
    transposed = StridedMemoryView.from_buffer(
        buffer, shape=(2, 4), strides=(1, 2), dtype=np.dtype("f4")
    )
    assert us.describe(transposed).strides == (4, 8)
    host = StridedMemoryView.from_any_interface(np.zeros(3), stream_ptr=-1)
    with pytest.raises(us.HostBufferError):
        us.get_stream(host)
    us.wait(0)
    buffer.close(stream)
    us.wait(0)


def test_closed_buffers_of_cuda_core(device: Device) -> None:
    stream = us.get_stream(0)
    buffer = device.allocate(64, stream=stream)
    buffer.close(stream)
    closed = pytest.raises(
        us.UnsupportedBufferError, match=r"cuda\.core\.Buffer is closed, .*: pass"
    )
    for function in (us.get_stream, us.device_of, us.describe, us.wait, us.acquire, us.asnumpy):
        with closed:
            function(buffer)
    with closed, us.borrow(buffer):
        pass
    with closed:
        us.get_stream([buffer])


def test_pinned_buffers_of_cuda_core(device: Device) -> None:
    from cuda.core import LegacyPinnedMemoryResource

    buffer = LegacyPinnedMemoryResource().allocate(64)
    with pytest.raises(us.HostBufferError, match="pinned"):
        us.get_stream(buffer)
    assert us.describe(buffer).memory == "pinned"


@pytest.mark.multi_device
def test_raw_pointers() -> None:
    for ordinal in (0, 1):
        with device_memory(ordinal) as address:
            pointer = driver.CUdeviceptr(address)
            assert resolves(pointer, ordinal)
            assert resolves(driver.CUdeviceptr(address + 100), ordinal), "inside the allocation"
            info = us.describe(pointer)
            assert (info.address, info.nbytes, info.ordering) == (address, None, "device")


# -- the protocols ----------------------------------------------------------------------------


def test_dlpack() -> None:
    assert resolves(on(0))
    info = us.describe(on(0))
    assert (info.source, info.ordering) == ("__dlpack_device__", "device")
    assert info.address is None, "this one is not exported"


def test_dlpack_of_a_real_export(device: Device) -> None:
    buffer = device.allocate(64, stream=us.get_stream(0))

    class Array:
        def __dlpack_device__(self) -> tuple[int, int]:
            return buffer.__dlpack_device__()

        def __dlpack__(self, **options: object) -> object:
            return buffer.__dlpack__(**options)

    assert resolves(Array())
    info = us.describe(Array())
    assert (info.address, info.nbytes, info.memory) == (int(buffer.handle), 64, "device")


def test_dlpack_with_an_interface_as_well(memory: int) -> None:
    class Array(CAI):
        def __dlpack_device__(self) -> tuple[int, int]:
            return (2, 0)

    assert resolves(Array(memory))
    info = us.describe(Array(memory, stream=4711))
    assert (info.address, info.shape, info.ordering) == (memory, (4,), "exact")
    for address in (0, memory + 256):
        assert resolves(Array(address, shape=(0,))), "an empty one"


@pytest.mark.multi_device
@pytest.mark.parametrize(("kind", "device"), [(2, 1), (3, 0)], ids=["device", "pinned"])
def test_an_empty_array_is_where_dlpack_says(kind: int, device: int) -> None:
    class Array(CAI):
        def __dlpack_device__(self) -> tuple[int, int]:
            return (kind, 1)

    assert us.describe(Array(0, shape=(0,))).device_id == device


def test_the_interface(memory: int) -> None:
    assert resolves(CAI(memory))
    for version, stream, expected in (
        (3, None, (None, "device")),
        (3, -1, (None, "none")),
        (3, 1, (None, "device")),
        (3, 2, (None, "device")),
        (3, 3, (3, "exact")),
        (3, 4711, (4711, "exact")),
        (2, None, (None, "device")),
        (0, None, (None, "device")),
    ):
        info = us.describe(CAI(memory, version=version, stream=stream))
        assert (info.producer, info.ordering) == expected
    assert us.describe(CAI(memory, shape=(2, 2), strides=(4, 8))).strides == (4, 8)
    assert us.describe(CAI(memory, shape=())).strides == ()
    structured = us.describe(
        CAI(memory, shape=(2,), typestr="|V12", descr=[("a", "<f4"), ("b", "<f8")])
    )
    assert structured.dtype == np.dtype([("a", "<f4"), ("b", "<f8")])
    assert structured.nbytes == 24


def test_the_interface_as_an_attribute_of_one_object(memory: int) -> None:
    array, plain = types.SimpleNamespace(), types.SimpleNamespace()
    array.__cuda_array_interface__ = CAI(memory).interface
    assert resolves(array)
    with pytest.raises(us.UnsupportedBufferError):
        us.get_stream(plain)
    plain.__dlpack_device__ = lambda: (2, 0)
    assert resolves(plain)


def test_managed_memory() -> None:
    for ordinal in range(device_count()):
        with managed_memory(ordinal) as address:
            assert resolves(CAI(address), ordinal)
            assert us.describe(CAI(address)).memory == "managed"


def test_managed_memory_by_dlpack(device: Device) -> None:
    """DLPack says device 0 of all managed memory, so the driver is asked."""
    with managed_memory(device_count() - 1) as address:
        buffer = __import__("cuda.core").core.Buffer.from_handle(address, 64)

        class Array:
            def __dlpack_device__(self) -> tuple[int, int]:
                return (13, 0)

            def __dlpack__(self, **options: object) -> object:
                return buffer.__dlpack__(**options)

        assert us.device_of(Array()).device_id == device_count() - 1
        assert us.describe(Array()).memory == "managed"


def test_pinned_memory() -> None:
    with pinned_memory() as address:
        for thing in (CAI(address), driver.CUdeviceptr(address), DLPack(3, 0)):
            for function in (us.get_stream, us.device_of):
                with pytest.raises(us.HostBufferError, match="pinned host memory"):
                    function(thing)
        assert us.describe(CAI(address)).memory == "pinned"
        assert us.describe(DLPack(3, 0)).source == "__dlpack_device__"


def test_memory_of_another_context() -> None:
    with another_context():
        pointer = checked(driver.cuMemAlloc(64))
        for thing in (pointer, CAI(int(pointer))):
            for function in (us.get_stream, us.device_of, us.describe):
                with pytest.raises(us.UnsupportedBufferError, match="not the primary one"):
                    function(thing)
        checked(driver.cuMemFree(pointer))


def test_a_type_that_names_no_module() -> None:
    kind = type("Array", (DLPack,), {"__module__": None})
    assert us.get_stream(kind(2, 0)) is us.get_stream(0)


def test_an_interface_of_numpy_integers(memory: int) -> None:
    shape, strides = (np.int64(2), np.int32(3)), [np.int64(24), np.int64(8)]
    array = CAI(np.uint64(memory), shape, strides=strides, stream=np.int64(9), version=np.int8(3))
    assert resolves(array)
    info = us.describe(array)
    assert (info.address, info.shape, info.strides) == (memory, (2, 3), (24, 8))
    assert all(type(each) is int for each in (info.address, *info.shape, *info.strides))
    assert (info.producer, info.ordering) == (9, "exact")
    assert us.describe(CAI(memory, stream=np.int64(1))).ordering == "device"


@pytest.mark.parametrize(
    "wrong",
    [
        {"typestr": "float32x"},
        {"typestr": 4},
        {"typestr": None},
        {"shape": (-1,)},
        {"shape": (2, 2), "strides": (4,)},
        {"shape": 3},
        {"shape": ("a",)},
        {"strides": 4},
        {"strides": (1.5,)},
        {"version": "3"},
        {"stream": "side"},
        {"stream": -2},
        {"stream": 1 << 64},
        {"stream": np.array([3, 4])},
        {"data": (4096, np.array([True, False]))},
        {"data": (4096.0, False)},
        {"data": (True, False)},
    ],
    ids=str,
)
def test_a_malformed_interface(wrong: dict[str, object], memory: int) -> None:
    with pytest.raises(us.UnsupportedBufferError, match="malformed"):
        us.describe(CAI(memory, **wrong))


def test_a_device_query_that_fails() -> None:
    class Array:
        def __dlpack_device__(self) -> tuple[int, int]:
            raise RuntimeError("it is lost")

    for use in (us.get_stream, us.acquire):
        with pytest.raises(us.UnsupportedBufferError, match="it is lost; pass the device itself"):
            use(Array())


def test_an_error_names_a_type_with_its_module() -> None:
    with pytest.raises(us.UnsupportedBufferError, match=r"\bast\.Load\b"):
        us.get_stream(ast.Load())


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((4, "OpenCL"), (7, "Vulkan"), (8, "Metal"), (10, "ROCm"), (11, "ROCm host")),
        *((14, "oneAPI"), (99, "unknown")),
    ],
)
def test_the_device_of_another_vendor(kind: int, name: str) -> None:
    class Array:
        def __dlpack_device__(self) -> tuple[int, int]:
            return (kind, 0)

    with pytest.raises(us.UnsupportedBufferError, match=rf"DLPack type {kind} \({name}\)"):
        us.get_stream(Array())
