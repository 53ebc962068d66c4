"""Operands of a copy: arrays on a device and on the host, independent of framework.

What a copy refuses is refused here, with what to pass instead.
"""

from __future__ import annotations

import functools
import importlib
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from cuda.core import Buffer

from userstream import _buffers, _driver, _targets
from userstream._buffers import type_name
from userstream._buffers.view import contiguous_strides
from userstream._copies import layout
from userstream._driver import core
from userstream.errors import (
    DeviceMismatchError,
    HostBufferError,
    UnsupportedBufferError,
    UserStreamError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from userstream._buffers.view import View
    from userstream._copies.layout import Shape
    from userstream._driver.pointers import Place
    from userstream._ordering.ordering import Ordering


# -- arrays ----------------------------------------------------------------------------------------


class DeviceArray(NamedTuple):
    """Address, shape, strides, type and device of an array on a device."""

    address: int  # of the first element
    shape: Shape
    strides: Shape  # 0 along an axis that takes no step
    dtype: np.dtype
    device: int

    @property
    def is_scattered(self) -> bool:
        """True if rows with gaps are so short that the framework packs faster than a copy."""
        if 0 in self.shape:
            return False
        packing, _ = layout.host_copy_plans(self.shape, self.strides, self.dtype.itemsize)
        return packing.scattered

    def as_bytes(self) -> DeviceArray:
        """Return the array of bytes, with one more axis for the bytes of an element."""
        return self._replace(
            shape=(*self.shape, self.dtype.itemsize), strides=(*self.strides, 1), dtype=_BYTE
        )

    def part(self, index: tuple[slice, ...]) -> DeviceArray:
        """Return the part of the array that an index of slices selects."""
        address, shape = self.address, []
        for cut, count, stride in zip(index, self.shape, self.strides, strict=True):
            start, stop, _ = cut.indices(count)
            address += start * stride
            shape.append(stop - start)
        return self._replace(address=address, shape=tuple(shape))


def device_array(view: View) -> DeviceArray:
    """Return the device array of a buffer; a buffer without a shape is an array of bytes.

    Raises for an array that extends beyond its allocation: otherwise a copy would read or overwrite
    memory of others, even host memory.
    """
    address, shape, strides, dtype = elements(view)
    there = extent(shape, strides, dtype.itemsize)
    array = DeviceArray(address, shape, there.strides, dtype, view.device)
    if there.nbytes:
        place = view.unchecked_place or view.place  # of a framework's memory any context may be
        if not place.covers(address - there.offset, there.nbytes):
            raise _reaching_out(array, there, place, view.source)
    elif there.nbytes is None:
        raise UnsupportedBufferError(
            f"this {view.source} has shape {shape} and elements of {dtype.itemsize} bytes, more "
            "than an array can have; correct what it reports"
        )
    return array


def elements(view: View) -> tuple[int, Shape, Shape | None, np.dtype]:
    """Return address, shape, strides and type of the elements of a buffer, for a copy."""
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


_MOST_BYTES = (1 << 63) - 1  # of a NumPy array


_BYTE = np.dtype(np.uint8)
_SHAPELESS = """\
this {} has neither a shape nor a type; pass an object that has them:
    class Array:
        __cuda_array_interface__ = {{
            "version": 3, "shape": (2, 3), "typestr": "<f4", "stream": handle,
            "data": (address, False),  # which the stream with that handle writes
        }}"""


def check_same(to: np.dtype, source: np.dtype) -> None:
    """Raise if the types of two arrays differ: a copy does not convert."""
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
    """Raise if elements of a target overlap: the result would depend on the order of writes."""
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
    """Return the number of leading axes of length 1 that broadcasting to a shape drops."""
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
    """Return the address of a page-locked host array; `None` for pageable memory."""
    address = address_of(array)
    return address if is_pinned(array, address) else None


def address_of(array: np.ndarray) -> int:
    """Return the address of the first element of a host array."""
    try:
        return core.address_of(array)  # a tenth of the time of the other way
    except (TypeError, ValueError):  # of a type without the buffer protocol
        return int(array.ctypes.data)


def is_pinned(array: np.ndarray, address: int) -> bool:
    """Return whether a host array at an address is page-locked: its copies do not block."""
    base: object = array.base
    if isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, core.Lease):  # from `pinned`; NumPy checks the bounds
        return True
    span = layout.spread(array.shape, array.strides, array.itemsize)
    lowest = address - span.offset
    place = _driver.pointers.place_of(lowest)
    return place is not None and place.kind == "pinned" and place.covers(lowest, span.nbytes)


_BELOW_A_BYTE = re.compile(r"u?int[124]|float[46]_\w+")


def numpy_dtype(dtype: np.dtype | str | None, source: str) -> np.dtype:
    """Return the NumPy type of the elements of a buffer of the kind `source`."""
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


# -- buffers as operands ---------------------------------------------------------------------------


class Operand(NamedTuple):
    """A device buffer of a copy: its view and its array."""

    view: View
    array: DeviceArray


def typed_as(operand: Operand, other: DeviceArray | np.ndarray) -> Operand:
    """Return a buffer without shape and type as an array of those of the other side.

    It needs as many bytes. Against an array of bytes it remains one, which may be broadcast.
    """
    shape, dtype = other.shape, other.dtype
    if dtype.hasobject:
        return operand
    nbytes, wanted = operand.array.shape[0], math.prod(shape) * dtype.itemsize
    if nbytes != wanted:
        if dtype == _BYTE:
            return operand
        raise ValueError(
            f"this {operand.view.source} has {nbytes} bytes and no type, so it is copied from and "
            f"to arrays of as many bytes; the {dtype} array of shape {shape} has {wanted}"
        )
    strides = extent(shape, None, dtype.itemsize).strides
    return operand._replace(array=operand.array._replace(shape=shape, strides=strides, dtype=dtype))


def packed(
    source: Operand, ordering: Ordering, kept: list[object], *, if_scattered: bool = True
) -> DeviceArray:
    """Return an array, made contiguous by its framework where that is necessary or faster.

    The framework works on the consumer's stream; its copy is added to `kept`.
    """
    view, array = source
    if view.framework is None or not view.packs:
        return array
    if not view.is_disguised and not (if_scattered and array.is_scattered):
        return array
    stream, device, buffer = ordering.consumer, array.device, view.buffer
    own = ordering.lane.device
    if own != device:  # the framework would pack on another stream, without an edge
        if not view.is_disguised:
            return array
        raise DeviceMismatchError(
            f"the memory of this {type_name(buffer)} differs from what it shows, and its framework "
            f"can resolve that only on device {device}, where {stream!r} is not; pass a stream= "
            "there",
            devices=(own, device),
        )
    with stream.activate(view.framework.name):
        # CuPy works on the current device, wherever the array is.
        copy = _driver.contexts.within(_driver.contexts.primary_context(device), view.pack)
    kept.append(copy)
    return device_array(type(view)(copy))


def copied(
    buffer: Any,
    copy: Callable[..., np.ndarray],
    out: np.ndarray | None = None,
    path: tuple[object, ...] = (),
    joined: Callable[..., np.ndarray] | None = None,
) -> np.ndarray | list[Any] | dict[Any, Any]:
    """Copy a buffer or a collection to the host; return the arrays in the same structure.

    `joined` creates the array for the pieces of a buffer before the first piece is copied.
    Without it, the array is created after the first piece, whose type it has.
    """
    view = _buffers.view_or_none(buffer)
    if view is None and _targets.is_collection(buffer):
        _refuse_one(out, buffer)
        _targets.check_depth(len(path), buffer)
        if isinstance(buffer, Mapping):
            items = buffer.items()
            return {key: copied(item, copy, None, (*path, key), joined) for key, item in items}
        return [copied(item, copy, None, (*path, i), joined) for i, item in enumerate(buffer)]
    try:
        return _whole(buffer, view, copy, out, joined)
    except UserStreamError as error:
        if path:
            error.add_note(f"that is buffer{_targets.subscripts(path)}")
        raise


def _whole(
    buffer: Any,
    view: View | None,
    copy: Callable[..., np.ndarray],
    out: np.ndarray | None,
    joined: Callable[..., np.ndarray] | None,
) -> np.ndarray | list[Any]:
    """Copy one buffer, which may consist of several arrays."""
    pieces = None if view is None else view.pieces
    if view is not None and pieces is None and view.parts is not None:
        _refuse_one(out, buffer)
        return [_whole(part.buffer, part, copy, None, joined) for part in view.parts]
    if out is not None and not isinstance(out, np.ndarray):
        raise TypeError(f"out must be a numpy.ndarray, not {type(out).__name__}")
    if view is None:
        return host_copied(require_numpys(buffer), out)
    if pieces is None:
        return copy(view, out)
    if out is None and joined is not None and len(pieces) > 1:
        out = joined(pieces, buffer)
    return _joined(buffer, pieces, copy, out)


def _refuse_one(out: np.ndarray | None, buffer: Any) -> None:
    if out is not None:
        raise TypeError(
            f"out= takes one array, and {type_name(buffer)} consists of several; copy each to its "
            "own"
        )


def _joined(
    buffer: Any,
    pieces: Sequence[tuple[View, Any]],
    copy: Callable[..., np.ndarray],
    out: np.ndarray | None,
) -> np.ndarray:
    """Copy the pieces of an array into one host array."""
    if len(pieces) == 1:  # the whole, on one device or on each of several
        return copy(pieces[0][0], out)
    if out is not None and out.shape != tuple(buffer.shape):
        raise ValueError(f"out has shape {out.shape}, and the buffer {tuple(buffer.shape)}")
    for piece, index in pieces:
        if out is None:
            first = copy(piece)
            out = np.empty(buffer.shape, first.dtype)
            out[index] = first
        else:
            copy(piece, out[index])
    assert out is not None
    return out


def source_of(buffer: Any) -> Operand | None:
    """Return the source of `copyto`; `None` if the source is on the host."""
    kind = _buffers.view_classes.get(type(buffer)) or _buffers.kind_of(buffer)
    if kind is not None:
        return operand(kind(buffer))
    if is_numpys(buffer):
        return None
    raise _unknown(buffer)


def target_of(buffer: Any) -> Operand | None:
    """Return the target of `copyto`; `None` if the target is on the host."""
    kind = _buffers.view_classes.get(type(buffer)) or _buffers.kind_of(buffer)
    if kind is None:
        raise _unknown(buffer)
    view = kind(buffer)
    if view.packs and view.is_disguised:
        raise ValueError(
            f"the memory of this {type_name(buffer)} differs from what it shows, because it is a "
            "conjugate or negated view: it cannot be the target of a copy; pass the tensor that it "
            "is a view of"
        )
    try:
        _ = view.device
    except HostBufferError:
        return None
    if view.is_read_only:
        raise ValueError(f"the target is read-only: this {view.source} says so")
    found = Operand(view, device_array(view))
    view.check_target()
    return found


def _unknown(buffer: object) -> UnsupportedBufferError:
    return UnsupportedBufferError(
        f"copyto takes GPU buffers and arrays on the host, and {type_name(buffer)} is neither; "
        "numpy.asarray makes an array of numbers, and buffers are copied one by one"
    )


def operand(view: View) -> Operand | None:
    """Return the operand of a view; `None` if it is on the host, page-locked memory included."""
    try:
        _ = view.device
    except HostBufferError:
        return None
    return Operand(view, device_array(view))  # refuses a buffer without a shape


def empty_array(view: View) -> np.ndarray | None:
    """Return an empty NumPy array for a zero-size buffer that reports no device, else `None`."""
    try:
        there = view.layout
    except UnsupportedBufferError:
        return None
    if not there.is_empty:
        return None
    if there.shape is None:
        return np.empty(0, np.uint8)
    return np.empty(there.shape, numpy_dtype(there.dtype, view.source))


def if_on_host(view: View, out: np.ndarray | None) -> np.ndarray | None:
    """Return a host buffer as an array, or copied to `out`; `None` for a buffer on a device."""
    try:
        _ = view.device
    except HostBufferError:
        return host_copied(view.buffer, out)
    except UnsupportedBufferError:
        empty = empty_array(view)
        if empty is None:
            raise
        return host_copied(empty, out)
    return None


_NUMPYS_OWN = ("__array__", "__array_interface__", "__array_struct__")


def is_numpys(buffer: Any) -> bool:
    """Return whether NumPy makes an array of an object by a protocol of its own."""
    return not isinstance(buffer, type) and any(hasattr(buffer, each) for each in _NUMPYS_OWN)


def require_numpys(buffer: Any) -> Any:
    """Return an unknown object if NumPy makes an array of the object; otherwise raise."""
    if not is_numpys(buffer):
        number = isinstance(buffer, (int, float, complex))
        raise UnsupportedBufferError(
            f"{_targets.text_of(buffer)} is not a buffer: it has neither __dlpack_device__ nor "
            "__cuda_array_interface__, and is not a NumPy array"
            + ("; numpy.asarray makes an array of numbers, or of lists of them" if number else "")
        )
    return buffer


class _Bytes:
    """Array interface of cuda.core's host memory, which DLPack exports signed or read-only."""

    def __init__(self, buffer: Buffer) -> None:
        address = int(buffer.handle)
        place = _driver.pointers.place_of(address) if buffer.size else None
        if place is not None and not place.covers(address, buffer.size):
            raise UnsupportedBufferError(
                f"this {type_name(buffer)} of {buffer.size} bytes at {address:#x} extends beyond "
                f"its memory: the allocation there has {place.size} from {place.start:#x} on"
            )
        self._buffer = buffer  # as long as there is an array on it
        self.__array_interface__ = {
            "version": 3,
            "shape": (buffer.size,),
            "typestr": "|u1",
            "data": (address, False),
        }


def as_array(buffer: Any) -> np.ndarray:
    """Return a buffer on the host as an array; copies nothing."""
    if type(buffer) is np.ndarray:
        return buffer
    if isinstance(buffer, Buffer):
        return np.asarray(_Bytes(buffer))
    if isinstance(buffer, np.ma.MaskedArray):
        raise UnsupportedBufferError(
            f"this {type_name(buffer)} is masked, and a copy would not show that; pass its data, "
            "or the result of filled()"
        )
    view, name = _buffers.view_or_none(buffer), None
    try:
        if view is not None:
            buffer, name = view.host
        if hasattr(buffer, "__dlpack__") and not is_numpys(buffer):
            array = np.from_dlpack(buffer)
        else:
            array = np.asarray(buffer)
    except MemoryError:
        raise
    except Exception as error:
        raise HostBufferError(
            f"this {type_name(buffer)} is in host memory, and NumPy cannot read it "
            f"({type(error).__name__}: {error}); pass a NumPy array of that memory"
        ) from error
    if name is not None:
        return array.view(numpy_dtype(name, type_name(buffer)))
    if array.dtype == object and array.shape == () and array.item() is buffer:
        raise HostBufferError(
            f"this {type_name(buffer)} is in host memory, and NumPy cannot read it: it has none of "
            f"{', '.join(_NUMPYS_OWN)}, __dlpack__; pass a NumPy array of that memory"
        )
    return array


def host_copied(buffer: Any, out: np.ndarray | None) -> np.ndarray:
    """Return a host buffer as an array, or copied to one."""
    array = as_array(buffer)
    if out is None:
        return array
    check_out(out, array.shape, array.dtype)
    np.copyto(out, array)
    return out


def writable(buffer: Any) -> np.ndarray:
    """Return a host buffer as an array that may be written."""
    array = as_array(buffer)
    again = array if array is buffer else as_array(buffer)
    if array is not again and array.size and array.ctypes.data != again.ctypes.data:
        raise ValueError(
            f"the target cannot be written: NumPy gets a new copy of this {type_name(buffer)} each "
            "time; pass a NumPy array of its memory"
        )
    if not array.flags.writeable:
        raise ValueError(f"the target is read-only: {type_name(buffer)}")
    return array
