"""Moves of a copy of a strided array, executed on host memory and compared with NumPy."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided, sliding_window_view

import userstream as us
from helpers import address, run_python
from layouts import random_target, same, views
from userstream._copies import layout as _layout
from userstream._copies.layout import Moves
from userstream._copies.operands import DeviceArray, numpy_dtype
from userstream._copies.staging import CopyLane
from userstream._driver.copies import Copy


def perform(plan: Moves, to: int, source: int) -> int:
    """Do with host memory what the driver calls of a plan do; return how many there are."""
    if not plan.axes:
        ctypes.memmove(to + plan.to_offset, source + plan.from_offset, plan.width)
        return 1
    count, copies = _layout.copies(plan)
    made = 0
    for copy in copies:
        check(copy)
        made += 1
        for z in range(copy.slices):
            for y in range(copy.rows):
                ctypes.memmove(
                    to + copy.to_offset + (z * copy.to_height + y) * copy.to_pitch,
                    source + copy.from_offset + (z * copy.from_height + y) * copy.from_pitch,
                    copy.width,
                )
    assert made == count
    return count


def check(copy: Copy) -> None:
    """Insist on what cuMemcpy3D demands."""
    for pitch, height in ((copy.to_pitch, copy.to_height), (copy.from_pitch, copy.from_height)):
        assert copy.width <= pitch < 1 << 31
        assert height >= copy.rows


@pytest.mark.parametrize("seed", range(8))
def test_packing_is_what_numpy_sees(seed: int) -> None:
    for view in views(seed):
        side = _layout.packed(view.shape, view.strides, view.itemsize)
        plan = _layout.moves(view.shape, view.itemsize, side.strides, view.strides)
        memory = np.zeros(side.nbytes, "u1")
        host = side.array(memory, view.shape, view.dtype)
        perform(plan, address(host), address(view))
        assert same(host, view)
        assert side.nbytes <= view.nbytes


@pytest.mark.parametrize("seed", range(8))
def test_the_covering_span_is_what_numpy_sees(seed: int) -> None:
    for view in views(seed):
        side = _layout.spread(view.shape, view.strides, view.itemsize)
        memory = np.zeros(side.nbytes, "u1")
        host = side.array(memory, view.shape, view.dtype)
        plan = Moves(side.nbytes, (), -side.offset, -side.offset)
        perform(plan, address(host), address(view))
        assert same(host, view)


@pytest.mark.parametrize("seed", range(8))
def test_any_layout_to_any_other(seed: int) -> None:
    for number, view in enumerate(views(seed + 100)):
        memory, target = random_target(np.random.default_rng([seed, number]), view)
        expected, numpys = random_target(np.random.default_rng([seed, number]), view)
        numpys[...] = view
        assert not _layout.may_alias(target.shape, target.strides, target.itemsize)
        plan = _layout.moves(view.shape, view.itemsize, target.strides, view.strides)
        perform(plan, address(target), address(view))
        assert same(memory, expected)  # between its elements as well


@pytest.mark.parametrize("seed", range(4))
def test_pieces_are_the_whole(seed: int) -> None:
    random = np.random.default_rng(seed)
    for view in views(seed + 200, 100):
        limit = int(random.integers(1, 200))
        copy, times = np.zeros(view.shape, view.dtype), np.zeros(view.shape, int)
        for index in _layout.pieces(view.shape, view.strides, view.itemsize, limit):
            part = view[index]
            side = _layout.packed(part.shape, part.strides, view.itemsize)
            assert side.nbytes <= max(limit, view.itemsize)
            copy[index] = part
            times[index] += 1
        assert same(copy, np.ascontiguousarray(view).reshape(view.shape))
        assert (times == 1).all()


@pytest.mark.parametrize(("limit", "count"), [(80, 120), (1600, 6), (2000, 6), (3200, 3)])
def test_pieces_are_as_large_as_the_limit(limit: int, count: int) -> None:
    assert len(list(_layout.pieces((12, 100), (800, 8), 8, limit))) == count


def plan_of(view: np.ndarray) -> Moves:
    side = _layout.packed(view.shape, view.strides, view.itemsize)
    return _layout.moves(view.shape, view.itemsize, side.strides, view.strides)


def strided(shape: tuple[int, ...], *strides: int) -> np.ndarray:
    """Return an array of bytes that nobody may look into."""
    return as_strided(np.zeros(1, "u1"), shape, strides)


@pytest.mark.parametrize(
    ("view", "axes", "calls"),
    [
        (np.zeros(()), 0, 1),
        (np.zeros((3, 4, 5)), 0, 1),
        (np.zeros((3, 4, 5)).T, 0, 1),
        (np.zeros((3, 4, 5)).transpose(1, 0, 2)[:, ::-1, ::-1], 0, 1),
        (np.broadcast_to(np.zeros(4), (1 << 40, 4)), 0, 1),
        (np.zeros((3, 1, 4))[:, ::-1], 0, 1),
        (np.zeros((6, 100))[:, :90], 1, 1),
        (np.zeros((6, 100))[::-2], 1, 1),
        (np.zeros((4, 6, 100))[:, :5, :90], 2, 1),
        (np.zeros((4, 7, 100))[:, :6:2, :90], 2, 3),  # slices at halves of rows
        (np.zeros((3, 4, 6, 100))[:, :3, :5, :90], 3, 3),
        (strided((3, 5, 600), 3001, 700, 1), 2, 3),  # slices that are no whole number of rows
        (strided((3, 600), 1 << 31, 1), 1, 3),  # a pitch that the driver does not take
        (strided((9, 600), 1, 1), 1, 9),  # rows that overlap
        (strided((70_000, 61), 301, 5), 2, 61),  # x[:, ::5]: one call for each column
    ],
    ids=lambda value: "" if isinstance(value, np.ndarray) else str(value),
)
def test_how_many_calls(view: np.ndarray, axes: int, calls: int) -> None:
    plan = plan_of(view)
    assert len(plan.axes) == axes
    assert _layout.copies(plan)[0] == calls


def test_short_rows_are_scattered() -> None:
    assert not _layout.has_short_rows(plan_of(np.zeros((1000, 1))))
    assert _layout.has_short_rows(plan_of(np.zeros((9, 64))[:, :63]))
    assert not _layout.has_short_rows(plan_of(np.zeros((9, 65))[:, :64]))


@pytest.mark.parametrize(
    ("view", "alias"),
    [
        (np.zeros((3, 4)), False),
        (np.zeros((3, 4)).T[::-1, ::2], False),
        (np.broadcast_to(np.zeros(1), (1,)), False),
        (np.broadcast_to(np.zeros(1), (2,)), True),
        (sliding_window_view(np.zeros(9), 3), True),
        (sliding_window_view(np.zeros(9), 3)[::3], False),
    ],
    ids=str,
)
def test_may_alias(view: np.ndarray, alias: bool) -> None:
    assert _layout.may_alias(view.shape, view.strides, view.itemsize) is alias


def test_too_many_copies_are_refused() -> None:
    plan = _layout.moves((70000, 2), 1, (2, 1), (1 << 31, 1))
    with pytest.raises(us.UnsupportedBufferError, match="contiguous first"):
        CopyLane(us.get_stream(0)._resolve(), None, []).copy(0, 0, plan)


def test_scattered_arrays_are_for_their_framework() -> None:
    large = np.zeros((24, 40, 300), "f4")

    def is_scattered(view: np.ndarray) -> bool:
        return DeviceArray(512, view.shape, view.strides, view.dtype, 0).is_scattered

    assert is_scattered(large[..., ::2])
    assert is_scattered(large[:, 7, 7])
    for view in (
        large,
        large.T,
        large[:, :, :200],
        sliding_window_view(large[0, 0], 100),
        np.broadcast_to(large[:, :1], (24, 7, 300)),
        large[3, 4, 5, ...],
        large[:, :0],
    ):
        assert not is_scattered(view), (view.shape, view.strides)


def test_bytes_of_elements() -> None:
    whole = DeviceArray(512, (2, 3), (24, 8), np.dtype("f8"), 0)
    assert whole.as_bytes() == DeviceArray(512, (2, 3, 8), (24, 8, 1), np.dtype(np.uint8), 0)


# -- types -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_types_of_ml_dtypes(name: str) -> None:
    expected = np.dtype(getattr(pytest.importorskip("ml_dtypes"), name))
    assert numpy_dtype(name, "framework x") == expected
    assert numpy_dtype(expected, "framework x") == expected


def test_without_ml_dtypes() -> None:
    done = run_python(
        """
        import sys
        sys.modules["ml_dtypes"] = None
        import userstream as us
        from userstream._copies.operands import numpy_dtype
        for name in "bfloat16", "float8_e4m3fn":
            try:
                numpy_dtype(name, "torch.Tensor")
            except us.UnsupportedBufferError as error:
                assert name in str(error)
                assert "ml_dtypes" in str(error)
            else:
                raise AssertionError(name)
        """,
        simulate=None,  # cuda.core would import it
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("dtype", ["qint8", "qint32", "float4_e2m1fn_x2", np.dtype("O"), None])
def test_types_that_numpy_has_not(dtype: Any) -> None:
    with pytest.raises(us.UnsupportedBufferError, match="framework x"):
        numpy_dtype(dtype, "framework x")


def test_types_below_a_byte_are_refused() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    with pytest.raises(us.UnsupportedBufferError, match="int4"):
        numpy_dtype(np.dtype(ml_dtypes.int4), "jax.Array")
