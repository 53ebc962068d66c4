"""Copies of arrays that are not quite what they seem: the right elements, or a clear refusal."""

from __future__ import annotations

import ctypes
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cuda.core import Buffer, Device
from cuda.core.utils import StridedMemoryView

import standins
import userstream as us
from helpers import CAI, array, content, device_current, device_memory, fill, write
from internals import CHUNK, name_dtypes_of_torch
from userstream import testing

NUMBERS = np.arange(6, dtype="f4").reshape(2, 3)


@pytest.fixture
def memory(memory: int) -> int:
    """The address of 256 cleared bytes on device 0."""
    fill(us.get_stream(0), memory, 0)
    us.wait(0)
    return memory


# -- DLPack ---------------------------------------------------------------------------------------


class _Tensor(ctypes.Structure):
    """``DLManagedTensorVersioned``, after dlpack.h."""

    _fields_ = (
        ("version", ctypes.c_uint32 * 2),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int * 2),
        ("ndim", ctypes.c_int),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
    )


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class Exported:
    """Four elements that are told by a capsule alone."""

    def __init__(
        self, address: int, *, code: int = 1, bits: int = 8, lanes: int = 1, flags: int = 0
    ) -> None:
        self.shape = (ctypes.c_int64 * 1)(4)
        self.tensor = _Tensor((1, 0), None, None, flags, address, (2, 0), 1, code, bits, lanes)
        self.tensor.shape = self.shape

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)

    def __dlpack__(self, **_: Any) -> Any:
        return _new_capsule(ctypes.addressof(self.tensor), b"dltensor_versioned", None)


def test_a_capsule_alone(memory: int) -> None:
    exported = Exported(memory)
    us.copyto(exported, np.arange(4, dtype=np.uint8))
    assert us.asnumpy(exported).tolist() == [0, 1, 2, 3]


def test_a_capsule_that_is_read_only(memory: int) -> None:
    for target in (
        Exported(memory, flags=1),
        StridedMemoryView.from_dlpack(Exported(memory, flags=1), stream_ptr=-1),
    ):
        with pytest.raises(ValueError, match="read-only"):
            us.copyto(target, np.ones(4, np.uint8), producer=None)
        assert us.asnumpy(target, producer=None).tolist() == [0] * 4
    assert content(memory, 4) == {0}
    writable = StridedMemoryView.from_dlpack(Exported(memory), stream_ptr=-1)
    us.copyto(writable, np.ones(4, np.uint8), producer=None)
    assert content(memory, 4) == {1}


def test_elements_below_a_byte(memory: int) -> None:
    for use in (us.asnumpy, us.describe):
        with pytest.raises(us.UnsupportedBufferError, match=r"not whole bytes .*multiple of 8"):
            use(Exported(memory, code=0, bits=4))


@pytest.mark.parametrize(
    ("code", "bits", "lanes"), [(10, 8, 1), (2, 32, 4)], ids=["float8", "vector"]
)
def test_elements_that_cuda_core_does_not_know(
    code: int, bits: int, lanes: int, memory: int
) -> None:
    exported = Exported(memory, code=code, bits=bits, lanes=lanes)
    with pytest.raises(us.UnsupportedBufferError, match=r"does not know.*ml_dtypes"):
        us.asnumpy(exported)
    info = us.describe(exported)
    assert (info.device_id, info.address, info.dtype) == (0, memory, None)


class Copying:
    """Exports another copy each time."""

    def __init__(self) -> None:
        self.copies = 0

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)

    def __dlpack__(self, *, stream: int | None = None, **how: Any) -> Any:
        self.copies += 1
        with device_current(0):
            copy = Device(0).allocate(4, stream=us.get_stream(0))
            copy.fill(40 + self.copies, stream=us.get_stream(0))
            return copy.__dlpack__(stream=stream, **how)


def test_capsules_of_another_copy_each() -> None:
    """One is enough to read from; what is written to it nobody would see."""
    copying = Copying()
    assert us.asnumpy(copying).tolist() == [41] * 4
    assert copying.copies == 1
    with pytest.raises(us.UnsupportedBufferError, match="a new copy at each call"):
        us.copyto(Copying(), np.ones(4, np.uint8))


def test_empty_capsules_have_no_memory_to_compare() -> None:
    exported = []

    class Empty(Copying):
        def __dlpack__(self, **how: Any) -> Any:
            exported.append(Exported(4096 * (len(exported) + 1)))
            exported[-1].shape[0] = 0
            return exported[-1].__dlpack__()

    assert us.asnumpy(Empty()).shape == (0,)


def test_why_there_is_no_capsule() -> None:
    class Refusing(Exported):
        def __dlpack__(self, **_: Any) -> Any:
            raise BufferError("it is sparse")

    with pytest.raises(us.UnsupportedBufferError, match=r"failed .BufferError: it is sparse"):
        us.asnumpy(Refusing(0))


def test_a_mask_beside_dlpack(memory: int) -> None:
    class Both(CAI):
        def __dlpack_device__(self) -> tuple[int, int]:
            return (2, 0)

        def __dlpack__(self, **_: Any) -> Any:
            raise AssertionError("not asked")

    masked = Both(memory, mask=array(memory, typestr="|b1"))
    for use in (lambda: us.asnumpy(masked), lambda: us.copyto(masked, np.ones(4, "f4"))):
        with pytest.raises(us.UnsupportedBufferError, match="masked"):
            use()


# -- the CUDA Array Interface ---------------------------------------------------------------------


def test_void_is_no_structure(memory: int) -> None:
    for dtype in (np.dtype("V4"), np.dtype("V2")):
        typestr, descr = dtype.str, dtype.descr
        result = us.asnumpy(array(memory, typestr=typestr, descr=descr))
        assert result.dtype == dtype


@pytest.mark.parametrize(
    "dtype",
    [
        np.dtype([("a", "u1"), ("b", "f8")], align=True),
        np.dtype([("a", "u1"), ("p", [("x", "f4"), ("y", "i2", (3,))])], align=True),
    ],
    ids=["flat", "nested"],
)
def test_padding_is_no_field(dtype: np.dtype, memory: int) -> None:
    whole = np.frombuffer(np.arange(2 * dtype.itemsize, dtype=np.uint8).tobytes(), dtype)
    write(memory, whole)
    buffer = array(memory, shape=(2,), typestr=f"|V{dtype.itemsize}", descr=dtype.descr)
    out = np.zeros(2, dtype)
    us.asnumpy(buffer, out=out)
    assert out["a"].tolist() == whole["a"].tolist()
    us.copyto(buffer, out)
    assert us.asnumpy(buffer).dtype == dtype


def test_a_structure_of_another_size_is_malformed(memory: int) -> None:
    for kind in ("<f8", "<f2"):
        wrong = array(memory, typestr="|V4", descr=[("a", kind)])
        with pytest.raises(us.UnsupportedBufferError, match=r"malformed.*descr.*V4"):
            us.asnumpy(wrong)


def test_an_address_that_is_none_is_malformed(memory: int) -> None:
    with pytest.raises(us.UnsupportedBufferError, match="malformed: its address"):
        us.asnumpy(array((1 << 64) + memory))


def test_a_stream_that_is_no_handle_is_malformed(memory: int) -> None:
    with pytest.raises(
        us.UnsupportedBufferError, match="version is 3, and its stream 'main': both"
    ):
        us.asnumpy(CAI(memory, stream="main"))


@pytest.mark.simulated  # what a real driver makes of such a handle is undefined
@pytest.mark.parametrize("use", [us.asnumpy, us.acquire])
def test_a_handle_that_no_stream_has_is_named(memory: int, use: Callable[[object], object]) -> None:
    with pytest.raises(us.DriverError, match="INVALID_HANDLE") as caught:
        use(CAI(memory, stream=0x5EED))
    assert any("no stream has the handle 0x5eed" in note for note in caught.value.__notes__)


@pytest.mark.simulated
def test_a_stream_that_cannot_be_asked_for_another_reason_is_not_called_gone() -> None:
    with device_current(0):
        theirs = Device(0).create_stream()
    with testing.inject("cuStreamGetCtx", 2, 9), pytest.raises(us.DriverError) as caught:
        us.Stream.from_handle(int(theirs.handle)).stream_id  # noqa: B018
    assert not hasattr(caught.value, "__notes__")


def test_records_of_numba(memory: int) -> None:
    record = np.dtype([("a", "<i4"), ("b", "<f4")])
    whole = np.array([(1, 2.5), (3, 4.5)], record)
    write(memory, whole)
    buffer = standins.NumbaArray(0, memory, 2, typestr="|V8")
    buffer.dtype = record
    result = us.asnumpy(buffer)
    assert result.dtype == record
    assert result.tolist() == whole.tolist()


def test_empty_arrays_without_a_device() -> None:
    nowhere = array(0, shape=(0, 3))
    result = us.asnumpy(nowhere)
    assert (result.shape, result.dtype) == ((0, 3), np.float32)
    out = np.empty((0, 3), "f4")
    assert us.asnumpy(nowhere, out=out) is out
    with pytest.raises(ValueError, match="out has shape"):
        us.asnumpy(nowhere, out=np.empty((0, 4), "f4"))
    assert us.asnumpy(Buffer.from_handle(0, 0, owner=object())).shape == (0,)
    with pytest.raises(us.UnsupportedBufferError, match="address 0"):
        us.asnumpy(array(0, shape=(1,)))


# -- PyTorch --------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["is_conj", "is_neg"])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_views_of_the_other_sign_are_no_targets(
    flag: str, device: str, torch: types.ModuleType, memory: int
) -> None:
    tensor = torch.Tensor(torch.device(device, 0), memory)
    setattr(tensor, flag, lambda: True)
    with pytest.raises(ValueError, match=r"conjugate or negated view.*tensor that it is a view"):
        us.copyto(tensor, NUMBERS if device == "cuda" else array(memory, shape=(2, 3)))
    assert content(memory) == {0}


def test_a_tensor_is_not_asked_whether_it_is_read_only(
    torch: types.ModuleType, memory: int
) -> None:
    tensor = torch.Tensor(torch.device("cuda", 0), memory)
    with pytest.raises(RuntimeError, match="requires grad"):
        _ = tensor.__cuda_array_interface__
    us.copyto(tensor, NUMBERS)
    assert us.asnumpy(tensor).tolist() == NUMBERS.tolist()


def test_tensors_without_memory(torch: types.ModuleType) -> None:
    with pytest.raises(us.UnsupportedBufferError, match="elements but no memory"):
        us.asnumpy(torch.Tensor(torch.device("cuda", 0), 0))


def test_nested_tensors(torch: types.ModuleType, memory: int) -> None:
    tensor = torch.Tensor(torch.device("cuda", 0), memory)
    tensor.is_nested = True
    with pytest.raises(us.UnsupportedBufferError, match=r"is nested: it consists of several"):
        us.asnumpy(tensor)


@pytest.mark.parametrize("is_numpys", [True, False], ids=["imported", "not yet"])
def test_types_of_ml_dtypes_on_the_host(
    is_numpys: bool, torch: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    numbers = np.arange(4).astype(bfloat16)
    dtype = np.dtype(bfloat16) if is_numpys else "bfloat16"
    name_dtypes_of_torch(monkeypatch, dtype)
    torch.uint8, torch.int16 = np.uint8, np.int16
    tensor = torch.Tensor(torch.device("cpu"))
    tensor.detach = tensor.resolve_conj = tensor.resolve_neg = lambda: tensor
    tensor.element_size, tensor.view = lambda: 2, numbers.view
    result = us.asnumpy(tensor)
    assert result.dtype == bfloat16
    assert result.tolist() == numbers.tolist()


# -- JAX ------------------------------------------------------------------------------------------


def jax_array(jax: types.ModuleType, address: int, order: tuple[int, ...]) -> Any:
    """Return an array of 2 by 3 that the compiler has laid out in that order of axes."""
    found = jax.Array(jax.Device(0))
    found.shape, found.nbytes, found.is_fully_addressable = (2, 3), 24, True
    found.unsafe_buffer_pointer = lambda: address
    found.__class__.__dlpack__ = lambda self, *, stream: object()
    shard = found.addressable_shards[0]
    shard.replica_id, shard.index = 0, (slice(None), slice(None))
    layout = types.SimpleNamespace(major_to_minor=order, tiling=())
    found.format = types.SimpleNamespace(layout=layout)
    return found


def test_the_layout_of_an_array_of_jax(jax: types.ModuleType, memory: int) -> None:
    write(memory, NUMBERS)
    assert us.asnumpy(jax_array(jax, memory, (0, 1))).tolist() == NUMBERS.tolist()
    write(memory, NUMBERS.T)
    transposed = jax_array(jax, memory, (1, 0))
    assert us.asnumpy(transposed).tolist() == NUMBERS.tolist()
    assert us.describe(transposed).strides == (4, 8)
    transposed.format = types.SimpleNamespace(layout=None)
    assert us.describe(transposed).strides == (12, 4)
    transposed = jax_array(jax, memory, (1, 0))
    transposed.format.layout.tiling = ((2, 2),)
    with pytest.raises(us.UnsupportedBufferError, match="tiles"):
        us.asnumpy(transposed)


def test_who_says_that_it_is_read_only(jax: types.ModuleType, memory: int) -> None:
    for target in (
        jax_array(jax, memory, (0, 1)),
        *(
            kind(0, memory, data=(memory, True))
            for kind in (standins.NumbaArray, standins.DaliTensor, standins.DaliDynamic)
        ),
        array(memory, data=(memory, True)),
    ):
        with pytest.raises(ValueError, match=r"^the target is read-only"):
            us.copyto(target, np.ones(target.shape if target.__class__ is jax.Array else 4, "f4"))
    assert content(memory) == {0}


def test_keys_of_jax(jax: types.ModuleType, memory: int) -> None:
    keys = jax_array(jax, memory, (0, 1))
    keys.dtype = types.SimpleNamespace(itemsize=8)
    with pytest.raises(us.UnsupportedBufferError, match=r"not numbers.*key_data"):
        us.asnumpy(keys)


# -- the host -------------------------------------------------------------------------------------


class Listed:
    """Of which NumPy makes a new array each time."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.zeros((2, 3), "f4")


def test_what_numpy_copies_is_no_target(memory: int) -> None:
    with pytest.raises(ValueError, match="a new copy"):
        us.copyto(Listed(), array(memory, shape=(2, 3)))
    assert us.asnumpy(Listed()).tolist() == [[0] * 3] * 2


def test_what_numpy_knows_and_no_rule_does() -> None:
    results = us.asnumpy({"loss": np.float32(2.5), "all": [np.ones(2)]})
    assert results["loss"] == 2.5
    assert results["loss"].shape == ()


def test_where_in_a_collection_there_is_no_buffer(memory: int) -> None:
    batch: dict[str, Any] = {"images": [array(memory)], "meta": ({"epoch": 3},)}
    with pytest.raises(us.UnsupportedBufferError, match=r"^3 is not a buffer") as caught:
        us.asnumpy(batch)
    assert caught.value.__notes__ == ["that is buffer['meta'][0]['epoch']"]
    batch["meta"] = array(memory, version=2)
    with pytest.raises(us.UnknownProducerError, match="all the buffers of this call") as unknown:
        us.UserStream(unknown="raise").asnumpy(batch)
    assert unknown.value.__notes__ == ["that is buffer['meta']"]
    with pytest.raises(us.UnsupportedBufferError, match=r"^a type is not a buffer") as alone:
        us.asnumpy(np.ndarray)
    assert not hasattr(alone.value, "__notes__")


def test_scalars_of_numpy_are_sources(memory: int) -> None:
    us.copyto(array(memory), np.float32(2.5))
    assert us.asnumpy(array(memory)).tolist() == [2.5] * 4
    with pytest.raises(us.UnsupportedBufferError, match="float32 is neither"):
        us.copyto(np.float32(1), array(memory))


def test_an_out_for_several(memory: int) -> None:
    several = {"a": array(memory)}
    for out in ({"a": np.empty(4, "f4")}, np.empty(4, "f4")):
        with pytest.raises(TypeError, match="dict consists of several; copy each to its own"):
            us.asnumpy(several, out=out)  # type: ignore[call-overload]


def test_a_copy_that_is_late_says_what_it_left(memory: int) -> None:
    with us.Stream.create(0) as producer, testing.latch(producer):
        with pytest.raises(us.WaitTimeout, match=r"not done within 0.*undefined: copy again"):
            us.asnumpy(array(memory, producer), timeout=0)


def test_empty_targets_on_the_host(memory: int) -> None:
    class Empty(Listed):
        def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
            return np.zeros((0, 3), "f4")

    us.copyto(Empty(), array(memory, shape=(0, 3)))
    us.copyto(np.zeros((0, 3), "f4"), array(memory, shape=(0, 3)))


def test_masks_on_the_host(memory: int) -> None:
    masked = np.ma.array(np.ones(4, "f4"), mask=[1, 0, 1, 0])
    for use in (
        lambda: us.asnumpy(masked),
        lambda: us.copyto(masked, array(memory)),
        lambda: us.copyto(array(memory), masked),
    ):
        with pytest.raises(us.UnsupportedBufferError, match=r"masked.*filled\(\)"):
            use()
    assert content(memory) == {0}


def test_too_little_memory_is_no_matter_of_the_buffer() -> None:
    class Large(Listed):
        def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
            raise MemoryError

    with pytest.raises(MemoryError):
        us.asnumpy(Large())


def test_why_numpy_cannot_read_it(memory: int) -> None:
    class Refusing(Listed):
        def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
            raise RuntimeError("call it otherwise")

    with pytest.raises(us.HostBufferError, match=r"NumPy cannot read it.*call it otherwise"):
        us.asnumpy(Refusing())


def test_a_masked_out(memory: int) -> None:
    with pytest.raises(TypeError, match=r"masked.*out\.data"):
        us.asnumpy(array(memory), out=np.ma.zeros(4, "f4"))


# -- shapes ---------------------------------------------------------------------------------------


def test_leading_axes_of_one_are_dropped_as_in_numpy(memory: int) -> None:
    target, wide = array(memory, shape=(3,)), np.arange(3, dtype="f4").reshape(1, 1, 3)
    us.copyto(target, wide)
    assert us.asnumpy(target).tolist() == [0, 1, 2]
    out = np.zeros(3, "f4")
    us.copyto(out, array(memory, shape=(1, 3)))
    assert out.tolist() == [0, 1, 2]
    us.copyto(array(memory + 64, shape=(3,)), array(memory, shape=(1, 3)))
    assert us.asnumpy(array(memory + 64, shape=(3,))).tolist() == [0, 1, 2]
    scalar = np.zeros((), "f4")
    us.copyto(scalar, array(memory + 4, shape=(1,)))
    assert scalar == 1
    with device_memory(0, 3 * 8192) as address:
        texts = array(address, shape=(3,), typestr="|S8192")
        for one in (np.array(b"ab", "S8192"), np.array([b"ab"], "S8192")):
            us.copyto(texts, one)
            assert us.asnumpy(texts).tolist() == [b"ab"] * 3
            us.copyto(array(address, shape=(), typestr="|S8192"), one)
    for source in (wide.repeat(2, axis=0), np.zeros((1, 2), "f4")):
        with pytest.raises(ValueError, match="could not broadcast"):
            us.copyto(target, source)


@pytest.mark.parametrize("room", ["cache", "chunks"])
def test_elements_larger_than_a_chunk(
    room: str, request: pytest.FixtureRequest, no_garbage: None
) -> None:
    if room == "chunks":
        request.getfixturevalue("no_cache")
    size = CHUNK + 4096
    whole = np.frombuffer(np.random.default_rng(0).bytes(3 * size), f"V{size}")
    with device_memory(0, 3 * size) as address:
        buffer = array(address, shape=(3,), typestr=f"|V{size}")
        us.copyto(buffer, whole, timeout=20)
        for view, shown in ((buffer, whole), (every_second(buffer, size), whole[::2])):
            out = np.empty(shown.shape, whole.dtype)
            assert us.asnumpy(view, out=out, timeout=20) is out
            assert out.tobytes() == shown.tobytes()
            assert us.asnumpy(view, timeout=20).tobytes() == shown.tobytes()
        us.copyto(every_second(buffer, size), whole[1:], timeout=20)
        assert us.asnumpy(buffer)[2].tobytes() == whole[2].tobytes()


def every_second(buffer: CAI, size: int) -> CAI:
    return CAI(
        buffer.interface["data"][0], (2,), typestr=f"|V{size}", strides=(2 * size,), stream=None
    )


# -- what a copy must not do ----------------------------------------------------------------------


def test_little_comes_with_what_lies_between(memory: int) -> None:
    """A covering span is at most four times as large as what is wanted of it."""
    with device_memory(0, 1 << 20) as address:
        for step, most in ((4, 4), (5, 1)):
            shape, strides = ((1 << 20) // 4 // step,), (4 * step,)
            result = us.asnumpy(array(address, shape=shape, strides=strides))
            assert allocation_of(result) <= most * result.nbytes + 4


def allocation_of(result: np.ndarray) -> int:
    """Return the bytes between the first and the last element of a result."""
    return abs(result.strides[0]) * (result.shape[0] - 1) + result.itemsize


@pytest.mark.simulated
@pytest.mark.multi_device
def test_only_copies_between_devices_name_the_contexts() -> None:
    with device_memory(0) as here, device_memory(1) as there:
        before = testing.calls("cuMemcpyPeerAsync")
        us.copyto(array(there), array(here)).sync(timeout=10)
        assert testing.calls("cuMemcpyPeerAsync") == before + 1
        us.copyto(array(there + 64), array(there)).sync(timeout=10)
        assert testing.calls("cuMemcpyPeerAsync") == before + 1


@pytest.mark.simulated
@pytest.mark.multi_device
def test_peer_access_is_the_users(memory: int) -> None:
    with device_memory(1, 4096) as there:
        for strides in ((4,), (8,)):
            us.copyto(array(there, strides=strides), array(memory)).sync(timeout=10)
    assert testing.calls("cuMemcpyPeerAsync") > 0
    assert testing.calls("cuCtxEnablePeerAccess") == 0
