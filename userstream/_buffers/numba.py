"""Device arrays of numba-cuda."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from userstream import _driver
from userstream._buffers._names import is_named
from userstream._buffers.cai import InterfaceView, checked
from userstream._buffers.view import Order, once

if TYPE_CHECKING:
    from collections.abc import Mapping

    from userstream._buffers._layout import Layout
    from userstream._buffers.view import View
    from userstream._driver.pointers import Memory


def view_for(kind: type) -> type[View] | None:
    """Return the view if `kind` is a device array type of numba."""
    return ArrayView if is_named(kind, ("numba.", "numba_cuda."), ("DeviceNDArrayBase",)) else None


def default_stream() -> int:
    """Return the handle of the stream that 0 is for numba."""
    config = getattr(sys.modules.get("numba"), "config", None)
    per_thread = getattr(config, "CUDA_PER_THREAD_DEFAULT_STREAM", 0)
    return _driver.streams.PER_THREAD if per_thread else _driver.streams.LEGACY


def _device(array: Any) -> int | None:
    """Return the ordinal of the device, where the address alone determines it."""
    address = array.device_ctypes_pointer.value if array.size else None
    return _driver.pointers.usual_device(address) if address else None


class ArrayView(InterfaceView):
    """A look at a ``DeviceNDArray`` of numba-cuda."""

    source = "numba DeviceNDArray"
    means_default_streams = True  # of an array that is bound to one

    @staticmethod
    def locate(array: Any) -> int:
        """Return the ordinal of the device."""
        # Numba makes the interface anew each time, which takes longer than all else here.
        device = _device(array)
        return ArrayView(array).device if device is None else device

    @staticmethod
    def named(array: Any) -> tuple[int, int] | None:
        """Return its device and the stream that it is bound to, or the default stream."""
        device = _device(array)
        # 0 if it is bound to none, and of `numba.cuda.default_stream()` as well.
        return None if device is None else (device, int(array.stream) or default_stream())

    @once
    def interface(self) -> Mapping[str, Any]:
        """The interface, where 0 is numba's default stream instead of being malformed."""
        # Of an array that is bound to the object `numba.cuda.default_stream()` numba says 0. The
        # specification forbids that, because it could be the legacy or the per-thread stream. Of
        # numba it is known which: the one of an array that is not bound.
        found = self._shown()
        return checked(
            self.buffer, found if found.get("stream") != 0 else {**found, "stream": None}
        )

    @once
    def device(self) -> int:
        """The ordinal of the device."""
        if self.buffer.size == 0:  # its address is 0, or that of what lies behind it
            return int(self.buffer.gpu_data.context.device.id)
        return super().device

    @once
    def where(self) -> tuple[int | None, Memory]:
        """Device and kind of memory."""
        return (self.device, "device") if self.buffer.size == 0 else super().where

    @once
    def layout(self) -> Layout:
        """What the interface says of the elements; the fields of a record it leaves out."""
        layout, dtype = super().layout, self.buffer.dtype
        return layout._replace(dtype=dtype) if dtype.names else layout

    @once
    def order(self) -> Order:
        """The stream that it is bound to; by "not bound" numba means its default stream."""
        order = super().order
        return order if order.ordering != "device" else Order("current", default_stream())
