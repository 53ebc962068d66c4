"""What is copied: the arrays that buffers are, whatever their frameworks and wherever they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from cuda.core import Buffer

from userstream import _buffers, _driver, _targets, _transfer
from userstream._buffers import cai, type_name
from userstream._registry import _host_operands
from userstream.errors import DeviceMismatchError, HostBufferError, UnsupportedBufferError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from userstream._buffers import BufferInfo, Layout, Rule
    from userstream._ordering import Ordering
    from userstream._transfer import DeviceArray


def packed(
    buffer: Any, rule: Rule, array: DeviceArray, ordering: Ordering, *, if_scattered: bool = True
) -> tuple[Any, DeviceArray]:
    """Let the framework of a buffer make it contiguous on our stream, if need be or if quicker."""
    if rule.pack is None or rule.framework is None:
        return buffer, array
    must = rule.must_pack is not None and rule.must_pack(buffer)
    if not must and not (if_scattered and _transfer.is_scattered(array)):
        return buffer, array
    stream, device = ordering.consumer, array.device
    if stream._device() != device:  # the framework would do it on another stream, unordered
        if not must:
            return buffer, array
        raise DeviceMismatchError(
            f"the memory of this {type_name(buffer)} is not what it shows, and its framework can "
            f"resolve that on device {device} alone, where {stream!r} is not; pass a stream= there",
            devices=(stream._device(), device),
        )
    with stream.activate(rule.framework.name):
        # CuPy works on the current device, wherever the array is.
        copy = _driver.within(_driver.primary_context(device), rule.pack, buffer)
    # Its memory belongs to our stream's arena: what is freed there is used in order.
    return copy, _transfer.device_array((rule.layout or rule.describe)(copy))


def copied(
    buffer: Any,
    copy: Callable[..., np.ndarray],
    out: np.ndarray | None = None,
    path: tuple[object, ...] = (),
) -> np.ndarray | list[Any] | dict[Any, Any]:
    """Copy each array that a buffer or a collection is made of; return them in its form."""
    if out is not None and not isinstance(out, np.ndarray):
        raise TypeError(f"out must be a numpy.ndarray, not {type(out).__name__}")
    rule = _buffers.rule_of(buffer)
    if rule is None and not _targets.is_collection(buffer):
        return _host_operands.copied(_numpys(buffer, path), out)
    if rule is not None and rule.parts is None:
        return copy(buffer, out)
    if rule is not None and rule.places is not None:
        return _joined(buffer, rule.places(buffer), copy, out)
    if out is not None:
        raise TypeError(f"out= takes one array, and {type_name(buffer)} is made of several")
    if rule is not None and rule.parts is not None:
        return [copy(part) for part in rule.parts(buffer)]
    _targets.check_depth(len(path), buffer)
    if isinstance(buffer, Mapping):
        return {key: copied(item, copy, path=(*path, key)) for key, item in buffer.items()}
    return [copied(item, copy, path=(*path, i)) for i, item in enumerate(buffer)]


def _numpys(buffer: Any, path: tuple[object, ...]) -> Any:
    """Return an object that no rule knows, and NumPy does."""
    if _host_operands.is_numpys(buffer):
        return buffer
    where = "".join(f"[{_targets.shown(key)}]" for key in path)
    raise UnsupportedBufferError(
        f"buffer{where} is {_targets.shown(buffer)}, which is no buffer: it has neither "
        "__dlpack_device__ nor __cuda_array_interface__, and no rule of its own"
    )


def _joined(
    buffer: Any,
    places: Sequence[tuple[Any, Any]],
    copy: Callable[..., np.ndarray],
    out: np.ndarray | None,
) -> np.ndarray:
    """Copy the parts of an array to their places in one."""
    if len(places) == 1:  # the whole, on one device or on each of several
        return copy(places[0][0], out)
    if out is not None and out.shape != tuple(buffer.shape):
        raise ValueError(f"out has shape {out.shape}, and the buffer {tuple(buffer.shape)}")
    for part, index in places:
        if out is None:
            first = copy(part)
            out = np.empty(buffer.shape, first.dtype)
            out[index] = first
        else:
            copy(part, out[index])
    assert out is not None
    return out


def source_of(buffer: Any) -> DeviceArray | None:
    """Return the array that `copyto` reads; `None` if it is on the host."""
    info = described(buffer, _rule_for_copy(buffer))
    return None if info is None else _transfer.device_array(info)


def target_of(buffer: Any) -> DeviceArray | None:
    """Return the array that `copyto` writes; `None` if it is on the host."""
    rule = _rule_for_copy(buffer)
    if rule.must_pack is not None and rule.must_pack(buffer):
        raise ValueError(
            f"the memory of this {type_name(buffer)} is not what it shows, as it is a conjugate or "
            "negated view: it cannot be the target of a copy; pass the tensor that it is a view of"
        )
    info = described(buffer, rule)
    if info is None:
        return None
    if rule.read_only is not None and rule.read_only(buffer):
        raise ValueError(f"the target is read-only: it is a {info.source} that says so")
    return _transfer.device_array(info)


def _rule_for_copy(buffer: Any) -> Rule:
    rule = _buffers.rule_of(buffer)
    if rule is None:
        raise UnsupportedBufferError(
            f"copyto takes GPU buffers and arrays on the host, and {type_name(buffer)} is neither; "
            "numpy.asarray makes an array of numbers"
        )
    return rule


def described(buffer: Any, rule: Rule) -> BufferInfo | Layout | None:
    """Describe a GPU buffer as far as a copy needs it; `None` if it is on the host."""
    try:
        rule.device_id(buffer)
    except HostBufferError:
        return None
    return (rule.layout or rule.describe)(buffer)


def empty_array(buffer: Any, rule: Rule) -> np.ndarray | None:
    """Return the array of a buffer that tells no device because it is empty, if it is."""
    if isinstance(buffer, Buffer):
        return np.empty(0, np.uint8) if buffer.size == 0 else None
    if rule is not cai.RULE:
        return None
    shape, dtype = cai.shape_and_dtype(buffer)
    return np.empty(shape, _transfer.numpy_dtype(dtype, cai.ATTRIBUTE)) if 0 in shape else None
