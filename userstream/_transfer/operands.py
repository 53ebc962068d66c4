"""What is copied: the arrays that buffers are, whatever their frameworks and wherever they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from userstream import _buffers, _driver, _targets, _transfer
from userstream._buffers import type_name
from userstream._transfer import host_operands
from userstream.errors import (
    DeviceMismatchError,
    HostBufferError,
    UnsupportedBufferError,
    UserStreamError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from userstream._buffers import View
    from userstream._ordering import Ordering
    from userstream._transfer import DeviceArray


class Operand(NamedTuple):
    """A buffer on a device that is copied from or to."""

    view: View
    array: DeviceArray


def packed(
    source: Operand, ordering: Ordering, *, if_scattered: bool = True
) -> tuple[Any, DeviceArray]:
    """Let the framework of a buffer make it contiguous on our stream, if need be or if quicker."""
    view, array = source
    buffer = view.buffer
    if view.framework is None or not view.packs:
        return buffer, array
    if not view.is_disguised and not (if_scattered and _transfer.is_scattered(array)):
        return buffer, array
    stream, device = ordering.consumer, array.device
    own = stream._resolve().device
    if own != device:  # the framework would do it on another stream, unordered
        if not view.is_disguised:
            return buffer, array
        raise DeviceMismatchError(
            f"the memory of this {type_name(buffer)} is not what it shows, and its framework can "
            f"resolve that on device {device} alone, where {stream!r} is not; pass a stream= there",
            devices=(own, device),
        )
    with stream.activate(view.framework.name):
        # CuPy works on the current device, wherever the array is.
        copy = _driver.within(_driver.primary_context(device), view.pack)
    # Its memory belongs to our stream's arena: what is freed there is used in order.
    return copy, _transfer.device_array(type(view)(copy))


def copied(
    buffer: Any,
    copy: Callable[..., np.ndarray],
    out: np.ndarray | None = None,
    path: tuple[object, ...] = (),
) -> np.ndarray | list[Any] | dict[Any, Any]:
    """Copy each array that a buffer or a collection is made of; return them in its form."""
    view = _buffers.view_or_none(buffer)
    if view is None and _targets.is_collection(buffer):
        _refuse_one(out, buffer)
        _targets.check_depth(len(path), buffer)
        if isinstance(buffer, Mapping):
            return {key: copied(item, copy, path=(*path, key)) for key, item in buffer.items()}
        return [copied(item, copy, path=(*path, i)) for i, item in enumerate(buffer)]
    try:
        return _whole(buffer, view, copy, out)
    except UserStreamError as error:
        if path:
            error.add_note(f"that is buffer{_targets.subscripts(path)}")
        raise


def _whole(
    buffer: Any, view: View | None, copy: Callable[..., np.ndarray], out: np.ndarray | None
) -> np.ndarray | list[Any]:
    """Copy one buffer, of however many arrays that consists."""
    pieces = None if view is None else view.pieces
    if view is not None and pieces is None and view.parts is not None:
        _refuse_one(out, buffer)
        return [copy(part) for part in view.parts]
    if out is not None and not isinstance(out, np.ndarray):
        raise TypeError(f"out must be a numpy.ndarray, not {type(out).__name__}")
    if view is None:
        return host_operands.copied(host_operands.require_numpys(buffer), out)
    if pieces is None:
        return copy(view, out)
    return _joined(buffer, pieces, copy, out)


def _refuse_one(out: np.ndarray | None, buffer: Any) -> None:
    if out is not None:
        raise TypeError(
            f"out= takes one array, and {type_name(buffer)} is made of several; copy each to its "
            "own"
        )


def _joined(
    buffer: Any,
    pieces: Sequence[tuple[View, Any]],
    copy: Callable[..., np.ndarray],
    out: np.ndarray | None,
) -> np.ndarray:
    """Copy the pieces of an array to their places in one."""
    if len(pieces) == 1:  # the whole, on one device or on each of several
        return copy(pieces[0][0], out)
    if out is not None and out.shape != tuple(buffer.shape):
        raise ValueError(f"out has shape {out.shape}, and the buffer {tuple(buffer.shape)}")
    for piece, index in pieces:
        if out is None:
            first = copy(piece)
            out = np.empty(buffer.shape, first.dtype)
            out[index] = first
        else:
            copy(piece, out[index])
    assert out is not None
    return out


def source_of(buffer: Any) -> Operand | None:
    """Return what `copyto` reads; `None` if it is on the host."""
    view = _buffers.view_or_none(buffer)
    if view is None and host_operands.is_numpys(buffer):
        return None
    return operand(_known(buffer, view))


def target_of(buffer: Any) -> Operand | None:
    """Return what `copyto` writes; `None` if it is on the host."""
    view = _known(buffer, _buffers.view_or_none(buffer))
    if view.is_disguised:
        raise ValueError(
            f"the memory of this {type_name(buffer)} is not what it shows, as it is a conjugate or "
            "negated view: it cannot be the target of a copy; pass the tensor that it is a view of"
        )
    if not is_on_host(view) and view.is_read_only:
        raise ValueError(f"the target is read-only: it is a {view.source} that says so")
    return operand(view)


def _known(buffer: Any, view: View | None) -> View:
    if view is None:
        raise UnsupportedBufferError(
            f"copyto takes GPU buffers and arrays on the host, and {type_name(buffer)} is neither; "
            "numpy.asarray makes an array of numbers, and buffers are copied one by one"
        )
    return view


def operand(view: View) -> Operand | None:
    """Return what is copied from or to; `None` if it is on the host."""
    if is_on_host(view):
        return None
    return Operand(view, _transfer.device_array(view))  # what has no shape is refused here


def is_on_host(view: View) -> bool:
    """Tell whether a buffer is on the host, page-locked memory included."""
    try:
        _ = view.device
    except HostBufferError:
        return True
    return False


def empty_array(view: View) -> np.ndarray | None:
    """Return the array of a buffer that tells no device because it is empty, if it is."""
    try:
        layout = view.layout
    except UnsupportedBufferError:
        return None
    if not layout.is_empty:
        return None
    if layout.shape is None:
        return np.empty(0, np.uint8)
    return np.empty(layout.shape, _transfer.numpy_dtype(layout.dtype, view.source))
