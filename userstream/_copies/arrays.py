"""The operands of a copy: arrays on a device and on the host, and what is refused of them."""

from __future__ import annotations

import ctypes
import functools
import importlib
import math
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from userstream import _driver
from userstream._buffers.view import contiguous_strides
from userstream._copies import layout
from userstream.errors import UnsupportedBufferError

if TYPE_CHECKING:
    from userstream._buffers.view import View
    from userstream._copies.layout import Shape
    from userstream._driver.pointers import Place


class DeviceArray(NamedTuple):
    """Device operand of a copy: address, shape, strides and type."""

    address: int  # of the first element
    shape: Shape
    strides: Shape  # 0 along an axis that takes no step
    dtype: np.dtype
    device: int

    @property
    def is_scattered(self) -> bool:
        """Whether its rows are so short that its framework packs it faster than a copy can."""
        shape, strides, itemsize = self.shape, self.strides, self.dtype.itemsize
        return 0 not in shape and layout.is_scattered(shape, strides, itemsize)

    def as_bytes(self) -> DeviceArray:
        """Return the array with each element spelled out along an axis of its own."""
        return self._replace(
            shape=(*self.shape, self.dtype.itemsize), strides=(*self.strides, 1), dtype=_BYTE
        )

    def part(self, index: tuple[slice, ...]) -> DeviceArray:
        """Return the part that an index with a slice for each axis cuts out."""
        address, shape = self.address, []
        for cut, count, stride in zip(index, self.shape, self.strides, strict=True):
            start, stop, _ = cut.indices(count)
            address += start * stride
            shape.append(stop - start)
        return self._replace(address=address, shape=tuple(shape))


def device_array(view: View) -> DeviceArray:
    """Return the array that a buffer is; one without a shape is its bytes.

    One that reaches out of its allocation is refused: nothing else would stop a copy from reading
    or overwriting what lies there, even host memory.
    """
    address, shape, strides, dtype = elements(view)
    there = extent(shape, strides, dtype.itemsize)
    array = DeviceArray(address, shape, there.strides, dtype, view.device)
    if there.nbytes:
        place = view.found or view.place  # of a framework's memory any context may be
        if not place.covers(address - there.offset, there.nbytes):
            raise _reaching_out(array, there, place, view.source)
    elif there.nbytes is None:
        raise UnsupportedBufferError(
            f"this {view.source} has shape {shape} and elements of {dtype.itemsize} bytes, more "
            "than an array can have; correct what it reports"
        )
    return array


def elements(view: View) -> tuple[int, Shape, Shape | None, np.dtype]:
    """Return address, shape, strides and type of what a copy would take for a buffer's elements."""
    view.check_copyable()
    address, shape, strides, kind, nbytes = view.layout
    if address is None:
        raise UnsupportedBufferError(
            f"this {view.source} is not a single array with an address and a shape; pass its parts "
            "one by one"
        )
    if shape is None:
        if nbytes is None:
            raise UnsupportedBufferError(_SHAPELESS.format(view.source))
        return address, (nbytes,), (1,), _BYTE
    return address, shape, strides, numpy_dtype(kind, view.source)


class Extent(NamedTuple):
    """Memory range of an array."""

    strides: Shape  # 0 along an axis that takes no step
    offset: int = 0  # of the first element, from the lowest byte
    nbytes: int | None = 0  # from the lowest byte on; None if that is more than an array can have


@functools.lru_cache(maxsize=256)
def extent(shape: Shape, strides: Shape | None, itemsize: int) -> Extent:
    """Return the memory range of an array."""
    if strides is None:
        steps = contiguous_strides(shape, itemsize)
    else:
        steps = tuple([step if n > 1 else 0 for n, step in zip(shape, strides, strict=True)])
    if math.prod(shape) * itemsize > _MOST_BYTES or max(shape, default=0) > _MOST_BYTES:
        return Extent(steps, nbytes=None)
    if 0 in shape or not itemsize:
        return Extent(steps)
    span = layout.spread(shape, steps, itemsize)
    return Extent(steps, span.offset, span.nbytes)


def _reaching_out(
    array: DeviceArray, there: Extent, place: Place, source: str
) -> UnsupportedBufferError:
    address, shape, strides, dtype, _device = array
    return UnsupportedBufferError(
        f"this {source} extends beyond its memory: shape {shape} and strides {strides} in bytes, "
        f"with elements of {dtype.itemsize} from address {address:#x} on, need {there.nbytes} "
        f"bytes from {address - there.offset:#x} on, and the allocation there has {place.size} "
        f"from {place.start:#x} on; correct what it reports"
    )


_MOST_BYTES = (1 << 63) - 1  # of an array of NumPy


_BYTE = np.dtype(np.uint8)
_SHAPELESS = """\
this {} has neither a shape nor a type; pass an object that has them:
    class Array:
        __cuda_array_interface__ = {{
            "version": 3, "shape": (2, 3), "typestr": "<f4", "stream": handle,
            "data": (address, False),  # which the stream with that handle writes
        }}"""


def check_same(to: np.dtype, source: np.dtype) -> None:
    """Refuse to convert: the types of two arrays must be the same."""
    if to != source:
        raise TypeError(
            f"a copy does not convert: the target has dtype {to}, the source {source}; "
            "convert one of them first, or pass a view of its bytes with the type of the other"
        )


def check_out(out: np.ndarray, shape: Shape, dtype: np.dtype) -> None:
    """Raise for an output array that cannot hold the result."""
    if out.shape != shape:
        raise ValueError(f"out has shape {out.shape}, and the buffer {shape}")
    check_same(out.dtype, dtype)
    if not out.flags.writeable:
        raise ValueError("out is read-only")
    if isinstance(out, np.ma.MaskedArray):
        raise TypeError("out is masked, and its mask would hide what is copied; pass out.data")


def check_target(to: DeviceArray) -> None:
    """Refuse a target whose elements overlap, as it makes no sense."""
    if layout.may_alias(to.shape, to.strides, to.dtype.itemsize):
        raise ValueError(
            f"the elements of the target may share memory (shape {to.shape}, strides {to.strides})"
        )


def broadcast_strides(source: DeviceArray, shape: Shape) -> Shape:
    """Return the strides of an array seen in another shape, by the rules of `numpy.copyto`."""
    surplus = surplus_axes(source.shape, shape)
    counts, strides = source.shape[surplus:], source.strides[surplus:]
    missing = len(shape) - len(counts)
    return (0,) * missing + tuple(
        0 if count == 1 else stride for count, stride in zip(counts, strides, strict=True)
    )


def surplus_axes(source: Shape, shape: Shape) -> int:
    """Return how many axes, of length 1, an array has before those of a shape it broadcasts to."""
    surplus = max(len(source) - len(shape), 0)
    counts = source[surplus:]
    fits = set(source[:surplus]) <= {1} and all(
        count in (1, wanted)
        for count, wanted in zip(counts, shape[len(shape) - len(counts) :], strict=True)
    )
    if not fits:
        raise ValueError(f"could not broadcast from shape {source} into shape {shape}")
    return surplus


def pinned_address(array: np.ndarray) -> int | None:
    """Return the address of a page-locked host array, of which copies do not block."""
    address = address_of(array)
    return address if is_pinned(array, address) else None


def address_of(array: np.ndarray) -> int:
    """Return the address of the first element of a host array."""
    memory: Any = array  # to NumPy's stubs for Python 3.11 it is no buffer
    try:
        return ctypes.addressof(_CHARACTER(memory))  # a third of the time of the other way
    except (TypeError, ValueError):  # of a type without the buffer protocol, or read-only, or gaps
        return int(array.ctypes.data)


_CHARACTER = ctypes.c_char.from_buffer


def is_pinned(array: np.ndarray, address: int) -> bool:
    """Return whether a host array at an address is page-locked: its copies do not block."""
    span = layout.spread(array.shape, array.strides, array.itemsize)
    lowest = address - span.offset
    place = _driver.pointers.place_of(lowest)
    return place is not None and place.kind == "pinned" and place.covers(lowest, span.nbytes)


_BELOW_A_BYTE = re.compile(r"u?int[124]|float[46]_\w+")


def numpy_dtype(dtype: np.dtype | str | None, source: str) -> np.dtype:
    """Return the type of the elements of a buffer that the rule `source` described."""
    if dtype is None:
        raise UnsupportedBufferError(
            f"this {source} does not say the type of its elements, or cuda.core does not know that "
            "type (such as float8 by DLPack); pass a view of them as integers, and view the result "
            "as the type of ml_dtypes"
        )
    if isinstance(dtype, np.dtype):
        if dtype.hasobject:
            raise UnsupportedBufferError(f"this {source} holds Python objects ({dtype})")
        if dtype.isbuiltin == 2:  # of ml_dtypes
            _refuse_parts_of_bytes(dtype.name, source)
        return dtype
    if not isinstance(dtype, str):
        raise UnsupportedBufferError(
            f"the elements of this {source} are {dtype}, which are not numbers; pass the data that "
            "they stand for (of keys of JAX, jax.random.key_data(keys))"
        )
    return _named(dtype, source)


@functools.cache
def _named(name: str, source: str) -> np.dtype:
    _refuse_parts_of_bytes(name, source)
    try:
        return np.dtype(name)
    except TypeError:
        pass
    try:
        extended: np.dtype = np.dtype(getattr(importlib.import_module("ml_dtypes"), name))
    except (ImportError, AttributeError) as error:
        raise UnsupportedBufferError(
            f"the elements of this {source} are {name}, which NumPy does not have: install or "
            f"upgrade the package ml_dtypes (it says: {error}), or convert them first"
        ) from error
    return extended


def _refuse_parts_of_bytes(name: str, source: str) -> None:
    if _BELOW_A_BYTE.fullmatch(name):
        raise UnsupportedBufferError(
            f"the elements of this {source} are {name}, several to a byte; convert them first"
        )
