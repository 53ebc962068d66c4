"""Arrays, sparse matrices and memory pointers of CuPy."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from userstream import _driver
from userstream._buffers.framework import Framework, is_named
from userstream._buffers.view import Form, Layout, View, cached, form, total

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from userstream._driver.pointers import Memory
    from userstream.typing import StreamLike

_modules = sys.modules  # a local name: one attribute lookup less per call
_LEGACY = _driver.streams.LEGACY


def view_for(kind: type) -> type[View] | None:
    """Return the view class if `kind` is a buffer type of CuPy."""
    array = getattr(sys.modules.get("cupy"), "ndarray", None)
    if isinstance(array, type) and issubclass(kind, array):
        return ArrayView
    if is_named(kind, ("cupyx.scipy.sparse.",), ("spmatrix", "sparray")):
        return SparseView
    pointer = getattr(sys.modules.get("cupy.cuda"), "MemoryPointer", None)
    return PointerView if isinstance(pointer, type) and issubclass(kind, pointer) else None


def device_id_of(device: Any) -> int:
    """Return the ordinal of a device object."""
    return int(device.id)


def _is_usable() -> bool:
    return hasattr(sys.modules.get("cupy"), "cuda")


def _current_stream(device: int) -> tuple[int, object]:
    stream = _modules["cupy"].cuda.get_current_stream(device)
    # In its per-thread mode CuPy reports 2. Destroying the Stream object destroys the stream.
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
    ours.__enter__()  # not `use`: a nested `with` block must return to this stream

    def undo() -> None:
        ours.__exit__(None, None, None)
        if cuda.get_current_stream(device) is not previous:  # `previous` was made current by `use`
            previous.use()

    return undo


FRAMEWORK = Framework("cupy", _is_usable, _current_stream, _activate)


class ArrayView(View):
    """View of a ``cupy.ndarray``."""

    source = "cupy.ndarray"
    framework = FRAMEWORK
    packs = True

    @staticmethod
    def locate(array: Any) -> int:
        """Return the ordinal of the device."""
        return array.device.id  # type: ignore[no-any-return]

    @staticmethod
    def producer_of(array: Any) -> tuple[int, int, object]:
        """Return the device, the handle of the current stream, and its object."""
        device = array.device.id
        # Inlined `_current_stream`: this path runs on every borrow.
        stream = _modules["cupy"].cuda.get_current_stream(device)
        return device, stream.ptr or _LEGACY, stream

    @staticmethod
    def quick_layout(array: Any) -> tuple[int, int, Form] | None:
        """Return device, address and form of a non-empty array."""
        address = array.data.ptr
        if not address:
            return None
        return array.device.id, address, form(array.shape, array.strides, array.dtype)

    @cached
    def layout(self) -> Layout:
        """The layout that the attributes of the array describe."""
        array = self.buffer
        return Layout(array.data.ptr, array.shape, array.strides, array.dtype, array.nbytes)

    @cached
    def device_and_memory(self) -> tuple[int | None, Memory]:
        """The array's device, and the kind of memory as reported by the driver."""
        # An empty slice may begin at the end of its allocation: do not query the driver.
        return self.device, self.place.kind if self.layout.nbytes else "device"

    def pack(self) -> Any:
        """Return an array in C order."""
        return sys.modules["cupy"].ascontiguousarray(self.buffer)


class SparseView(View):
    """View of a ``cupyx.scipy.sparse`` matrix, which consists of several arrays."""

    source = "cupyx.scipy.sparse"
    framework = FRAMEWORK

    @staticmethod
    def locate(matrix: Any) -> int:
        """Return the ordinal of the device."""
        return ArrayView.locate(matrix.data)

    @cached
    def parts(self) -> Sequence[View]:
        """The views of the matrix's arrays: the elements, then the indices."""
        names = ("data", "indices", "indptr", "row", "col", "offsets")
        found = [getattr(self.buffer, name, None) for name in names]
        return [ArrayView(array) for array in found if array is not None]

    @cached
    def layout(self) -> Layout:
        """The shape of the matrix, and the total size of its arrays."""
        return total(self.parts)._replace(shape=tuple(self.buffer.shape))


class PointerView(View):
    """View of a ``cupy.cuda.MemoryPointer``: bytes up to the end of the allocation."""

    source = "cupy.cuda.MemoryPointer"
    framework = FRAMEWORK

    @staticmethod
    def locate(pointer: Any) -> int:
        """Return the ordinal of the device."""
        return int(pointer.device_id)

    @staticmethod
    def producer_of(pointer: Any) -> tuple[int, int, object]:
        """Return the device, the handle of the current stream, and its object."""
        device = int(pointer.device_id)
        return (device, *_current_stream(device))

    @cached
    def layout(self) -> Layout:
        """The address, and the size up to the end of the allocation."""
        memory, address = self.buffer.mem, int(self.buffer.ptr)
        return Layout(address, nbytes=int(memory.ptr) + int(memory.size) - address)
