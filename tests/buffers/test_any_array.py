"""Copies of arrays of any type and any layout say what NumPy, and each framework itself, says."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from cuda.bindings import driver

import userstream as us
from helpers import CAI, checked, device_current, device_memory, upload
from internals import pinned_limit

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import strategies as st  # noqa: E402
from hypothesis.extra import numpy as hnp  # noqa: E402

# The same examples in every run; a fixture that goes on through all of them is fine.
any_array = hypothesis.settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)

NUMBERS = ["u1", "i2", "u4", "i8", "f2", "f4", "f8", "c8", "c16"]  # that every framework has
DTYPES = ["?", *NUMBERS, ">i4", ">f8", "S3", "U2", "M8[ns]", [("a", "u1"), ("b", "f8", 3)]]


class Layout(NamedTuple):
    """An array of one shape, and how to look at it."""

    shape: tuple[int, ...]
    order: list[int]  # of the axes
    index: tuple[slice, ...]
    repeats: int  # broadcast to so many

    def __call__(self, array: Any) -> Any:
        """Return the view of an array of NumPy or CuPy."""
        view = array.transpose(self.order)[(*self.index, ...)]
        if self.repeats:
            view = np.broadcast_to(view, (self.repeats, *view.shape))
        return view

    def of_torch(self, tensor: Any) -> Any:
        view = tensor.permute(self.order)[(*self.index, ...)]
        return view.expand(self.repeats, *view.shape) if self.repeats else view


@st.composite
def layouts(draw: st.DrawFn, *, flipped: bool = True) -> Layout:
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=6))
    order = draw(st.permutations(range(len(shape))))
    steps = st.sampled_from([1, 1, 2, 3, -1, -2] if flipped else [1, 1, 2, 3])
    cuts = [
        slice(None, None, step) if draw(st.booleans()) else slice(1, None, abs(step))
        for step in (draw(steps) for _ in shape)
    ]
    return Layout(shape, order, tuple(cuts), draw(st.sampled_from([0, 0, 0, 1, 3])))


def numbers(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return an array whose elements differ from each other, as far as they can."""
    wanted = np.dtype(dtype)
    count = int(np.prod(shape, dtype=int))
    raw = np.random.default_rng(count).integers(0, 100, count * wanted.itemsize).astype("u1")
    if wanted.kind == "b":
        raw %= 2
    return raw.view(wanted).reshape(shape)


def exactly(one: np.ndarray, other: np.ndarray) -> bool:
    alike = one.shape == other.shape and one.dtype == other.dtype
    return alike and one.tobytes() == other.tobytes()


@pytest.fixture(params=[False, True], ids=["cached", "past the limit"], autouse=True)
def _limit(request: pytest.FixtureRequest) -> Iterator[None]:
    before = pinned_limit()
    if request.param:
        us.UserStream.set_pinned_limit(0)
    yield
    us.UserStream.set_pinned_limit(before)


class OnDevice:
    """Device memory with the content of a host array, of which it makes views."""

    def __init__(self, address: int, whole: np.ndarray) -> None:
        self.address = address
        self.whole = whole
        if whole.nbytes:
            upload(address, whole.ctypes.data, whole.nbytes)

    def view(self, view: np.ndarray) -> CAI:
        """Return the part that is a view of the host array."""
        there = view.__array_interface__
        offset = there["data"][0] - self.whole.ctypes.data if view.size else 0
        return CAI(
            self.address + offset,
            view.shape,
            strides=view.strides,
            typestr=there["typestr"],
            descr=there["descr"],
            stream=None,
        )

    def content(self) -> np.ndarray:
        """Return the memory as it is now."""
        found = np.empty_like(self.whole)
        if found.nbytes:
            checked(driver.cuCtxSynchronize())
            checked(driver.cuMemcpyDtoH(found.ctypes.data, self.address, found.nbytes))
        return found


@pytest.fixture(scope="module")
def room() -> Iterator[int]:
    with device_memory(0, 1 << 20) as address:
        yield address


@pytest.fixture(autouse=True)
def _current() -> Iterator[None]:
    with device_current(0):
        yield
        gc.collect()  # what destructors of frameworks make current goes as well


# -- the CUDA Array Interface, against NumPy -----------------------------------------------------


@any_array
@hypothesis.given(layouts(), st.sampled_from(DTYPES))
def test_asnumpy(room: int, layout: Layout, dtype: Any) -> None:
    whole = numbers(layout.shape, dtype)
    view = layout(whole)
    result = us.asnumpy(OnDevice(room, whole).view(view), timeout=20)
    assert exactly(result, view)


@any_array
@hypothesis.given(layouts(), layouts(), st.sampled_from(DTYPES))
def test_asnumpy_into_an_array(room: int, layout: Layout, other: Layout, dtype: Any) -> None:
    whole = numbers(layout.shape, dtype)
    view = layout(whole)
    # An array of that shape, in another order and with gaps that must stay as they are.
    order = np.argsort(np.resize(np.array([*other.order, 0]), view.ndim), kind="stable")
    area = numbers(tuple(2 * view.shape[axis] for axis in order), dtype)
    expected = area.copy()
    every_second = (*(np.s_[::2],) * view.ndim, ...)
    out, target = (each[every_second].transpose(np.argsort(order)) for each in (area, expected))
    assert us.asnumpy(OnDevice(room, whole).view(view), out=out, timeout=20) is out
    np.copyto(target, view)
    assert exactly(area, expected)


@any_array
@hypothesis.given(layouts(), st.sampled_from(DTYPES), st.booleans())
def test_copyto(room: int, layout: Layout, dtype: Any, broadcast: bool) -> None:
    layout = layout._replace(repeats=0)  # elements that share memory are refused
    whole = numbers(layout.shape, dtype)
    memory = OnDevice(room, whole)
    target = layout(whole)
    source = numbers(target.shape, dtype)[::-1] if target.ndim else numbers((), dtype)
    if broadcast and target.ndim:
        source = source[:1]
    stream = us.copyto(memory.view(target), source, timeout=20)
    stream.sync(timeout=20)
    np.copyto(target, source)
    assert exactly(memory.content(), whole)


@any_array
@hypothesis.given(layouts(), st.sampled_from(DTYPES))
def test_copyto_between_buffers(room: int, layout: Layout, dtype: Any) -> None:
    layout = layout._replace(repeats=0)
    whole = numbers(layout.shape, dtype)
    memory, target = OnDevice(room, whole), layout(whole)
    origin = numbers(target.shape[::-1], dtype)
    elsewhere = OnDevice(room + (1 << 19), origin)
    us.copyto(memory.view(target), elsewhere.view(origin.T), timeout=20).sync(timeout=20)
    np.copyto(target, origin.T)
    assert exactly(memory.content(), whole)


# -- frameworks, against themselves --------------------------------------------------------------


def framework(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name, exc_type=ImportError)


def agrees(view: Any, itself: Callable[[Any], np.ndarray]) -> None:
    """Copy there and back, and let the framework say what is right."""
    result = us.asnumpy(view, timeout=20)
    assert exactly(result, np.asarray(itself(view)))


@pytest.mark.gpu
@any_array
@hypothesis.given(layouts(flipped=False), st.sampled_from(["?", "u1", *NUMBERS[3:]]))
def test_pytorch(layout: Layout, dtype: str) -> None:
    torch = framework("torch")
    tensor = torch.as_tensor(numbers(layout.shape, dtype), device="cuda:0")
    agrees(layout.of_torch(tensor), lambda view: view.cpu().numpy())
    target = layout._replace(repeats=0).of_torch(tensor)
    source = numbers(tuple(target.shape), dtype)
    us.copyto(target, source, timeout=20)
    assert exactly(target.cpu().numpy(), source)


@pytest.mark.gpu
@hypothesis.settings(any_array, max_examples=50)  # CuPy compiles for each
@hypothesis.given(layouts(), st.sampled_from(["?", *NUMBERS]))
def test_cupy(layout: Layout, dtype: str) -> None:
    cupy = framework("cupy")
    array = cupy.asarray(numbers(layout.shape, dtype))
    view = layout._replace(repeats=0)(array)
    agrees(cupy.broadcast_to(view, (3, *view.shape)) if layout.repeats else view, cupy.asnumpy)
    source = numbers(view.shape, dtype)
    us.copyto(view, source, timeout=20)
    assert exactly(cupy.asnumpy(view), source)


@pytest.mark.gpu
@hypothesis.settings(any_array, max_examples=25)  # so does JAX
@hypothesis.given(layouts(), st.sampled_from(["?", *NUMBERS]))
def test_jax(layout: Layout, dtype: str) -> None:
    jax = framework("jax")
    with jax.enable_x64(True):
        agrees(jax.numpy.asarray(layout(numbers(layout.shape, dtype))), np.asarray)
