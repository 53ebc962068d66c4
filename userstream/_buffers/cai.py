"""Anything with ``__cuda_array_interface__``."""

from __future__ import annotations

import functools
import math
import operator
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from userstream import _driver
from userstream._buffers import _known
from userstream._buffers._layout import Layout, contiguous_strides
from userstream._buffers._names import type_name
from userstream._buffers._places import checked_place, device_at, place_of
from userstream._buffers.view import DOUBTED, UNKNOWN, Order, View, once
from userstream.errors import UnsupportedBufferError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from userstream._driver.pointers import Memory, Place

ATTRIBUTE = "__cuda_array_interface__"
_SYNCHRONIZED = -1  # as a stream: nothing is pending, as CV-CUDA and cuda.core say it
# The default streams, 1 and 2. Real types say one of them as a constant: on an H200 copies from
# each of the four that were examined were stale, or overtaken by their next work.
_LAST_DEFAULT = _driver.streams.PER_THREAD


def view_for(kind: Any) -> type[View] | None:
    """Return the view if objects of `kind`, or this very object, speak the CUDA Array Interface."""
    return view_of_interface(kind) if hasattr(kind, ATTRIBUTE) else None


def view_of_interface(kind: Any) -> type[InterfaceView]:
    """Return the view of the interface that objects of `kind`, or this very object, have."""
    named = kind if isinstance(kind, type) else type(kind)
    return MisledView if _known.misleads(named) else InterfaceView


def checked(obj: Any, found: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the interface of an object, with what every version must have."""
    try:
        found["shape"], found["typestr"]
        where, read_only = found["data"]
        bool(read_only)  # raises for an array of several elements
    except (KeyError, TypeError, ValueError) as error:
        raise _malformed(obj, "it needs shape, typestr and data: (address, read-only)") from error
    try:
        wrong = isinstance(where, bool) or not 0 <= operator.index(where) < 1 << 64
    except TypeError:
        wrong = True
    if wrong:
        raise _malformed(obj, f"its address is {where!r}")
    stream = found.get("stream")
    if isinstance(stream, (int, np.integer)) and stream == 0:  # an array's == has no truth value
        raise _malformed(obj, "its stream is 0, which the interface forbids; 1 is the legacy one")
    return found


def _malformed(obj: object, why: str) -> UnsupportedBufferError:
    return UnsupportedBufferError(f"the {ATTRIBUTE} of this {type_name(obj)} is malformed: {why}")


class InterfaceView(View):
    """A look at an object by its ``__cuda_array_interface__``, which is read once."""

    source = ATTRIBUTE

    #: Whether a default stream is meant where the interface says one, and not a constant.
    means_default_streams: ClassVar[bool] = False

    def __init__(self, obj: Any, found: Mapping[str, Any] | None = None) -> None:
        self.buffer = obj
        self._found = found  # if it was read already

    @staticmethod
    def locate(obj: Any) -> int:
        """Return the ordinal of the device of the memory that the interface points to."""
        address = operator.index(checked(obj, getattr(obj, ATTRIBUTE))["data"][0])
        device = _driver.pointers.usual_device(address) if address else None
        return device_at(place_of(address, obj), obj) if device is None else device

    @staticmethod
    def named(obj: Any) -> tuple[int, int] | None:
        """Return the device and the stream that it names, if that is no default stream."""
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
        return None if device is None else (device, handle)

    @once
    def interface(self) -> Mapping[str, Any]:
        """The interface, with what every version must have."""
        return checked(self.buffer, self._shown())

    def _shown(self) -> Mapping[str, Any]:
        """Return what the object shows; `interface` keeps it, so that it is read once."""
        shown: Mapping[str, Any]
        shown = getattr(self.buffer, ATTRIBUTE) if self._found is None else self._found
        return shown

    @once
    def address(self) -> int:
        """The address of the first element, as an int of Python's."""
        return operator.index(self.interface["data"][0])

    @once
    def found(self) -> Place | None:
        """What the driver knows of the address."""
        address = self.address
        return _driver.pointers.place_of(address) if address else None

    @once
    def place(self) -> Place:
        """What the driver knows of the address, whatever the interface says of the elements."""
        place = self.found
        if place is not None and not place.is_host and place.is_in_primary_context():
            return place
        return checked_place(place, self.address, self.buffer)

    @once
    def device(self) -> int:
        """The ordinal of the device, by the driver."""
        place = self.place
        return device_at(place, self.buffer) if place.is_host else place.device

    @once
    def where(self) -> tuple[int | None, Memory]:
        """Device and kind of memory, by the driver."""
        return self.place.device, self.place.kind

    @once
    def layout(self) -> Layout:
        """What the interface says of the elements."""
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

    @once
    def order(self) -> Order:
        """The producer's stream, as the interface states it, unless that is a default stream."""
        version, stream = self.interface.get("version", 0), self.interface.get("stream")
        try:
            if operator.index(version) < 3:
                return UNKNOWN  # before version 3 there was no way to tell
            handle = None if stream is None else operator.index(stream)
        except TypeError as error:
            raise _malformed(
                self.buffer,
                f"its version is {version!r}, and its stream {stream!r}: both are numbers, the "
                "stream a handle such as int(stream.handle), or None",
            ) from error
        if handle is None:  # it should mean that nothing is pending; not all who say so mean it
            return UNKNOWN
        if handle == _SYNCHRONIZED:
            return Order("none")
        if not 0 < handle < 1 << 64:
            raise _malformed(self.buffer, f"its stream is {stream!r}")
        if handle <= _LAST_DEFAULT and not self.means_default_streams:
            return DOUBTED
        return Order("exact", handle)

    def check_copyable(self) -> None:
        """Refuse an array some of whose elements are not valid, which a copy would not tell."""
        if self.interface.get("mask") is not None:
            raise UnsupportedBufferError(
                f"this {type_name(self.buffer)} is masked, and a copy would contain invalid "
                "elements; fill or drop them first, in its framework"
            )

    @once
    def is_read_only(self) -> bool:
        """Whether the interface forbids to write."""
        return bool(self.interface["data"][1])


class MisledView(InterfaceView):
    """A look at an object whose interface names a stream that is wrong, or that is none."""

    @staticmethod
    def locate(obj: Any) -> int:
        """Return the ordinal of the device, whatever stream the interface names."""
        return MisledView(obj).device

    @once
    def interface(self) -> Mapping[str, Any]:
        """The interface as if it did not name a stream."""
        return checked(self.buffer, {**self._shown(), "stream": None})


def _integers(found: Iterable[Any]) -> tuple[int, ...]:
    return tuple(map(operator.index, found))


@functools.lru_cache(maxsize=256)
def _extent(
    shape: tuple[int, ...], strides: tuple[int, ...] | None, itemsize: int
) -> tuple[tuple[int, ...], int]:
    """Return the strides of an array, and the bytes of its elements; raise if it cannot be one."""
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
    if not isinstance(typestr, str):  # of None NumPy makes float64
        raise TypeError(f"typestr {typestr!r}")
    dtype: np.dtype[Any] = _dtype_of(typestr)  # DALI writes "=f" where NumPy writes "<f4"
    if dtype.kind != "V" or not fields:
        return dtype
    # A structured type is spelled out in descr, where a field without a name is padding.
    spelled = np.lib.format.descr_to_dtype(list(fields))
    if spelled.itemsize != dtype.itemsize:
        raise ValueError(f"descr {fields} for typestr {typestr!r}")
    return spelled if spelled.names else dtype
