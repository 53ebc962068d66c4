"""The table of C functions of a type since DLPack 1.3, one of which returns a stream."""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

ATTRIBUTE = "__dlpack_c_exchange_api__"  # of the type, a capsule
_CAPSULE = b"dlpack_exchange_api"
_MAJOR = 1  # of the version that the table begins with
_CURRENT_WORK_STREAM = 48  # behind the version, a pointer to an older table, and four functions
_CUDA = 2  # DLDeviceType

# With the GIL, and an exception that it leaves is raised.
_Function = ctypes.PYFUNCTYPE(
    ctypes.c_int, ctypes.c_int, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p)
)
# Of our own: the types of `ctypes.pythonapi.PyCapsule_GetPointer` can be set by anyone.
_pointer_in = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def current_stream(kind: type, device: int) -> int:
    """Return the handle of the stream on which a type's framework works on a device; 0 if unknown.

    0 may stand for the legacy default stream, but with tvm_ffi it means that none was set.
    """
    function = _function_of(kind)
    if function is None:
        return 0
    stream = ctypes.c_void_p()
    try:
        status = function(_CUDA, device, ctypes.byref(stream))
    except Exception:  # of the framework: it does not tell
        return 0
    return 0 if status else stream.value or 0


@functools.lru_cache(maxsize=256)
def _function_of(kind: type) -> Callable[..., int] | None:
    capsule = getattr(kind, ATTRIBUTE, None)
    if capsule is None:
        return None
    try:
        table = _pointer_in(capsule, _CAPSULE)  # which lives as long as the process
    except (TypeError, ValueError):  # no such capsule, as of drafts of the protocol
        return None
    if ctypes.c_uint32.from_address(table).value != _MAJOR:
        return None
    address = ctypes.c_void_p.from_address(table + _CURRENT_WORK_STREAM).value
    return None if address is None else _Function(address)
