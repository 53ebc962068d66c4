"""CuPy arrays, sparse matrices, and pointers to its memory."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from userstream import _driver
from userstream._buffers._framework import Framework
from userstream._buffers._layout import Form, Layout, form
from userstream._buffers._names import is_named
from userstream._buffers.view import View, once

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from userstream._driver.pointers import Memory
    from userstream.typing import StreamLike

_modules = sys.modules  # each look-up counts
_LEGACY = _driver.streams.LEGACY


def view_for(kind: type) -> type[View] | None:
    """Return the view if `kind` is a type of CuPy's that holds data."""
    array = getattr(sys.modules.get("cupy"), "ndarray", None)
    if isinstance(array, type) and issubclass(kind, array):
        return ArrayView
    if is_named(kind, ("cupyx.scipy.sparse.",), ("spmatrix", "sparray")):
        return SparseView
    pointer = getattr(sys.modules.get("cupy.cuda"), "MemoryPointer", None)
    return PointerView if isinstance(pointer, type) and issubclass(kind, pointer) else None


def _is_usable() -> bool:
    return hasattr(sys.modules.get("cupy"), "cuda")


def _current_stream(device: int) -> tuple[int, object]:
    stream = _modules["cupy"].cuda.get_current_stream(device)
    # In its per-thread mode CuPy says 2 itself. The object destroys the stream when it goes.
    return stream.ptr or _LEGACY, stream


def _activate(stream: StreamLike, device: int) -> Callable[[], object]:
    cuda = sys.modules["cupy"].cuda
    previous = cuda.get_current_stream(device)
    handle = stream.__cuda_stream__()[1]
    if handle == _driver.streams.LEGACY:
        ours = cuda.Stream.null
    elif handle == _driver.streams.PER_THREAD:
        ours = cuda.Stream.ptds
    else:  # ExternalStream warns, and the streams of from_external do not know their device
        ours = cuda.stream._BaseStream(handle, device)
    ours.__enter__()  # not `use`, so that a with block inside returns to it

    def undo() -> None:
        ours.__exit__(None, None, None)
        if cuda.get_current_stream(device) is not previous:  # made current by `use`
            previous.use()

    return undo


FRAMEWORK = Framework("cupy", _is_usable, _current_stream, _activate, captures=True)


class ArrayView(View):
    """A look at a ``cupy.ndarray``."""

    source = "cupy.ndarray"
    framework = FRAMEWORK
    packs = True

    @staticmethod
    def locate(array: Any) -> int:
        """Return the ordinal of the device."""
        return array.device.id  # type: ignore[no-any-return]

    @staticmethod
    def glance(array: Any) -> tuple[int, int, Form] | None:
        """Return device, address and form of an array that has memory."""
        address = array.data.ptr
        if not address:
            return None
        return array.device.id, address, form(array.shape, array.strides, array.dtype)

    @once
    def layout(self) -> Layout:
        """What the array has as its attributes."""
        array = self.buffer
        return Layout(array.data.ptr, array.shape, array.strides, array.dtype, array.nbytes)

    @once
    def where(self) -> tuple[int | None, Memory]:
        """The array's device, and the kind of memory by the driver."""
        # A slice without elements may begin where its allocation ends.
        return self.device, self.place.kind if self.layout.nbytes else "device"

    def pack(self) -> Any:
        """Return an array in C order."""
        return sys.modules["cupy"].ascontiguousarray(self.buffer)


class SparseView(View):
    """A look at a matrix of ``cupyx.scipy.sparse``, which is made of several arrays."""

    source = "cupyx.scipy.sparse"
    framework = FRAMEWORK

    @staticmethod
    def locate(matrix: Any) -> int:
        """Return the ordinal of the device."""
        return ArrayView.locate(matrix.data)

    @once
    def parts(self) -> Sequence[View]:
        """The views of its arrays: the elements, and then where they are."""
        names = ("data", "indices", "indptr", "row", "col", "offsets")
        found = [getattr(self.buffer, name, None) for name in names]
        return [ArrayView(array) for array in found if array is not None]

    @once
    def layout(self) -> Layout:
        """The shape, and the size of all its arrays."""
        nbytes = sum(part.layout.nbytes or 0 for part in self.parts)
        return Layout(None, tuple(self.buffer.shape), nbytes=nbytes)


class PointerView(View):
    """A look at a ``cupy.cuda.MemoryPointer``: bytes, up to the end of their allocation."""

    source = "cupy.cuda.MemoryPointer"
    framework = FRAMEWORK

    @staticmethod
    def locate(pointer: Any) -> int:
        """Return the ordinal of the device."""
        return int(pointer.device_id)

    @once
    def layout(self) -> Layout:
        """Address and size."""
        memory, address = self.buffer.mem, int(self.buffer.ptr)
        return Layout(address, nbytes=int(memory.ptr) + int(memory.size) - address)
