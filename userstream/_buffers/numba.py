"""Device arrays of numba-cuda."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Any

from userstream import _driver
from userstream._buffers import cai
from userstream._buffers._rule import NOTHING_PENDING, Rule, device_at, is_named

if TYPE_CHECKING:
    from userstream._buffers._info import BufferInfo


def rule_for(kind: type) -> Rule | None:
    """Return the rule if `kind` is a device array type of numba."""
    return _RULE if is_named(kind, ("numba.", "numba_cuda."), ("DeviceNDArrayBase",)) else None


def _device_id(array: Any) -> int:  # DeviceNDArray
    if array.size == 0:  # its address is 0, or that of what lies behind it
        return _device_of_empty(array)
    return device_at(cai.address(cai.interface(array)), array)


def _device_of_empty(array: Any) -> int:
    return int(array.gpu_data.context.device.id)


def _default_stream() -> int:
    config = getattr(sys.modules.get("numba"), "config", None)
    per_thread = getattr(config, "CUDA_PER_THREAD_DEFAULT_STREAM", 0)
    return _driver.PER_THREAD if per_thread else _driver.LEGACY


def _producer(array: Any) -> int:
    handle, _ = cai.producer(array, cai.interface(array))
    # Not bound to a stream, which for numba means its default stream.
    return _default_stream() if handle == NOTHING_PENDING else handle


def _describe(array: Any) -> BufferInfo:
    empty = array.size == 0
    device = _device_of_empty(array) if empty else None
    info = cai.describe_interface(array, "numba DeviceNDArray", device=device)
    if array.dtype.names:  # its interface does not tell them
        info = dataclasses.replace(info, dtype=array.dtype)
    if info.ordering != "none":
        return info
    return dataclasses.replace(info, producer=_default_stream(), ordering="current")


_RULE = Rule(_device_id, _describe, _producer, read_only=cai.is_read_only)
