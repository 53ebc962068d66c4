"""Streams, and the queries of them that leave all graph captures alone."""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from cuda.bindings import driver

from userstream._driver import account, core
from userstream._driver.status import SUCCESS, call, failed, raised
from userstream.errors import CaptureError, DriverError

if TYPE_CHECKING:
    from collections.abc import Iterator

# Two handles that name no stream but "the default stream of the current context".
LEGACY = 1
PER_THREAD = 2

CAPTURE_IMPLICIT = driver.CUresult.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
NOT_CAPTURING = driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
_FREE = (SUCCESS, NOT_CAPTURING)
_INVALID_HANDLE = int(driver.CUresult.CUDA_ERROR_INVALID_HANDLE)
_RELAXED = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED


# Call `relaxed(function, *args)`: the driver calls of the function leave the captures of other
# threads alone. See `native/calls.c`.
relaxed = core.relaxed


def relax_capture_of_this_thread() -> None:
    """As `relaxed`, for a thread of ours and for good."""
    call(driver.cuThreadExchangeStreamCaptureMode, _RELAXED)


def capture_status(handle: driver.CUstream, stream: object) -> driver.CUstreamCaptureStatus:
    """Tell whether a stream is being captured, which harms no capture.

    Raises
    ------
    CaptureError
        It is a legacy default stream, and using it would break a capture.
    """
    try:
        answer = driver.cuStreamIsCapturing(handle)
    except (RuntimeError, ValueError) as error:
        raise raised("cuStreamIsCapturing", error) from error
    if answer == _FREE:  # nearly always
        return NOT_CAPTURING
    status, capture = answer
    if status == SUCCESS:
        return capture
    if status == CAPTURE_IMPLICIT:
        raise CaptureError(
            f"{stream!r} cannot be used now: a blocking stream of its context is being captured, "
            "and the legacy default stream would invalidate that capture",
            stream=repr(stream),
        )
    raise failed("cuStreamIsCapturing", status, stream)


_NEVER_RUNS = (
    " into a graph, and work that is captured never runs: wait for the stream on which the graph "
    "is launched"
)


def refuse_capturing(handle: driver.CUstream, stream: object, why: str = _NEVER_RUNS) -> None:
    """Raise `CaptureError` if this stream is part of a capture, or its use would break one.

    `why` continues the message after "is being captured".
    """
    if capture_status(handle, stream) != NOT_CAPTURING:
        raise CaptureError(f"{stream!r} is being captured{why}", stream=repr(stream))


def stream_is_idle(handle: Any, stream: object, result: int | None = None) -> bool:
    """Return whether all the work queued on a stream is done, without harm to any capture.

    `result` is the result of `core.query`, if it was called already.

    Raises
    ------
    CaptureError
        The stream is being captured, and the query would invalidate that capture.
    """
    if result is None:
        result = core.query(handle)
    while result == core.CAPTURED:
        refuse_capturing(handle, stream)  # returns only if the capture has ended meanwhile
        result = core.query(handle)
    if not result:
        return True
    if core.is_not_ready(result):
        return False
    raise core.result_failure(result, stream)


def cuda_core_failure(function: str, error: Exception, stream: object = None) -> Exception:
    """Return the exception for an error that cuda.core raised for a driver call of its own."""
    # CUDAError is not public before cuda.core 1.3, and the code is only in the text.
    if type(error).__name__ != "CUDAError" and type(error) is not RuntimeError:
        return error
    unknown = re.search(r"UNEXPECTED ERROR CODE: (\d+)", str(error))
    if unknown:
        return failed(function, int(unknown[1]), stream)
    name = re.match(r"CUDA_ERROR_\w+", str(error))
    if name:
        return failed(function, getattr(driver.CUresult, name[0]), stream)
    # Where cuda.core cannot create an object it drops the code; an error of the GPU persists.
    return _gpu_error(stream) or DriverError(f"{function} failed: {error}", function=function)


def _gpu_error(stream: object) -> DriverError | None:
    """Return the GPU error that a stream reports, if there is one; breaks no capture."""
    handle = getattr(stream, "handle", None)
    if handle is None:
        return None
    try:
        account.on(account.HOUSEKEEPING, stream_is_idle, handle, stream)
    except CaptureError:  # a captured stream cannot be queried
        return None
    except DriverError as error:
        return error
    return None


@contextmanager
def cuda_core_errors(function: str, stream: object = None) -> Iterator[None]:
    """Convert the errors that cuda.core raises in a block (see `cuda_core_failure`)."""
    try:
        yield
    except Exception as error:
        failure = cuda_core_failure(function, error, stream)
        if failure is error:
            raise
        raise failure from error


def stream_context(handle: driver.CUstream) -> driver.CUcontext:
    """Return the context that a stream belongs to."""
    try:
        values = call(driver.cuStreamGetCtx, handle)
    except DriverError as error:
        if error.code == _INVALID_HANDLE:
            error.add_note(
                f"no stream has the handle {int(handle):#x}; keep a stream as long as a buffer "
                "names it"
            )
        raise
    # cuda-bindings 13 returns a green context beside it.
    return values[0] if isinstance(values, list) else values


def stream_id(handle: driver.CUstream, stream: object) -> int:
    """Return the driver's identifier of a stream, which is never used again."""
    return int(call(driver.cuStreamGetId, handle, stream=stream))


def stream_flags(handle: driver.CUstream, stream: object) -> int:
    """Return the flags that a stream was created with."""
    return int(call(driver.cuStreamGetFlags, handle, stream=stream))
