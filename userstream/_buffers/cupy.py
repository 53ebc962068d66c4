"""CuPy arrays."""

from __future__ import annotations

import sys
from typing import Any

from userstream import _driver
from userstream._buffers._info import BufferInfo
from userstream._buffers._rule import Rule, locate


def rule_for(kind: type) -> Rule | None:
    """Return the rule if `kind` is an array type of CuPy."""
    array = getattr(sys.modules.get("cupy"), "ndarray", None)
    return _RULE if array is not None and issubclass(kind, array) else None


def _device_id(array: Any) -> int:  # cupy.ndarray
    return array.device.id  # type: ignore[no-any-return]


def current_stream(device: int) -> int:
    """Return the handle of CuPy's current stream of a device."""
    handle: int = sys.modules["cupy"].cuda.get_current_stream(device).ptr
    return handle or _driver.LEGACY  # in its per-thread mode CuPy says 2 itself


def _describe(array: Any) -> BufferInfo:
    device = _device_id(array)
    address: int = array.data.ptr
    return BufferInfo(
        source="cupy.ndarray",
        device_id=device,
        memory=locate(address, array)[1] if address else "device",
        address=address,
        nbytes=array.nbytes,
        shape=array.shape,
        strides=array.strides,
        dtype=array.dtype,
        producer=current_stream(device),
        ordering="current",
    )


_RULE = Rule(_device_id, _describe)
