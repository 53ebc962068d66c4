"""The C exchange table of DLPack 1.3, whose functions include one that returns a stream."""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

ATTRIBUTE = "__dlpack_c_exchange_api__"  # attribute of the type: a capsule
_CAPSULE = b"dlpack_exchange_api"
_MAJOR = 1  # major version in the header of the table
_CURRENT_WORK_STREAM = 48  # offset, after the header, the older table and four functions
_CUDA = 2  # DLDeviceType

# PYFUNCTYPE keeps the GIL and raises the exception that the function sets.
_Function = ctypes.PYFUNCTYPE(
    ctypes.c_int, ctypes.c_int, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p)
)
# A private prototype: any code can change the types of `ctypes.pythonapi.PyCapsule_GetPointer`.
_pointer_in = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def current_stream(kind: type, device: int) -> int:
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
    capsule = getattr(kind, ATTRIBUTE, None)
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
