"""PyTorch tensors."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from userstream import _driver
from userstream._buffers._info import BufferInfo, Layout, info_of
from userstream._buffers._rule import Framework, Rule, host_error, locate
from userstream.errors import UnsupportedBufferError

if TYPE_CHECKING:
    from collections.abc import Callable

    from userstream.typing import StreamLike


def rule_for(kind: type) -> Rule | None:
    """Return the rule if `kind` is a tensor type."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    return _RULE if isinstance(tensor, type) and issubclass(kind, tensor) else None


def _device_id(tensor: Any) -> int:  # torch.Tensor
    # get_device() alone would answer 0 for a tensor of "xla:0".
    if tensor.is_cuda:
        return tensor.get_device()  # type: ignore[no-any-return]
    raise host_error(tensor, f"the memory of torch device {str(tensor.device)!r}")


def _is_usable() -> bool:
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda is not None and cuda.is_available()


def _current_stream(device: int) -> tuple[int, None]:
    try:
        raw: int = sys.modules["torch"]._C._cuda_getCurrentRawStream(device)
    except AttributeError:  # a private function; the public one takes 20 times as long
        raw = sys.modules["torch"].cuda.current_stream(device).cuda_stream
    # By 0 PyTorch means the legacy default stream. It destroys no stream of its own.
    return raw or _driver.LEGACY, None


def _activate(stream: StreamLike, device: int) -> Callable[[], object]:
    cuda = sys.modules["torch"].cuda
    handle = stream.__cuda_stream__()[1]
    previous = cuda.current_stream(device)
    # An ExternalStream of a default stream would be another stream to PyTorch.
    ours = (
        cuda.default_stream(device)
        if handle == _driver.LEGACY
        else cuda.ExternalStream(handle, device=device)
    )
    cuda.set_stream(ours)
    return functools.partial(cuda.set_stream, previous)


def _record_use(tensor: Any) -> None:
    tensor.record_stream(sys.modules["torch"].cuda.current_stream(tensor.get_device()))


def _describe(tensor: Any) -> BufferInfo:
    layout = _layout(tensor)
    address = layout.address
    if tensor.is_cuda:
        device = layout.device_id
        memory = locate(address, tensor)[1] if address else "device"
    elif tensor.device.type == "cpu" and address and tensor.is_pinned():
        device, memory = locate(address, tensor)
    else:
        raise host_error(tensor, f"the memory of torch device {str(tensor.device)!r}")
    return info_of(
        layout,
        device_id=device,
        memory=memory,
        nbytes=tensor.nelement() * tensor.element_size(),
        producer=_current_stream(device)[0],
    )


def _layout(tensor: Any) -> Layout:
    if tensor.is_nested or _text(tensor.layout) != "torch.strided":
        kind = "nested" if tensor.is_nested else f"of layout {tensor.layout}"
        raise UnsupportedBufferError(
            f"this tensor is {kind}: it is made of several; pass those, such as its values(), or "
            "what unbind() gives"
        )
    itemsize = tensor.element_size()
    return Layout(
        source="torch.Tensor",
        device_id=tensor.get_device(),
        address=tensor.data_ptr(),
        shape=tuple(tensor.shape),
        strides=tuple([step * itemsize for step in tensor.stride()]),
        dtype=_dtype(tensor.dtype),
    )


def _layout_for_copy(tensor: Any) -> Layout:
    layout = _layout(tensor)
    if not layout.address and tensor.nelement():
        raise UnsupportedBufferError(
            "this tensor has elements and no memory: it is a fake one, or its storage was resized "
            "to nothing (as FSDP does between its uses)"
        )
    return layout


_text = functools.cache(str)


@functools.cache
def _dtype(dtype: Any) -> np.dtype | str:  # torch.dtype
    name = str(dtype).removeprefix("torch.")
    try:
        return np.dtype(name)
    except TypeError:
        return name


def _pack(tensor: Any) -> Any:
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _must_pack(tensor: Any) -> bool:
    # Its memory holds the other sign, and a flag says so.
    return tensor.is_conj() or tensor.is_neg()  # type: ignore[no-any-return]


def _host(tensor: Any) -> tuple[Any, str | None]:
    torch, dtype = sys.modules["torch"], _dtype(tensor.dtype)
    plain = tensor.detach().resolve_conj().resolve_neg()
    bits = {1: torch.uint8, 2: torch.int16}.get(tensor.element_size())
    # Of a type that NumPy has from ml_dtypes, PyTorch makes no array either.
    if bits is None or (isinstance(dtype, np.dtype) and dtype.isbuiltin == 1):
        return plain, None
    return plain.view(bits), str(dtype)


FRAMEWORK = Framework("torch", _is_usable, _current_stream, _activate, _record_use)
_RULE = Rule(
    _device_id,
    _describe,
    framework=FRAMEWORK,
    pack=_pack,
    must_pack=_must_pack,
    layout=_layout_for_copy,
    host=_host,
)
