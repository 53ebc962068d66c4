"""PyTorch tensors."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from userstream import _driver
from userstream._buffers._info import BufferInfo
from userstream._buffers._rule import Rule, host_error, locate


def rule_for(kind: type) -> Rule | None:
    """Return the rule if `kind` is a tensor type."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    return _RULE if tensor is not None and issubclass(kind, tensor) else None


def _device_id(tensor: Any) -> int:  # torch.Tensor
    # get_device() alone would answer 0 for a tensor of "xla:0".
    if tensor.is_cuda:
        return tensor.get_device()  # type: ignore[no-any-return]
    raise host_error(tensor, f"the memory of torch device {str(tensor.device)!r}")


def current_stream(device: int) -> int:
    """Return the handle of PyTorch's current stream of a device."""
    torch = sys.modules["torch"]
    try:
        raw: int = torch._C._cuda_getCurrentRawStream(device)
    except AttributeError:  # a private function; the public one takes 20 times as long
        raw = torch.cuda.current_stream(device).cuda_stream
    return raw or _driver.LEGACY  # by 0 PyTorch means the legacy default stream


def _describe(tensor: Any) -> BufferInfo:
    address = tensor.data_ptr()
    if tensor.is_cuda:
        device = tensor.get_device()
        memory = locate(address, tensor)[1] if address else "device"
        producer = current_stream(device)
    elif tensor.device.type == "cpu" and address and tensor.is_pinned():
        device, memory = locate(address, tensor)
        producer = current_stream(device)
    else:
        raise host_error(tensor, f"the memory of torch device {str(tensor.device)!r}")
    itemsize = tensor.element_size()
    return BufferInfo(
        source="torch.Tensor",
        device_id=device,
        memory=memory,
        address=address,
        nbytes=tensor.nelement() * itemsize,
        shape=tuple(tensor.shape),
        strides=tuple(step * itemsize for step in tensor.stride()),
        dtype=_dtype(tensor.dtype),
        producer=producer,
        ordering="current",
    )


def _dtype(dtype: Any) -> np.dtype | str:  # torch.dtype
    name = str(dtype).removeprefix("torch.")
    try:
        return np.dtype(name)
    except TypeError:
        return name


_RULE = Rule(_device_id, _describe)
