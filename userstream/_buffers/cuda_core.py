"""cuda.core's buffers and views, and raw device pointers of cuda.bindings."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from cuda.bindings import driver
from cuda.core import Buffer

from userstream._buffers._info import BufferInfo, contiguous_strides
from userstream._buffers._rule import Rule, device_at, host_error, locate
from userstream.errors import UnsupportedBufferError

if TYPE_CHECKING:
    import numpy as np

    from userstream._driver import Memory


def rule_for(kind: type) -> Rule | None:
    """Return the rule if `kind` is one of cuda-python's."""
    if issubclass(kind, Buffer):
        return _BUFFER
    if issubclass(kind, driver.CUdeviceptr):
        return _POINTER
    view = getattr(sys.modules.get("cuda.core.utils"), "StridedMemoryView", None)
    return _VIEW if isinstance(view, type) and issubclass(kind, view) else None


def _buffer_device_id(buffer: Buffer) -> int:
    # Host memory reports -1, and managed or pinned memory what DLPack would: ask the driver.
    if buffer.is_host_accessible or not buffer.is_device_accessible:
        return device_at(int(buffer.handle or 0), buffer)
    return int(buffer.device_id)


def _describe_buffer(buffer: Buffer) -> BufferInfo:
    address = int(buffer.handle or 0)
    device, memory = locate(address, buffer)
    return BufferInfo(
        source="cuda.core.Buffer",
        device_id=device,
        memory=memory,
        address=address,
        nbytes=buffer.size,
        ordering="unknown",  # the stream that it was allocated on is not to be had
    )


def _view_device_id(view: Any) -> int:  # StridedMemoryView
    if view.is_device_accessible and view.device_id >= 0:
        return device_at(view.ptr, view) if view.ptr else int(view.device_id)
    raise host_error(view)


def _describe_view(view: Any) -> BufferInfo:
    return describe_view(view, "cuda.core StridedMemoryView", device=_view_device_id(view))


def describe_view(view: Any, source: str, *, device: int) -> BufferInfo:
    """Describe what a `StridedMemoryView` shows."""
    memory: Memory = "device"
    try:
        shape, dtype = view.shape, _dtype(view)
    except ValueError as error:  # such as int4
        raise UnsupportedBufferError(
            f"the elements of this {source} are no whole bytes ({error}); convert them first"
        ) from error
    if view.ptr and 0 not in shape:  # an empty one may begin where its allocation ends
        device, memory = locate(view.ptr, view)
    size = 0 if dtype is None else dtype.itemsize
    if not size:
        strides = None
    elif view.strides is None:
        strides = contiguous_strides(shape, size)
    else:
        strides = tuple(step * size for step in view.strides)
    return BufferInfo(
        source=source,
        device_id=device,
        memory=memory,
        address=view.ptr,
        nbytes=view.size * size if size else None,
        shape=shape,
        strides=strides,
        dtype=dtype,
        ordering="unknown",
    )


def _dtype(view: Any) -> np.dtype | None:
    try:
        dtype: np.dtype | None = view.dtype
    except (TypeError, NotImplementedError):  # NumPy has none, or cuda.core does not know it
        return None
    return dtype


def _is_read_only(view: Any) -> bool:
    return bool(view.readonly)


def _pointer_device_id(pointer: driver.CUdeviceptr) -> int:
    return device_at(int(pointer), pointer)


def _describe_pointer(pointer: driver.CUdeviceptr) -> BufferInfo:
    device, memory = locate(int(pointer), pointer)
    return BufferInfo(
        source="CUdeviceptr",
        device_id=device,
        memory=memory,
        address=int(pointer),
        ordering="unknown",
    )


_BUFFER = Rule(_buffer_device_id, _describe_buffer)
_VIEW = Rule(_view_device_id, _describe_view, read_only=_is_read_only)
_POINTER = Rule(_pointer_device_id, _describe_pointer)
