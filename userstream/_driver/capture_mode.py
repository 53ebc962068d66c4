"""The capture mode of the calling thread, by a call that no signal comes into.

cuda.bindings runs code of Python's when the driver has answered, to make an enum of the answer. A
Ctrl-C there loses the mode that the thread had, which cannot be queried. So the driver is called
by its address, and writes that mode to memory itself.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from cuda.bindings import driver

from userstream._driver import restoring
from userstream._driver.status import call
from userstream.errors import NotSupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

NAME = "cuThreadExchangeStreamCaptureMode"

_VERSION = 12000  # of CUDA, whose variant this is
_FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)

# Takes a reference to a c_int, the mode; returns the status. None until `find`.
exchange: Callable[[object], int] | None = None


def find() -> Callable[[object], int]:
    """Return `exchange`, from now on in its place."""
    global exchange  # noqa: PLW0603 -- the driver is one per process
    flags = driver.CUdriverProcAddress_flags.CU_GET_PROC_ADDRESS_DEFAULT
    address, _status = call(driver.cuGetProcAddress, NAME.encode(), _VERSION, flags)
    if not int(address):
        raise NotSupportedError(f"{NAME} is not in the installed driver", function=NAME)
    exchange = _FUNCTION(int(address))
    return exchange


def restore_again(mode: ctypes.c_int) -> None:
    """Set a mode back where the first attempt has failed."""
    again = exchange or find()

    def attempt(_before: object) -> tuple[int]:
        return (again(ctypes.byref(mode)),)

    attempt.__name__ = NAME
    restoring.restore_again(attempt, driver.CUstreamCaptureMode(mode.value), (999,), level=2)
