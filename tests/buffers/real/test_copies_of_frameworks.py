"""Copies of the arrays of real frameworks to the host, back, and between devices."""

from __future__ import annotations

import warnings
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import userstream as us
from helpers import (
    run_python,
)

pytestmark = pytest.mark.gpu


# -- to the host and back ---------------------------------------------------------------------


def views(array: Any) -> list[Any]:
    """Return views of an array of shape (4, 6, 5), of all kinds of strides."""
    return [
        array,
        array[1:3],
        array[:, ::2],
        array[..., 1:4],
        array[2, 3],
        array[0, 0, 0],
        array[:0],
        array.T if array.ndim == 2 else array.transpose(0, 1) if _is_torch(array) else array.T,
    ]


def _is_torch(array: Any) -> bool:
    return type(array).__module__.startswith("torch")


@pytest.mark.parametrize(
    "dtype", ["float32", "float64", "float16", "int8", "int64", "uint8", "bool", "complex64"]
)
def test_asnumpy_as_the_frameworks_do(
    torch: ModuleType, cupy: ModuleType, jax: ModuleType, dtype: str
) -> None:
    numbers = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 100, (4, 6, 5))
    numbers = numbers.astype(dtype)
    tensor = torch.as_tensor(numbers, device="cuda:0")
    for view in views(tensor):
        np.testing.assert_array_equal(us.asnumpy(view), view.cpu().numpy(), strict=True)
    array = cupy.asarray(numbers)
    for view in [*views(array), array[::-1], cupy.broadcast_to(array[0], (3, 6, 5))]:
        np.testing.assert_array_equal(us.asnumpy(view), cupy.asnumpy(view), strict=True)
    with jax.enable_x64(True):
        array = jax.numpy.asarray(numbers)
        np.testing.assert_array_equal(us.asnumpy(array), np.asarray(array), strict=True)
        np.testing.assert_array_equal(us.asnumpy(array.T), np.asarray(array.T), strict=True)


def test_asnumpy_of_unusual_tensors(torch: ModuleType, jax: ModuleType) -> None:
    numbers = torch.randn(3, 4, dtype=torch.complex64, device="cuda:0")
    for tensor in (numbers.conj(), numbers.conj().imag, numbers.requires_grad_()):
        np.testing.assert_array_equal(
            us.asnumpy(tensor), tensor.detach().cpu().resolve_conj().resolve_neg().numpy()
        )
    half = torch.randn(3, 4, dtype=torch.bfloat16, device="cuda:0")
    result = us.asnumpy(half)  # jax has brought ml_dtypes
    np.testing.assert_array_equal(result.astype("f4"), half.float().cpu().numpy())
    array = jax.numpy.arange(6, dtype="bfloat16")
    assert us.asnumpy(array).dtype == array.dtype
    host = torch.arange(3)
    assert us.asnumpy(host).tolist() == us.asnumpy(jax.numpy.arange(3)).tolist() == [0, 1, 2]
    with pytest.raises(us.UnsupportedBufferError, match="layout"):
        us.asnumpy(torch.eye(3, device="cuda:0").to_sparse())
    scattered = torch.arange(1 << 20, device="cuda:0").reshape(1024, 1024)[:, ::7]
    np.testing.assert_array_equal(us.asnumpy(scattered), scattered.cpu().numpy())


def test_tensors_on_the_host_are_read_as_those_on_the_device(torch: ModuleType) -> None:
    numbers = torch.randn(3, 4, dtype=torch.complex64)
    odd = [
        torch.nn.Parameter(torch.randn(4)),
        torch.randn(3, 4, dtype=torch.bfloat16),
        torch.randn(3, 4).to(torch.float8_e4m3fn).T,
        numbers.conj(),
        numbers.conj().imag,
    ]
    for host in odd:
        here, there = us.asnumpy([host, host.to("cuda:0")])
        assert (here.dtype, here.tobytes()) == (there.dtype, there.tobytes())
    parameter = odd[0]
    us.copyto(parameter, torch.arange(4.0, device="cuda:0"))
    assert parameter.tolist() == [0, 1, 2, 3]
    for sparse in (torch.eye(3).to_sparse(), torch.eye(3).bfloat16().to_sparse()):
        with pytest.raises(us.HostBufferError, match="NumPy cannot read it"):
            us.asnumpy(sparse)
    us.copyto(torch.empty(0, 4), torch.empty(0, 4, device="cuda:0"))


def test_tensors_that_are_refused(torch: ModuleType) -> None:
    tensor = torch.zeros(2, dtype=torch.complex64, device="cuda:0")
    for target in (tensor.conj(), tensor.conj().imag):
        source = np.ones(2, str(target.dtype).removeprefix("torch."))
        with pytest.raises(ValueError, match="conjugate or negated"):
            us.copyto(target, source)
    assert us.asnumpy(tensor).tolist() == [0, 0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that they are new
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], device="cuda:0")
    with pytest.raises(us.UnsupportedBufferError, match="nested"):
        us.asnumpy(nested)
    freed = torch.zeros(8, device="cuda:0")
    freed.untyped_storage().resize_(0)
    with pytest.raises(us.UnsupportedBufferError, match="no memory"):
        us.asnumpy(freed)


def test_layouts_that_jax_has_chosen(jax: ModuleType) -> None:
    layout = pytest.importorskip("jax.experimental.layout")
    numbers = np.arange(24, dtype="f4").reshape(2, 3, 4)
    array = jax.numpy.asarray(numbers)
    for order in ((2, 1, 0), (1, 0, 2), (0, 1, 2)):
        wanted = layout.Format(layout.Layout(major_to_minor=order), array.sharding)
        laid_out = jax.device_put(array, wanted)
        np.testing.assert_array_equal(us.asnumpy(laid_out), numbers, strict=True)
        assert us.asnumpy(laid_out, out=np.empty_like(numbers)).tolist() == numbers.tolist()
    with pytest.raises(us.UnsupportedBufferError, match="key_data"):
        us.asnumpy(jax.random.key(0))


def test_records_of_numba(numba_cuda: ModuleType) -> None:
    records = np.zeros(3, np.dtype([("a", "i4"), ("b", "f8")], align=True))
    records["a"], records["b"] = range(3), 2.5
    array = numba_cuda.to_device(records)
    result = us.asnumpy(array)
    assert result.dtype == records.dtype
    assert result.tolist() == records.tolist()
    records["b"] = 1.5
    us.copyto(array, records)
    us.wait(array, timeout=10)
    assert array.copy_to_host()["b"].tolist() == [1.5] * 3


def test_copyto_between_frameworks(
    torch: ModuleType, cupy: ModuleType, jax: ModuleType, numba_cuda: ModuleType
) -> None:
    numbers = np.arange(12, dtype="f4").reshape(3, 4)
    tensor = torch.zeros(3, 4, device="cuda:0")
    array = cupy.zeros((3, 4), dtype="f4")
    device_array = numba_cuda.device_array((3, 4), dtype=np.float32)
    us.copyto(tensor, numbers)
    assert tensor.cpu().numpy().tolist() == numbers.tolist()
    us.copyto(array, tensor)
    assert array.get().tolist() == numbers.tolist()
    us.copyto(device_array, array.T[::-1].T)
    assert us.asnumpy(device_array).tolist() == numbers[:, ::-1].tolist()
    us.copyto(tensor.T, jax.numpy.asarray(numbers.T.copy()))
    assert tensor.cpu().numpy().tolist() == numbers.tolist()
    us.copyto(tensor, jax.numpy.float32(3))
    out = torch.zeros(3, 4)
    us.copyto(out, tensor)
    assert (out == 3).all()
    with pytest.raises(ValueError, match="read-only"):
        us.copyto(jax.numpy.zeros((3, 4)), numbers)


@pytest.mark.multi_device
def test_copies_between_devices(torch: ModuleType, cupy: ModuleType, jax: ModuleType) -> None:
    numbers = np.arange(12, dtype="f4").reshape(3, 4)
    there = torch.as_tensor(numbers, device="cuda:1")
    here = cupy.zeros((3, 4), dtype="f4")
    us.copyto(here, there)
    assert here.get().tolist() == us.asnumpy(there).tolist() == numbers.tolist()
    us.copyto(there[:, ::2], here[:, 1::2])
    assert us.asnumpy(there)[:, ::2].tolist() == numbers[:, 1::2].tolist()
    assert torch.cuda.current_device() == 0  # until JAX chooses another one
    mesh = jax.sharding.Mesh(np.array(jax.devices("gpu")[:2]), ("x",))
    for spec in (jax.sharding.PartitionSpec("x"), jax.sharding.PartitionSpec()):
        sharded = jax.device_put(np.arange(8.0), jax.sharding.NamedSharding(mesh, spec))
        np.testing.assert_array_equal(us.asnumpy(sharded), np.asarray(sharded), strict=True)


@pytest.mark.parametrize("allocator", ["expandable_segments:True", "backend:cudaMallocAsync"])
def test_other_allocators_of_torch(torch: ModuleType, allocator: str) -> None:
    """Memory that is mapped page by page, and memory of the driver's pool."""
    done = run_python(
        """
        import torch
        import userstream as us

        class Interface:  # of which the driver has to be asked
            def __init__(self, tensor):
                known = tensor.__cuda_array_interface__  # of version 2, which names no stream
                self.__cuda_array_interface__ = {**known, "version": 3, "stream": 1}

        def same(one, other):
            return (us.asnumpy(one) == us.asnumpy(other)).all()

        tensor = torch.arange(1 << 24, device="cuda:0").reshape(4096, 4096)  # of several mappings
        for view in (tensor, tensor[::2], tensor[:, :1000], tensor[:, ::7], tensor.T):
            assert (us.asnumpy(view) == view.cpu().numpy()).all(), view.stride()
            assert same(Interface(view), view)
        info = us.describe(Interface(tensor))
        assert (info.device_id, info.memory) == (0, "device"), info
        with us.borrow(tensor, activate=True):
            more = tensor + 1
        us.copyto(tensor.T, more)
        assert same(tensor, more.T)
        if torch.cuda.device_count() > 1:
            there = torch.empty_like(tensor, device="cuda:1")
            us.copyto(there, tensor)
            us.copyto(there[:, ::2], tensor[:, 1::2])
            assert same(there[:, 1::2], tensor[:, 1::2]) and same(there[:, ::2], tensor[:, 1::2])
        """,
        PYTORCH_CUDA_ALLOC_CONF=allocator,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.multi_device
def test_managed_memory_between_devices(cupy: ModuleType) -> None:
    numbers = np.arange(12, dtype="f4").reshape(3, 4)
    pool = cupy.cuda.MemoryPool(cupy.cuda.malloc_managed)
    arrays = []
    for device in (0, 1):
        with cupy.cuda.Device(device), cupy.cuda.using_allocator(pool.malloc):
            arrays.append(cupy.asarray(numbers))
    here, there = arrays
    us.copyto(there[:, ::2], here[:, 1::2])
    assert us.asnumpy(there)[:, ::2].tolist() == numbers[:, 1::2].tolist()
    with cupy.cuda.Device(1):
        local = cupy.zeros((3, 4), dtype="f4")
    us.copyto(local, here[::-1])
    assert us.asnumpy(local).tolist() == numbers[::-1].tolist()
