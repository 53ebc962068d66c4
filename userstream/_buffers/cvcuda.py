"""Tensors, images and batches of CV-CUDA."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

from cuda.bindings import driver

from userstream import _driver
from userstream._buffers.dlpack import DLPackView
from userstream._buffers.framework import NO_STREAM, Framework, named, type_name
from userstream._buffers.view import (
    UNKNOWN,
    Layout,
    ProducerStream,
    SeveralView,
    View,
    cached,
    total,
)
from userstream.errors import UnsupportedBufferError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from userstream.typing import StreamLike


def view_for(kind: type) -> type[View] | None:
    """Return the view class if `kind` is a buffer type of CV-CUDA."""
    return named(_VIEWS, kind, ("cvcuda", "nvcv"))


def _streams() -> Any:
    return getattr(sys.modules.get("cvcuda"), "Stream", None)


def _is_usable() -> bool:
    return hasattr(_streams(), "current")  # missing without a GPU


def _current_stream(device: int) -> tuple[int, object]:
    stream = _streams().current  # per thread, for one device
    handle = int(stream.handle) or _driver.streams.LEGACY
    if handle > _driver.streams.PER_THREAD:
        context = _driver.streams.stream_context(driver.CUstream(handle))
        if _driver.contexts.within(context, _driver.contexts.current_device) != device:
            return NO_STREAM, None
    return handle, stream


def _activate(stream: StreamLike, device: int) -> Callable[[], object]:
    del device  # CV-CUDA uses the current device, which is this one
    handle = stream.__cuda_stream__()[1]
    ours = (
        _streams().default
        if handle == _driver.streams.LEGACY
        else sys.modules["cvcuda"].as_stream(handle)
    )
    ours.__enter__()
    return functools.partial(ours.__exit__, None, None, None)


FRAMEWORK = Framework("cvcuda", _is_usable, _current_stream, _activate)


class ExternalView(DLPackView):
    """View of an ``ExternalBuffer``, by which CV-CUDA exports its memory."""

    source = "cvcuda.ExternalBuffer"
    framework = FRAMEWORK

    @cached
    def producer(self) -> ProducerStream:
        """The stream of the last use, after which CV-CUDA orders its next use.

        A buffer without a use names the legacy default stream or is "synchronized". Its first use
        by CV-CUDA, on any stream, does not wait.
        """
        producer = super().producer
        if producer.handle > _driver.streams.PER_THREAD:
            return producer
        current = _streams() and _streams().current.handle
        return ProducerStream("current", _driver.streams.LEGACY) if current == 0 else UNKNOWN


class TensorView(ExternalView):
    """View of a ``Tensor``, by the export of its ``cuda()``."""

    source = "cvcuda.Tensor"

    @cached
    def exporter(self) -> Any:
        """The tensor's ``ExternalBuffer``."""
        return self.buffer.cuda()


class ImageView(ExternalView):
    """View of an ``Image``, whose planes may be separate arrays."""

    source = "cvcuda.Image"

    @cached
    def planes(self) -> Sequence[Any]:
        """The exports of the image's planes: one per plane, or one for all planes."""
        given = self.buffer.cuda()
        return given if isinstance(given, (list, tuple)) else (given,)

    @cached
    def exporter(self) -> Any:
        """The first plane, for all planes: they are on one device and used together."""
        return self.planes[0]

    @cached
    def parts(self) -> Sequence[View] | None:
        """The views of the planes; `None` if one array has all planes."""
        return None if len(self.planes) == 1 else [ExternalView(plane) for plane in self.planes]

    @cached
    def layout(self) -> Layout:
        """The layout of a single array, or the total size of all planes."""
        return super().layout if self.parts is None else total(self.parts)


class BatchView(SeveralView):
    """View of an ``ImageBatchVarShape`` or a ``TensorBatch``."""

    source = "cvcuda batch"
    framework = FRAMEWORK

    @staticmethod
    def locate(batch: Any) -> int:
        """Return the ordinal of the device."""
        for item in batch:
            return _part(item).device
        raise UnsupportedBufferError(
            f"this {type_name(batch)} is empty, which does not determine its device (get_stream "
            "and the waits also take the device itself)"
        )

    @cached
    def parts(self) -> Sequence[View]:
        """The views of the batch's tensors or images."""
        return [_part(item) for item in self.buffer]


def _part(item: Any) -> View:
    return (view_for(type(item)) or ImageView)(item)


_VIEWS: dict[str, type[View]] = {
    "Tensor": TensorView,
    "Image": ImageView,
    "ImageBatchVarShape": BatchView,
    "TensorBatch": BatchView,
    "ExternalBuffer": ExternalView,
}
