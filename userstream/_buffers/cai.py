"""Anything with ``__cuda_array_interface__``."""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any

import numpy as np

from userstream._buffers._info import BufferInfo, Ordering, contiguous_strides
from userstream._buffers._rule import (
    NOTHING_PENDING,
    UNKNOWN,
    Rule,
    device_at,
    locate,
    type_name,
)
from userstream.errors import UnsupportedBufferError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from userstream._driver import Memory

ATTRIBUTE = "__cuda_array_interface__"


def rule_for(kind: type) -> Rule | None:
    """Return the rule if objects of `kind` speak the CUDA Array Interface."""
    return RULE if hasattr(kind, ATTRIBUTE) else None


def interface(obj: Any) -> Mapping[str, Any]:
    """Return the interface of an object, with what every version must have."""
    found: Mapping[str, Any] = getattr(obj, ATTRIBUTE)
    try:
        found["shape"], found["typestr"]
        where, _readonly = found["data"]
    except (KeyError, TypeError, ValueError) as error:
        raise _malformed(obj, "it needs shape, typestr and data: (address, read-only)") from error
    try:
        wrong = isinstance(where, bool) or not 0 <= operator.index(where) < 1 << 64
    except TypeError:
        wrong = True
    if wrong:
        raise _malformed(obj, f"its address is {where!r}")
    if found.get("stream") == 0:
        raise _malformed(obj, "its stream is 0, which the interface forbids; 1 is the legacy one")
    return found


def address(found: Mapping[str, Any]) -> int:
    """Return the address of the first element, as an int of Python's."""
    return operator.index(found["data"][0])


def _malformed(obj: object, why: str) -> UnsupportedBufferError:
    return UnsupportedBufferError(f"the {ATTRIBUTE} of this {type_name(obj)} is malformed: {why}")


def device_id(obj: Any) -> int:
    """Return the device of the memory that the interface points to."""
    return device_at(address(interface(obj)), obj)


def producer(obj: Any, found: Mapping[str, Any]) -> tuple[int, Ordering]:
    """Return the producer's stream as the interface tells it."""
    version, stream = found.get("version", 0), found.get("stream")
    try:
        if operator.index(version) < 3:
            return UNKNOWN, "unknown"  # before version 3 there was no way to tell
        handle = NOTHING_PENDING if stream is None else operator.index(stream)
    except TypeError as error:
        raise _malformed(
            obj, f"its version is {version!r} and its stream {stream!r}, a handle as an int or None"
        ) from error
    if stream is None:
        return handle, "none"
    if not 0 < handle < 1 << 64:
        raise _malformed(obj, f"its stream is {stream!r}")
    return handle, "exact"


def _producer(obj: Any) -> int:
    return producer(obj, interface(obj))[0]


def describe_interface(obj: Any, source: str, *, device: int | None = None) -> BufferInfo:
    """Describe an object by its interface.

    `device` is where it is if it is empty, because then its address is 0, or behind an allocation.
    """
    found = interface(obj)
    where = address(found)
    memory: Memory = "device"
    shape, strides, dtype = _parsed(obj, found)
    if device is None or (where and 0 not in shape):
        device, memory = locate(where, obj)
    if strides is None:
        strides = contiguous_strides(shape, dtype.itemsize)
    stream, ordering = producer(obj, found)
    return BufferInfo(
        source=source,
        device_id=device,
        memory=memory,
        address=where,
        nbytes=math.prod(shape) * dtype.itemsize,
        shape=shape,
        strides=strides,
        dtype=dtype,
        producer=stream if stream > 0 else None,
        ordering=ordering,
    )


def shape_and_dtype(obj: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return what the interface tells wherever the memory is."""
    shape, _strides, dtype = _parsed(obj, interface(obj))
    return shape, dtype


def _parsed(
    obj: Any, found: Mapping[str, Any]
) -> tuple[tuple[int, ...], tuple[int, ...] | None, np.dtype[Any]]:
    try:
        shape, strides = _integers(found["shape"]), found.get("strides")
        if strides is not None:
            strides = _integers(strides)
            if len(strides) != len(shape):
                raise ValueError(f"{len(strides)} strides for {len(shape)} axes")
        if min(shape, default=0) < 0:
            raise ValueError(f"shape {shape}")
        return shape, strides, _dtype(found)
    except (TypeError, ValueError) as error:
        raise _malformed(obj, f"of its shape, strides, typestr and descr, {error}") from error


def _integers(found: Iterable[Any]) -> tuple[int, ...]:
    return tuple(map(operator.index, found))


def _dtype(found: Mapping[str, Any]) -> np.dtype[Any]:
    fields, typestr = found.get("descr"), found["typestr"]
    if not isinstance(typestr, str):  # of None NumPy makes float64
        raise TypeError(f"typestr {typestr!r}")
    dtype: np.dtype[Any] = np.dtype(typestr)  # DALI writes "=f" where NumPy writes "<f4"
    if dtype.kind != "V" or not fields:
        return dtype
    # A structured type is spelled out in descr, where a field without a name is padding.
    spelled = np.lib.format.descr_to_dtype(list(fields))
    if spelled.itemsize != dtype.itemsize:
        raise ValueError(f"descr {fields} for typestr {typestr!r}")
    return spelled if spelled.names else dtype


def _describe(obj: Any) -> BufferInfo:
    return describe_interface(obj, ATTRIBUTE)


def refuse_masked(obj: Any) -> None:
    """Raise if an object says that some of its elements are not valid."""
    if interface(obj).get("mask") is not None:
        raise UnsupportedBufferError(
            f"this {type_name(obj)} is masked, and a copy would hold what is not valid; fill or "
            "drop that first, in its framework"
        )


def _layout(obj: Any) -> BufferInfo:
    refuse_masked(obj)
    return _describe(obj)


def is_read_only(obj: Any) -> bool:
    """Tell whether the interface forbids to write."""
    return bool(interface(obj)["data"][1])


RULE = Rule(device_id, _describe, _producer, layout=_layout, read_only=is_read_only)
