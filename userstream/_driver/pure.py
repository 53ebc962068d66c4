"""Sequences of driver calls in Python: the reference for `_native.c`, and what stands in for it.

A handle is one of cuda.bindings, or its number. A result is 0, or the index in `FUNCTIONS` of the
function that failed << 32 | its ``CUresult``, or `CAPTURED`. What cuda.bindings raises itself (for
a function that the driver lacks, or a result that it does not know) is raised here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cuda.bindings import driver

from userstream._driver.status import SUCCESS, ask, raised
from userstream._driver.streams import NOT_CAPTURING, relaxed
from userstream.errors import UserStreamError

if TYPE_CHECKING:
    from collections.abc import Callable

FUNCTIONS = (
    "cuThreadExchangeStreamCaptureMode",
    "cuStreamIsCapturing",
    "cuStreamQuery",
    "cuEventQuery",
    "cuEventRecord",
    "cuStreamWaitEvent",
    "cuCtxGetCurrent",
    "cuMemcpyAsync",
)
CAPTURED = -1

_FREE = (SUCCESS, NOT_CAPTURING)
_QUERY_STREAM = FUNCTIONS.index("cuStreamQuery") << 32
_QUERY_EVENT = FUNCTIONS.index("cuEventQuery") << 32
_RECORD_EVENT = FUNCTIONS.index("cuEventRecord") << 32
_WAIT_EVENT = FUNCTIONS.index("cuStreamWaitEvent") << 32
_COPY = FUNCTIONS.index("cuMemcpyAsync") << 32


def are_free(first: Any, second: Any) -> bool:
    """Tell whether neither of two streams is being captured; `False` also if one cannot tell."""
    try:
        return bool(
            driver.cuStreamIsCapturing(first) == _FREE
            and driver.cuStreamIsCapturing(second) == _FREE
        )
    except (RuntimeError, ValueError):
        return False


def query(stream: Any) -> int:
    """Query a stream unless it is being captured, and leave the captures of other threads alone."""
    # Not by `are_free`: each call of a function counts in a wait that is over.
    try:
        free = driver.cuStreamIsCapturing(stream) == _FREE
    except (RuntimeError, ValueError):
        free = False
    if not free:
        return CAPTURED
    try:
        (status,) = relaxed(driver.cuStreamQuery, stream)
    except UserStreamError:
        raise
    except (RuntimeError, ValueError) as error:
        raise raised("cuStreamQuery", error) from error
    return 0 if status == SUCCESS else _QUERY_STREAM | int(status)


def poll(event: Any) -> int:
    """Query an event, and leave the captures of other threads alone."""
    return relaxed(_result, _QUERY_EVENT, driver.cuEventQuery, event)


def edge(source: Any, destination: Any, event: Any) -> int:
    """Order one stream after another by an event, unless one of them is being captured."""
    if not are_free(source, destination):
        return CAPTURED
    return _result(_RECORD_EVENT, driver.cuEventRecord, event, source) or _result(
        _WAIT_EVENT, driver.cuStreamWaitEvent, destination, event, 0
    )


def fetch(  # noqa: PLR0917 -- as `_native.fetch`, to which a name would cost as much as a value
    to: int, source: int, size: int, stream: Any, event: Any, context: Any, _nanoseconds: int, /
) -> int:
    """Copy to page-locked memory, and ask whether the event that is recorded behind is reached.

    `CAPTURED` if nothing was queued, as the stream is captured or the context is not current. The
    compiled one asks again, up to so many nanoseconds.
    """
    try:
        here = int(driver.cuCtxGetCurrent()[1] or 0) == int(context)
    except (RuntimeError, ValueError):
        here = False
    if not here or not are_free(stream, stream):
        return CAPTURED
    return (
        _result(_COPY, driver.cuMemcpyAsync, to, source, size, stream)
        or _result(_RECORD_EVENT, driver.cuEventRecord, event, stream)
        or poll(event)
    )


def _result(which: int, function: Callable[..., tuple[Any, ...]], *handles: Any) -> int:
    (status,) = ask(function, *handles)
    return 0 if status == SUCCESS else which | int(status)
