"""Outputs of NVIDIA DALI: tensors, lists of tensors, and outputs of the dynamic mode.

With ``exec_dynamic=False`` DALI reuses the memory of a pipeline's outputs even if references to the
outputs exist: wait for your work on the outputs before the pipeline's next run.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from userstream import _driver
from userstream._buffers.cai import InterfaceView
from userstream._buffers.framework import NO_STREAM, Framework, named
from userstream._buffers.view import (
    UNKNOWN,
    Layout,
    ProducerStream,
    SeveralView,
    View,
    cached,
    host_error,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from userstream.typing import StreamLike

_DYNAMIC = "nvidia.dali.experimental.dynamic"


def view_for(kind: type) -> type[View] | None:
    """Return the view class if `kind` is a buffer type of DALI."""
    return named(_VIEWS, kind, ("nvidia.dali.",))


def _is_usable() -> bool:
    return _DYNAMIC in sys.modules


def _current_stream(device: int) -> tuple[int, object]:
    context = sys.modules[_DYNAMIC].EvalContext.current()
    if context.device_id != device:
        return NO_STREAM, None
    stream = context.cuda_stream
    return stream.handle or _driver.streams.LEGACY, stream


def _activate(stream: StreamLike, device: int) -> Callable[[], object]:
    context = sys.modules[_DYNAMIC].EvalContext(device_id=device, cuda_stream=stream)
    context.__enter__()
    return functools.partial(context.__exit__, None, None, None)


FRAMEWORK = Framework("dali", _is_usable, _current_stream, _activate)


def _named_stream(stream: int | None) -> ProducerStream:
    return UNKNOWN if stream is None else ProducerStream("exact", stream or _driver.streams.LEGACY)


class _Tensor(InterfaceView):
    """Base class of the views of a tensor, whose object names its device and its stream."""

    device = View.device  # by `locate`, not by the driver
    device_and_memory = View.device_and_memory


class TensorView(_Tensor):
    """View of a ``TensorGPU``."""

    source = "dali TensorGPU"

    @staticmethod
    def locate(tensor: Any) -> int:
        """Return the ordinal of the device."""
        return tensor.device_id()  # type: ignore[no-any-return]

    @cached
    def producer(self) -> ProducerStream:
        """The stream that the tensor names."""
        return _named_stream(self.buffer.stream)


class ListView(SeveralView):
    """View of a ``TensorListGPU``."""

    source = "dali TensorListGPU"
    units = View.units  # the list names a stream for all

    @staticmethod
    def locate(batch: Any) -> int:
        """Return the ordinal of the device."""
        return batch.device_id()  # type: ignore[no-any-return]

    @cached
    def parts(self) -> Sequence[View]:
        """The views of the tensors."""
        return [TensorView(self.buffer[i]) for i in range(len(self.buffer))]

    @cached
    def producer(self) -> ProducerStream:
        """The stream that the list names."""
        return _named_stream(self.buffer.stream)


class DynamicTensorView(_Tensor):
    """View of a ``Tensor`` of the dynamic mode, which is evaluated lazily."""

    source = "dali dynamic Tensor"
    framework = FRAMEWORK

    @staticmethod
    def locate(tensor: Any) -> int:
        """Return the ordinal of the device without evaluating the output."""
        return _dynamic_device_id(tensor)

    @cached
    def producer(self) -> ProducerStream:
        """The stream on which the tensor was evaluated."""
        return _named_stream(getattr(self.buffer.evaluate()._storage, "stream", None))


class BatchView(SeveralView):
    """View of a ``Batch`` of the dynamic mode."""

    source = "dali dynamic Batch"
    framework = FRAMEWORK

    @staticmethod
    def locate(batch: Any) -> int:
        """Return the ordinal of the device without evaluating the output."""
        return _dynamic_device_id(batch)

    @cached
    def parts(self) -> Sequence[View]:
        """The views of the tensors."""
        return [DynamicTensorView(tensor) for tensor in self.buffer.tensors]


def _dynamic_device_id(output: Any) -> int:  # Tensor, Batch
    device = output.device
    if device.device_type != "gpu":
        raise host_error(output)
    return int(device.device_id)


class HostView(View):
    """View of a ``TensorCPU``, which is refused."""

    source = "dali TensorCPU"

    @staticmethod
    def locate(output: object) -> NoReturn:
        """Raise `HostBufferError`."""
        raise host_error(output)

    @cached
    def layout(self) -> Layout:
        """Raise `HostBufferError`."""
        self.locate(self.buffer)


class HostListView(HostView):
    """View of a ``TensorListCPU``, which is refused."""

    source = "dali TensorListCPU"

    @cached
    def parts(self) -> Sequence[View]:
        """The views of the tensors."""
        return [HostView(self.buffer[i]) for i in range(len(self.buffer))]


_VIEWS: dict[str, type[View]] = {
    "TensorGPU": TensorView,
    "TensorListGPU": ListView,
    "TensorCPU": HostView,
    "TensorListCPU": HostListView,
    "Batch": BatchView,
    "Tensor": DynamicTensorView,
}
