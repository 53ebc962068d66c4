"""How a strided array comes to the host: packed on the way, or with what lies in between."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

from userstream._transfer import _layout
from userstream._transfer._layout import Moves, Shape, Side

if TYPE_CHECKING:
    import numpy as np

    from userstream._transfer._arrays import DeviceArray


class Way(NamedTuple):
    """A layout on the host, and the copy that brings the array there."""

    side: Side
    moves: Moves
    scattered: bool  # short rows, which the framework of the array may pack faster
    read_only: bool  # as elements may share memory

    def array(self, memory: object, shape: Shape, dtype: np.dtype) -> np.ndarray:
        """Return the array that is in a block of host memory now."""
        found = self.side.array(memory, shape, dtype)
        if self.read_only:
            found.flags.writeable = False
        return found


@functools.lru_cache(maxsize=256)
def _ways(shape: Shape, strides: Shape, itemsize: int) -> tuple[Way, Way | None]:
    """Return the way that packs, and the covering span if that should be tried first."""
    side = _layout.packed(shape, strides, itemsize)
    plan = _layout.moves(shape, itemsize, side.strides, strides)
    span = _layout.spread(shape, strides, itemsize)
    scattered = _layout.is_scattered(plan) and span.nbytes >= side.nbytes
    packing = Way(side, plan, scattered, _layout.may_alias(shape, side.strides, itemsize))
    most = side.nbytes * _layout.MOST_SPREAD if scattered else side.nbytes - 1
    if span.nbytes > most:
        return packing, None
    # Larger than the elements, or smaller where they overlap; one copy in any case.
    plan = Moves(span.nbytes, (), -span.offset, -span.offset)
    return packing, Way(span, plan, scattered, _layout.may_alias(shape, strides, itemsize))


def is_scattered(source: DeviceArray) -> bool:
    """Tell whether an array that is not empty has short rows, apart from each other."""
    return _ways(source.shape, source.strides, source.dtype.itemsize)[0].scattered


def way(source: DeviceArray, most: int | None = None) -> Way:
    """Return how an array that is not empty is copied to the host, in `most` bytes there."""
    packing, covering = _ways(source.shape, source.strides, source.dtype.itemsize)
    if covering is None or (most is not None and covering.side.nbytes > most):
        return packing
    return covering
