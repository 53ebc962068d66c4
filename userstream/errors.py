"""The exceptions of userstream.

.. code-block:: text

    UserStreamError
    ├── DriverError               (RuntimeError)   a driver call, or work on the GPU, failed
    ├── DriverNotFoundError       (RuntimeError)   no usable NVIDIA driver or device
    ├── NotSupportedError         (RuntimeError)   the driver or the device lacks a feature
    ├── ForkedError               (RuntimeError)   CUDA was used before os.fork()
    ├── CaptureError              (RuntimeError)   the call would break a graph capture
    ├── ClosedError               (RuntimeError)   the stream or the registry is closed
    ├── UnsupportedBufferError    (TypeError)      not a buffer that userstream recognizes
    │   └── HostBufferError       (TypeError)      the buffer is in host memory
    ├── UnsupportedStreamError    (TypeError)      not a stream
    ├── DeviceMismatchError       (ValueError)     buffers on several devices, one expected
    ├── InvalidDeviceError        (ValueError)     no such device
    ├── UnknownProducerError      (ValueError)     the stream that wrote the buffer is unknown
    ├── NoUserStreamError         (LookupError)    the device has no user stream
    ├── RaceError                 (AssertionError) `observe` found a race
    ├── StallError                (AssertionError) the host waited in a block of `no_stalls`
    ├── WaitTimeout               (TimeoutError)   work not done in time; nothing is cancelled
    └── WaitErrors                (ExceptionGroup) some of several streams failed

All of them can be pickled and carry their facts as attributes; a fact that is not known is `None`.
Devices are given by ordinal, which depends on what the process sees, and by UUID, which does not.

Examples
--------
>>> import userstream as us
>>> try:
...     us.get_stream("tensor")
... except us.UserStreamError as error:
...     print(type(error).__name__)
UnsupportedBufferError
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "CaptureError",
    "ClosedError",
    "DeviceMismatchError",
    "DriverError",
    "DriverNotFoundError",
    "ForkedError",
    "HostBufferError",
    "InvalidDeviceError",
    "NoUserStreamError",
    "NotSupportedError",
    "RaceError",
    "StallError",
    "UnknownProducerError",
    "UnsupportedBufferError",
    "UnsupportedStreamError",
    "UserStreamError",
    "WaitErrors",
    "WaitTimeout",
]


# The driver layer adds its function here: importing that layer would be a circular import.
_uuid_sources: list[Callable[[int], str | None]] = []


def _uuid_of(device: int) -> str | None:
    for source in _uuid_sources:
        return source(device)
    return None


class UserStreamError(Exception):
    """Base class of the exceptions that userstream defines.

    Parameters
    ----------
    message : str
        What was passed, what is wrong with it, and what to do.
    device : int, optional
        Ordinal of the device involved.
    stream : str, optional
        ``repr`` of the stream involved.

    Attributes
    ----------
    device_uuid : str or None
        UUID of that device, as shown by ``nvidia-smi -L``.

    Examples
    --------
    >>> import userstream as us
    >>> try:
    ...     us.get_stream(99)
    ... except us.UserStreamError as error:
    ...     print(type(error).__name__, error.device)
    InvalidDeviceError 99
    """

    def __init__(
        self, message: str = "", *, device: int | None = None, stream: str | None = None
    ) -> None:
        super().__init__(message)
        self.device = device
        self.device_uuid: str | None = None if device is None else _uuid_of(device)
        self.stream = stream


class DriverError(UserStreamError, RuntimeError):
    """A CUDA driver call, or work that was queued on the GPU, failed.

    Errors of the GPU itself, such as ``CUDA_ERROR_ILLEGAL_ADDRESS``, are sticky: every later call
    in that context reports the same error, and only a new process recovers.

    Parameters
    ----------
    message : str
        What happened.
    function : str, optional
        The driver function that reported the error.
    code : int, optional
        The numeric value of the ``CUresult``.
    name : str, optional
        The name of the ``CUresult``; its number as text if cuda-bindings does not know the code.
    device : int, optional
        Ordinal of the device involved.
    stream : str, optional
        ``repr`` of the stream involved.

    Examples
    --------
    >>> import userstream as us
    >>> try:
    ...     us.wait_for_device(0)
    ... except us.DriverError as error:  # the GPU failed
    ...     print(error.function, error.name)
    """

    def __init__(
        self,
        message: str = "",
        *,
        function: str | None = None,
        code: int | None = None,
        name: str | None = None,
        device: int | None = None,
        stream: str | None = None,
    ) -> None:
        super().__init__(message, device=device, stream=stream)
        self.function = function
        self.code = code
        self.name = name


class DriverNotFoundError(UserStreamError, RuntimeError):
    """The machine has no usable NVIDIA driver, or the driver sees no device.

    Examples
    --------
    >>> import userstream as us
    >>> try:
    ...     stream = us.get_stream()
    ... except us.DriverNotFoundError:
    ...     stream = None  # no GPU: work on the host
    """


class NotSupportedError(UserStreamError, RuntimeError):
    """The driver, cuda-bindings or the device does not support the operation.

    Parameters
    ----------
    message : str
        What is missing, and which version or device provides it.
    function : str, optional
        The driver function that is missing.
    device : int, optional
        Ordinal of the device involved.
    stream : str, optional
        ``repr`` of the stream involved.

    Examples
    --------
    >>> import userstream as us
    >>> stream = us.get_stream(0)
    >>> try:
    ...     stream.batch_mem_op([us.MemoryBarrier()])
    ... except us.NotSupportedError:
    ...     pass  # fall back
    """

    def __init__(
        self,
        message: str = "",
        *,
        function: str | None = None,
        device: int | None = None,
        stream: str | None = None,
    ) -> None:
        super().__init__(message, device=device, stream=stream)
        self.function = function


class ForkedError(UserStreamError, RuntimeError):
    """The process was forked after CUDA was used, so CUDA is unusable in the child.

    Start workers with the ``"spawn"`` or ``"forkserver"`` method of `multiprocessing` instead.

    Examples
    --------
    >>> import multiprocessing
    >>> workers = multiprocessing.get_context("spawn")  # and workers.Process, workers.Pool
    """


class CaptureError(UserStreamError, RuntimeError):
    """The call would invalidate a CUDA graph capture, or cannot be captured.

    Raised before the driver is called, so the capture continues. The exceptions are calls that name
    an event: only the driver knows where it was recorded, and invalidates the capture.

    Examples
    --------
    >>> import userstream as us
    >>> stream = us.Stream.create(0)
    >>> with stream.capture():
    ...     stream.sync()
    Traceback (most recent call last):
        ...
    userstream.CaptureError: ...
    """


class ClosedError(UserStreamError, RuntimeError):
    """The stream or the registry has been closed.

    Examples
    --------
    >>> import userstream as us
    >>> stream = us.Stream.create(0)
    >>> stream.close()
    >>> stream.sync()
    Traceback (most recent call last):
        ...
    userstream.ClosedError: ...
    """


class UnsupportedBufferError(UserStreamError, TypeError):
    """The object is not a GPU buffer, or not of a kind that userstream recognizes.

    Examples
    --------
    >>> import userstream as us
    >>> us.get_stream("tensor")
    Traceback (most recent call last):
        ...
    userstream.UnsupportedBufferError: 'tensor' names no device: pass a GPU buffer, ...
    """


class HostBufferError(UnsupportedBufferError):
    """The buffer is in host memory (pageable or pinned), so it belongs to no device.

    Examples
    --------
    >>> import numpy as np
    >>> import userstream as us
    >>> us.get_stream(np.zeros(4))
    Traceback (most recent call last):
        ...
    userstream.HostBufferError: this numpy.ndarray is in host memory, ...
    """


class UnsupportedStreamError(UserStreamError, TypeError, ValueError):
    """The object is not a stream: neither a `Stream` nor an object with ``__cuda_stream__``.

    A `TypeError`, and a `ValueError` as well because `cuda.core.Stream.wait` raises that.

    Examples
    --------
    >>> import userstream as us
    >>> us.hold("anything", stream=1)
    Traceback (most recent call last):
        ...
    userstream.UnsupportedStreamError: ...the number 1 is not a stream: pass ...
    """


class DeviceMismatchError(UserStreamError, ValueError):
    """The target spans several devices where a single device is required.

    Parameters
    ----------
    message : str
        Which devices the target spans.
    devices : sequence of int
        The ordinals of these devices.
    device : int, optional
        Ordinal of the device involved.
    stream : str, optional
        ``repr`` of the stream involved.

    Attributes
    ----------
    device_uuids : tuple of (str or None)
        The UUID of each of ``devices``.

    Examples
    --------
    >>> import userstream as us
    >>> from cuda.core import Device
    >>> Device(0).set_current()
    >>> buffers = [Device(0).allocate(1024, stream=us.get_stream(0))]
    >>> try:
    ...     streams = [us.get_stream(buffers)]
    ... except us.DeviceMismatchError as error:  # buffers of several devices
    ...     streams = [us.get_stream(device) for device in error.devices]
    """

    def __init__(
        self,
        message: str = "",
        *,
        devices: Sequence[int] = (),
        device: int | None = None,
        stream: str | None = None,
    ) -> None:
        super().__init__(message, device=device, stream=stream)
        self.devices: tuple[int, ...] = tuple(devices)
        self.device_uuids: tuple[str | None, ...] = tuple(map(_uuid_of, self.devices))


class InvalidDeviceError(UserStreamError, ValueError):
    """The process sees no CUDA device with the given ordinal.

    Examples
    --------
    >>> import userstream as us
    >>> us.get_stream(99)
    Traceback (most recent call last):
        ...
    userstream.InvalidDeviceError: there is no CUDA device 99: ...
    """


class UnknownProducerError(UserStreamError, ValueError):
    """The producer of a buffer is unknown; pass ``producer=``.

    Raised if such buffers are not ordered with everything on their device: because
    `UserStream.unknown` is ``"raise"``, or because the driver is older than CUDA 12.5.

    Examples
    --------
    >>> import userstream as us
    >>> from cuda.bindings import driver
    >>> from cuda.core import Device
    >>> Device(0).set_current()
    >>> buffer = Device(0).allocate(1024, stream=us.get_stream(0))
    >>> strict = us.UserStream(unknown="raise")
    >>> strict.acquire(driver.CUdeviceptr(int(buffer.handle)))
    Traceback (most recent call last):
        ...
    userstream.UnknownProducerError: ...
    """


class NoUserStreamError(UserStreamError, LookupError):
    """The device has no user stream (of that name), so there is nothing to wait for.

    DALI's equivalent is "Can only wait on user streams".

    Examples
    --------
    >>> import userstream as us
    >>> us.wait(0, name="nobody made this one")
    Traceback (most recent call last):
        ...
    userstream.NoUserStreamError: device 0 has no user stream named 'nobody made this one': ...
    """


class WaitTimeout(UserStreamError, TimeoutError):
    """The work did not finish in time. Nothing is cancelled; the wait can be repeated.

    Parameters
    ----------
    message : str
        What was waited for.
    seconds : float, optional
        The timeout that was passed.
    devices : sequence of int
        The devices whose work had not finished.
    streams : sequence of str
        The ``repr`` of each stream that had not finished.

    Attributes
    ----------
    device_uuids : tuple of (str or None)
        The UUID of each of ``devices``.

    Examples
    --------
    >>> import userstream as us
    >>> from userstream.testing import latch
    >>> with latch(us.get_stream(0)):
    ...     try:
    ...         us.wait(0, timeout=0.01)
    ...     except us.WaitTimeout as error:
    ...         print(error.seconds, error.devices)
    0.01 (0,)
    """

    def __init__(
        self,
        message: str = "",
        *,
        seconds: float | None = None,
        devices: Sequence[int] = (),
        streams: Sequence[str] = (),
    ) -> None:
        super().__init__(
            message,
            device=devices[0] if len(devices) == 1 else None,
            stream=streams[0] if len(streams) == 1 else None,
        )
        self.seconds = seconds
        self.devices: tuple[int, ...] = tuple(devices)
        self.device_uuids: tuple[str | None, ...] = tuple(map(_uuid_of, self.devices))
        self.streams: tuple[str, ...] = tuple(streams)


class RaceError(UserStreamError, AssertionError):
    """An observation found races: `Observation.check` raises it, with the report as its message.

    Parameters
    ----------
    message : str
        The report.
    races : sequence of str, optional
        The line by which each race is suppressed.
    device : int, optional
        Ordinal of the device involved.
    stream : str, optional
        ``repr`` of the stream involved.

    Examples
    --------
    >>> import userstream as us
    >>> with us.observe() as seen:
    ...     stream = us.get_stream(0)
    >>> try:
    ...     seen.check()
    ... except us.RaceError as error:
    ...     print(error.races)
    """

    def __init__(
        self,
        message: str = "",
        *,
        races: Sequence[str] = (),
        device: int | None = None,
        stream: str | None = None,
    ) -> None:
        super().__init__(message, device=device, stream=stream)
        self.races: list[str] = list(races)


class StallError(UserStreamError, AssertionError):
    """The host waited for the GPU in a block of `no_stalls`, which raises this at its end.

    Parameters
    ----------
    message : str
        What waited, and where.
    stalls : sequence of str, optional
        Each wait: its duration, the call, and the line.
    device : int, optional
        Ordinal of the device involved.
    stream : str, optional
        ``repr`` of the stream involved.

    Examples
    --------
    >>> import userstream as us
    >>> try:
    ...     with us.no_stalls():
    ...         stream = us.get_stream(0)
    ... except us.StallError as error:
    ...     print(error.stalls)
    """

    def __init__(
        self,
        message: str = "",
        *,
        stalls: Sequence[str] = (),
        device: int | None = None,
        stream: str | None = None,
    ) -> None:
        super().__init__(message, device=device, stream=stream)
        self.stalls: list[str] = list(stalls)


class WaitErrors(UserStreamError, ExceptionGroup[Exception]):
    """At least one of several streams failed on the GPU while all were being waited for.

    An `ExceptionGroup` with a `DriverError` for each stream that failed and, if others did not
    finish in time, a `WaitTimeout`. A failure does not cut the wait for the other streams short.
    ``except*`` and ``split`` work as usual.

    Parameters
    ----------
    message : str
        What was waited for.
    exceptions : sequence of Exception
        The failures, and the timeout if there was one.

    Examples
    --------
    >>> import userstream as us
    >>> try:
    ...     us.wait_all(timeout=10)
    ... except* us.DriverError as failed:
    ...     print(failed.exceptions)
    ... except* us.WaitTimeout as late:
    ...     print(late.exceptions)
    """

    # BaseExceptionGroup stores its arguments in __new__; there is nothing left to initialize.
    def __init__(self, message: str, exceptions: Sequence[Exception], /) -> None:
        super(UserStreamError, self).__init__(message, exceptions)
        self.device: int | None = None
        self.device_uuid: str | None = None
        self.stream: str | None = None

    def derive(self, excs: Sequence[Any], /) -> WaitErrors:  # type: ignore[override]
        """Return a group of the same class; called by ``split`` and ``except*``.

        Parameters
        ----------
        excs : sequence of Exception
            The exceptions of the new group.

        Returns
        -------
        WaitErrors
            The new group, with the message of this one.

        Examples
        --------
        >>> import userstream as us
        >>> both = us.WaitErrors("2 streams", [us.DriverError("one"), us.WaitTimeout("the other")])
        >>> late, failed = both.split(us.WaitTimeout)
        >>> late
        WaitErrors('2 streams', [WaitTimeout('the other')])
        """
        return WaitErrors(self.message, excs)


def _report_failures(failures: Sequence[Exception], error: BaseException | None) -> None:
    """Raise the first of the failures of a block's end, unless `error` is leaving the block.

    The other failures become notes of the exception that is raised, or of `error`.
    """
    if not failures:
        return
    raised = failures[0] if error is None else error
    for failure in failures:
        if failure is not raised:
            raised.add_note(f"and at the end of the block: {type(failure).__name__}: {failure}")
    if error is None:
        try:
            raise raised
        finally:
            del raised, failure  # or the traceback of an exception would refer to itself
