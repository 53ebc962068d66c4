"""The compiled core: sequences of driver calls as one call, and errors for its results.

`native/core.h` describes the files of the core. A result is 0, `CAPTURED`, or the index in
`FUNCTIONS` of the driver function that failed << 32 | its ``CUresult``.
"""

from __future__ import annotations

from cuda.bindings import driver

from userstream import _built, _hooks, errors

try:
    from userstream._driver import _core
except ImportError as error:
    raise ImportError(
        f"the compiled core of userstream cannot be loaded ({error}); {_built.REINSTALL}"
    ) from error

from userstream._driver._core import (
    CAPTURED,
    DUE,
    FUNCTIONS,
    FUTURE,
    HOUSEKEEPING,
    MOST_PARTS,
    PROGRAM,
    SWEEP_SECONDS,
    EventPool,
    LaneState,
    Lease,
    OrderingState,
    Ticket,
    Use,
    account_address,
    acquire,
    are_all_free,
    are_free,
    enter,
    enter_mode,
    fetch,
    finish,
    in_use,
    is_complete,
    is_in,
    is_sticky,
    leave,
    leave_mode,
    lend,
    make_pool,
    mark,
    new_ordering,
    on_account,
    order,
    orphans,
    pointer,
    query,
    queues,
    record,
    relaxed,
    release,
    set_account,
    sweep,
    use,
    wait_for,
    within,
)
from userstream._driver.status import call, failed

__all__ = [
    "CAPTURED",
    "DUE",
    "FUNCTIONS",
    "FUTURE",
    "HOUSEKEEPING",
    "MOST_PARTS",
    "PROGRAM",
    "SWEEP_SECONDS",
    "EventPool",
    "LaneState",
    "Lease",
    "OrderingState",
    "Ticket",
    "Use",
    "account_address",
    "acquire",
    "are_all_free",
    "are_free",
    "edge_failure",
    "enter",
    "enter_mode",
    "fetch",
    "finish",
    "in_use",
    "is_complete",
    "is_fetched",
    "is_in",
    "is_not_ready",
    "is_sticky",
    "leave",
    "leave_mode",
    "lend",
    "load",
    "make_pool",
    "mark",
    "new_ordering",
    "on_account",
    "order",
    "orphans",
    "pointer",
    "query",
    "queues",
    "record",
    "relaxed",
    "release",
    "result_failure",
    "set_account",
    "sweep",
    "use",
    "wait_for",
    "within",
]

_built.check(_built.CORE, _core.SOURCE)

_NOT_READY = {_core.NOT_READY | each << 32 for each in range(len(FUNCTIONS))}
_QUERY_STREAM = FUNCTIONS.index("cuStreamQuery")
_WAIT_EVENT = FUNCTIONS.index("cuStreamWaitEvent")
_OLDEST = 12000  # the CUDA version whose variants of the functions `native/core.h` declares


def load() -> None:
    """Pass the addresses of the driver's functions to the core, once the driver is loaded."""
    _core.load(*map(_address, FUNCTIONS))


def _address(function: str) -> int:
    flags = driver.CUdriverProcAddress_flags.CU_GET_PROC_ADDRESS_DEFAULT
    address, _status = call(driver.cuGetProcAddress, function.encode(), _OLDEST, flags)
    return int(address)


def _report_failure(result: int, what: str, error: BaseException | None) -> None:
    """Raise the failure to restore something, or add it as a note to the error of the call."""
    failure = result_failure(result, None)
    failure.add_note(f"so {what} could not be made current again in this thread")
    errors._report_failures([failure], error)


def is_not_ready(result: int) -> bool:
    """Return whether a result says that the GPU has not completed the work yet."""
    return result in _NOT_READY


def result_failure(result: int, stream: object) -> Exception:
    """Return the exception for a result that names a driver function and its error."""
    return failed(FUNCTIONS[result >> 32], result & 0xFFFFFFFF, stream)


def edge_failure(result: int, source: object, destination: object) -> Exception:
    """Return the exception for the result of an edge between two lanes that failed."""
    return result_failure(result, destination if result >> 32 == _WAIT_EVENT else source)


def is_fetched(result: int, lane: object, producer: object) -> bool | None:
    """Return whether the copy of `fetch` is complete, for a result that is not 0.

    `None` if nothing was queued.
    """
    if result == CAPTURED:
        return None
    if result in _NOT_READY:
        return False
    raise result_failure(result, producer if result >> 32 == _QUERY_STREAM else lane)


_core.set_failures(result_failure, _report_failure)
_core.set_edge_listeners(_hooks.edge_added)
