"""What is copied: the arrays that buffers are, whatever their frameworks and wherever they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from cuda.core import Buffer

from userstream import _buffers, _driver, _targets
from userstream._buffers import type_name
from userstream._copies.arrays import check_out, device_array, numpy_dtype
from userstream.errors import (
    DeviceMismatchError,
    HostBufferError,
    UnsupportedBufferError,
    UserStreamError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from userstream._buffers.view import View
    from userstream._copies.arrays import DeviceArray
    from userstream._ordering import Ordering


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
    if not view.is_disguised and not (if_scattered and array.is_scattered):
        return buffer, array
    stream, device = ordering.consumer, array.device
    own = stream._resolve().device
    if own != device:  # the framework would do it on another stream, unordered
        if not view.is_disguised:
            return buffer, array
        raise DeviceMismatchError(
            f"the memory of this {type_name(buffer)} differs from what it shows, and its framework "
            f"can resolve that only on device {device}, where {stream!r} is not; pass a stream= "
            "there",
            devices=(own, device),
        )
    with stream.activate(view.framework.name):
        # CuPy works on the current device, wherever the array is.
        copy = _driver.contexts.within(_driver.contexts.primary_context(device), view.pack)
    # Its memory belongs to our stream's arena: what is freed there is used in order.
    return copy, device_array(type(view)(copy))


def copied(
    buffer: Any,
    copy: Callable[..., np.ndarray],
    out: np.ndarray | None = None,
    path: tuple[object, ...] = (),
    joined: Callable[..., np.ndarray] | None = None,
) -> np.ndarray | list[Any] | dict[Any, Any]:
    """Copy each array that a buffer or a collection is made of; return them in its form.

    `joined` makes the array for the pieces of one before any of them is copied, instead of after
    the first.
    """
    view = _buffers.view_or_none(buffer)
    if view is None and _targets.is_collection(buffer):
        _refuse_one(out, buffer)
        _targets.check_depth(len(path), buffer)
        if isinstance(buffer, Mapping):
            items = buffer.items()
            return {key: copied(item, copy, None, (*path, key), joined) for key, item in items}
        return [copied(item, copy, None, (*path, i), joined) for i, item in enumerate(buffer)]
    try:
        return _whole(buffer, view, copy, out, joined)
    except UserStreamError as error:
        if path:
            error.add_note(f"that is buffer{_targets.subscripts(path)}")
        raise


def _whole(
    buffer: Any,
    view: View | None,
    copy: Callable[..., np.ndarray],
    out: np.ndarray | None,
    joined: Callable[..., np.ndarray] | None,
) -> np.ndarray | list[Any]:
    """Copy one buffer, of however many arrays that consists."""
    pieces = None if view is None else view.pieces
    if view is not None and pieces is None and view.parts is not None:
        _refuse_one(out, buffer)
        return [_whole(part.buffer, part, copy, None, joined) for part in view.parts]
    if out is not None and not isinstance(out, np.ndarray):
        raise TypeError(f"out must be a numpy.ndarray, not {type(out).__name__}")
    if view is None:
        return host_copied(require_numpys(buffer), out)
    if pieces is None:
        return copy(view, out)
    if out is None and joined is not None and len(pieces) > 1:
        out = joined(pieces, buffer)
    return _joined(buffer, pieces, copy, out)


def _refuse_one(out: np.ndarray | None, buffer: Any) -> None:
    if out is not None:
        raise TypeError(
            f"out= takes one array, and {type_name(buffer)} consists of several; copy each to its "
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
    if view is None and is_numpys(buffer):
        return None
    return operand(_known(buffer, view))


def target_of(buffer: Any) -> Operand | None:
    """Return what `copyto` writes; `None` if it is on the host."""
    view = _known(buffer, _buffers.view_or_none(buffer))
    if view.is_disguised:
        raise ValueError(
            f"the memory of this {type_name(buffer)} differs from what it shows, because it is a "
            "conjugate or negated view: it cannot be the target of a copy; pass the tensor that it "
            "is a view of"
        )
    if not is_on_host(view) and view.is_read_only:
        raise ValueError(f"the target is read-only: this {view.source} says so")
    found = operand(view)
    if found is not None:
        view.check_target()
    return found


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
    return Operand(view, device_array(view))  # what has no shape is refused here


def is_on_host(view: View) -> bool:
    """Tell whether a buffer is on the host, page-locked memory included."""
    try:
        _ = view.device
    except HostBufferError:
        return True
    return False


def empty_array(view: View) -> np.ndarray | None:
    """Return the array of a buffer that has no device because it is empty, if it is."""
    try:
        there = view.layout
    except UnsupportedBufferError:
        return None
    if not there.is_empty:
        return None
    if there.shape is None:
        return np.empty(0, np.uint8)
    return np.empty(there.shape, numpy_dtype(there.dtype, view.source))


def if_on_host(view: View, out: np.ndarray | None) -> np.ndarray | None:
    """Return the array that a buffer is, or `out` that has it now; `None` if it is on a device."""
    try:
        _ = view.device
    except HostBufferError:
        return host_copied(view.buffer, out)
    except UnsupportedBufferError:
        empty = empty_array(view)
        if empty is None:
            raise
        return host_copied(empty, out)
    return None


_NUMPYS_OWN = ("__array__", "__array_interface__", "__array_struct__")


def is_numpys(buffer: Any) -> bool:
    """Tell whether NumPy makes an array of it by a protocol of its own."""
    return not isinstance(buffer, type) and any(hasattr(buffer, each) for each in _NUMPYS_OWN)


def require_numpys(buffer: Any) -> Any:
    """Return an object that no rule knows, if NumPy does."""
    if not is_numpys(buffer):
        number = isinstance(buffer, (int, float, complex))
        raise UnsupportedBufferError(
            f"{_targets.shown(buffer)} is not a buffer: it has neither __dlpack_device__ nor "
            "__cuda_array_interface__, and is not an array of NumPy"
            + ("; numpy.asarray makes an array of numbers, or of lists of them" if number else "")
        )
    return buffer


class _Bytes:
    """Host memory of cuda.core for NumPy: by DLPack it is signed, and to NumPy 1 read-only."""

    def __init__(self, buffer: Buffer) -> None:
        address = int(buffer.handle)
        place = _driver.pointers.place_of(address) if buffer.size else None
        if place is not None and not place.covers(address, buffer.size):
            raise UnsupportedBufferError(
                f"this {type_name(buffer)} of {buffer.size} bytes at {address:#x} extends beyond "
                f"its memory: the allocation there has {place.size} from {place.start:#x} on"
            )
        self._buffer = buffer  # as long as there is an array on it
        self.__array_interface__ = {
            "version": 3,
            "shape": (buffer.size,),
            "typestr": "|u1",
            "data": (address, False),
        }


def as_array(buffer: Any) -> np.ndarray:
    """Return a buffer on the host as an array; copies nothing."""
    if isinstance(buffer, Buffer):
        return np.asarray(_Bytes(buffer))
    if isinstance(buffer, np.ma.MaskedArray):
        raise UnsupportedBufferError(
            f"this {type_name(buffer)} is masked, and a copy would not show that; pass its data, "
            "or the result of filled()"
        )
    view, name = _buffers.view_or_none(buffer), None
    try:
        if view is not None:
            buffer, name = view.host
        if hasattr(buffer, "__dlpack__") and not is_numpys(buffer):
            array = np.from_dlpack(buffer)
        else:
            array = np.asarray(buffer)
    except MemoryError:
        raise
    except Exception as error:
        raise HostBufferError(
            f"this {type_name(buffer)} is in host memory, and NumPy cannot read it "
            f"({type(error).__name__}: {error}); pass a NumPy array of that memory"
        ) from error
    if name is not None:
        return array.view(numpy_dtype(name, type_name(buffer)))
    if array.dtype == object and array.shape == () and array.item() is buffer:
        raise HostBufferError(
            f"this {type_name(buffer)} is in host memory, and NumPy cannot read it: it has none of "
            f"{', '.join(_NUMPYS_OWN)}, __dlpack__; pass a NumPy array of that memory"
        )
    return array


def host_copied(buffer: Any, out: np.ndarray | None) -> np.ndarray:
    """Return a host buffer as an array, or copied to one."""
    array = as_array(buffer)
    if out is None:
        return array
    check_out(out, array.shape, array.dtype)
    np.copyto(out, array)
    return out


def writable(buffer: Any) -> np.ndarray:
    """Return a host buffer as an array that may be written."""
    array, again = as_array(buffer), as_array(buffer)
    if array.size and array.ctypes.data != again.ctypes.data:  # both are kept up to here
        raise ValueError(
            f"the target cannot be written: NumPy gets a new copy of this {type_name(buffer)} each "
            "time; pass a NumPy array of its memory"
        )
    if not array.flags.writeable:
        raise ValueError(f"the target is read-only: {type_name(buffer)}")
    return array
