"""Races that are lost without an edge and never with one: real frameworks on a real GPU.

In one direction the producer is busy before it writes, and the reader must wait for it. In the
other the reader is busy before it reads, and the producer must not overwrite the data. Each run
writes its number; what was read is looked at in the end, so that nothing but edges orders anything.
"""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver
from cuda.core import Device, LaunchConfig, Program, ProgramOptions, Stream, launch

import userstream as us
from helpers import checked, device_count, device_current

pytestmark = pytest.mark.gpu

ORDERED_RUNS = int(os.environ.get("USERSTREAM_RACE_RUNS", "200"))
UNORDERED_RUNS = 50
LOST = 0.9  # at least this share of the unordered runs
SMALL, LARGE = 1 << 8, 1 << 24  # elements of 4 bytes
BUSY_CYCLES = 400_000  # a quarter of a millisecond


def framework(name: str) -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name, exc_type=ImportError)


@pytest.fixture(autouse=True)
def _current_context() -> Iterator[None]:
    with device_current(0):
        yield
        gc.collect()  # what destructors of frameworks make current goes as well


_kernels: dict[int, Any] = {}


def busy(stream: Any, device: int = 0) -> None:
    """Keep a stream of any library busy for a while."""
    if device not in _kernels:
        code = """
            extern "C" __global__ void busy(long long cycles) {
                long long begin = clock64();
                while (clock64() - begin < cycles) {}
            }"""
        options = ProgramOptions(arch=f"sm_{Device(device).arch}")
        _kernels[device] = Program(code, "c++", options).compile("cubin").get_kernel("busy")
    theirs = stream if isinstance(stream, Stream) else Stream.from_handle(stream)
    with device_current(device):
        Device(device).set_current()
        launch(theirs, LaunchConfig(grid=1, block=1), _kernels[device], np.int64(BUSY_CYCLES))


# -- producers: a stream to be busy on, a block in which it is current, a buffer, and a write ------


class Producer:
    """A framework that writes numbers to a buffer of its own, on a stream of its own."""

    handle: int
    buffer: Any
    address: int

    def current(self) -> AbstractContextManager[object]:
        return nullcontext()

    def write(self, number: int) -> None:
        raise NotImplementedError


class Torch(Producer):
    def __init__(self, count: int, device: int = 0) -> None:
        self.torch = framework("torch")
        self.stream = self.torch.cuda.Stream(device)
        self.handle = self.stream.cuda_stream
        with self.torch.cuda.stream(self.stream):
            self.buffer = self.torch.zeros(count, dtype=self.torch.int32, device=f"cuda:{device}")
        self.address = self.buffer.data_ptr()

    def current(self) -> AbstractContextManager[object]:
        return self.torch.cuda.stream(self.stream)  # type: ignore[no-any-return]

    def write(self, number: int) -> None:
        self.buffer.fill_(number)


class TorchDefault(Torch):
    """PyTorch on its default stream, which is the legacy one."""

    def __init__(self, count: int, device: int = 0) -> None:
        super().__init__(count, device)
        self.stream.synchronize()
        self.stream = self.torch.cuda.default_stream(device)
        self.handle = 1


class Cupy(Producer):
    def __init__(self, count: int, device: int = 0) -> None:
        self.cupy = framework("cupy")
        with self.cupy.cuda.Device(device):
            self.stream = self.cupy.cuda.Stream(non_blocking=True)
            with self.stream:
                self.buffer = self.cupy.zeros(count, dtype="i4")
        self.handle = self.stream.ptr
        self.address = self.buffer.data.ptr

    def current(self) -> AbstractContextManager[object]:
        return self.stream  # type: ignore[no-any-return]

    def write(self, number: int) -> None:
        self.buffer.fill(number)


class Bare(Producer):
    """An array that the driver writes, because its framework has no function without a kernel."""

    count: int

    def write(self, number: int) -> None:
        handle = driver.CUstream(self.handle)
        checked(driver.cuMemsetD32Async(self.address, number % (1 << 32), self.count, handle))


class Numba(Bare):
    def __init__(self, count: int, device: int = 0) -> None:
        assert device == 0
        self.cuda = framework("numba.cuda")
        self.stream = self.cuda.stream()
        self.handle = us.Stream.from_handle(self.stream).__cuda_stream__()[1]
        self.buffer = self.cuda.device_array(count, dtype=np.int32, stream=self.stream)
        self.address = self.buffer.__cuda_array_interface__["data"][0]
        self.count = count


PRODUCERS = [Torch, TorchDefault, Cupy, Numba]


class OnSomeStream(Bare):
    """A framework that works on a stream which nothing tells."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.stream = us.Stream.create(0)
        self.handle = int(self.stream.handle)
        self.make()
        us.wait_for_device(0, timeout=60)

    def make(self) -> None:
        raise NotImplementedError


class CudaCore(OnSomeStream):
    def make(self) -> None:
        self.buffer = Device(0).allocate(4 * self.count, stream=self.stream)
        self.address = int(self.buffer.handle)


class Rmm(OnSomeStream):
    def make(self) -> None:
        self.buffer = framework("rmm").DeviceBuffer(size=4 * self.count)
        self.address = self.buffer.ptr


class Pylibraft(OnSomeStream):
    def make(self) -> None:
        framework("rmm")  # it loads its library, also for one that is not there without libraft
        self.buffer = framework("pylibraft.common").device_ndarray(np.zeros(self.count, "i4"))
        self.address = self.buffer.__cuda_array_interface__["data"][0]


class TvmFfi(OnSomeStream):
    def make(self) -> None:
        torch, self.tvm_ffi = framework("torch"), framework("tvm_ffi")
        memory = torch.zeros(self.count, dtype=torch.int32, device="cuda:0")
        self.buffer, self.address = self.tvm_ffi.from_dlpack(memory), memory.data_ptr()


class TvmFfiOnItsStream(TvmFfi):
    def current(self) -> AbstractContextManager[object]:
        device = self.tvm_ffi.device("cuda", 0)
        return self.tvm_ffi.use_raw_stream(device, self.handle)  # type: ignore[no-any-return]


class NvImageCodec(OnSomeStream):
    def make(self) -> None:
        codec, cupy = framework("nvidia.nvimgcodec"), framework("cupy")
        memory = cupy.zeros((1, self.count, 4), "u1")
        cupy.cuda.runtime.deviceSynchronize()
        self.buffer = codec.as_image(memory, cuda_stream=self.handle)
        self.address = memory.data.ptr


class NvComp(OnSomeStream):
    def make(self) -> None:
        nvcomp, cupy = framework("nvidia.nvcomp"), framework("cupy")
        memory = cupy.zeros(4 * self.count, "u1")
        cupy.cuda.runtime.deviceSynchronize()
        self.buffer = nvcomp.as_array(memory, cuda_stream=self.handle)
        self.address = memory.data.ptr


class CvCuda(Bare):
    """A tensor that was used on a stream before."""

    def __init__(self, count: int) -> None:
        self.cvcuda = framework("cvcuda")
        self.count, self.stream = count, self.cvcuda.Stream()
        self.handle = self.stream.handle
        self.buffer = self.cvcuda.Tensor((4 * count,), np.uint8)
        self.address = self.buffer.cuda().__cuda_array_interface__["data"][0]
        self.use()

    def use(self) -> None:
        self.buffer.submitStreamSync(self.stream)  # as an operator does


class CvCudaAtFirst(CvCuda):
    """A tensor that no operator has used, while another stream than the default one is current."""

    def use(self) -> None:
        pass

    def current(self) -> AbstractContextManager[object]:
        return self.stream  # type: ignore[no-any-return]


class Warp(Producer):
    def __init__(self, count: int) -> None:
        warp = framework("warp")
        device = warp.get_device("cuda:0")
        self.buffer = warp.zeros(count, dtype=warp.int32, device=device)
        self.handle, self.address = int(device.stream.cuda_stream), self.buffer.ptr

    def write(self, number: int) -> None:
        self.buffer.fill_(number)


OTHERS = [
    CudaCore,
    Rmm,
    Pylibraft,
    TvmFfi,
    TvmFfiOnItsStream,
    NvImageCodec,
    NvComp,
    CvCuda,
    CvCudaAtFirst,
    Warp,
]


# -- consumers: how the first and the last number of a buffer are put aside -----------------------


class Reader:
    """Reads on a stream with the calls of the driver."""

    activate: str | bool = False

    def __init__(self, producer: Producer, count: int, runs: int) -> None:
        self.count, self.producer = count, producer
        self.seen = checked(driver.cuMemAlloc(8 * runs))
        self.runs = runs

    def read(self, run: int, stream: us.Stream) -> None:
        last = self.producer.address + 4 * (self.count - 1)
        handle = stream.handle
        checked(driver.cuMemcpyAsync(int(self.seen) + 8 * run, self.producer.address, 4, handle))
        checked(driver.cuMemcpyAsync(int(self.seen) + 8 * run + 4, last, 4, handle))

    def result(self) -> np.ndarray:
        for device in range(device_count()):
            us.wait_for_device(device, timeout=60)
        host = np.empty((self.runs, 2), np.int32)
        checked(driver.cuMemcpyDtoH(host, self.seen, host.nbytes))
        checked(driver.cuMemFree(self.seen))
        return host


class TorchReader(Reader):
    activate = "torch"

    def __init__(self, producer: Producer, count: int, runs: int) -> None:
        super().__init__(producer, count, runs)
        self.torch = framework("torch")
        self.view = self.torch.as_tensor(producer.buffer, device="cuda:0")
        self.results = self.torch.full((runs, 2), -1, dtype=self.torch.int32, device="cuda:0")

    def read(self, run: int, stream: us.Stream) -> None:
        self.results[run, 0].copy_(self.view[0])
        self.results[run, 1].copy_(self.view[-1])

    def result(self) -> np.ndarray:
        super().result()
        return self.results.cpu().numpy()  # type: ignore[no-any-return]


class CupyReader(Reader):
    activate = "cupy"

    def __init__(self, producer: Producer, count: int, runs: int) -> None:
        super().__init__(producer, count, runs)
        cupy = framework("cupy")
        self.view = cupy.asarray(producer.buffer)
        self.results = cupy.full((runs, 2), -1, dtype="i4")

    def read(self, run: int, stream: us.Stream) -> None:
        self.results[run, 0:1] = self.view[:1]
        self.results[run, 1:2] = self.view[-1:]

    def result(self) -> np.ndarray:
        super().result()
        return self.results.get()  # type: ignore[no-any-return]


READERS = [Reader, TorchReader, CupyReader]


# -- the races ------------------------------------------------------------------------------------


def lost(
    producer: Producer,
    reader: Reader,
    run: Callable[[int, Callable[[us.Stream], None]], None],
    *,
    runs: int,
) -> float:
    """Return the share of the runs that read another number than was written for them."""
    with producer.current():
        for number in range(runs):
            run(number, lambda stream, number=number: reader.read(number, stream))  # type: ignore[misc]
    seen = reader.result()
    return float((seen != np.arange(runs)[:, None]).any(axis=1).mean())


def race(kind: type[Producer], reading: type[Reader], count: int, direction: str) -> None:
    producer = kind(count)
    stream = us.get_stream(0)

    def ordered(number: int, read: Callable[[us.Stream], None]) -> None:
        if direction == "in":
            busy(producer.handle)
        producer.write(number)
        with us.borrow(producer.buffer, activate=reading.activate) as stream:
            if direction == "out":
                busy(stream)
            read(stream)

    def unordered(number: int, read: Callable[[us.Stream], None]) -> None:
        if direction == "in":
            busy(producer.handle)
        producer.write(number)
        if direction == "out":
            us.acquire(producer.buffer)
            busy(stream)
        Reader.read(reader, number, stream)

    with producer.current():
        producer.write(-1)
        busy(producer.handle)
        busy(stream)
    runs = ORDERED_RUNS if count == SMALL else max(ORDERED_RUNS // 20, 25)
    us.wait_for_device(0, timeout=60)
    assert lost(producer, reading(producer, count, runs), ordered, runs=runs) == 0
    if reading is Reader:
        reader = Reader(producer, count, UNORDERED_RUNS)
        share = lost(producer, reader, unordered, runs=UNORDERED_RUNS)
        assert share >= LOST, f"only {share:.0%} of the unordered runs were lost: no proof"


@pytest.mark.parametrize("direction", ["in", "out"])
@pytest.mark.parametrize("count", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("reading", READERS)
@pytest.mark.parametrize("kind", PRODUCERS)
def test_race(kind: type[Producer], reading: type[Reader], count: int, direction: str) -> None:
    race(kind, reading, count, direction)


@pytest.mark.parametrize("direction", ["in", "out"])
@pytest.mark.parametrize("kind", OTHERS)
def test_race_of_others(kind: type[Producer], direction: str) -> None:
    """Of those that tell no stream, or theirs in a way of their own."""
    race(kind, Reader, SMALL, direction)


@pytest.mark.multi_device
@pytest.mark.parametrize("kind", [Torch, TorchDefault, Cupy])
def test_race_between_devices(kind: type[Producer]) -> None:
    """A buffer of device 1, read on a stream of device 0."""
    producer = kind(SMALL, 1)
    stream = us.get_stream(0)
    runs = ORDERED_RUNS
    reader = Reader(producer, SMALL, runs)
    with device_current(1):
        us.wait_for_device(1, timeout=60)
        with producer.current():
            for number in range(runs):
                if number % 2:
                    busy(producer.handle, 1)
                producer.write(number)
                with us.borrow(producer.buffer, stream=stream):
                    if number % 2 == 0:
                        busy(stream)
                    reader.read(number, stream)
    assert (reader.result() == np.arange(runs)[:, None]).all()


def test_race_with_jax() -> None:
    jax = framework("jax")
    matrix = jax.numpy.ones((2048, 2048))

    @jax.jit
    def make(number: Any) -> Any:
        slow = matrix @ matrix @ matrix @ matrix
        return jax.numpy.full(SMALL, number) + (slow[0, 0] * 0).astype("int32")

    class Arrays(Producer):
        def write(self, number: int) -> None:
            self.buffer = make(number)
            self.address = self.buffer.unsafe_buffer_pointer()

    producer = Arrays()
    producer.write(-1)
    us.wait_for_device(0, timeout=60)
    runs = ORDERED_RUNS

    def ordered(number: int, read: Callable[[us.Stream], None]) -> None:
        producer.write(number)
        with us.borrow(producer.buffer) as stream:
            busy(stream)  # it is gone by then, and its memory held
            read(stream)

    assert lost(producer, Reader(producer, SMALL, runs), ordered, runs=runs) == 0


# -- memory ---------------------------------------------------------------------------------------


class Allocator:
    """Allocation and filling by a framework, on one of two streams of the framework."""

    def __init__(self) -> None:
        self.streams: list[Any] = []

    def on(self, which: int) -> AbstractContextManager[object]:
        return self.streams[which]  # type: ignore[no-any-return]

    def full(self, number: int, which: int) -> Any:
        raise NotImplementedError


class TorchAllocator(Allocator):
    def __init__(self) -> None:
        self.torch = framework("torch")
        self.streams = [self.torch.cuda.Stream(0) for _ in range(2)]

    def on(self, which: int) -> AbstractContextManager[object]:
        return self.torch.cuda.stream(self.streams[which])  # type: ignore[no-any-return]

    def full(self, number: int, which: int) -> tuple[Any, int]:
        with self.on(which):
            buffer = self.torch.full((LARGE,), number, dtype=self.torch.int32, device="cuda:0")
        return buffer, buffer.data_ptr()


class CupyAllocator(Allocator):
    def __init__(self) -> None:
        self.cupy = framework("cupy")
        self.streams = [self.cupy.cuda.Stream(non_blocking=True) for _ in range(2)]

    def full(self, number: int, which: int) -> tuple[Any, int]:
        with self.on(which):
            buffer = self.cupy.full(LARGE, number, dtype="i4")
        return buffer, buffer.data.ptr


@pytest.mark.parametrize("freed", ["inside", "after"])
@pytest.mark.parametrize("kind", [TorchAllocator, CupyAllocator])
def test_memory_is_not_used_again_underneath(kind: type[Any], freed: str) -> None:
    """Allocated on one stream, borrowed while another is current, freed, allocated again."""
    allocator = kind()

    def corrupted(keep: bool, runs: int = 20) -> int:
        reader = Reader(Producer(), LARGE, runs)
        for run in range(runs):
            buffer, reader.producer.address = allocator.full(run, 0)
            us.wait_for_device(0, timeout=60)
            with allocator.on(1):
                borrow = us.borrow(buffer, keep=keep)
                with borrow as stream:
                    busy(stream)
                    if freed == "inside" and keep:
                        del buffer, borrow
                    reader.read(run, stream)
                borrow = buffer = None
            again = allocator.full(-1, 0)
            us.wait_for_device(0, timeout=60)
            del again
        return int((reader.result() != np.arange(runs)[:, None]).any(axis=1).sum())

    assert corrupted(keep=True) == 0
    if freed == "after":
        assert corrupted(keep=False) >= 10, "nothing was used again: no proof"


def test_memory_of_cuda_core() -> None:
    """Freed on the stream that it was allocated on, which nobody told to wait."""
    device = Device(0)
    device.set_current()
    allocating = device.create_stream()
    other = us.Stream.create(0)

    def full(number: int) -> Any:
        buffer = device.allocate(4 * LARGE, stream=allocating)
        checked(
            driver.cuMemsetD32Async(
                int(buffer.handle), number, LARGE, driver.CUstream(int(allocating.handle))
            )
        )
        return buffer

    def corrupted(keep: bool, runs: int = 20) -> int:
        reader = Reader(Producer(), LARGE, runs)
        for run in range(runs):
            buffer = full(run)
            reader.producer.address = int(buffer.handle)
            us.wait_for_device(0, timeout=60)
            with us.borrow(buffer, producer=other, keep=keep) as stream:
                busy(stream)
                reader.read(run, stream)
            del buffer
            again = full(0xFFFF)
            us.wait_for_device(0, timeout=60)
            again.close(allocating)
        return int((reader.result() != np.arange(runs)[:, None]).any(axis=1).sum())

    assert corrupted(keep=True) == 0
    assert corrupted(keep=False) >= 18, "nothing was used again: no proof"
    other.close()
