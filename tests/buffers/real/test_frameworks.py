"""Real objects of real frameworks, on a real GPU."""

from __future__ import annotations

import time
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver
from cuda.core import Device

import userstream as us
from helpers import (
    checked,
    device_count,
    device_current,
    framework,
    in_thread,
    is_blocked,
    run_python,
    running,
)
from userstream import testing

pytestmark = pytest.mark.gpu


def resolves(buffer: object, device: int = 0) -> us.BufferInfo:
    stream = us.get_stream(device)
    for _ in range(2):
        assert us.get_stream(buffer) is stream
        assert us.get_stream([buffer]) is stream
        assert us.device_of(buffer).device_id == device
    us.wait(buffer, timeout=10)
    info = us.describe(buffer)
    assert info.device_id == device
    return info


# -- PyTorch ----------------------------------------------------------------------------------


def test_torch(torch: ModuleType) -> None:
    tensor = torch.arange(12.0, device="cuda:0").reshape(3, 4)
    info = resolves(tensor)
    assert (info.source, info.ordering, info.memory) == ("torch.Tensor", "current", "device")
    assert (info.address, info.nbytes) == (tensor.data_ptr(), 48)
    assert (info.shape, info.strides, info.dtype) == ((3, 4), (16, 4), np.dtype("f4"))
    assert resolves(tensor.T).strides == (4, 16)
    assert resolves(tensor[1:, ::2]).strides == (16, 8)
    assert resolves(tensor[1:, ::2]).nbytes == 16
    assert resolves(torch.empty(0, device="cuda:0")).address == 0
    for other in (
        torch.nn.Parameter(tensor),
        tensor.clone().requires_grad_(),
        torch.zeros(3, dtype=torch.complex64, device="cuda:0").conj(),
        torch.zeros((), device="cuda:0"),
        torch.zeros(3, dtype=torch.int64, device="cuda:0"),
    ):
        resolves(other)
    assert str(resolves(tensor.bfloat16()).dtype) == "bfloat16"


def test_torch_streams(torch: ModuleType) -> None:
    tensor = torch.zeros(3, device="cuda:0")
    assert us.describe(tensor).producer == 1, "the legacy default stream"
    side = torch.cuda.Stream(0)
    with torch.cuda.stream(side):
        assert us.describe(tensor).producer == side.cuda_stream
    assert us.get_stream(side).__cuda_stream__()[1] == side.cuda_stream
    assert us.get_stream(torch.cuda.default_stream(0)) is us.Stream.legacy_default()
    stream = us.get_stream(0)
    before = torch.cuda.current_stream(0)
    with torch.cuda.stream(torch.cuda.ExternalStream(int(stream.handle), device=0)):
        result = tensor + 1
        assert us.describe(tensor).producer == int(stream.handle)
    assert torch.cuda.current_stream(0) == before
    us.wait(tensor, timeout=10)
    assert result.tolist() == [1, 1, 1]


def test_torch_off_the_gpu(torch: ModuleType) -> None:
    for tensor in (torch.zeros(2), torch.zeros(2).pin_memory(), torch.zeros(2, device="meta")):
        with pytest.raises(us.HostBufferError, match="torch device"):
            us.get_stream(tensor)
    assert us.describe(torch.zeros(2).pin_memory()).memory == "pinned"


def test_torch_devices(torch: ModuleType) -> None:
    assert us.get_stream(torch.device("cuda", 0)) is us.get_stream(0)
    assert us.get_stream(torch.device("cuda")) is us.get_stream(0)
    with pytest.raises(us.InvalidDeviceError):
        us.get_stream(torch.device("cpu"))


@pytest.mark.multi_device
def test_torch_on_a_device_that_is_not_current(torch: ModuleType) -> None:
    tensor = torch.ones(5, device="cuda:1")
    assert torch.cuda.current_device() == 0
    resolves(tensor, 1)
    assert in_thread(lambda: us.get_stream(tensor)) is us.get_stream(1)
    with pytest.raises(us.DeviceMismatchError):
        us.get_stream([tensor, torch.ones(5, device="cuda:0")])
    us.wait_for_device(tensor, timeout=20)
    assert torch.cuda.current_device() == 0


# -- CuPy -------------------------------------------------------------------------------------


def test_cupy(cupy: ModuleType) -> None:
    array = cupy.arange(12, dtype="f4").reshape(3, 4)
    info = resolves(array)
    assert (info.source, info.ordering, info.producer) == ("cupy.ndarray", "current", 1)
    assert (info.address, info.strides, info.memory) == (array.data.ptr, (16, 4), "device")
    assert resolves(array.T).strides == (4, 16)
    assert resolves(cupy.empty(0)).address == 0
    assert us.get_stream(cupy.cuda.Device(0)) is us.get_stream(0)


def test_cupy_streams(cupy: ModuleType) -> None:
    array = cupy.zeros(3)
    with cupy.cuda.Stream(non_blocking=True) as side:
        assert us.describe(array).producer == side.ptr
        assert us.get_stream(side).__cuda_stream__()[1] == side.ptr
    assert us.get_stream(cupy.cuda.Stream.null) is us.Stream.legacy_default()
    assert us.get_stream(cupy.cuda.Stream.ptds) is us.Stream.per_thread_default()
    with cupy.cuda.Stream.ptds:
        assert us.describe(array).producer == 2
    stream = us.get_stream(array)
    with cupy.cuda.Stream.from_external(stream):
        result = array + 1
    us.wait(array, timeout=10)
    assert result.get().tolist() == [1, 1, 1]


def test_cupy_managed_memory(cupy: ModuleType) -> None:
    with cupy.cuda.using_allocator(cupy.cuda.MemoryPool(cupy.cuda.malloc_managed).malloc):
        assert resolves(cupy.zeros(5)).memory == "managed"


@pytest.mark.multi_device
def test_cupy_on_a_device_that_is_not_current(cupy: ModuleType) -> None:
    with cupy.cuda.Device(1):
        array = cupy.ones(5)
    resolves(array, 1)


# -- JAX --------------------------------------------------------------------------------------


def test_jax(jax: ModuleType) -> None:
    array = jax.numpy.arange(12.0).reshape(3, 4)
    info = resolves(array)
    assert (info.source, info.ordering, info.producer) == ("jax.Array", "dlpack", None)
    assert (info.shape, info.strides, info.nbytes) == ((3, 4), (16, 4), 48)
    assert info.address == array.__cuda_array_interface__["data"][0]
    resolves(array.T)
    resolves(jax.numpy.zeros((0, 3)))
    assert str(resolves(array.astype(jax.numpy.bfloat16)).dtype) == "bfloat16"
    assert us.get_stream(jax.devices("gpu")[0]) is us.get_stream(0)


def test_jax_off_the_gpu(jax: ModuleType) -> None:
    host = jax.device_put(np.zeros(3), jax.devices("cpu")[0])
    with pytest.raises(us.HostBufferError, match="cpu"):
        us.get_stream(host)
    with pytest.raises(us.InvalidDeviceError):
        us.get_stream(jax.devices("cpu")[0])
    with pytest.raises(us.UnsupportedBufferError, match="traced"):
        jax.jit(us.get_stream)(jax.numpy.zeros(3))


@pytest.mark.multi_device
def test_jax_sharded(jax: ModuleType) -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices("gpu")[:2]), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    array = jax.device_put(np.arange(8.0), sharding)
    with pytest.raises(us.DeviceMismatchError) as caught:
        us.get_stream(array)
    assert caught.value.devices == (0, 1)
    info = us.describe(array)
    assert info.device_id is None
    assert [part.device_id for part in info.parts] == [0, 1]
    for shard, part in zip(array.addressable_shards, info.parts, strict=True):
        assert part.nbytes == shard.data.nbytes
        resolves(shard.data, shard.device.local_hardware_id)


# -- numba, RMM -------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:__int__ returned non-int:DeprecationWarning")  # numba's own
def test_numba(numba_cuda: ModuleType) -> None:
    array = numba_cuda.to_device(np.arange(6.0).reshape(2, 3))
    info = resolves(array)
    assert (info.ordering, info.producer, info.strides) == ("current", 1, (24, 8))
    assert resolves(numba_cuda.device_array((0, 3))).address == 0
    side = numba_cuda.stream()
    bound = us.describe(numba_cuda.device_array(3, stream=side))
    assert (bound.ordering, bound.producer) == ("exact", us.get_stream(side).__cuda_stream__()[1])
    assert us.get_stream(numba_cuda.default_stream()) is us.Stream.legacy_default()
    default = us.describe(numba_cuda.device_array(3, stream=numba_cuda.default_stream()))
    assert (default.ordering, default.producer) == ("current", 1)
    mapped = numba_cuda.mapped_array(4)
    with pytest.raises(us.HostBufferError, match="pinned"):
        us.get_stream(mapped)
    assert us.describe(mapped).memory == "pinned"
    stream = us.get_stream(array)
    theirs = numba_cuda.external_stream(int(stream.handle))
    array.copy_to_host(stream=theirs)
    us.wait(array, timeout=10)


def test_rmm(rmm: ModuleType) -> None:
    buffer = rmm.DeviceBuffer(size=100)
    info = resolves(buffer)
    assert (info.ordering, info.producer, info.nbytes) == ("device", None, 100)
    with pytest.raises(us.UnsupportedBufferError, match="address 0"):
        us.get_stream(rmm.DeviceBuffer(size=0))
    assert us.asnumpy(rmm.DeviceBuffer(size=0)).shape == (0,)


# -- DALI -------------------------------------------------------------------------------------


def test_dali(dali: ModuleType) -> None:
    @dali.pipeline_def(batch_size=2, num_threads=1, device_id=0)
    def pipeline() -> Any:
        host = dali.fn.constant(fdata=[1.0, 2.0, 3.0], shape=[3])
        return host.gpu(), host

    built = pipeline()
    built.build()
    batch, host = built.run()
    info = resolves(batch)
    assert (info.source, info.ordering, len(info.parts)) == ("dali TensorListGPU", "exact", 2)
    assert info.producer == (batch.stream or 1)
    assert info.nbytes == 24
    tensor = resolves(batch[0])
    assert (tensor.source, tensor.ordering, tensor.shape) == ("dali TensorGPU", "exact", (3,))
    assert tensor.dtype == np.dtype("f4")
    for thing in (host, host[0]):
        with pytest.raises(us.HostBufferError):
            us.get_stream(thing)


def test_dali_dynamic(dali: ModuleType) -> None:
    dynamic = framework("nvidia.dali.experimental.dynamic")
    tensor = dynamic.as_tensor(np.arange(3, dtype="f4")).gpu()
    info = resolves(tensor)
    assert (info.source, info.shape, info.dtype) == ("dali dynamic Tensor", (3,), np.dtype("f4"))
    batch = dynamic.as_batch([np.arange(3, dtype="f4")] * 2).gpu()
    info = resolves(batch)
    assert (info.source, len(info.parts), info.nbytes) == ("dali dynamic Batch", 2, 24)
    with pytest.raises(us.HostBufferError):
        us.get_stream(dynamic.as_tensor(np.arange(3)))


# -- cuda.core --------------------------------------------------------------------------------


def test_a_kernel_of_cuda_core() -> None:
    from cuda.core import LaunchConfig, LegacyPinnedMemoryResource, Program, ProgramOptions, launch

    for ordinal in range(device_count()):
        device = Device(ordinal)
        with device_current(ordinal):
            device.set_current()
            stream = us.get_stream(ordinal)
            buffer = device.allocate(4 * 1024, stream=stream)
            code = 'extern "C" __global__ void fill(int *out) { out[threadIdx.x] = threadIdx.x; }'
            options = ProgramOptions(arch=f"sm_{device.arch}")
            kernel = Program(code, "c++", options).compile("cubin").get_kernel("fill")
            launch(stream, LaunchConfig(grid=1, block=1024), kernel, buffer)
            host = LegacyPinnedMemoryResource().allocate(4 * 1024)
            buffer.copy_to(host, stream=stream)
            us.wait(buffer, timeout=30)
            assert np.from_dlpack(host).view(np.int32).tolist() == list(range(1024))


def test_views_of_cuda_core(cupy: ModuleType) -> None:
    from cuda.core.utils import StridedMemoryView

    view = StridedMemoryView.from_any_interface(cupy.zeros((2, 3), dtype="f4"), stream_ptr=-1)
    assert resolves(view).strides == (12, 4)


# -- all of them ------------------------------------------------------------------------------


def test_a_wait_covers_real_work(torch: ModuleType) -> None:
    tensor = torch.zeros(1 << 20, device="cuda:0")
    external = torch.cuda.ExternalStream(int(us.get_stream(tensor).handle), device=0)
    torch.cuda.synchronize()
    with torch.cuda.stream(external):  # load the kernels before anything is held
        tensor.add_(0)
    torch.cuda.synchronize()
    with testing.latch(us.get_stream(tensor)) as latch:
        with torch.cuda.stream(external):
            tensor.add_(1)
        with running(lambda: us.wait(tensor)) as result:
            assert is_blocked(result)
            latch.release()
            result()
    assert tensor.sum().item() == 1 << 20


@pytest.mark.parametrize("name", ["torch", "cupy", "jax", "numba.cuda"])
def test_resolving_one_framework_imports_no_other(name: str) -> None:
    framework(name)
    make = {
        "torch": "torch.zeros(3, device='cuda')",
        "cupy": "cupy.zeros(3)",
        "jax": "jax.numpy.zeros(3)",
        "numba.cuda": "numba.cuda.device_array(3)",
    }[name]
    done = run_python(
        f"""
        import sys, warnings
        warnings.simplefilter("ignore")
        import {name}
        buffer = {make}
        before = set(sys.modules)
        import userstream as us
        us.describe(buffer), us.get_stream(buffer), us.wait(buffer)
        new = {{module.split(".")[0] for module in set(sys.modules) - before}}
        assert not new & {{"torch", "cupy", "jax", "numba", "rmm", "nvidia"}}, new
        """,
        XLA_PYTHON_CLIENT_PREALLOCATE="false",
    )
    assert done.returncode == 0, done.stderr


# -- order ------------------------------------------------------------------------------------


def waits(source: Any, use: Any) -> bool:
    """Return whether the stream that `use` returns is ordered after the work of another stream."""
    source = us.Stream.from_handle(source)
    us.get_stream(0)  # none can be made while the legacy default stream is held
    with testing.latch(source) as latch:
        stream = use()
        late = not stream.is_done
        latch.release()
        stream.sync(timeout=10)
    return late


def test_order_with_torch(torch: ModuleType) -> None:
    tensor = torch.zeros(6, device="cuda:0")
    side = torch.cuda.Stream(0)
    kinds = [
        tensor,
        torch.nn.Parameter(tensor),
        tensor.clone().requires_grad_(),
        torch.zeros(6, dtype=torch.complex64, device="cuda:0").conj(),
        tensor[::2],
        type("Mine", (torch.Tensor,), {})(tensor),
    ]
    torch.cuda.synchronize()
    for each in kinds:
        assert waits(us.Stream.legacy_default(), lambda each=each: us.acquire(each))
        with torch.cuda.stream(side):
            assert waits(side, lambda each=each: us.acquire(each))
            with us.borrow(each) as stream:
                pass
            with testing.latch(stream) as latch:
                us.release(each)
                assert not side.query()
                latch.release()
    assert torch.cuda.current_stream(0) == torch.cuda.default_stream(0)


def test_order_with_cupy(cupy: ModuleType) -> None:
    array = cupy.zeros(6)
    side = cupy.cuda.Stream(non_blocking=True)
    us.wait_for_device(0, timeout=10)
    for current in (side, cupy.cuda.Stream.null, cupy.cuda.Stream.ptds):
        with current:
            assert waits(current, lambda: us.acquire(array))
            with testing.latch(us.get_stream(0)) as latch:
                us.release(array)
                assert not us.Stream.from_handle(current).is_done
                latch.release()


def test_order_with_others(numba_cuda: ModuleType, rmm: ModuleType) -> None:
    side = numba_cuda.stream()
    bound = numba_cuda.device_array(6, stream=side)
    unbound = numba_cuda.device_array(6)
    assert waits(side, lambda: us.acquire(bound))
    assert waits(us.Stream.legacy_default(), lambda: us.acquire(unbound))
    buffer = rmm.DeviceBuffer(size=100)
    assert waits(side, lambda: us.acquire(buffer)), "and for all others"
    with pytest.raises(us.UnknownProducerError, match="producer="):
        us.UserStream(unknown="raise").acquire(buffer)
    assert waits(side, lambda: us.acquire(buffer, producer=side))
    with us.borrow(buffer, producer=None):
        pass


def test_order_with_jax(jax: ModuleType) -> None:
    array = jax.numpy.arange(6.0)
    with us.borrow(array, jax.numpy.zeros((2, 3), dtype="bfloat16")) as stream:
        assert stream is us.get_stream(0)
    int4 = jax.numpy.zeros(4, dtype="int4")
    assert us.acquire(int4) is us.get_stream(0), "by the device"
    with pytest.raises(us.UnknownProducerError, match=r"int4|S4"):
        us.UserStream(unknown="raise").acquire(int4)
    for token in (us.Stream.legacy_default(), us.Stream.per_thread_default()):
        with us.borrow(array, stream=token):
            pass


def test_an_array_of_jax_is_not_donated_while_it_is_held(jax: ModuleType) -> None:
    donating = jax.jit(lambda x: x + 1, donate_argnums=0)
    array = jax.numpy.arange(1024.0)
    mine = us.UserStream(unknown="raise")  # or all of JAX would wait for the latch
    stream = mine.get_stream(0)
    with testing.latch(stream) as latch:
        with mine.borrow(array):
            pass
        with pytest.raises((ValueError, RuntimeError), match="external reference"):
            donating(array)
        latch.release()
    us.wait(stream, timeout=10)
    array = jax.numpy.arange(1024.0)
    with us.borrow(array):
        pass
    us.wait(0, timeout=10)
    assert donating(array)[0] == 1


def test_jax_comes_after_a_block(jax: ModuleType) -> None:
    """JAX names no stream that could wait, so all of the device does."""
    next_ = jax.jit(lambda x: x + 1)
    array = jax.numpy.zeros(1 << 20, dtype="int32")
    next_(array).block_until_ready()
    stream = us.get_stream(0)
    with testing.latch(stream) as latch:
        with us.borrow(array):
            address = array.unsafe_buffer_pointer()
            checked(driver.cuMemsetD32Async(address, 7, array.size, stream.handle))

        def release() -> None:  # in a thread: JAX itself may wait for the device
            time.sleep(0.2)
            latch.release()

        with running(release) as released:
            result = np.asarray(next_(array))
            released()
    assert (result == 8).all()


@pytest.mark.multi_device
def test_order_with_a_sharded_array(jax: ModuleType) -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices("gpu")[:2]), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    array = jax.device_put(np.arange(8.0), sharding)
    with pytest.raises(us.DeviceMismatchError):
        us.acquire(array)
    with us.borrow(array, stream=us.get_stream(0)) as stream:
        assert stream is us.get_stream(0)


def test_order_with_dali(dali: ModuleType) -> None:
    @dali.pipeline_def(batch_size=2, num_threads=1, device_id=0)
    def pipeline() -> Any:
        return dali.fn.constant(fdata=[1.0, 2.0, 3.0], shape=[3]).gpu()

    built = pipeline()
    built.build()
    (batch,) = built.run()
    producer = us.Stream.from_handle(batch.stream or 1)
    for output in (batch, batch[0]):
        assert waits(producer, lambda output=output: us.acquire(output))
        with us.borrow(output):
            pass
    us.wait(batch, timeout=10)


def test_the_next_run_of_dali_waits_for_a_block(dali: ModuleType) -> None:
    """Its memory is overwritten from then on, and the host waits for nothing."""
    size = 1 << 20

    def numbers() -> Any:
        for value in range(1, 100):
            yield np.full(size, value, "i4")

    @dali.pipeline_def(batch_size=1, num_threads=1, device_id=0, prefetch_queue_depth=2)
    def pipeline() -> Any:
        number = dali.fn.external_source(source=numbers(), batch=False)
        return number.gpu() + dali.fn.constant(idata=[0], shape=[size], device="gpu")

    built = pipeline()
    built.build()
    stream = us.get_stream(0)
    copy = checked(driver.cuMemAlloc(4 * size))
    for number in range(1, 21):
        (batch,) = built.run()
        with testing.latch(stream) as latch:
            with us.borrow(batch, producer="device"):
                address = us.describe(batch[0]).address
                checked(driver.cuMemcpyDtoDAsync(copy, address, 4 * size, int(stream.handle)))

            def release(latch: testing.latch = latch) -> None:
                time.sleep(0.02)
                latch.release()

            with running(release) as released:  # meanwhile the next run takes the memory back
                (batch,) = built.run()
                released()
        stream.sync(timeout=10)
        host = np.empty(size, "i4")
        checked(driver.cuMemcpyDtoH(host.ctypes.data, copy, host.nbytes))
        assert set(host.tolist()) == {2 * number - 1}
    checked(driver.cuMemFree(copy))


def test_order_with_dali_dynamic(dali: ModuleType) -> None:
    dynamic = framework("nvidia.dali.experimental.dynamic")
    tensor = dynamic.as_tensor(np.arange(3, dtype="f4")).gpu()
    with us.borrow(tensor, activate=True) as stream:
        assert dynamic.EvalContext.current().cuda_stream.handle == int(stream.handle)
        result = (tensor + 1).evaluate()
    assert dynamic.EvalContext.current().cuda_stream.handle != int(stream.handle)
    assert np.asarray(result.cpu()).tolist() == [1, 2, 3]


def test_activate_torch_and_cupy(torch: ModuleType, cupy: ModuleType) -> None:
    tensor, array = torch.ones(1000, device="cuda:0"), cupy.ones(1000)
    side = torch.cuda.Stream(0)
    stream = us.get_stream(0)
    assert (tensor + 1).sum() == float((array + 1).sum())  # no kernel is loaded beside a latch

    def now() -> tuple[Any, ...]:
        return (
            torch.cuda.current_stream(0),
            cupy.cuda.get_current_stream(0),
            torch.cuda.current_device(),
            cupy.cuda.runtime.getDevice(),
        )

    with torch.cuda.stream(side):
        before = now()
        with us.borrow(tensor, array, activate=True) as inside:
            assert torch.cuda.current_stream(0).cuda_stream == int(inside.handle)
            assert cupy.cuda.get_current_stream(0).ptr == int(inside.handle)
            with testing.latch(stream) as latch:
                made = tensor + 1, array + 1
                assert not stream.is_done
                latch.release()
            with cupy.cuda.Stream(), torch.cuda.stream(torch.cuda.Stream(0)):
                pass
            assert torch.cuda.current_stream(0).cuda_stream == int(inside.handle)
            assert cupy.cuda.get_current_stream(0).ptr == int(inside.handle)
        assert now() == before
        assert made[0].sum().item() == 2000
    assert float(made[1].sum()) == 2000
    with stream.activate("torch"):
        early = tensor + 2
        ended = []

        def elsewhere() -> None:
            us.hand_over(early)
            ended.append(early.sum().item())

        in_thread(elsewhere)
    assert ended == [3000]
    for token in (us.Stream.legacy_default(), us.Stream.per_thread_default()):
        with token.activate("torch", "cupy"):
            assert (tensor + 1).sum().item() == 2000
            assert float((array + 1).sum()) == 2000


@pytest.mark.multi_device
def test_activate_on_a_device_that_is_not_current(torch: ModuleType, cupy: ModuleType) -> None:
    tensor = torch.ones(1000, device="cuda:1")
    with cupy.cuda.Device(1):
        array = cupy.ones(1000)
    before = torch.cuda.current_stream(1), cupy.cuda.get_current_stream(1)
    with us.borrow(tensor, array, activate=True) as stream:
        assert stream is us.get_stream(1)
        assert torch.cuda.current_device() == cupy.cuda.runtime.getDevice() == 0
        assert torch.cuda.current_stream(1).cuda_stream == int(stream.handle)
        assert torch.cuda.current_stream(0) == torch.cuda.default_stream(0)
        assert (tensor + 1).sum().item() == 2000
        with cupy.cuda.Device(1):
            assert cupy.cuda.get_current_stream().ptr == int(stream.handle)
            assert float((array + 1).sum()) == 2000
    assert (torch.cuda.current_stream(1), cupy.cuda.get_current_stream(1)) == before
    assert torch.cuda.current_device() == 0
