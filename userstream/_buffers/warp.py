"""Arrays of NVIDIA Warp."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

from userstream import _driver
from userstream._buffers._framework import Framework
from userstream._buffers._layout import Layout
from userstream._buffers._names import is_named
from userstream._buffers._places import host_error
from userstream._buffers.cai import InterfaceView
from userstream._buffers.view import Order, View, once

if TYPE_CHECKING:
    from collections.abc import Callable

    from userstream._driver.pointers import Memory
    from userstream.typing import StreamLike


def view_for(kind: type) -> type[View] | None:
    """Return the view if `kind` is an array type of Warp."""
    if is_named(kind, ("warp.",), ("array",)):
        return ArrayView
    return IndexedView if is_named(kind, ("warp.",), ("indexedarray",)) else None


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
    theirs.set_stream(ours, sync=False)  # the edges are made already
    return functools.partial(theirs.set_stream, previous, sync=False)


# Warp frees memory on the legacy default stream, also of what its kernels still use. It captures on
# blocking streams, which the legacy default stream reveals.
FRAMEWORK = Framework("warp", _is_usable, _current_stream, _activate, needs_blocking=True)


def _device_id(array: Any) -> int:
    if not array.device.is_cuda:
        raise host_error(array, "pinned host memory" if array.pinned else "host memory")
    return int(array.device.ordinal)


def _order(array: Any) -> Order:
    # One for each device, whichever thread asks; Warp's own __dlpack__ takes it as well.
    stream = array.device.stream
    return Order("current", _handle(stream), stream)


class ArrayView(InterfaceView):
    """A look at a ``warp.array``, whose interface has no stream."""

    source = "warp.array"
    framework = FRAMEWORK

    @staticmethod
    def locate(array: Any) -> int:
        """Return the ordinal of the device."""
        return _device_id(array)

    @once
    def device(self) -> int:
        """The ordinal of the device."""
        return _device_id(self.buffer)

    @once
    def where(self) -> tuple[int | None, Memory]:
        """Device and kind of memory; of an empty one without asking the driver."""
        _ = self.device  # an array on the host has another interface
        return super(InterfaceView, self).where

    @once
    def order(self) -> Order:
        """Warp's current stream of the device."""
        return _order(self.buffer)


class IndexedView(View):
    """A look at a ``warp.indexedarray``: elements of an array, by arrays of their indices."""

    source = "warp.indexedarray"
    framework = FRAMEWORK

    @staticmethod
    def locate(array: Any) -> int:
        """Return the ordinal of the device."""
        return _device_id(array)

    @once
    def layout(self) -> Layout:
        """The shape; where the elements are its indices say."""
        return Layout(None, tuple(self.buffer.shape))

    @once
    def order(self) -> Order:
        """Warp's current stream of the device."""
        return _order(self.buffer)
