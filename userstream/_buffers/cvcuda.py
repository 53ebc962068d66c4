"""Tensors, images and batches of CV-CUDA."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

from cuda.bindings import driver

from userstream import _driver
from userstream._buffers._framework import NO_STREAM, Framework
from userstream._buffers._layout import Layout
from userstream._buffers._names import is_named, type_name
from userstream._buffers.dlpack import DLPackView
from userstream._buffers.view import UNKNOWN, Order, View, once
from userstream.errors import UnsupportedBufferError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from userstream.typing import StreamLike


def view_for(kind: type) -> type[View] | None:
    """Return the view if `kind` is a type of CV-CUDA's that holds data."""
    for name, view in _KINDS:
        if is_named(kind, ("cvcuda", "nvcv"), (name,)):
            return view
    return None


def _streams() -> Any:
    return getattr(sys.modules.get("cvcuda"), "Stream", None)


def _is_usable() -> bool:
    return hasattr(_streams(), "current")  # which it lacks where there is no GPU


def _current_stream(device: int) -> tuple[int, object]:
    stream = _streams().current  # of the calling thread, and of one device
    handle = int(stream.handle) or _driver.streams.LEGACY
    if handle > _driver.streams.PER_THREAD:
        context = _driver.streams.stream_context(driver.CUstream(handle))
        if _driver.contexts.within(context, _driver.contexts.current_device) != device:
            return NO_STREAM, None
    return handle, stream


def _activate(stream: StreamLike, device: int) -> Callable[[], object]:
    del device  # it is current, which is where CV-CUDA takes the stream to be
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
    """A look at an ``ExternalBuffer``, the form in which CV-CUDA gives its memory to others."""

    source = "cvcuda.ExternalBuffer"
    framework = FRAMEWORK

    @once
    def order(self) -> Order:
        """The stream of its last use; the next one, on any stream, comes after what is there then.

        What was not used yet says the legacy default stream, or that it is synchronized. What uses
        it first waits for nothing, on whichever stream of CV-CUDA that is.
        """
        order = super().order
        if order.handle > _driver.streams.PER_THREAD:
            return order
        current = _streams() and _streams().current.handle
        return Order("current", _driver.streams.LEGACY) if current == 0 else UNKNOWN


class TensorView(ExternalView):
    """A look at a ``Tensor``, by what its ``cuda()`` gives."""

    source = "cvcuda.Tensor"

    @staticmethod
    def locate(tensor: Any) -> int:
        """Return the ordinal of the device."""
        return ExternalView.locate(tensor.cuda())

    @once
    def speaker(self) -> Any:
        """The ``ExternalBuffer``."""
        return self.buffer.cuda()


class ImageView(ExternalView):
    """A look at an ``Image``, whose planes may be arrays of their own."""

    source = "cvcuda.Image"

    @staticmethod
    def locate(image: Any) -> int:
        """Return the ordinal of the device."""
        return ImageView(image).device

    @once
    def planes(self) -> Sequence[Any]:
        """Its planes, or all of them in one array."""
        given = self.buffer.cuda()
        return given if isinstance(given, (list, tuple)) else (given,)

    @once
    def speaker(self) -> Any:
        """The first plane: all are on one device, and used together."""
        return self.planes[0]

    @once
    def parts(self) -> Sequence[View] | None:
        """The views of the planes, if there are several arrays."""
        return None if len(self.planes) == 1 else [ExternalView(plane) for plane in self.planes]

    @once
    def layout(self) -> Layout:
        """Where the elements are, or the size of all planes."""
        return super().layout if self.parts is None else _total(self.parts)


class BatchView(View):
    """A look at an ``ImageBatchVarShape`` or a ``TensorBatch``."""

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

    @once
    def parts(self) -> Sequence[View]:
        """The views of its tensors or images."""
        return [_part(item) for item in self.buffer]

    @property
    def units(self) -> Sequence[View]:
        """Its tensors or images, each of which names its stream."""
        return self.parts or (self,)

    @once
    def layout(self) -> Layout:
        """The size of all of them."""
        return _total(self.parts)

    @once
    def order(self) -> Order:
        """The stream of all of them, if that is one."""
        orders = {part.order for part in self.parts}
        return orders.pop() if len(orders) == 1 else UNKNOWN


def _part(item: Any) -> View:
    return (
        TensorView(item)
        if is_named(type(item), ("cvcuda", "nvcv"), ("Tensor",))
        else ImageView(item)
    )


def _total(parts: Sequence[View]) -> Layout:
    return Layout(None, nbytes=sum(part.layout.nbytes or 0 for part in parts))


_KINDS: tuple[tuple[str, type[View]], ...] = (
    ("Tensor", TensorView),
    ("Image", ImageView),
    ("ImageBatchVarShape", BatchView),
    ("TensorBatch", BatchView),
    ("ExternalBuffer", ExternalView),
)
