"""What is copied from the host or to it: NumPy's arrays of whatever is there."""

from __future__ import annotations

from typing import Any

import numpy as np
from cuda.core import Buffer

from userstream import _buffers, _driver, _targets, _transfer
from userstream._buffers import type_name
from userstream.errors import HostBufferError, UnsupportedBufferError

_NUMPYS_OWN = ("__array__", "__array_interface__", "__array_struct__")


def is_numpys(buffer: Any) -> bool:
    """Tell whether NumPy makes an array of it by a protocol of its own."""
    return not isinstance(buffer, type) and any(hasattr(buffer, each) for each in _NUMPYS_OWN)


def require_numpys(buffer: Any) -> Any:
    """Return an object that no rule knows, if NumPy does."""
    if not is_numpys(buffer):
        raise UnsupportedBufferError(
            f"{_targets.shown(buffer)} is no buffer: it has neither __dlpack_device__ nor "
            "__cuda_array_interface__, no rule of its own, and is no array of NumPy's; leave it out"
        )
    return buffer


class _Bytes:
    """Host memory of cuda.core for NumPy: by DLPack it is signed, and to NumPy 1 read-only."""

    def __init__(self, buffer: Buffer) -> None:
        address = int(buffer.handle)
        place = _driver.place_of(address) if buffer.size else None
        if place is not None and not place.covers(address, buffer.size):
            raise UnsupportedBufferError(
                f"this {type_name(buffer)} of {buffer.size} bytes at {address:#x} reaches out of "
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
            f"this {type_name(buffer)} is masked, which a copy would not tell; pass its data, or "
            "what filled() gives"
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
        return array.view(_transfer.numpy_dtype(name, type_name(buffer)))
    if array.dtype == object and array.shape == () and array.item() is buffer:
        raise HostBufferError(
            f"this {type_name(buffer)} is in host memory, and NumPy cannot read it: it has none of "
            f"{', '.join(_NUMPYS_OWN)}, __dlpack__; pass a NumPy array of that memory"
        )
    return array


def copied(buffer: Any, out: np.ndarray | None) -> np.ndarray:
    """Return a host buffer as an array, or copied to one."""
    array = as_array(buffer)
    if out is None:
        return array
    _transfer.check_out(out, array)
    np.copyto(out, array)
    return out


def writable(buffer: Any) -> np.ndarray:
    """Return a host buffer as an array that may be written."""
    array, again = as_array(buffer), as_array(buffer)
    if array.size and array.ctypes.data != again.ctypes.data:  # both are kept up to here
        raise ValueError(
            f"the target cannot be written: NumPy gets another copy of this {type_name(buffer)} "
            "each time; pass a NumPy array of its memory"
        )
    if not array.flags.writeable:
        raise ValueError(f"the target is read-only: {type_name(buffer)}")
    return array
