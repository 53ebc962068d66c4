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
from userstream._buffers.framework import NO_STREAM, Framework, is_named
from userstream._buffers.view import UNKNOWN, Layout, Order, View, host_error, once

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from userstream._driver.pointers import Memory
    from userstream.typing import StreamLike

_DYNAMIC = "nvidia.dali.experimental.dynamic"


def view_for(kind: type) -> type[View] | None:
    """Return the view class if `kind` is a buffer type of DALI."""
    for name, view in _KINDS:
        if is_named(kind, ("nvidia.dali.",), (name,)):
            return view
    return None


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


def _order(stream: int | None) -> Order:
    return UNKNOWN if stream is None else Order("exact", stream or _driver.streams.LEGACY)


class _Tensor(InterfaceView):
    """View of a tensor of either mode, which reports its interface, device and stream."""

    @once
    def device(self) -> int:
        """The ordinal of the device, as reported by DALI."""
        return self.locate(self.buffer)

    @once
    def where(self) -> tuple[int | None, Memory]:
        """Device and kind of memory; the driver is not queried for an empty tensor."""
        return super(InterfaceView, self).where


class TensorView(_Tensor):
    """View of a ``TensorGPU``."""

    source = "dali TensorGPU"

    @staticmethod
    def locate(tensor: Any) -> int:
        """Return the ordinal of the device."""
        return tensor.device_id()  # type: ignore[no-any-return]

    @once
    def order(self) -> Order:
        """The stream that the tensor names."""
        return _order(self.buffer.stream)


class _Several(View):
    """Several tensors on one device."""

    @once
    def layout(self) -> Layout:
        """The total size of the tensors."""
        return Layout(None, nbytes=sum(part.layout.nbytes or 0 for part in self.parts or ()))


class ListView(_Several):
    """View of a ``TensorListGPU``."""

    source = "dali TensorListGPU"

    @staticmethod
    def locate(batch: Any) -> int:
        """Return the ordinal of the device."""
        return batch.device_id()  # type: ignore[no-any-return]

    @once
    def parts(self) -> Sequence[View]:
        """The views of its tensors."""
        return [TensorView(self.buffer[i]) for i in range(len(self.buffer))]

    @once
    def order(self) -> Order:
        """The stream that the list names."""
        return _order(self.buffer.stream)


class DynamicTensorView(_Tensor):
    """View of a ``Tensor`` of the dynamic mode, which is evaluated lazily."""

    source = "dali dynamic Tensor"
    framework = FRAMEWORK

    @staticmethod
    def locate(tensor: Any) -> int:
        """Return the ordinal of the device; evaluates nothing."""
        return _dynamic_device_id(tensor)

    @once
    def order(self) -> Order:
        """The stream on which the tensor was evaluated."""
        return _order(getattr(self.buffer.evaluate()._storage, "stream", None))


class BatchView(_Several):
    """View of a ``Batch`` of the dynamic mode."""

    source = "dali dynamic Batch"
    framework = FRAMEWORK

    @staticmethod
    def locate(batch: Any) -> int:
        """Return the ordinal of the device; evaluates nothing."""
        return _dynamic_device_id(batch)

    @once
    def parts(self) -> Sequence[View]:
        """The views of its tensors."""
        return [DynamicTensorView(tensor) for tensor in self.buffer.tensors]

    @property
    def units(self) -> Sequence[View]:
        """The views of the tensors, each of which names its stream."""
        return self.parts

    @once
    def order(self) -> Order:
        """The stream of the tensors, if all name the same stream."""
        handles = {part.order.handle for part in self.parts}
        return _order(handles.pop() or None if len(handles) == 1 else None)


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
        """Refuse it."""
        raise host_error(output)

    @once
    def layout(self) -> Layout:
        """Refuse it."""
        self.locate(self.buffer)


class HostListView(HostView):
    """View of a ``TensorListCPU``, which is refused."""

    source = "dali TensorListCPU"

    @once
    def parts(self) -> Sequence[View]:
        """The views of its tensors."""
        return [HostView(self.buffer[i]) for i in range(len(self.buffer))]


_KINDS: tuple[tuple[str, type[View]], ...] = (
    ("TensorGPU", TensorView),
    ("TensorListGPU", ListView),
    ("TensorCPU", HostView),
    ("TensorListCPU", HostListView),
    ("Batch", BatchView),
    ("Tensor", DynamicTensorView),
)
