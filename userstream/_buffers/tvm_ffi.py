"""Tensors of TVM FFI, which FlashInfer, CuTe DSL and TileLang use as well."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

from userstream import _driver
from userstream._buffers import dlpack
from userstream._buffers.framework import Framework, is_named
from userstream._buffers.view import UNKNOWN, ProducerStream, View, cached
from userstream.errors import InvalidDeviceError

if TYPE_CHECKING:
    from collections.abc import Callable

    from userstream.typing import StreamLike


def view_for(kind: type) -> type[View] | None:
    """Return the view class if `kind` is the tensor type of TVM FFI."""
    return TensorView if is_named(kind, ("tvm_ffi.",), ("Tensor",)) else None


def device_id_of(device: Any) -> int:
    """Return the ordinal of a device object."""
    if device.type != "cuda":
        raise InvalidDeviceError(f'{device!r} is not a CUDA device; pass tvm_ffi.device("cuda:0")')
    return int(device.index)


def _is_usable() -> bool:
    return hasattr(sys.modules.get("tvm_ffi"), "use_raw_stream")


@functools.cache
def _device(ordinal: int) -> Any:  # tvm_ffi.Device
    return sys.modules["tvm_ffi"].device("cuda", ordinal)


def _raw_stream(device: int) -> int:
    return int(sys.modules["tvm_ffi"].get_raw_stream(_device(device)) or 0)


def _current_stream(device: int) -> tuple[int, None]:
    # 0: no stream was set, so functions are launched on the legacy default stream.
    return _raw_stream(device) or _driver.streams.LEGACY, None


def _activate(stream: StreamLike, device: int) -> Callable[[], object]:
    handle = stream.__cuda_stream__()[1]
    context = sys.modules["tvm_ffi"].use_raw_stream(_device(device), handle)
    context.__enter__()
    return functools.partial(context.__exit__, None, None, None)


FRAMEWORK = Framework("tvm_ffi", _is_usable, _current_stream, _activate)


class TensorView(dlpack.DLPackView):
    """View of a ``tvm_ffi.Tensor``, whose ``__dlpack__`` ignores the stream."""

    source = "tvm_ffi.Tensor"
    framework = FRAMEWORK

    @cached
    def producer(self) -> ProducerStream:
        """The current stream of TVM FFI; unknown if none was set.

        A function with tensors of another framework works on the current stream of that framework.
        """
        handle = _raw_stream(self.device)
        return ProducerStream("current", handle) if handle else UNKNOWN
