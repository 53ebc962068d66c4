"""Layouts of strided arrays, and the runs of bytes that a copy between two layouts moves.

Pure computation, without CUDA. Strides are in bytes, as NumPy counts them.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from userstream._driver.copies import Copy

if TYPE_CHECKING:
    from collections.abc import Iterator

Shape: TypeAlias = tuple[int, ...]

SHORTEST_ROW = 512  # bytes; the copy engines are slow with shorter ones
MOST_SPREAD = 4  # times its bytes that an array may come with what lies between its elements
MOST_COPIES = 1 << 16  # of one array; each takes microseconds
_GREATEST_PITCH = (1 << 31) - 1  # CU_DEVICE_ATTRIBUTE_MAX_PITCH


class Side(NamedTuple):
    """Layout of an array in the memory that a copy reads or writes."""

    strides: Shape
    offset: int  # of the first element, from the lowest byte
    nbytes: int  # from the lowest byte to the end of the highest

    def array(self, memory: Any, shape: Shape, dtype: np.dtype) -> np.ndarray:
        """Return the array with this layout in a block of host memory."""
        return np.ndarray(shape, dtype, memory, self.offset, self.strides)


class Axis(NamedTuple):
    """One loop of a copy."""

    length: int
    to_stride: int
    from_stride: int


class Moves(NamedTuple):
    """A copy between two layouts of one shape: runs of `width` bytes in loops, outermost first.

    The offsets, in bytes, are those of the first run from the first elements.
    """

    width: int
    axes: tuple[Axis, ...]
    to_offset: int
    from_offset: int


@functools.lru_cache(maxsize=256)
def spread(shape: Shape, strides: Shape, itemsize: int) -> Side:
    """Return the layout of an array in place: its strides and the span that covers the array."""
    steps = [(count - 1) * stride for count, stride in zip(shape, strides, strict=True)]
    lowest = sum(step for step in steps if step < 0)
    highest = sum(step for step in steps if step > 0)
    return Side(strides, -lowest, highest - lowest + itemsize)


def packed(shape: Shape, strides: Shape, itemsize: int) -> Side:
    """Return the layout without gaps, with the elements in their order in memory.

    A broadcast axis stays one, and a negative stride stays negative.
    """
    dense = [0] * len(shape)
    nbytes = itemsize
    for axis in reversed(_outermost_first(shape, strides)):
        dense[axis] = nbytes if strides[axis] > 0 else -nbytes
        nbytes *= shape[axis]
    return spread(shape, tuple(dense), itemsize)


def _outermost_first(shape: Shape, strides: Shape) -> list[int]:
    """Return the axes that step through memory, the longest steps first."""
    axes = [axis for axis, count in enumerate(shape) if count > 1 and strides[axis]]
    return sorted(axes, key=lambda axis: -abs(strides[axis]))


@functools.lru_cache(maxsize=256)
def may_alias(shape: Shape, strides: Shape, itemsize: int) -> bool:
    """Return whether elements may share memory: a step is shorter than the span of inner axes."""
    if 0 in shape:
        return False
    if any(count > 1 and not stride for count, stride in zip(shape, strides, strict=True)):
        return True
    inside = itemsize
    for axis in reversed(_outermost_first(shape, strides)):
        step = abs(strides[axis])
        if step < inside:
            return True
        inside += (shape[axis] - 1) * step
    return False


@functools.lru_cache(maxsize=256)
def moves(shape: Shape, itemsize: int, to_strides: Shape, from_strides: Shape) -> Moves:
    """Return the moves that copy a non-empty array; no two elements of the target overlap.

    An axis along which neither side moves is copied once.
    """
    axes = []
    to_offset = from_offset = 0
    for count, to_stride, from_stride in zip(shape, to_strides, from_strides, strict=True):
        if count == 1 or not (to_stride or from_stride):
            continue
        if to_stride < 0:  # start at the other end
            to_offset += (count - 1) * to_stride
            from_offset += (count - 1) * from_stride
            to_stride, from_stride = -to_stride, -from_stride  # noqa: PLW2901
        axes.append(Axis(count, to_stride, from_stride))
    axes.sort(key=lambda axis: axis.to_stride)
    merged = [Axis(itemsize, 1, 1)]  # innermost first
    for axis in axes:
        inner = merged[-1]
        if axis[1:] == (inner.to_stride * inner.length, inner.from_stride * inner.length):
            merged[-1] = inner._replace(length=inner.length * axis.length)
        else:
            merged.append(axis)
    return Moves(merged[0].length, tuple(merged[:0:-1]), to_offset, from_offset)


def has_short_rows(plan: Moves) -> bool:
    """Return whether the rows are so short that a strided copy would be slow."""
    return bool(plan.axes) and plan.width < SHORTEST_ROW


def copies(plan: Moves) -> tuple[int, Iterator[Copy]]:
    """Return the number of driver calls that a copy takes, and the parameters of each call."""
    width = plan.width
    rows, slices, loops = _fewest_loops(plan)
    first = Copy(
        width=width,
        rows=rows.length,
        slices=slices.length,
        to_offset=plan.to_offset,
        to_pitch=rows.to_stride,
        to_height=slices.to_stride // rows.to_stride,
        from_offset=plan.from_offset,
        from_pitch=rows.from_stride,
        from_height=slices.from_stride // rows.from_stride,
    )
    return math.prod(axis.length for axis in loops), _repeated(first, loops)


@functools.lru_cache(maxsize=256)
def _fewest_loops(plan: Moves) -> tuple[Axis, Axis, tuple[Axis, ...]]:
    """Return the axes of rows and slices of one call, and the axes along which calls repeat.

    Among equals, the rows are the innermost axis that can be.
    """
    width = plan.width
    choices = [(Axis(1, width, width), Axis(1, width, width), plan.axes)]
    for rows, others in _one_of(plan.axes):
        if _steps_over(width, rows):
            whole = Axis(1, rows.to_stride * rows.length, rows.from_stride * rows.length)
            choices.append((rows, whole, others))
            choices += [(rows, *each) for each in _one_of(others) if _stacks(rows, each[0])]
    return min(choices, key=lambda choice: math.prod(axis.length for axis in choice[2]))


def _one_of(axes: tuple[Axis, ...]) -> Iterator[tuple[Axis, tuple[Axis, ...]]]:
    """Yield each axis with the remaining axes, the innermost first."""
    for i in reversed(range(len(axes))):
        yield axes[i], axes[:i] + axes[i + 1 :]


def _steps_over(size: int, axis: Axis) -> bool:
    """Return whether an axis can be the pitch of rows of a size, on both sides."""
    return all(size <= stride <= _GREATEST_PITCH for stride in axis[1:])


def _stacks(rows: Axis, axis: Axis) -> bool:
    """Return whether an axis can be the axis of slices: whole numbers of rows, on both sides."""
    return all(
        stride % pitch == 0 and stride >= pitch * rows.length
        for stride, pitch in zip(axis[1:], rows[1:], strict=True)
    )


def _repeated(first: Copy, loops: tuple[Axis, ...]) -> Iterator[Copy]:
    for index in itertools.product(*(range(axis.length) for axis in loops)):
        steps = list(zip(index, loops, strict=True))
        yield first._replace(
            to_offset=first.to_offset + sum(i * axis.to_stride for i, axis in steps),
            from_offset=first.from_offset + sum(i * axis.from_stride for i, axis in steps),
        )


def pieces(shape: Shape, strides: Shape, itemsize: int, limit: int) -> Iterator[tuple[slice, ...]]:
    """Cut an array into parts of at most `limit` bytes, and yield the index of each."""
    whole = [slice(None)] * len(shape)
    size = itemsize
    axes = _outermost_first(shape, strides)
    while axes and size * shape[axes[-1]] <= limit:
        size *= shape[axes.pop()]
    if not axes:
        yield tuple(whole)
        return
    *outer, cut = axes
    step = max(1, limit // size)
    for index in itertools.product(*(range(shape[axis]) for axis in outer)):
        for axis, i in zip(outer, index, strict=True):
            whole[axis] = slice(i, i + 1)
        for start in range(0, shape[cut], step):
            whole[cut] = slice(start, min(start + step, shape[cut]))
            yield tuple(whole)


class HostCopyPlan(NamedTuple):
    """Layout of an array on the host, packed or not, and the copy to this layout."""

    side: Side
    moves: Moves
    scattered: bool  # short rows, which the framework of the array may pack faster
    read_only: bool  # as elements may share memory

    def array(self, memory: object, shape: Shape, dtype: np.dtype) -> np.ndarray:
        """Return the copied array, which lies in a block of host memory."""
        found = self.side.array(memory, shape, dtype)
        if self.read_only:
            found.flags.writeable = False
        return found


@functools.lru_cache(maxsize=256)
def host_copy_plans(
    shape: Shape, strides: Shape, itemsize: int
) -> tuple[HostCopyPlan, HostCopyPlan | None]:
    """Return the plan that packs an array, and the plan that copies its span, or `None`."""
    side = packed(shape, strides, itemsize)
    plan = moves(shape, itemsize, side.strides, strides)
    span = spread(shape, strides, itemsize)
    scattered = has_short_rows(plan) and span.nbytes >= side.nbytes
    packing = HostCopyPlan(side, plan, scattered, may_alias(shape, side.strides, itemsize))
    most = side.nbytes * MOST_SPREAD if scattered else side.nbytes - 1
    if span.nbytes > most:
        return packing, None
    # Larger than the elements, or smaller where they overlap; one copy in any case.
    plan = Moves(span.nbytes, (), -span.offset, -span.offset)
    return packing, HostCopyPlan(span, plan, scattered, may_alias(shape, strides, itemsize))


def host_copy_plan(
    shape: Shape, strides: Shape, itemsize: int, most: int | None = None
) -> HostCopyPlan:
    """Return the plan that copies a non-empty array to at most `most` bytes of host memory."""
    packing, covering = host_copy_plans(shape, strides, itemsize)
    if covering is None or (most is not None and covering.side.nbytes > most):
        return packing
    return covering
