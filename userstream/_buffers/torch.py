"""PyTorch tensors."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from userstream import _driver
from userstream._buffers.framework import Framework
from userstream._buffers.view import Form, Layout, View, cached, host_error
from userstream.errors import InvalidDeviceError, UnsupportedBufferError

if TYPE_CHECKING:
    from collections.abc import Callable

    from userstream._driver.pointers import Memory
    from userstream.typing import StreamLike

_modules = sys.modules  # a local name: one attribute lookup less per call
_LEGACY = _driver.streams.LEGACY


def view_for(kind: type) -> type[View] | None:
    """Return the view class if `kind` is a tensor type."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    return TensorView if isinstance(tensor, type) and issubclass(kind, tensor) else None


def device_id_of(device: Any) -> int:
    """Return the ordinal of a device object."""
    if device.type != "cuda":
        raise InvalidDeviceError(f"{device!r} is not a CUDA device; pass torch.device('cuda', i)")
    # torch.device("cuda") means the current device, as in torch.
    return _driver.contexts.current_device() if device.index is None else int(device.index)


# `torch.cuda` once it was available, which takes microseconds to ask and stays so.
_available: Any = None


def _is_usable() -> bool:
    global _available  # noqa: PLW0603 -- torch is one module
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is not None and cuda is not _available and cuda.is_available():
        _available = cuda
    return cuda is not None and cuda is _available


def _current_stream(device: int) -> tuple[int, None]:
    try:
        raw: int = _modules["torch"]._C._cuda_getCurrentRawStream(device)
    except AttributeError:  # the private function is missing; the public one is 20 times slower
        raw = _modules["torch"].cuda.current_stream(device).cuda_stream
    # PyTorch means the legacy default stream by 0, and never destroys its streams.
    return raw or _LEGACY, None


def _activate(stream: StreamLike, device: int) -> Callable[[], object]:
    cuda = sys.modules["torch"].cuda
    handle = stream.__cuda_stream__()[1]
    previous = cuda.current_stream(device)
    # PyTorch would treat an ExternalStream of a default stream as a different stream.
    ours = (
        cuda.default_stream(device)
        if handle == _driver.streams.LEGACY
        else cuda.ExternalStream(handle, device=device)
    )
    cuda.set_stream(ours)
    return functools.partial(cuda.set_stream, previous)


def _record_use(tensor: Any) -> None:
    tensor.record_stream(sys.modules["torch"].cuda.current_stream(tensor.get_device()))


FRAMEWORK = Framework("torch", _is_usable, _current_stream, _activate, record_use=_record_use)

_text = functools.cache(str)


@functools.cache
def _dtype(dtype: Any) -> np.dtype | str:  # torch.dtype
    name = str(dtype).removeprefix("torch.")
    try:
        return np.dtype(name)
    except TypeError:
        return name


# Cache of forms, by PyTorch's layout, shape, strides and type.
_forms: dict[tuple[Any, ...], Form] = {}
_MOST_FORMS = 256


def _new_form(tensor: Any, key: tuple[Any, ...]) -> Form | None:
    """Create and cache the form of a tensor; return `None` for a tensor of several parts."""
    layout, shape, steps, dtype = key
    if str(layout) != "torch.strided":
        return None
    if len(_forms) >= _MOST_FORMS:
        _forms.clear()
    strides = tuple([step * tensor.element_size() for step in steps])
    return _forms.setdefault(key, Form(tuple(shape), strides, _dtype(dtype)))


class TensorView(View):
    """View of a ``torch.Tensor``.

    Avoids `__cuda_array_interface__`, which raises for a tensor that requires a gradient, and
    `__dlpack__`, which takes 17 µs.
    """

    source = "torch.Tensor"
    framework = FRAMEWORK
    packs = True

    @staticmethod
    def locate(tensor: Any) -> int:
        """Return the ordinal of the device."""
        # Check is_cuda first: get_device() also returns 0 for a tensor on "xla:0".
        if tensor.is_cuda:
            return tensor.get_device()  # type: ignore[no-any-return]
        raise host_error(tensor, f"the memory of torch device {str(tensor.device)!r}")

    @staticmethod
    def producer_of(tensor: Any) -> tuple[int, int, None] | None:
        """Return the device and the current stream."""
        # Inlined `locate` and `_current_stream`: this path runs on every borrow.
        if not tensor.is_cuda:
            return None
        device = tensor.get_device()
        try:
            raw = _modules["torch"]._C._cuda_getCurrentRawStream(device)
        except AttributeError:
            raw = _current_stream(device)[0]
        return device, raw or _LEGACY, None

    @staticmethod
    def quick_layout(tensor: Any) -> tuple[int, int, Form] | None:
        """Return device, address and form of a non-empty device tensor without flags."""
        if not tensor.is_cuda or tensor.is_nested or tensor.is_conj() or tensor.is_neg():
            return None
        try:
            key = tensor.layout, tensor.shape, tensor.stride(), tensor.dtype
            form = _forms.get(key) or _new_form(tensor, key)
            address = tensor.data_ptr()
        except (RuntimeError, TypeError):  # sparse, fake, or with a symbolic size
            return None
        return (tensor.get_device(), address, form) if address and form else None

    @cached
    def layout(self) -> Layout:
        """The layout that the tensor reports, ignoring the flags of `is_disguised`."""
        tensor = self.buffer
        if tensor.is_nested or _text(tensor.layout) != "torch.strided":
            kind = "nested" if tensor.is_nested else f"of layout {tensor.layout}"
            raise UnsupportedBufferError(
                f"this tensor is {kind}: it consists of several; pass those, such as its values() "
                "or the results of unbind()"
            )
        itemsize = tensor.element_size()
        return Layout(
            tensor.data_ptr(),
            tuple(tensor.shape),
            tuple([step * itemsize for step in tensor.stride()]),
            _dtype(tensor.dtype),
            tensor.nelement() * itemsize,
        )

    @cached
    def device_and_memory(self) -> tuple[int | None, Memory]:
        """Device and kind of memory, including pinned memory."""
        tensor, address = self.buffer, self.layout.address
        if tensor.is_cuda:
            return self.device, self.place.kind if address else "device"
        if tensor.device.type == "cpu" and address and tensor.is_pinned():
            return self.place.device, self.place.kind
        return self.device, "device"  # `device` raises

    def check_copyable(self) -> None:
        """Raise for a tensor without memory."""
        if not self.layout.address and self.layout.nbytes:
            raise UnsupportedBufferError(
                "this tensor has elements but no memory: it is a fake tensor, or its storage was "
                "resized to nothing (as FSDP does between its uses)"
            )

    @cached
    def is_disguised(self) -> bool:
        """True if a flag says that the memory holds the conjugate or negated values."""
        return self.buffer.is_conj() or self.buffer.is_neg()  # type: ignore[no-any-return]

    def pack(self) -> Any:
        """Return a contiguous tensor without flags."""
        return self.buffer.detach().resolve_conj().resolve_neg().contiguous()

    @cached
    def host(self) -> tuple[Any, str | None]:
        """A NumPy-readable form of a host tensor, detached and with its flags resolved."""
        tensor = self.buffer
        torch, dtype = sys.modules["torch"], _dtype(tensor.dtype)
        plain = tensor.detach().resolve_conj().resolve_neg()
        bits = {1: torch.uint8, 2: torch.int16}.get(tensor.element_size())
        # PyTorch does not convert types that ml_dtypes adds to NumPy.
        if bits is None or (isinstance(dtype, np.dtype) and dtype.isbuiltin == 1):
            return plain, None
        return plain.view(bits), str(dtype)
