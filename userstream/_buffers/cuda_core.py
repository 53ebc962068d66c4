"""Buffers and views of cuda.core, and raw device pointers of cuda.bindings."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from cuda.bindings import driver
from cuda.core import Buffer

from userstream import _driver
from userstream._buffers.view import (
    Layout,
    View,
    cached,
    contiguous_strides,
    device_at,
    host_error,
)
from userstream.errors import UnsupportedBufferError

if TYPE_CHECKING:
    import numpy as np

    from userstream._driver.pointers import Memory


def view_for(kind: type) -> type[View] | None:
    """Return the view class if `kind` is a buffer type of cuda-python."""
    if issubclass(kind, Buffer):
        return BufferView
    if issubclass(kind, driver.CUdeviceptr):
        return PointerView
    strided = getattr(sys.modules.get("cuda.core.utils"), "StridedMemoryView", None)
    return StridedView if isinstance(strided, type) and issubclass(kind, strided) else None


class BufferView(View):
    """View of a ``cuda.core.Buffer``. Its allocation stream is not available."""

    source = "cuda.core.Buffer"

    @staticmethod
    def locate(buffer: Buffer, view: View | None = None) -> int:
        """Return the ordinal of the device."""
        try:
            # cuda.core reports -1 for host memory and DLPack's device for managed or pinned memory:
            # query the driver instead.
            if buffer.is_host_accessible or not buffer.is_device_accessible:
                return device_at((view or BufferView(buffer)).place, buffer)
            return int(buffer.device_id)
        except RuntimeError:
            _check_open(buffer)
            raise

    @cached
    def device(self) -> int:
        """The ordinal of the device."""
        return self.locate(self.buffer, self)

    def check_context(self) -> None:
        """Query the driver for the memory, unless the buffer is empty."""
        if self.layout.address and not self.layout.is_empty:
            _ = self.place

    @cached
    def layout(self) -> Layout:
        """The address and the size of the buffer."""
        address = int(self.buffer.handle or 0)
        if not address:
            _check_open(self.buffer)
        return Layout(address, nbytes=self.buffer.size)

    @cached
    def device_and_memory(self) -> tuple[int | None, Memory]:
        """Device and kind of memory, as reported by the driver."""
        return self.place.device, self.place.kind


def _check_open(buffer: Buffer) -> None:
    try:
        _ = buffer.is_host_accessible
    except RuntimeError as error:
        raise UnsupportedBufferError(
            "this cuda.core.Buffer is closed, and its memory is freed: pass a buffer that is open, "
            "and close it after its last use"
        ) from error


class PointerView(View):
    """View of a ``CUdeviceptr``: only the address is known."""

    source = "CUdeviceptr"
    device_and_memory = BufferView.device_and_memory

    @cached
    def device(self) -> int:
        """The ordinal of the device, as reported by the driver."""
        address = int(self.buffer)
        device = _driver.pointers.usual_device(address) if address else None
        return device_at(self.place, self.buffer) if device is None else device

    @cached
    def layout(self) -> Layout:
        """The address of the pointer."""
        return Layout(int(self.buffer))


class StridedView(View):
    """View of a ``cuda.core.utils.StridedMemoryView``, whose producer is unknown."""

    source = "cuda.core StridedMemoryView"

    @cached
    def device(self) -> int:
        """The ordinal of the device, from the driver, or from cuda.core for an empty view."""
        strided = self.buffer
        if not strided.is_device_accessible or strided.device_id < 0:
            raise host_error(strided)
        return device_at(self.place, strided) if strided.ptr else int(strided.device_id)

    @cached
    def layout(self) -> Layout:
        """The layout that cuda.core reports."""
        return layout_of(self.buffer, self.source)

    @cached
    def is_read_only(self) -> bool:
        """True if cuda.core reports the memory as read-only."""
        return bool(self.buffer.readonly)


def layout_of(strided: Any, source: str) -> Layout:
    """Return the layout that a `StridedMemoryView` reports."""
    try:
        shape, dtype = strided.shape, _dtype(strided)
    except ValueError as error:  # such as int4
        raise UnsupportedBufferError(
            f"the elements of this {source} are not whole bytes ({error}); convert them first"
        ) from error
    size = 0 if dtype is None else dtype.itemsize
    if not size:
        strides = None
    elif strided.strides is None:
        strides = contiguous_strides(shape, size)
    else:
        strides = tuple(step * size for step in strided.strides)
    return Layout(strided.ptr, shape, strides, dtype, strided.size * size if size else None)


def _dtype(strided: Any) -> np.dtype | None:
    try:
        dtype: np.dtype | None = strided.dtype
    except (TypeError, NotImplementedError):  # NumPy lacks the type, or cuda.core does not know it
        return None
    return dtype
