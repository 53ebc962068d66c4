"""Convert the results of driver functions to values or exceptions."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from cuda.bindings import driver

from userstream import errors
from userstream._driver import _core
from userstream.errors import CaptureError, DriverError, NotSupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED to _WRONG_THREAD: what they mean, and what to do. What
# userstream asks beforehand can only have changed since.
_BETWEEN = "another thread may have begun a capture in between, which may be invalid now"
CAPTURE_ERRORS = {
    900: f"a stream does not allow it while it is being captured; {_BETWEEN}",
    901: "an earlier call has invalidated the capture; end it, and capture again without that call",
    902: (
        "it would merge two captures, which are now invalid; an event of a capture can be waited "
        "for only in that capture, which a stream joins by waiting before it is captured itself"
    ),
    903: "it joined the capture of another stream; end that one",
    904: (
        "other streams that joined it were not joined back; make this stream wait() for them "
        "before the end"
    ),
    905: (
        "a captured stream cannot depend on work outside of its capture, which is invalid now; "
        "record the event inside the capture, or let the graph wait: wait_event(event, flags=1)"
    ),
    906: (
        "the legacy default stream can take no part in a capture, which may be invalid now; use a "
        f"stream of Stream.create(). Or {_BETWEEN}"
    ),
    907: (
        "the event was last recorded in a capture, and what is captured never runs; wait for the "
        f"stream on which the graph is launched. Or {_BETWEEN}"
    ),
    908: "another thread began the capture, and has to end it",
}

# The CUDA version of the drivers that first had a function, where ours may lack it.
_SINCE = {
    "cuStreamBeginCaptureToGraph": "12.3",
    "cuStreamGetCaptureInfo": "12.3",
    "cuCtxRecordEvent": "12.5",
    "cuCtxWaitEvent": "12.5",
}

_STAYS = "; earlier work may have caused it, and the context does not recover: start a new process"

SUCCESS = driver.CUresult.CUDA_SUCCESS
NOT_READY = driver.CUresult.CUDA_ERROR_NOT_READY


def failed(
    function: str, status: driver.CUresult | int, stream: object = None
) -> DriverError | CaptureError:
    """Return the error for a status that is not success."""
    code = int(status)
    try:
        name = driver.CUresult(code).name
    except ValueError:  # newer than the bindings
        name = str(code)
    where = "" if stream is None else f" on {stream!r}"
    if code in CAPTURE_ERRORS:
        return CaptureError(
            f"{function}{where} failed with {name} ({code}): {CAPTURE_ERRORS[code]}",
            stream=None if stream is None else repr(stream),
        )
    device = getattr(stream, "device", None)  # of a lane, or of the work on a device
    device = getattr(device, "device_id", device)  # of a stream of cuda.core
    return DriverError(
        f"{function}{where} failed with {name} ({code}){uuids([device])}"
        f"{_STAYS + _details(code) if _core.is_sticky(code) else ''}",
        function=function,
        code=code,
        name=name,
        stream=None if stream is None else repr(stream),
        device=device,
    )


def _details(code: int) -> str:
    """Return the driver's error text after its first line: the traceback of a simulated kernel."""
    text = driver.cuGetErrorString(driver.CUresult(code))[1] or b""
    return "".join(text.decode(errors="replace").partition("\n")[1:])


def ended_context(error: Exception) -> bool:
    """Return whether an error is one from which a context does not recover.

    Any other may be of the question alone (out of memory, say): the work continues.
    """
    return isinstance(error, DriverError) and error.code is not None and _core.is_sticky(error.code)


def uuids(devices: Iterable[int | None]) -> str:
    """Return the end of a message with the UUIDs of devices, which all processes share."""
    named = {device: errors._uuid_of(device) for device in devices if device is not None}
    return "".join(f"; device {device} is {uuid}" for device, uuid in named.items() if uuid)


def raised(function: str, error: Exception) -> Exception:
    """Convert an exception that cuda-bindings raised inside a call to one of userstream."""
    # A RuntimeError with this text in cuda-bindings 12.9, and of a class of its own later.
    if re.match(r'[Ff]unction "?\w+"? (is )?not found', str(error)):
        since = f" of CUDA {_SINCE[function]} or newer" if function in _SINCE else ""
        return NotSupportedError(
            f"{function} is not in the installed driver; install a newer NVIDIA driver{since}",
            function=function,
        )
    # A CUresult that is newer than the bindings fails in its conversion to the enum.
    newer = re.search(r"(\d+) is not a valid CUresult", str(error))
    if newer:
        return failed(function, int(newer[1]))
    return error


def ask(function: Callable[..., tuple[Any, ...]], *args: object) -> tuple[Any, ...]:
    """Call a driver function; return its status and its values without raising for the status."""
    try:
        return function(*args)
    except (RuntimeError, ValueError) as error:
        raise raised(function.__name__, error) from error


def call(function: Callable[..., tuple[Any, ...]], *args: object, stream: object = None) -> Any:
    """Call a driver function and return its one value, its values, or `None`."""
    try:
        answer = function(*args)  # not by `ask`, which would cost as much as some driver calls
    except (RuntimeError, ValueError) as error:
        raise raised(function.__name__, error) from error
    if answer[0] != SUCCESS:
        raise failed(function.__name__, answer[0], stream)
    if len(answer) == 2:
        return answer[1]
    return list(answer[1:]) or None


def make(
    made: list[tuple[Any, ...]], function: Callable[..., tuple[Any, ...]], *args: object
) -> Any:
    """Call a driver function that creates an object, and append its result to `made`.

    C code calls the driver and the list, so no signal handler runs between the two: the caller of
    `make` can always free the objects in `made`. An object that was not created is not in `made`.
    """
    try:
        made.extend(map(function, *([argument] for argument in args)))
    except (RuntimeError, ValueError) as error:
        raise raised(function.__name__, error) from error
    status, value = made[-1]
    if status != SUCCESS:
        del made[-1]
        raise failed(function.__name__, status)
    return value
