"""Arrays of NVIDIA Warp."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

from userstream import _driver
from userstream._buffers.cai import InterfaceView
from userstream._buffers.framework import Framework, named
from userstream._buffers.view import Layout, ProducerStream, View, cached, host_error
from userstream.errors import InvalidDeviceError

if TYPE_CHECKING:
    from collections.abc import Callable

    from userstream._driver.pointers import Memory
    from userstream.typing import StreamLike


def view_for(kind: type) -> type[View] | None:
    """Return the view class if `kind` is an array type of Warp."""
    return named({"array": ArrayView, "indexedarray": IndexedView}, kind, ("warp.",))


def device_id_of(device: Any) -> int:
    """Return the ordinal of a device object."""
    if not device.is_cuda:
        raise InvalidDeviceError(f'{device!r} is not a CUDA device; pass warp.get_device("cuda:0")')
    return int(device.ordinal)


def _is_usable() -> bool:
    return hasattr(sys.modules.get("warp"), "get_device")


def _handle(stream: Any) -> int:
    return int(stream.cuda_stream or 0) or _driver.streams.LEGACY


def _current_stream(device: int) -> tuple[int, object]:
    stream = sys.modules["warp"].get_device(f"cuda:{device}").stream
    return _handle(stream), stream


def _activate(stream: StreamLike, device: int) -> Callable[[], object]:
    warp = sys.modules["warp"]
    theirs = warp.get_device(f"cuda:{device}")
    handle = stream.__cuda_stream__()[1]
    if handle == _driver.streams.LEGACY:
        ours = theirs.null_stream
    else:
        ours = warp.Stream(theirs, cuda_stream=handle)
    previous = theirs.stream
    theirs.set_stream(ours, sync=False)  # userstream adds the edges
    return functools.partial(theirs.set_stream, previous, sync=False)


# Warp frees memory on the legacy default stream, even if its kernels still use the memory: only
# blocking streams are safe. Warp also captures on blocking streams, and a query reveals that.
FRAMEWORK = Framework("warp", _is_usable, _current_stream, _activate, needs_blocking=True)


class ArrayView(InterfaceView):
    """View of a ``warp.array``, whose interface has no stream."""

    source = "warp.array"
    framework = FRAMEWORK
    device = View.device  # by `locate`, not by the driver

    @staticmethod
    def locate(array: Any) -> int:
        """Return the ordinal of the device."""
        if not array.device.is_cuda:
            raise host_error(array, "pinned host memory" if array.pinned else "host memory")
        return int(array.device.ordinal)

    @cached
    def device_and_memory(self) -> tuple[int | None, Memory]:
        """Device and kind of memory; the driver is not queried for an empty array."""
        _ = self.device  # raises for a host array, which has another interface
        return super(InterfaceView, self).device_and_memory

    @cached
    def producer(self) -> ProducerStream:
        """Warp's current stream of the device, which is one for all threads."""
        stream = self.buffer.device.stream  # its __dlpack__ uses the same stream
        return ProducerStream("current", _handle(stream), stream)


class IndexedView(View):
    """View of a ``warp.indexedarray``: elements selected from an array by index arrays."""

    source = "warp.indexedarray"
    framework = FRAMEWORK
    producer = ArrayView.producer

    @staticmethod
    def locate(array: Any) -> int:
        """Return the ordinal of the device."""
        return ArrayView.locate(array)

    @cached
    def layout(self) -> Layout:
        """The shape; the index arrays determine the addresses of the elements."""
        return Layout(None, tuple(self.buffer.shape))
