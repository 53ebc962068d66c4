"""Anything with ``__cuda_array_interface__``."""

from __future__ import annotations

import math
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
    from collections.abc import Mapping

    from userstream._driver import Memory

ATTRIBUTE = "__cuda_array_interface__"


def rule_for(kind: type) -> Rule | None:
    """Return the rule if objects of `kind` speak the CUDA Array Interface."""
    return RULE if hasattr(kind, ATTRIBUTE) else None


def interface(obj: Any) -> Mapping[str, Any]:
    """Return the interface of an object, with what every version must have."""
    found: Mapping[str, Any] = getattr(obj, ATTRIBUTE)
    try:
        data, _readonly = found["data"]
        found["shape"], found["typestr"]
    except (KeyError, TypeError, ValueError) as error:
        raise _malformed(obj, "it needs shape, typestr and data: (address, read-only)") from error
    if not isinstance(data, int) or isinstance(data, bool) or data < 0:
        raise _malformed(obj, f"its address is {data!r}")
    if found.get("stream") == 0:
        raise _malformed(obj, "its stream is 0, which the interface forbids; 1 is the legacy one")
    return found


def _malformed(obj: object, why: str) -> UnsupportedBufferError:
    return UnsupportedBufferError(f"the {ATTRIBUTE} of this {type_name(obj)} is malformed: {why}")


def device_id(obj: Any) -> int:
    """Return the device of the memory that the interface points to."""
    return device_at(interface(obj)["data"][0], obj)


def producer(found: Mapping[str, Any]) -> tuple[int, Ordering]:
    """Return the producer's stream as the interface tells it."""
    if found.get("version", 0) < 3:
        return UNKNOWN, "unknown"  # before version 3 there was no way to tell
    stream = found.get("stream")
    return (NOTHING_PENDING, "none") if stream is None else (int(stream), "exact")


def _producer(obj: Any, device: int) -> tuple[int, object]:  # noqa: ARG001
    return producer(interface(obj))[0], None


def describe_interface(obj: Any, source: str, *, device: int | None = None) -> BufferInfo:
    """Describe an object by its interface.

    `device` is where it is if it is empty, because then its address is 0.
    """
    found = interface(obj)
    address = found["data"][0]
    memory: Memory = "device"
    if address or device is None:
        device, memory = locate(address, obj)
    # A structured type is spelled out in descr; DALI writes "=f" where NumPy writes "<f4".
    fields = found.get("descr")
    structured = fields and found["typestr"][1] == "V"
    dtype = np.dtype(fields if structured else found["typestr"])
    shape = tuple(found["shape"])
    stream, ordering = producer(found)
    return BufferInfo(
        source=source,
        device_id=device,
        memory=memory,
        address=address,
        nbytes=math.prod(shape) * dtype.itemsize,
        shape=shape,
        strides=found.get("strides") or contiguous_strides(shape, dtype.itemsize),
        dtype=dtype,
        producer=stream if stream > 0 else None,
        ordering=ordering,
    )


def _describe(obj: Any) -> BufferInfo:
    return describe_interface(obj, ATTRIBUTE)


RULE = Rule(device_id, _describe, _producer)
