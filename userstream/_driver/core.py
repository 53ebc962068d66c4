"""From what cuda.core raises to an exception of ours."""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cuda.bindings import driver

from userstream._driver import account
from userstream._driver.fused import stream_is_idle
from userstream._driver.status import failed
from userstream.errors import CaptureError, DriverError

if TYPE_CHECKING:
    from collections.abc import Iterator


def core_failure(function: str, error: Exception, stream: object = None) -> Exception:
    """Return the error for what cuda.core raised for a driver call of its own."""
    # Its CUDAError is not public before 1.3; the code is in the text alone.
    if type(error).__name__ != "CUDAError" and type(error) is not RuntimeError:
        return error
    unknown = re.search(r"UNEXPECTED ERROR CODE: (\d+)", str(error))
    if unknown:
        return failed(function, int(unknown[1]), stream)
    name = re.match(r"CUDA_ERROR_\w+", str(error))
    if name:
        return failed(function, getattr(driver.CUresult, name[0]), stream)
    # Where it cannot make something it drops the code, which an error of the GPU stays with.
    return _fault_of(stream) or DriverError(f"{function} failed: {error}", function=function)


def _fault_of(stream: object) -> DriverError | None:
    """Return the GPU error that a stream reports, if there is one; breaks no capture."""
    handle = getattr(stream, "handle", None)
    if handle is None:
        return None
    try:
        account.on(account.HOUSEKEEPING, stream_is_idle, handle, stream)
    except CaptureError:  # it may not be asked
        return None
    except DriverError as fault:
        return fault
    return None


@contextmanager
def core_errors(function: str, stream: object = None) -> Iterator[None]:
    """Turn what cuda.core raises into an exception of ours (see `core_failure`)."""
    try:
        yield
    except Exception as error:
        failure = core_failure(function, error, stream)
        if failure is error:
            raise
        raise failure from error
