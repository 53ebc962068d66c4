"""Native functions that a stream calls.

``cuLaunchHostFunc`` is called by its address: cuda-bindings 12.9 would wrap the function in one
that takes the GIL, on a thread of the driver's.
"""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING

from cuda.bindings import driver

from userstream._driver.status import call, failed

if TYPE_CHECKING:
    from collections.abc import Callable

_FUNCTION = "cuLaunchHostFunc"
_INTRODUCED = 10000  # the CUDA version, which selects the signature


@functools.cache
def _function() -> Callable[..., int]:
    address, _found = call(driver.cuGetProcAddress, _FUNCTION.encode(), _INTRODUCED, 0)
    pointer = ctypes.c_void_p
    return ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer, pointer)(int(address))


def call_native(
    handle: driver.CUstream, function: int | None, argument: int, stream: object
) -> None:
    """Let a stream call ``function(argument)``, by address, when it gets there."""
    status = _function()(int(handle), function, argument)
    if status:
        raise failed(_FUNCTION, status, stream)
