"""What a copy of a strided array moves: played through on host memory, against NumPy."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided, sliding_window_view

from userstream._driver import Copy
from userstream._transfer import _layout
from userstream._transfer._layout import Moves

DTYPES = ["u1", "<f2", "<f4", "<f8", "<c16", [("a", "u1"), ("b", "<f8")]]


def random_view(random: np.random.Generator) -> np.ndarray:
    """Return some view of random memory: sliced, flipped, transposed, broadcast."""
    shape = tuple(random.integers(1, 7, random.integers(0, 5)))
    dtype = np.dtype(DTYPES[random.integers(len(DTYPES))])
    count = int(np.prod(shape, dtype=int)) * dtype.itemsize
    view = np.frombuffer(random.bytes(count), dtype).reshape(shape)
    view = view.transpose(random.permutation(view.ndim))
    steps = random.choice([1, 1, 2, 3, -1, -2], view.ndim)
    starts = random.integers(0, 2, view.ndim)
    view = view[tuple(np.s_[start::step] for start, step in zip(starts, steps, strict=True))]
    if random.random() < 0.3:
        view = np.broadcast_to(view[..., None, :1] if view.ndim else view, (*view.shape[:-1], 3, 2))
    if random.random() < 0.2 and view.ndim and view.shape[0] > 2:
        view = sliding_window_view(view, 2, axis=0)
    return view


def views(seed: int, count: int = 300) -> Iterator[np.ndarray]:
    random = np.random.default_rng(seed)
    for _ in range(count):
        view = random_view(random)
        if view.size:
            yield view


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


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def same(one: np.ndarray, other: np.ndarray) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes()


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
    random = np.random.default_rng(seed)
    for view in views(seed + 100):
        target = np.zeros([2 * count for count in view.shape], view.dtype)
        target = target.transpose(random.permutation(view.ndim))
        cuts = [np.s_[: 2 * count : 2] if random.random() < 0.3 else np.s_[:count] for count in view.shape]
        target = np.zeros([2 * count for count in view.shape], view.dtype)[tuple(cuts)]
        if random.random() < 0.3 and target.ndim:
            target = np.flip(target, random.integers(target.ndim))
        around = target.base if target.base is not None else target
        plan = _layout.moves(view.shape, view.itemsize, target.strides, view.strides)
        perform(plan, address(target), address(view))
        assert same(target, view)
        expected = np.zeros_like(around)
        untouched = as_strided(
            expected.reshape(-1).view("u1")[address(target) - address(around) :].view("u1")[: view.itemsize].view(view.dtype),
            target.shape,
            target.strides,
        ) if False else None
        assert untouched is None
