"""What is copied: the arrays that buffers are, whatever their frameworks and wherever they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from cuda.core import Buffer

from userstream import _buffers, _driver, _targets, _transfer
from userstream._buffers import cai, type_name
from userstream._registry import _host_operands
from userstream.errors import (
    DeviceMismatchError,
    HostBufferError,
    UnsupportedBufferError,
    UserStreamError,
)

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
    rule = _buffers.rule_of(buffer)
    if rule is None and _targets.is_collection(buffer):
        _refuse_one(out, buffer)
        _targets.check_depth(len(path), buffer)
        if isinstance(buffer, Mapping):
            return {key: copied(item, copy, path=(*path, key)) for key, item in buffer.items()}
        return [copied(item, copy, path=(*path, i)) for i, item in enumerate(buffer)]
    try:
        return _whole(buffer, rule, copy, out)
    except UserStreamError as error:
        if path:
            error.add_note(f"that is buffer{_targets.subscripts(path)}")
        raise


def _whole(
    buffer: Any, rule: Rule | None, copy: Callable[..., np.ndarray], out: np.ndarray | None
) -> np.ndarray | list[Any]:
    """Copy one buffer, of however many arrays that consists."""
    if rule is not None and rule.parts is not None and rule.places is None:
        _refuse_one(out, buffer)
        return [copy(part) for part in rule.parts(buffer)]
    if out is not None and not isinstance(out, np.ndarray):
        raise TypeError(f"out must be a numpy.ndarray, not {type(out).__name__}")
    if rule is None:
        return _host_operands.copied(_host_operands.require_numpys(buffer), out)
    if rule.places is None:
        return copy(buffer, out)
    return _joined(buffer, rule.places(buffer), copy, out)


def _refuse_one(out: np.ndarray | None, buffer: Any) -> None:
    if out is not None:
        raise TypeError(
            f"out= takes one array, and {type_name(buffer)} is made of several; copy each to its "
            "own"
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
    if _buffers.rule_of(buffer) is None and _host_operands.is_numpys(buffer):
        return None
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
            "numpy.asarray makes an array of numbers, and buffers are copied one by one"
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
