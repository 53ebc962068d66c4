"""The exceptions of userstream.

.. code-block:: text

    UserStreamError
    ├── DriverError               (RuntimeError)   a driver call failed, or the GPU did
    ├── DriverNotFoundError       (RuntimeError)   no usable NVIDIA driver or device
    ├── NotSupportedError         (RuntimeError)   this driver or device lacks the function
    ├── ForkedError               (RuntimeError)   CUDA does not survive os.fork
    ├── CaptureError              (RuntimeError)   would break a graph capture
    ├── ClosedError               (RuntimeError)   the stream or registry is closed
    ├── UnsupportedBufferError    (TypeError)      no rule knows this object
    │   └── HostBufferError       (TypeError)      it lives in host memory
    ├── DeviceMismatchError       (ValueError)     several devices where one is needed
    ├── InvalidDeviceError        (ValueError)     there is no such device
    ├── UnknownProducerError      (ValueError)     nobody says which stream wrote the buffer
    ├── NoUserStreamError         (LookupError)    the device has no user stream
    ├── WaitTimeout               (TimeoutError)   not finished in time; nothing was cancelled
    └── WaitErrors                (ExceptionGroup) several waits failed

Every one of them pickles, with its facts as attributes; a fact that is not known is `None`. A
device has an ordinal, which counts what the process sees, and a UUID, which is the same in all.

Examples
--------
>>> import userstream as us
>>> try:
...     us.get_stream("cuda")
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
    "UnknownProducerError",
    "UnsupportedBufferError",
    "UserStreamError",
    "WaitErrors",
    "WaitTimeout",
]


def _unknown(device: int) -> str | None:  # noqa: ARG001
    return None


# The driver, which is built upon this module, puts the function that asks it here.
_uuid_of: Callable[[int], str | None] = _unknown


class UserStreamError(Exception):
    """Base class of every exception that userstream raises on its own account.

    Parameters
    ----------
    message : str
        What was passed, what was wrong and what to do.
    device : int, optional
        Ordinal of the device concerned.
    stream : str, optional
        ``repr`` of the stream concerned.

    Attributes
    ----------
    device_uuid : str or None
        UUID of the device concerned, as ``nvidia-smi -L`` names it.

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
    """A CUDA driver call failed, or work on the GPU did.

    An error of the GPU itself (such as ``CUDA_ERROR_ILLEGAL_ADDRESS``) stays with its context:
    every later call there reports it again, and only a new process helps.

    Parameters
    ----------
    message : str
        What happened.
    function : str, optional
        The driver function that reported it.
    code : int, optional
        The ``CUresult`` as a number.
    name : str, optional
        The ``CUresult`` by name; of a code newer than cuda-bindings, the number as text.
    device : int, optional
        Ordinal of the device concerned.
    stream : str, optional
        ``repr`` of the stream concerned.

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
    """No usable NVIDIA driver on this machine, or no device that it sees.

    Examples
    --------
    >>> import userstream as us
    >>> try:
    ...     stream = us.get_stream()
    ... except us.DriverNotFoundError:
    ...     stream = None  # no GPU: work on the host
    """


class NotSupportedError(UserStreamError, RuntimeError):
    """The installed driver, cuda-bindings or the device lacks what was asked for.

    Parameters
    ----------
    message : str
        What is missing and what would have it.
    function : str, optional
        The driver function that is missing.
    device : int, optional
        Ordinal of the device concerned.
    stream : str, optional
        ``repr`` of the stream concerned.

    Examples
    --------
    >>> import userstream as us
    >>> stream = us.get_stream(0)
    >>> try:
    ...     stream.batch_mem_op([us.MemoryBarrier()])
    ... except us.NotSupportedError:
    ...     pass  # do without
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
    """The process was forked after the driver was used; CUDA cannot be used in the child.

    Start workers with the ``"spawn"`` or ``"forkserver"`` method of `multiprocessing` instead.

    Examples
    --------
    >>> import multiprocessing
    >>> workers = multiprocessing.get_context("spawn")  # and workers.Process, workers.Pool
    """


class CaptureError(UserStreamError, RuntimeError):
    """The call would break a CUDA graph capture, or cannot be captured.

    Raised before the driver is asked, so that the capture goes on.

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
    """The stream or the registry was closed.

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
    """No rule tells where this object lives: it is not a GPU buffer that userstream knows.

    Examples
    --------
    >>> import userstream as us
    >>> us.get_stream("cuda")
    Traceback (most recent call last):
        ...
    userstream.UnsupportedBufferError: 'cuda' names no device: pass a GPU buffer, ...
    """


class HostBufferError(UnsupportedBufferError):
    """The object lives in host memory (pinned memory included), so it has no device.

    Examples
    --------
    >>> import numpy as np
    >>> import userstream as us
    >>> us.get_stream(np.zeros(4))
    Traceback (most recent call last):
        ...
    userstream.HostBufferError: this numpy.ndarray is in host memory, ...
    """


class DeviceMismatchError(UserStreamError, ValueError):
    """One device is needed, and the target names several.

    Parameters
    ----------
    message : str
        Which devices were named.
    devices : sequence of int
        The ordinals of those devices.
    device : int, optional
        Ordinal of the device concerned.
    stream : str, optional
        ``repr`` of the stream concerned.

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
    """There is no such CUDA device in this process.

    Examples
    --------
    >>> import userstream as us
    >>> us.get_stream(99)
    Traceback (most recent call last):
        ...
    userstream.InvalidDeviceError: there is no CUDA device 99: ...
    """


class UnknownProducerError(UserStreamError, ValueError):
    """Nothing tells which stream the buffer's producer works on; pass ``producer=``.

    Examples
    --------
    >>> import userstream as us
    >>> from cuda.bindings import driver
    >>> from cuda.core import Device
    >>> Device(0).set_current()
    >>> buffer = Device(0).allocate(1024, stream=us.get_stream(0))
    >>> us.acquire(driver.CUdeviceptr(int(buffer.handle)))
    Traceback (most recent call last):
        ...
    userstream.UnknownProducerError: ...
    """


class NoUserStreamError(UserStreamError, LookupError):
    """The device has no user stream (of that name), so there is nothing to wait for.

    As in DALI: "Can only wait on user streams".

    Examples
    --------
    >>> import userstream as us
    >>> us.wait(0, name="nobody made this one")
    Traceback (most recent call last):
        ...
    userstream.NoUserStreamError: device 0 has no user stream named 'nobody made this one': ...
    """


class WaitTimeout(UserStreamError, TimeoutError):
    """The work had not finished in time. Nothing was cancelled; waiting again works.

    Parameters
    ----------
    message : str
        What was waited for.
    seconds : float, optional
        The timeout that was given.
    devices : sequence of int
        The devices that had not finished.
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


class WaitErrors(UserStreamError, ExceptionGroup[Exception]):
    """Several streams were waited for and at least one failed on the GPU.

    An `ExceptionGroup` of `DriverError` and, for streams that were late, `WaitTimeout`; every
    stream was waited for nevertheless. ``except*`` and ``split`` work on it.

    Parameters
    ----------
    message : str
        What was waited for.
    exceptions : sequence of Exception
        One per stream that failed or was late.

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

    # BaseExceptionGroup keeps its arguments in __new__; there is nothing left to initialise.
    def __init__(self, message: str, exceptions: Sequence[Exception], /) -> None:
        super(UserStreamError, self).__init__(message, exceptions)
        self.device: int | None = None
        self.device_uuid: str | None = None
        self.stream: str | None = None

    def derive(self, excs: Sequence[Any], /) -> WaitErrors:  # type: ignore[override]
        """Make a group of the same class; what ``split`` and ``except*`` call.

        Parameters
        ----------
        excs : sequence of Exception
            The exceptions of the new group.

        Returns
        -------
        WaitErrors
            The new group, with this one's message.

        Examples
        --------
        >>> import userstream as us
        >>> both = us.WaitErrors("2 streams", [us.DriverError("one"), us.WaitTimeout("the other")])
        >>> late, failed = both.split(us.WaitTimeout)
        >>> late
        WaitErrors('2 streams', [WaitTimeout('the other')])
        """
        return WaitErrors(self.message, excs)
