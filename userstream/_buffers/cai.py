"""Views of objects with ``__cuda_array_interface__``."""

from __future__ import annotations

import functools
import math
import operator
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from userstream import _driver
from userstream._buffers.framework import KNOWN, is_named, type_name
from userstream._buffers.view import (
    DOUBTED,
    UNKNOWN,
    Layout,
    ProducerStream,
    View,
    cached,
    checked_place,
    contiguous_strides,
    device_at,
    place_of,
)
from userstream.errors import UnsupportedBufferError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from userstream._driver.pointers import Memory, Place

ATTRIBUTE = "__cuda_array_interface__"
_SYNCHRONIZED = -1  # as a stream: nothing is pending, by the convention of CV-CUDA and cuda.core
# The default streams, 1 and 2. Some types name one as a constant: on an H200, copies from each of
# the four examined types were stale, or overtaken by the next work on the buffer.
_LAST_DEFAULT = _driver.streams.PER_THREAD
_INTEGERS = (int, np.integer)


def view_for(kind: Any) -> type[View] | None:
    """Return the view class if `kind`, a type or an object, has the CUDA Array Interface."""
    return view_of_interface(kind) if hasattr(kind, ATTRIBUTE) else None


def view_of_interface(kind: Any) -> type[InterfaceView]:
    """Return the view class for the interface of `kind`, a type or an object."""
    named = kind if isinstance(kind, type) else type(kind)
    return MisledView if _misleads(named) else InterfaceView


@functools.lru_cache(maxsize=256)
def _misleads(kind: type) -> bool:
    """Return whether the interface of a type is known to name a wrong stream."""
    return any(is_named(kind, each.packages, each.misleads) for each in KNOWN)


def checked(obj: Any, found: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the interface of an object, after checking the fields that every version requires."""
    try:
        found["shape"], found["typestr"]
        where, read_only = found["data"]
        if type(read_only) is not bool:
            bool(read_only)  # raises for an array of several elements
    except (KeyError, TypeError, ValueError) as error:
        raise _malformed(obj, "it needs shape, typestr and data: (address, read-only)") from error
    try:
        address = where if type(where) is int else operator.index(where)
        wrong = type(where) is bool or not 0 <= address < 1 << 64
    except TypeError:
        wrong = True
    if wrong:
        raise _malformed(obj, f"its address is {where!r}")
    stream = found.get("stream")
    # Of integers only: an array's == has no truth value.
    if stream is not None and isinstance(stream, _INTEGERS) and stream == 0:
        raise _malformed(obj, "its stream is 0, which the interface forbids; 1 is the legacy one")
    return found


def _malformed(obj: object, why: str) -> UnsupportedBufferError:
    return UnsupportedBufferError(f"the {ATTRIBUTE} of this {type_name(obj)} is malformed: {why}")


class InterfaceView(View):
    """View of an object by its ``__cuda_array_interface__``, which is read once."""

    source = ATTRIBUTE

    #: True if a default stream in the interface is the producer, not a constant.
    means_default_streams: ClassVar[bool] = False

    def __init__(self, obj: Any, found: Mapping[str, Any] | None = None) -> None:
        self.buffer = obj
        self._found = found  # the interface, if the caller has read it already

    @staticmethod
    def locate(obj: Any) -> int:
        """Return the ordinal of the device of the interface's memory."""
        address = operator.index(checked(obj, getattr(obj, ATTRIBUTE))["data"][0])
        device = _driver.pointers.usual_device(address) if address else None
        return device_at(place_of(address, obj), obj) if device is None else device

    @staticmethod
    def producer_of(obj: Any) -> tuple[int, int, object] | None:
        """Return the device and the stream of the interface; `None` for a default stream."""
        found = getattr(obj, ATTRIBUTE)
        try:
            found["shape"], found["typestr"]
            (address, _readonly), version = found["data"], found["version"]
            handle = found.get("stream")
        except (KeyError, TypeError, ValueError):
            return None
        if (
            not type(address) is type(version) is type(handle) is int
            or version < 3
            or not _LAST_DEFAULT < handle < 1 << 64
            or not 0 < address < 1 << 64
        ):
            return None
        device = _driver.pointers.usual_device(address)
        return None if device is None else (device, handle, None)

    @cached
    def interface(self) -> Mapping[str, Any]:
        """The interface, with all fields that every version requires."""
        found = self._found
        return checked(self.buffer, getattr(self.buffer, ATTRIBUTE) if found is None else found)

    def _read_interface(self) -> Mapping[str, Any]:
        """Read the object's interface. Only `interface` calls this, and caches the result."""
        shown: Mapping[str, Any]
        shown = getattr(self.buffer, ATTRIBUTE) if self._found is None else self._found
        return shown

    @cached
    def address(self) -> int:
        """The address of the first element, as a Python int."""
        return operator.index(self.interface["data"][0])

    @cached
    def unchecked_place(self) -> Place | None:
        """The driver's information about the address."""
        address = self.address
        return _driver.pointers.place_of(address) if address else None

    @cached
    def place(self) -> Place:
        """The driver's information about the address, checked for use on a user stream."""
        place = self.unchecked_place
        if place is not None and not place.is_host and place.is_in_primary_context():
            return place
        return checked_place(place, self.address, self.buffer)

    @cached
    def device(self) -> int:
        """The ordinal of the device, as reported by the driver."""
        place = self.unchecked_place
        if place is None or place.is_host or not place.is_in_primary_context():
            place = self.place
        return device_at(place, self.buffer) if place.is_host else place.device

    @cached
    def device_and_memory(self) -> tuple[int | None, Memory]:
        """Device and kind of memory, as reported by the driver."""
        return self.place.device, self.place.kind

    @cached
    def layout(self) -> Layout:
        """The layout that the interface describes."""
        obj, found = self.buffer, self.interface
        try:
            shape, strides = _integers(found["shape"]), found.get("strides")
            if strides is not None:
                strides = _integers(strides)
            dtype = _dtype(found)
            strides, nbytes = _extent(shape, strides, dtype.itemsize)
        except (TypeError, ValueError) as error:
            raise _malformed(obj, f"its shape, strides, typestr or descr: {error}") from error
        return Layout(self.address, shape, strides, dtype, nbytes)

    @cached
    def producer(self) -> ProducerStream:
        """The producer's stream in the interface; unknown if that is a default stream."""
        version, stream = self.interface.get("version", 0), self.interface.get("stream")
        try:
            if operator.index(version) < 3:
                return UNKNOWN  # versions before 3 have no stream
            handle = None if stream is None else operator.index(stream)
        except TypeError as error:
            raise _malformed(
                self.buffer,
                f"its version is {version!r}, and its stream {stream!r}: both are numbers, the "
                "stream a handle such as int(stream.handle), or None",
            ) from error
        if handle is None:  # by the specification nothing is pending, but not all types comply
            return UNKNOWN
        if handle == _SYNCHRONIZED:
            return ProducerStream("none")
        if not 0 < handle < 1 << 64:
            raise _malformed(self.buffer, f"its stream is {stream!r}")
        if handle <= _LAST_DEFAULT and not self.means_default_streams:
            return DOUBTED
        return ProducerStream("exact", handle)

    def check_copyable(self) -> None:
        """Raise for a masked array: a copy would not carry the mask."""
        if self.interface.get("mask") is not None:
            raise UnsupportedBufferError(
                f"this {type_name(self.buffer)} is masked, and a copy would contain invalid "
                "elements; fill or drop them first, in its framework"
            )

    @cached
    def is_read_only(self) -> bool:
        """True if the interface declares the memory read-only."""
        return bool(self.interface["data"][1])


class MisledView(InterfaceView):
    """View of an object whose interface names a wrong or invalid stream."""

    @staticmethod
    def locate(obj: Any) -> int:
        """Return the ordinal of the device, ignoring the stream of the interface."""
        return MisledView(obj).device

    @cached
    def interface(self) -> Mapping[str, Any]:
        """The interface without its stream."""
        return checked(self.buffer, {**self._read_interface(), "stream": None})


def _integers(found: Iterable[Any]) -> tuple[int, ...]:
    return tuple(map(operator.index, found))


@functools.lru_cache(maxsize=256)
def _extent(
    shape: tuple[int, ...], strides: tuple[int, ...] | None, itemsize: int
) -> tuple[tuple[int, ...], int]:
    """Return the strides of an array and the size of its elements; raise for invalid values."""
    if strides is not None and len(strides) != len(shape):
        raise ValueError(f"{len(strides)} strides for {len(shape)} axes")
    if min(shape, default=0) < 0:
        raise ValueError(f"shape {shape}")
    if strides is None:
        strides = contiguous_strides(shape, itemsize)
    return strides, math.prod(shape) * itemsize


_dtype_of = functools.lru_cache(maxsize=256)(np.dtype)


def _dtype(found: Mapping[str, Any]) -> np.dtype[Any]:
    fields, typestr = found.get("descr"), found["typestr"]
    if not isinstance(typestr, str):  # NumPy would turn None into float64
        raise TypeError(f"typestr {typestr!r}")
    dtype: np.dtype[Any] = _dtype_of(typestr)  # DALI writes "=f" where NumPy writes "<f4"
    if dtype.kind != "V" or not fields:
        return dtype
    # `descr` spells out a structured type; a field without a name is padding.
    spelled = np.lib.format.descr_to_dtype(list(fields))
    if spelled.itemsize != dtype.itemsize:
        raise ValueError(f"descr {fields} for typestr {typestr!r}")
    return spelled if spelled.names else dtype
