"""Device arrays of numba-cuda."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from userstream import _driver
from userstream._buffers.cai import InterfaceView, checked
from userstream._buffers.framework import is_named
from userstream._buffers.view import ProducerStream, cached

if TYPE_CHECKING:
    from collections.abc import Mapping

    from userstream._buffers.view import Layout, View
    from userstream._driver.pointers import Memory


def view_for(kind: type) -> type[View] | None:
    """Return the view class if `kind` is a device array type of numba."""
    return ArrayView if is_named(kind, ("numba.", "numba_cuda."), ("DeviceNDArrayBase",)) else None


def default_stream() -> int:
    """Return the handle of the default stream that numba means by 0."""
    config = getattr(sys.modules.get("numba"), "config", None)
    per_thread = getattr(config, "CUDA_PER_THREAD_DEFAULT_STREAM", 0)
    return _driver.streams.PER_THREAD if per_thread else _driver.streams.LEGACY


def _device(array: Any) -> int | None:
    """Return the ordinal of the device; `None` if a view has to determine the device."""
    address = array.device_ctypes_pointer.value if array.size else None
    return _driver.pointers.usual_device(address) if address else None


class ArrayView(InterfaceView):
    """View of a ``DeviceNDArray`` of numba-cuda."""

    source = "numba DeviceNDArray"
    means_default_streams = True  # an array may be bound to a default stream

    @staticmethod
    def locate(array: Any) -> int:
        """Return the ordinal of the device."""
        # Avoid the interface: numba creates it on each access, which is slow.
        device = _device(array)
        return ArrayView(array).device if device is None else device

    @staticmethod
    def producer_of(array: Any) -> tuple[int, int, object] | None:
        """Return the array's device, and its bound stream or else the default stream."""
        device = _device(array)
        # 0: not bound to a stream, or bound to `numba.cuda.default_stream()`.
        return None if device is None else (device, int(array.stream) or default_stream(), None)

    @cached
    def interface(self) -> Mapping[str, Any]:
        """The interface, with stream 0 replaced by numba's default stream."""
        # Numba reports 0 for an array bound to `numba.cuda.default_stream()`. The specification
        # forbids 0, because it is ambiguous. For numba it means the stream of unbound arrays.
        found = self._read_interface()
        return checked(
            self.buffer, found if found.get("stream") != 0 else {**found, "stream": None}
        )

    @cached
    def device(self) -> int:
        """The ordinal of the device."""
        if self.buffer.size == 0:  # its address is 0 or may belong to other memory
            return int(self.buffer.gpu_data.context.device.id)
        return super().device

    @cached
    def device_and_memory(self) -> tuple[int | None, Memory]:
        """Device and kind of memory."""
        return (self.device, "device") if self.buffer.size == 0 else super().device_and_memory

    @cached
    def layout(self) -> Layout:
        """The layout that the interface describes, with the fields of a record dtype."""
        layout, dtype = super().layout, self.buffer.dtype
        return layout._replace(dtype=dtype) if dtype.names else layout

    @cached
    def producer(self) -> ProducerStream:
        """The array's bound stream, or numba's default stream for an unbound array."""
        producer = super().producer
        return (
            producer
            if producer.ordering != "device"
            else ProducerStream("current", default_stream())
        )
