"""Sequences of driver calls as one call: by the compiled core, or by Python where there is none."""

from __future__ import annotations

import os
import zlib
from typing import TYPE_CHECKING, Any

from cuda.bindings import driver

from userstream._driver import pure
from userstream._driver.status import NOT_READY, call, failed
from userstream._driver.streams import refuse_capturing

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


_NOT_READY = {int(NOT_READY) | each << 32 for each in range(len(pure.FUNCTIONS))}
_QUERY_STREAM = pure.FUNCTIONS.index("cuStreamQuery")
_WAIT_EVENT = pure.FUNCTIONS.index("cuStreamWaitEvent")
_OLDEST = 12000  # the CUDA version whose variants of the functions `_native.c` calls


def _choose() -> tuple[ModuleType, str | None]:
    """Return the module that has the functions, and why that is not the compiled one."""
    if os.environ.get("USERSTREAM_PURE", "0") not in ("", "0"):
        return pure, "USERSTREAM_PURE is set"
    try:
        import userstream._driver._native as _native  # noqa: PLR0402 -- says that it is missing
    except ModuleNotFoundError:
        return pure, "it was not compiled when userstream was installed"
    except ImportError as error:
        return pure, f"it cannot be loaded: {error}"
    if _is_stale(_native):
        return pure, "it was compiled from another source than that beside it: install again"
    return _native, None


def _is_stale(native: Any) -> bool:
    """Tell whether a checkout has changed since: the functions may take other arguments by now."""
    try:
        with open(os.path.join(os.path.dirname(native.__file__), "_native.c"), "rb") as source:
            return bool(f"{zlib.crc32(source.read()):08x}" != native.SOURCE)
    except OSError:  # installed without it
        return False


_core, why_pure = _choose()
native: Any = None if _core is pure else _core  # what has the functions on lanes as well
CAPTURED = pure.CAPTURED  # if nothing was queued, as a stream may be captured
# A handle as these functions take it soonest. The compiled core takes a number, which cuda.bindings
# would wrap again.
raw_handle: Callable[[Any], Any] = (lambda handle: handle) if _core is pure else int
query: Callable[[Any], int] = _core.query  # 0 if a stream is idle; else for `stream_is_idle`
are_free = _core.are_free
is_in = _core.is_in
pointer: Callable[[int], tuple[int, ...]] = _core.pointer
lend: Callable[[dict[int, object], int], pure.Lease | None] = _core.lend
# Copies to page-locked memory, and waits for that a short time: see pure.py. 0 if it is there.
fetch: Callable[..., int] = _core.fetch  # else for `is_fetched`
MOST_PARTS = 32  # of one copy by that; as in `_native.c`


def load() -> None:
    """Give the compiled core the driver's functions, once the driver is there."""
    if _core is not pure:
        _core.load(*map(_address, pure.FUNCTIONS))


def stream_is_idle(handle: Any, stream: object, result: int | None = None) -> bool:
    """Ask whether all the work queued on a stream is done, without harm to any capture.

    `result` is what `query` has answered, if it was asked already.

    Raises
    ------
    CaptureError
        The stream is being captured, and the query would invalidate that capture.
    """
    if result is None:
        result = query(handle)
    while result == pure.CAPTURED:
        refuse_capturing(handle, stream)  # which returns only if the capture has ended meanwhile
        result = query(handle)
    if not result:
        return True
    if result in _NOT_READY:
        return False
    raise _failed(result, stream)


def edge_failure(result: int, source: object, destination: object) -> Exception:
    """Return the error for what made no edge between two lanes."""
    return _failed(result, destination if result >> 32 == _WAIT_EVENT else source)


def is_fetched(result: int, lane: object, producer: object) -> bool | None:
    """Tell what `fetch` has answered, if not 0.

    False if the copy is not over yet, and `None` if nothing was queued.
    """
    if result == pure.CAPTURED:
        return None
    if result in _NOT_READY:
        return False
    raise _failed(result, producer if result >> 32 == _QUERY_STREAM else lane)


def _failed(result: int, stream: object) -> Exception:
    return failed(pure.FUNCTIONS[result >> 32], result & 0xFFFFFFFF, stream)


def _address(function: str) -> int:
    flags = driver.CUdriverProcAddress_flags.CU_GET_PROC_ADDRESS_DEFAULT
    address, _status = call(driver.cuGetProcAddress, function.encode(), _OLDEST, flags)
    return int(address)
