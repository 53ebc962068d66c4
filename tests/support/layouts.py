"""Arrays of all layouts, for tests of copies."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

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
    cuts = (np.s_[start::step] for start, step in zip(starts, steps, strict=True))
    view = view[(*cuts, ...)]
    if random.random() < 0.3:
        view = np.moveaxis(np.broadcast_to(view, (3, *view.shape)), 0, -1)
    if random.random() < 0.2 and view.ndim and view.shape[0] > 2:
        view = sliding_window_view(view, 2, axis=0)
    return view


def views(seed: int, count: int = 300) -> Iterator[np.ndarray]:
    random = np.random.default_rng(seed)
    for _ in range(count):
        view = random_view(random)
        if view.size:
            yield view


def usual(whole: np.ndarray) -> Iterator[tuple[np.ndarray, int]]:
    """Return views of an array of three axes, and where each begins, in bytes."""
    for view in (
        whole,
        whole[::-1],
        whole[:, 1:, ::2],
        whole.transpose(2, 0, 1),
        whole[0, 0, 1:2].reshape(()),
        whole[:0],
        np.broadcast_to(whole[0, 0], (5, 4)),
    ):
        yield view, view.ctypes.data - whole.ctypes.data if view.size else 0


def same(one: np.ndarray, other: np.ndarray) -> bool:
    alike = one.shape == other.shape and one.dtype == other.dtype
    return alike and one.tobytes() == other.tobytes()


def random_target(random: np.random.Generator, like: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return some memory, and a view of it that is to be written."""
    order = random.permutation(like.ndim)
    memory = np.full([2 * like.shape[axis] for axis in order], 7, like.dtype)
    view = memory.transpose(np.argsort(order).astype(int))
    steps = random.choice([1, 2, -1, -2], like.ndim)
    view = view[(*(np.s_[::step] for step in steps), ...)]
    return memory, view[(*(np.s_[:count] for count in like.shape), ...)]
