"""Views of objects with ``__dlpack_device__``."""

from __future__ import annotations

import ctypes
import functools
import operator
from typing import TYPE_CHECKING, Any

from userstream import _driver
from userstream._buffers import cai
from userstream._buffers.cuda_core import layout_of
from userstream._buffers.framework import KNOWN, is_named, type_name
from userstream._buffers.view import (
    UNKNOWN,
    BufferInfo,
    ProducerStream,
    View,
    cached,
    device_at,
    host_error,
)
from userstream.errors import UnsupportedBufferError

if TYPE_CHECKING:
    from collections.abc import Callable

    from userstream._buffers.view import Layout
    from userstream._driver.pointers import Memory, Place

ATTRIBUTE = "__dlpack_device__"

# Values of DLDeviceType.
_CPU = 1
_CUDA = 2
_CUDA_HOST = 3
_CUDA_MANAGED = 13
_NAMES = {4: "OpenCL", 7: "Vulkan", 8: "Metal", 10: "ROCm", 11: "ROCm host", 14: "oneAPI"}


def view_for(kind: object) -> type[View] | None:
    """Return the view class if `kind`, a type or an object, implements DLPack."""
    return DLPackView if hasattr(kind, ATTRIBUTE) else None


class DLPackView(View):
    """View of an object that implements DLPack, and perhaps the CUDA Array Interface.

    The device is known without an export. The elements are described by the interface, or by one
    export if there is none.
    """

    source = ATTRIBUTE

    @classmethod
    def locate(cls, obj: Any) -> int:
        """Return the ordinal of the device."""
        try:
            kind, ordinal = obj.__dlpack_device__()
        except Exception:  # a view finds the exporter, or raises with a better message
            return cls(obj).device
        # Fast path: the same result as the view's, without creating one.
        if kind == _CUDA and type(ordinal) is int and ordinal in _driver.library.ordinals:
            return ordinal
        return cls(obj).device

    @cached
    def exporter(self) -> Any:
        """The object that implements the protocols: the buffer, or a proxy of its framework."""
        return self.buffer

    @cached
    def dlpack_device(self) -> tuple[int, int]:
        """Type and ordinal of the device, as reported by DLPack."""
        obj = self.exporter
        try:
            kind, ordinal = obj.__dlpack_device__()
            return operator.index(kind), operator.index(ordinal)
        except Exception as error:
            raise UnsupportedBufferError(
                f"{ATTRIBUTE} of this {type_name(obj)} failed: {error}; pass the device itself"
            ) from error

    @cached
    def device(self) -> int:
        """The ordinal of the device; by the driver for managed memory, where DLPack reports 0."""
        obj, (kind, ordinal) = self.buffer, self.dlpack_device
        if kind == _CUDA:
            _driver.library.check_device(ordinal)
            return ordinal
        if kind == _CPU:
            raise host_error(obj)
        if kind == _CUDA_HOST:
            raise host_error(obj, "pinned host memory")
        if kind == _CUDA_MANAGED:
            return self._managed_device()
        raise UnsupportedBufferError(
            f"this {type_name(obj)} is on a device of DLPack type {kind}"
            f" ({_NAMES.get(kind, 'unknown')}), not on a CUDA device"
        )

    def _managed_device(self) -> int:
        try:
            place = self.place
        except UnsupportedBufferError as error:
            raise UnsupportedBufferError(
                f"this {type_name(self.buffer)} is in managed memory, and its device could not be "
                f"determined ({error}); pass the device itself"
            ) from error
        return device_at(place, self.buffer)

    @cached
    def interface(self) -> cai.InterfaceView | None:
        """The view of the object's CUDA Array Interface; `None` without an interface."""
        try:
            found = getattr(self.exporter, cai.ATTRIBUTE, None)
        except Exception:  # such as host images of nvImageCodec: use DLPack
            return None
        if found is None:
            return None
        return cai.view_of_interface(self.exporter)(self.buffer, found)

    @cached
    def exported(self) -> Any:
        """One export of the object, as a `StridedMemoryView`, without ordering a stream."""
        from cuda.core.utils import StridedMemoryView

        try:
            return StridedMemoryView.from_dlpack(self.exporter, stream_ptr=-1)
        except Exception as error:
            raise UnsupportedBufferError(
                f"__dlpack__ of this {type_name(self.buffer)} failed ({type(error).__name__}: "
                f"{error}), and nothing else says where its elements are"
            ) from error

    @cached
    def layout(self) -> Layout:
        """The layout that the interface or, without an interface, one export describes."""
        if self.interface is not None:
            return self.interface.layout
        return layout_of(self.exported, self.source)

    @cached
    def unchecked_place(self) -> Place | None:
        """The driver's information about the address, in any context."""
        return super().unchecked_place if self.interface is None else self.interface.unchecked_place

    @cached
    def place(self) -> Place:
        """The driver's information about the address, checked for use on a user stream."""
        return super().place if self.interface is None else self.interface.place

    @cached
    def device_and_memory(self) -> tuple[int | None, Memory]:
        """Device and kind of memory, including pinned memory."""
        if self.layout.address and not self.layout.is_empty:
            return self.place.device, self.place.kind
        return 0 if self.dlpack_device[0] == _CUDA_HOST else self.device, "device"

    @cached
    def producer(self) -> ProducerStream:
        """The producer: the named stream, the framework's current stream, or `export`.

        The protocol requires `export` to order the consumer's stream, but several implementations
        do not. So `export` is trusted only for types that were verified.
        """
        kind: type = type(self.exporter)
        producer = UNKNOWN
        if self.interface is not None:
            producer = self.interface.producer
            if producer.ordering != "device":
                return producer
        handle = exchanged_stream(kind, self.dlpack_device[1])
        if handle:
            return ProducerStream("current", handle)
        return ProducerStream("dlpack") if _honors(kind) else producer

    def check_context(self) -> None:
        """Query the driver for the context of the memory, if the interface has the address."""
        interface = self.interface
        if interface is not None and interface.address and not interface.layout.is_empty:
            _ = interface.place

    def export(self, handle: int) -> object:
        """Order a stream after the producer by ``__dlpack__``; the capsule keeps the memory."""
        return self.exporter.__dlpack__(stream=handle)

    @property
    def memory_owner(self) -> object:
        """The object and its export, which may be a separate copy."""
        exported = vars(self).get("exported")
        return self.buffer if exported is None else (self.buffer, exported)

    def check_copyable(self) -> None:
        """Raise for a masked array."""
        if self.interface is not None:
            self.interface.check_copyable()

    def check_target(self) -> None:
        """Raise for an object that exports a new copy each time: a write would be lost."""
        if self.interface is not None:
            return
        # Both exports stay alive while their addresses are compared.
        first, again = self.exported, type(self)(self.buffer).exported
        if not self.layout.is_empty and first.ptr != again.ptr:
            raise UnsupportedBufferError(
                f"__dlpack__ of this {type_name(self.buffer)} returns a new copy at each call; "
                "make an array of one of them, with its framework or "
                "cuda.core.utils.StridedMemoryView, and pass that"
            )

    @cached
    def is_read_only(self) -> bool:
        """True if the object declares itself read-only."""
        if self.interface is not None:
            return self.interface.is_read_only
        return bool(self.exported.readonly)

    def info(self) -> BufferInfo:
        """Return the description, without a layout if the export fails."""
        device = 0 if self.dlpack_device[0] == _CUDA_HOST else self.device
        if self.interface is None:
            try:
                _ = self.exported
            except UnsupportedBufferError:
                return BufferInfo(
                    source=self.source, device_id=device, ordering=self.producer.ordering
                )
        return super().info()


@functools.lru_cache(maxsize=256)
def _honors(kind: type) -> bool:
    """Return whether ``__dlpack__`` of a type is known to order the consumer's stream."""
    return any(is_named(kind, each.packages, each.honors_dlpack) for each in KNOWN)


# -- the C exchange table of DLPack 1.3, whose functions include one that returns a stream ---------

_EXCHANGE = "__dlpack_c_exchange_api__"  # attribute of the type: a capsule
_CAPSULE = b"dlpack_exchange_api"
_MAJOR = 1  # major version in the header of the table
_CURRENT_WORK_STREAM = 48  # offset, after the header, the older table and four functions

# PYFUNCTYPE keeps the GIL and raises the exception that the function sets.
_Function = ctypes.PYFUNCTYPE(
    ctypes.c_int, ctypes.c_int, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p)
)
# A private prototype: any code can change the types of `ctypes.pythonapi.PyCapsule_GetPointer`.
_pointer_in = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def exchanged_stream(kind: type, device: int) -> int:
    """Return the handle of the current stream of a type's framework on a device; 0 if unknown.

    0 may stand for the legacy default stream, but with tvm_ffi it means that none was set.
    """
    function = _function_of(kind)
    if function is None:
        return 0
    stream = ctypes.c_void_p()
    try:
        status = function(_CUDA, device, ctypes.byref(stream))
    except Exception:  # any error of the framework: the stream is unknown
        return 0
    return 0 if status else stream.value or 0


@functools.lru_cache(maxsize=256)
def _function_of(kind: type) -> Callable[..., int] | None:
    capsule = getattr(kind, _EXCHANGE, None)
    if capsule is None:
        return None
    try:
        table = _pointer_in(capsule, _CAPSULE)  # the table lives until the process ends
    except (TypeError, ValueError):  # another kind of capsule, from a draft of the protocol
        return None
    if ctypes.c_uint32.from_address(table).value != _MAJOR:
        return None
    address = ctypes.c_void_p.from_address(table + _CURRENT_WORK_STREAM).value
    return None if address is None else _Function(address)
