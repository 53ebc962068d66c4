"""New arrays in page-locked memory of the cache."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from userstream import _buffers, _driver
from userstream._arguments import integer
from userstream._buffers.view import contiguous_strides
from userstream._copies import layout, pinned
from userstream._copies.arrays import device_array
from userstream._copies.operands import as_array, is_on_host, require_numpys

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from userstream._copies.arrays import DeviceArray
    from userstream._copies.layout import Shape


def empty(shape: Any, dtype: DTypeLike) -> np.ndarray:
    """Return a new array in C order, its contents undefined."""
    kind = np.dtype(dtype)
    counts, kind = _shape_of(shape) + kind.shape, kind.base
    return _array(counts, kind, contiguous_strides(counts, kind.itemsize))


def empty_like(prototype: Any, dtype: DTypeLike | None) -> np.ndarray:
    """Return a new array of the shape, the dtype and the order in memory that another one has."""
    view = _buffers.view_or_none(prototype)
    like: DeviceArray | np.ndarray
    if view is not None and not is_on_host(view):
        like = device_array(view)
    else:
        like = as_array(prototype if view is not None else require_numpys(prototype))
    return empty_as(like.shape, like.strides, like.dtype if dtype is None else np.dtype(dtype))


def empty_as(shape: Shape, strides: Shape, dtype: np.dtype) -> np.ndarray:
    """Return a new array without gaps, its axes in the order that these strides have."""
    steps = [abs(step) for count, step in zip(shape, strides, strict=True) if count > 1]
    if 0 in shape or 0 in steps:  # a broadcast axis has no place in the order
        return _array(shape, dtype, contiguous_strides(shape, dtype.itemsize))
    order = tuple(map(abs, strides))
    return _array(shape, dtype, layout.packed(shape, order, dtype.itemsize).strides)


def _array(shape: Shape, dtype: np.dtype, strides: Shape) -> np.ndarray:
    if dtype.hasobject:
        raise TypeError(f"page-locked memory cannot hold Python objects ({dtype}): no GPU has them")
    nbytes = math.prod(shape) * dtype.itemsize
    if not nbytes:
        return np.empty(shape, dtype)
    _driver.library.ensure()
    memory: Any = pinned.take_or_raise(nbytes, _driver.contexts.current_device())
    return np.ndarray(shape, dtype, memory, 0, strides)


def _shape_of(shape: Any) -> Shape:
    lengths = [shape] if hasattr(shape, "__index__") else shape
    counts = tuple([integer(count, "each length in shape") for count in lengths])
    if min(counts, default=0) < 0:
        raise ValueError(f"shape has a negative length: {shape!r}")
    return counts
