"""`Stream`: cuda.core's stream, made in the right context, with waits that can be stopped.

Built up in layers, a subject each: `_base` (handle, device, end), `_edges` and `_order` (order and
waits), `_capture` (graphs), `_values` and `_memory` (raw memory), `_attributes`, `_event_waits`
(events of anybody), `_host_functions` (Python functions), and here the factories, which `_making`
makes streams for. `_default` holds the two default streams.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cuda.bindings import driver

from userstream import _devices, _driver, _numbers
from userstream._stream import _base, _making
from userstream._stream._access_policy import AccessPolicyWindow
from userstream._stream._capture import CaptureInfo
from userstream._stream._host_functions import CallingStream
from userstream._stream._operations import (
    FlushRemoteWrites,
    MemoryBarrier,
    WaitFlags,
    WaitValue,
    WriteValue,
)

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from userstream._stream._activation import Activation
    from userstream.typing import DeviceLike, StreamLike

__all__ = [
    "AccessPolicyWindow",
    "CaptureInfo",
    "FlushRemoteWrites",
    "MemoryBarrier",
    "Stream",
    "WaitFlags",
    "WaitValue",
    "WriteValue",
]

_NONBLOCKING = int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)


class Stream(CallingStream):
    """A CUDA stream.

    Everything that takes a `cuda.core.Stream` takes it, and so does everything that takes an
    object with ``__cuda_stream__``. It is made by `get_stream`, `Stream.create`,
    `Stream.from_handle`, `Stream.legacy_default` and `Stream.per_thread_default`; ``Stream(...)``
    is refused.

    A stream that userstream created is destroyed when its last owner goes, but not before exit
    once its handle was given away (by ``handle`` or ``__cuda_stream__``): frameworks keep such
    handles. ``close`` destroys it at once. A stream that somebody else made is never destroyed.

    Notes
    -----
    Thread-safe. It remembers its device, so it is right whichever device is current, also in
    threads without a context. In a forked child what needs CUDA raises `ForkedError`.

    Examples
    --------
    >>> import userstream as us
    >>> with us.Stream.create(priority=-1) as stream:
    ...     stream.sync()
    """

    __slots__ = ()

    @classmethod
    def create(
        cls,
        device: DeviceLike | None = None,
        *,
        nonblocking: bool = True,
        priority: int = 0,
        flags: int | None = None,
    ) -> Self:
        """Create a stream of your own, beside the user streams.

        Parameters
        ----------
        device : device or int, optional
            Where; the calling thread's current device by default. What is current stays so.
        nonblocking : bool, default True
            Whether it runs beside the legacy default stream instead of in order with it.
        priority : int, default 0
            Lower numbers run first. Clamped to what the device has (see `priority_range`); the
            ``priority`` attribute tells the result.
        flags : int or CUstream_flags, optional
            ``nonblocking`` as the driver spells it. Must not contradict it.

        Returns
        -------
        Stream
            In the primary context of the device. ``with Stream.create() as s:`` closes it.

        Raises
        ------
        InvalidDeviceError
            There is no such device.
        TypeError
            ``device`` is none; ``priority`` or ``flags`` is no integer.
        ValueError
            ``flags`` contradicts ``nonblocking``, or has bits that are no flag of a stream.
        DriverNotFoundError, ForkedError, DriverError
            The driver is not there, may not be used, or refused.

        Notes
        -----
        Driver call: ``cuStreamCreateWithPriority``. Does not block, except for the first use of a
        device, which brings its primary context into being.

        Examples
        --------
        >>> from userstream import Stream
        >>> stream = Stream.create(0, nonblocking=False)
        >>> stream.is_nonblocking, stream.priority
        (False, 0)
        >>> stream.close()
        """
        wanted = _numbers.integer(priority, "priority")
        if flags is not None:
            asked = _NONBLOCKING if nonblocking else 0
            if _numbers.integer(flags, "flags") != asked:
                raise ValueError(
                    f"flags={flags!r} contradicts nonblocking={nonblocking!r}: "
                    "CU_STREAM_NON_BLOCKING (1) goes with True, CU_STREAM_DEFAULT (0) with False, "
                    "and there are no others"
                )
        stream = _making.create(
            cls,
            _devices.device_id_or_current(device),
            nonblocking=bool(nonblocking),
            priority=wanted,
        )
        stream._closes_in_with = True
        return stream

    @classmethod
    def from_handle(cls, handle: int | StreamLike, owner: object = None) -> Stream:
        """Wrap a stream that somebody else made; it is never destroyed here.

        Parameters
        ----------
        handle : int, CUstream or object with ``__cuda_stream__``
            The stream. 1 and 2 give the default streams. 0 is refused, because libraries do not
            agree on which of them it is.
        owner : object, optional
            Kept alive as long as the returned stream is open. Without it an object with
            ``__cuda_stream__`` is kept itself. For 1, 2 and a `Stream` nothing is kept.

        Returns
        -------
        Stream
            A `Stream` is returned as it is, also for the handle of one.

        Raises
        ------
        TypeError
            ``handle`` is none of these.
        ValueError
            ``handle`` is 0, negative, or too large for an address.
        ClosedError
            ``handle`` is a stream that was closed.
        DriverNotFoundError, ForkedError, DriverError
            The driver is not there, may not be used, or does not know the stream.

        Notes
        -----
        The driver cannot be asked whether a handle is valid: a wrong one crashes the process.
        Driver call: ``cuStreamGetCtx``. Does not block. With a cuda.core stream as ``handle`` the
        ownership is shared, as in cuda.core: it is destroyed at the last close.

        Examples
        --------
        >>> from cuda.core import Device
        >>> from userstream import Stream
        >>> Device(0).set_current()
        >>> theirs = Device(0).create_stream()
        >>> Stream.from_handle(theirs) == theirs
        True
        """
        if isinstance(handle, Stream):
            handle._live()
            return handle
        address = _making.address_of(handle)
        _driver.ensure()
        if address == _driver.LEGACY:
            return cls.legacy_default()
        if address == _driver.PER_THREAD:
            return cls.per_thread_default()
        ours = _base.ours_at(address) if owner is None else None
        if isinstance(ours, Stream):
            return ours
        return _making.adopt(cls, address, handle if owner is None else owner)

    @classmethod
    def legacy_default(cls) -> Stream:
        """Return the legacy default stream, which all blocking streams of a context wait for.

        Returns
        -------
        Stream
            The same object on every call. It stands for the stream of whichever context is
            current where it is used (device 0 without one).

        Notes
        -----
        The driver's ``CU_STREAM_LEGACY``. Blocks nothing and calls nothing.

        Examples
        --------
        >>> from userstream import Stream
        >>> int(Stream.legacy_default().handle)
        1
        """
        from userstream._stream._default import DefaultStream

        return DefaultStream.at(_driver.LEGACY)

    @classmethod
    def per_thread_default(cls) -> Stream:
        """Return the per-thread default stream.

        Returns
        -------
        Stream
            The same object on every call. It stands for another stream in each thread, and in
            each context that is current there (device 0 without one).

        Notes
        -----
        The driver's ``CU_STREAM_PER_THREAD``. Blocks nothing and calls nothing.

        Examples
        --------
        >>> from userstream import Stream
        >>> int(Stream.per_thread_default().handle)
        2
        """
        from userstream._stream._default import DefaultStream

        return DefaultStream.at(_driver.PER_THREAD)

    @staticmethod
    def priority_range(device: DeviceLike | None = None) -> tuple[int, int]:
        """Return the least and the greatest priority that streams of a device can have.

        Parameters
        ----------
        device : device or int, optional
            The calling thread's current device by default.

        Returns
        -------
        least : int
            The lowest priority: the larger number, 0.
        greatest : int
            The highest priority: a negative number.

        Raises
        ------
        InvalidDeviceError
            There is no such device.

        Notes
        -----
        Driver call: ``cuCtxGetStreamPriorityRange``. Does not block.

        Examples
        --------
        >>> from userstream import Stream
        >>> least, greatest = Stream.priority_range(0)
        >>> greatest <= least
        True
        """
        return _driver.priority_range(
            _driver.primary_context(_devices.device_id_or_current(device))
        )

    def activate(self, *frameworks: str) -> Activation:
        """Make this stream the current one of frameworks for the length of a block.

        Parameters
        ----------
        *frameworks : str
            ``"torch"``, ``"cupy"`` or ``"dali"`` (the dynamic mode of DALI); by default all of
            these that are imported. The others have no current stream that could be set: pass the
            stream to their functions.

        Returns
        -------
        context manager
            Its value is the stream. At the end of the block the frameworks have the current
            streams that they had before, also after an exception.

        Raises
        ------
        ValueError, TypeError
            A framework has no current stream, or is not imported.
        CaptureError
            As `wait`.
        RuntimeError
            At the end of the block: it ends in another thread than it began in.

        Notes
        -----
        For the calling thread, and for the device of the stream; the current device stays as it
        is. At its begin this stream waits for the streams that were current, and at its end those
        wait for this one, so memory that is freed to this stream's arena is not used again before
        its time. What was made inside is safe to use after the block, on the streams that were
        current before it; for any other use see `hand_over`. Blocks must end in the reverse
        order of their begin: take care with generators and asyncio tasks.
        Does not block. Driver calls: those of `wait`.

        Examples
        --------
        >>> from userstream import Stream
        >>> with Stream.create(0) as stream, stream.activate():
        ...     pass  # PyTorch and CuPy work on the stream
        """
        from userstream._stream import _activation  # which is built upon this

        found = _activation.called(frameworks) if frameworks else _activation.usable()
        return _activation.Activation(self, found)

    def __enter__(self) -> Self:
        if not self._closes_in_with:
            raise TypeError(
                f"{self!r} cannot be used in a with statement, which would close it: only streams "
                "made by Stream.create are closed so"
            )
        self._live()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
