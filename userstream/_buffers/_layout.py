"""`Layout`: address, shape, strides and type of the elements of a buffer."""

from __future__ import annotations

import functools
import math
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np


class Layout(NamedTuple):
    """Address, shape, strides and type of a buffer's elements. An unknown fact is `None`."""

    address: int | None  # of the first element; None for a buffer of several parts
    shape: tuple[int, ...] | None = None
    strides: tuple[int, ...] | None = None  # in bytes
    dtype: np.dtype | str | None = None  # the name of a type that NumPy lacks
    nbytes: int | None = None  # of the elements, without gaps between them

    @property
    def is_empty(self) -> bool:
        """True if the buffer is known to have no elements."""
        return self.nbytes == 0 or (self.shape is not None and 0 in self.shape)


class Form:
    """Layout of an array's elements relative to the first one.

    Arrays with the same layout share one object, which serves as the key of caches.
    """

    __slots__ = ("dtype", "shape", "strides")

    def __init__(
        self,
        shape: tuple[int, ...],
        strides: tuple[int, ...],  # in bytes
        dtype: np.dtype | str,  # the name of a type that NumPy lacks
    ) -> None:
        self.shape = shape
        self.strides = strides
        self.dtype = dtype


form: Callable[[tuple[int, ...], tuple[int, ...], np.dtype], Form]
form = functools.lru_cache(maxsize=256)(Form)


def packed(address: int, shape: Sequence[int], dtype: np.dtype) -> Layout:
    """Return the layout of an array in C order, without gaps."""
    shape, size = tuple(shape), dtype.itemsize
    return Layout(address, shape, contiguous_strides(shape, size), dtype, math.prod(shape) * size)


@functools.lru_cache(maxsize=256)
def contiguous_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Return the strides in bytes of an array in C order."""
    if 0 in shape:
        return (0,) * len(shape)  # the same as NumPy and CuPy
    sizes = accumulate(shape[:0:-1], int.__mul__, initial=itemsize)
    return tuple(sizes)[::-1] if shape else ()
