"""Sequences of driver calls as one call: by the compiled core, or by Python where there is none."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from cuda.bindings import driver

from userstream._driver import pure
from userstream._driver.status import NOT_READY, call, failed
from userstream._driver.streams import refuse_capturing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
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
    return _native, None


_core, why_pure = _choose()
# From, to, an event of the first's context, and the context that has to be current or 0. Without
# the compiled core nothing here makes an edge: cuda.core takes half the time of the bindings.
edge: Callable[[Any, Any, Any, Any], int] | None = getattr(_core, "edge", None)
CAPTURED = pure.CAPTURED  # what it returns if it has queued nothing, as one may be captured
# A handle as these functions take it soonest. The compiled core takes a number, which cuda.bindings
# would wrap again.
taken: Callable[[Any], Any] = (lambda handle: handle) if _core is pure else int
query: Callable[[Any], int] = _core.query  # 0 if the stream is idle; else for `stream_is_idle`
are_free = _core.are_free
is_in = _core.is_in
pointer: Callable[[int], tuple[int, ...]] = _core.pointer


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
    """Return the error for what `edge` has returned."""
    return _failed(result, destination if result >> 32 == _WAIT_EVENT else source)


MOST_PARTS = 32  # of one copy; as in `_native.c`


def fetch(  # noqa: PLR0917 -- as `edge`: names would cost as much as a call
    lane: Any,
    to: int,
    source: int,
    size: int,
    seconds: float,
    producer: Any,
    out: int,
    events: Iterable[Any],
) -> bool | None:
    """Copy to page-locked memory on a lane, and tell whether that is over within a short time.

    The copy comes after the work of `producer`, a lane of the same context, if one is given. With
    an address `out` the bytes go on to there, in parts, one for each event: the first while the GPU
    copies the next. The last event is recorded behind all of it. No signal is looked at meanwhile,
    so the time is not for a user to choose. `None` says that nothing was queued, because a stream
    is being captured or the context is not current.
    """
    result = _core.fetch(
        to,
        source,
        size,
        lane.taken or lane.live(),
        lane.home,
        int(seconds * 1_000_000_000),
        0 if producer is None else producer.taken or producer.live(),
        out,
        *events,
    )
    if not result:
        return True
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
