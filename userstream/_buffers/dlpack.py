"""Anything with ``__dlpack_device__``."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

from userstream import _driver
from userstream._buffers import cai, cuda_core
from userstream._buffers._info import BufferInfo
from userstream._buffers._rule import Rule, device_at, host_error, type_name
from userstream.errors import UnsupportedBufferError

ATTRIBUTE = "__dlpack_device__"

# DLDeviceType
_CPU = 1
_CUDA = 2
_CUDA_HOST = 3
_CUDA_MANAGED = 13
_NAMES = {4: "OpenCL", 7: "Vulkan", 8: "Metal", 10: "ROCm", 11: "ROCm host", 14: "oneAPI"}


def rule_for(kind: type) -> Rule | None:
    """Return the rule if objects of `kind` speak DLPack."""
    return RULE if hasattr(kind, ATTRIBUTE) else None


def _ask(obj: Any) -> tuple[int, int]:
    try:
        kind, ordinal = obj.__dlpack_device__()
        return operator.index(kind), operator.index(ordinal)
    except Exception as error:
        raise UnsupportedBufferError(
            f"{ATTRIBUTE} of this {type_name(obj)} failed: {error}; pass the device itself"
        ) from error


def _device_id(obj: Any) -> int:
    kind, ordinal = _ask(obj)
    if kind == _CUDA:
        _driver.check_device(ordinal)
        return ordinal
    if kind == _CPU:
        raise host_error(obj)
    if kind == _CUDA_HOST:
        raise host_error(obj, "pinned host memory")
    if kind == _CUDA_MANAGED:
        return _managed_device_id(obj)
    raise UnsupportedBufferError(
        f"this {type_name(obj)} is on a device of DLPack type {kind}"
        f" ({_NAMES.get(kind, 'unknown')}), not on a CUDA device"
    )


def _managed_device_id(obj: Any) -> int:
    # DLPack says device 0 of all managed memory.
    try:
        view = _view(obj)
    except Exception as error:
        raise UnsupportedBufferError(
            f"this {type_name(obj)} is in managed memory, and its __dlpack__ failed "
            f"({error}); pass the device itself"
        ) from error
    return device_at(view.ptr, obj)


def _view(obj: Any) -> Any:
    from cuda.core.utils import StridedMemoryView

    # -1: nothing is ordered, because only the metadata are looked at.
    return StridedMemoryView.from_dlpack(obj, stream_ptr=-1)


def _describe(obj: Any) -> BufferInfo:
    kind, _ = _ask(obj)
    device = 0 if kind == _CUDA_HOST else _device_id(obj)  # pinned memory is described
    if hasattr(obj, cai.ATTRIBUTE):
        info = cai.describe_interface(obj, ATTRIBUTE, device=device)
    else:
        try:
            view = _view(obj)
        except Exception:
            return BufferInfo(source=ATTRIBUTE, device_id=device, ordering="dlpack")
        info = cuda_core.describe_view(view, ATTRIBUTE, device=device)
    return dataclasses.replace(info, producer=None, ordering="dlpack")


def _layout(obj: Any) -> BufferInfo:
    if hasattr(obj, cai.ATTRIBUTE):
        cai.refuse_masked(obj)
        return _describe(obj)
    try:
        view, again = _view(obj), _view(obj)
    except Exception as error:
        raise UnsupportedBufferError(
            f"__dlpack__ of this {type_name(obj)} failed ({type(error).__name__}: {error}), and "
            "nothing else tells where its elements are"
        ) from error
    info = cuda_core.describe_view(view, ATTRIBUTE, device=_device_id(obj))
    if info.nbytes != 0 and view.ptr != again.ptr:  # both are kept up to here
        raise UnsupportedBufferError(
            f"__dlpack__ of this {type_name(obj)} gives another copy at each call; make an array "
            "of one of them, with its framework or cuda.core.utils.StridedMemoryView, and pass that"
        )
    return info


def _is_read_only(obj: Any) -> bool:
    if hasattr(obj, cai.ATTRIBUTE):
        return cai.is_read_only(obj)
    return bool(_view(obj).readonly)


def _export(obj: Any, handle: int) -> object:
    return obj.__dlpack__(stream=handle)


RULE = Rule(_device_id, _describe, export=_export, layout=_layout, read_only=_is_read_only)
