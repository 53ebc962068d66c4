"""`UserStream`: a registry of user streams, and what is done with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, overload

from userstream import (
    _buffers,
    _device_wait,
    _holding,
    _numbers,
    _process,
    _targets,
    _waiting,
)
from userstream._copies import copies, pinned, staging
from userstream._engine import host_wait
from userstream._ordering import (
    Borrow,
    Ordering,
    given_lane,
    hand_over,
    ordering_of,
    settings,
    usual_streams_of,
)
from userstream._table import Table
from userstream.errors import WaitErrors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from concurrent.futures import Future
    from types import TracebackType
    from typing import Self

    import numpy as np

    from userstream._engine.lane import Lane
    from userstream._ordering.settings import Unknown
    from userstream._stream.stream import Stream
    from userstream.typing import Buffer, Producer, StreamLike, Target, WaitPolicy

_AUTO = "auto"


class UserStream:
    """A registry of user streams, one per device and name.

    The functions of the `userstream` module are the methods of the process-wide registry,
    ``UserStream.get()``. A library or a test that needs streams of its own creates another registry
    with ``UserStream()``. Used as a context manager, a registry waits for its streams on exit and
    is then closed permanently.

    Parameters
    ----------
    unknown : {"device", "raise"}, optional
        What to do about a buffer of which nothing tells which stream works on it: see
        `UserStream.unknown`.

    Notes
    -----
    Thread-safe. Looking up an existing stream takes no lock. After DALI's C++ singleton
    ``dali::UserStream``.

    Examples
    --------
    >>> from userstream import UserStream
    >>> UserStream.get() is UserStream.get()
    True
    >>> with UserStream() as mine:
    ...     stream = mine.get_stream(0)
    ...     stream is mine.get_stream(0), stream is UserStream.get().get_stream(0)
    (True, False)
    """

    __slots__ = ("__weakref__", "_table", "_unknown", "_unnamed")

    def __init__(self, *, unknown: Unknown | None = None) -> None:
        self.unknown = settings.UNKNOWN if unknown is None else unknown
        self._table = Table()
        self._unnamed = self._table.unnamed  # for the path of nearly every call

    @staticmethod
    def get() -> UserStream:
        """Return the process-wide registry.

        Returns
        -------
        UserStream
            The same object on every call, in every thread. It can be pickled, as can the functions
            of the `userstream` module: unpickling gives those of the other process.

        Examples
        --------
        >>> from userstream import UserStream
        >>> UserStream.get().streams() == UserStream.get().streams()
        True
        """
        return _process_registry

    @property
    def unknown(self) -> Unknown:
        """What is done about a buffer of which nothing tells which stream works on it.

        ``"device"`` orders it with everything on its device, in both directions. That invalidates
        any graph capture under way there, on any thread. ``"raise"`` raises `UnknownProducerError`
        instead, for programs that capture graphs in other threads. By default what
        ``USERSTREAM_UNKNOWN`` says, or ``"device"``. `ValueError` for anything else.

        Examples
        --------
        >>> from userstream import UserStream
        >>> UserStream.get().unknown
        'device'
        >>> UserStream(unknown="raise").unknown
        'raise'
        """
        return self._unknown

    @unknown.setter
    def unknown(self, value: Unknown) -> None:
        self._unknown = settings.check_unknown(value)

    # -- the streams ------------------------------------------------------------------------------

    def get_stream(
        self, target: Target = None, *, name: str | None = None, priority: int | None = None
    ) -> Stream:
        """Return the user stream of a device, creating it on first use.

        Parameters
        ----------
        target : GPU buffer, sequence or mapping of them, device, int or stream, optional
            What determines the device: a buffer of any framework, several buffers on the same
            device, a device, or its ordinal; by default the calling thread's current device
            (device 0 without a context, like ``cudaGetDevice``). A stream is returned as it is.
        name : str, optional
            Selects one of several user streams of a device; by default the unnamed one.
        priority : int, optional
            Lower numbers run first. Clamped to the device's range. By default the priority of the
            existing stream, or 0 for a new one.

        Returns
        -------
        Stream
            A non-blocking stream: the same object on every call, in every thread.

        Raises
        ------
        UnsupportedBufferError, HostBufferError
            *target*, or something in it, is not a GPU buffer.
        DeviceMismatchError
            The buffers are on several devices.
        InvalidDeviceError
            There is no such device, or *target* does not determine one.
        ValueError
            The stream exists with another priority; *name* is empty; or *name* or *priority* is
            given together with a stream.
        TypeError
            *name* is not a string, or *priority* is not an integer.
        ClosedError
            The stream that was passed, or this registry, is closed.
        DriverNotFoundError, ForkedError, DriverError
            The driver is missing, cannot be used in a forked child, or reported an error.

        Notes
        -----
        Thread-safe; takes no lock if the stream exists. Does not block, except that the first use
        of a device creates its primary context. This call orders nothing: the stream may run ahead
        of the work that fills the buffer. The current device and context do not change. Driver
        call, once: ``cuStreamCreateWithPriority``. From DALI: one non-blocking stream of default
        priority per device, created on demand.

        Examples
        --------
        >>> import userstream as us
        >>> stream = us.get_stream(0)
        >>> stream is us.get_stream(0)
        True
        >>> us.get_stream(0, name="io", priority=-1).name
        'io'
        """
        # The path of every call but the first: one look at the type, one at the table.
        streams = self._unnamed if name is None else self._table.called(name)
        if priority is None:
            stream = _known(target, streams)
            if stream is not None:
                return stream
        return self._table.find_or_create(target, name, priority)

    def streams(self) -> Mapping[tuple[int, str | None], Stream]:
        """Return the existing user streams.

        Returns
        -------
        Mapping
            A read-only snapshot that maps (device ordinal, name) to `Stream`.

        Raises
        ------
        ForkedError
            In a child of a process that had used the driver.

        Examples
        --------
        >>> import userstream as us
        >>> stream = us.get_stream(0)
        >>> us.streams()[0, None] is stream
        True
        """
        return self._table.streams()

    def close(self, *, timeout: float | None = None) -> None:
        """Wait for the user streams, then empty the registry, which can be used again.

        Parameters
        ----------
        timeout : float, optional
            Seconds for all streams together, at least 0; None waits indefinitely.

        Raises
        ------
        WaitTimeout
            Some streams did not complete in time. The registry keeps all its streams.
        WaitErrors
            The GPU failed. The registry is emptied nevertheless.
        CaptureError
            One of the streams is being captured. The registry keeps all its streams.
        TypeError, ValueError
            *timeout* is not a number of seconds.

        Notes
        -----
        The process-wide registry also frees the page-locked memory of `asnumpy` that no array uses.
        Streams to which there are references remain usable; the others are destroyed, unless their
        handle has been read (see `Stream`). Only applications should close the process-wide
        registry: other code may be using it. Blocks, but never inside the driver. Thread-safe.

        Examples
        --------
        >>> from userstream import UserStream
        >>> mine = UserStream()
        >>> stream = mine.get_stream(0)
        >>> mine.close()
        >>> len(mine.streams())
        0
        """
        _waiting.check_arguments(timeout, "auto")
        lanes = self._table.lanes()
        try:
            _waiting.wait_for(
                list(lanes.values()),
                timeout=timeout,
                policy="auto",
                grouped=True,
                closed_is_done=True,
            )
        except WaitErrors:
            self._table.remove(lanes)
            raise
        self._table.remove(lanes)
        if self is _process_registry:
            staging.trim()

    def __enter__(self) -> Self:
        self._table.check_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.close()
        finally:
            self._table.close()

    def __reduce__(self) -> tuple[Callable[[], UserStream], tuple[()]]:
        if self is not _process_registry:
            _process.refuse_copy(
                self, "send a function that calls userstream there: each process has a registry"
            )
        return UserStream.get, ()  # the functions of the package are bound to it

    def __repr__(self) -> str:
        which = " of the process" if self is _process_registry else ""
        return f"<userstream.UserStream{which}: {self._table}>"

    # -- host waits -------------------------------------------------------------------------------

    def wait(
        self,
        target: Target = None,
        *,
        name: str | None = None,
        timeout: float | None = None,
        policy: WaitPolicy = "auto",
    ) -> None:
        """Block until the work queued on a device's user stream now has completed.

        Parameters
        ----------
        target : GPU buffer, device, int, stream, or sequence or mapping, optional
            What determines the device, as for `get_stream`; for buffers on several devices, the
            user streams of all of them are waited for. A stream is waited for itself, whether it is
            registered or not. A sequence or mapping holds either buffers or streams.
        name : str, optional
            Selects one of several user streams of a device; by default the unnamed one.
        timeout : float, optional
            Seconds for all streams together, at least 0. 0 polls once; None waits indefinitely.
        policy : {"auto", "spin"}, default "auto"
            ``"auto"`` polls for 250 µs and then sleeps between polls, for 5 % of the elapsed time
            and at most 5 ms. ``"spin"`` never sleeps.

        Raises
        ------
        NoUserStreamError
            A device has no user stream of that name.
        WaitTimeout
            The work did not complete in time. Nothing was cancelled; you can wait again.
        CaptureError
            The stream is being captured. The capture continues.
        DriverError, WaitErrors
            The GPU failed; `WaitErrors` if there are several streams.
        UnsupportedBufferError, HostBufferError
            *target*, or something in it, is not a GPU buffer.
        InvalidDeviceError
            There is no such device.
        ValueError, TypeError
            *timeout* is not a number of seconds, *policy* is not one of these, *name* is not a
            non-empty string, or *name* is given together with a stream.
        RuntimeError
            Called from a host function or callback, which must not wait.

        Notes
        -----
        Waits for your own work: not for that of the buffer's producer, nor for work that is queued
        during the wait. Blocks, but never inside the driver, so Ctrl-C interrupts it. Thread-safe.
        Graph captures are not affected. Driver calls: ``cuStreamQuery``, and if the stream is busy
        ``cuEventRecord`` and ``cuEventQuery``. From DALI: a device without a user stream is an
        error.

        Examples
        --------
        >>> import userstream as us
        >>> stream = us.get_stream(0)
        >>> us.wait(0, timeout=10)
        """
        streams = self._unnamed if name is None else self._table.called(name)
        stream = _known(target, streams)
        if stream is None:
            _waiting.check_arguments(timeout, policy)
            host_wait.sync_all(self._table.waited_for(target, name), timeout, policy)
        else:
            host_wait.sync(stream._lane or stream._resolve(), timeout, policy)

    def wait_for_device(self, target: Target = None, *, timeout: float | None = None) -> None:
        """Block until everything queued on a device now has completed, whoever queued it.

        **This invalidates any graph capture in the device's context, in every thread and mode**;
        CUDA offers no alternative. If the capture can be seen, the call raises `CaptureError`
        instead: that is the case when the legacy default stream, the stream that was passed, or a
        stream that userstream created takes part in it. Prefer `wait`.

        Parameters
        ----------
        target : GPU buffer, sequence or mapping of them, device, int or stream, optional
            What determines the device or devices; by default the calling thread's current device.
        timeout : float, optional
            Seconds for all devices together, at least 0. 0 polls once; None waits indefinitely.

        Raises
        ------
        WaitTimeout
            The work did not complete in time. Nothing was cancelled; you can wait again.
        CaptureError
            A graph capture was found. The capture continues.
        DriverError, WaitErrors
            The GPU failed; `WaitErrors` if there are several devices.
        UnsupportedBufferError, HostBufferError
            *target*, or something in it, is not a GPU buffer.
        InvalidDeviceError
            There is no such device.
        ValueError, TypeError
            *timeout* is not a number of seconds.
        RuntimeError
            Called from a host function or callback, which must not wait.

        Notes
        -----
        Covers the primary context and, if it is a different one, the context of the stream that was
        passed or the current context; green contexts are not covered. A device that has not been
        used is not initialized. Blocks, but never inside the driver, so Ctrl-C interrupts it.
        Thread-safe. Driver calls: ``cuCtxRecordEvent`` and ``cuEventQuery``; before CUDA 12.5,
        ``cuCtxSynchronize`` in a thread that continues after a timeout. From DALI, with a timeout
        added.

        Examples
        --------
        >>> import userstream as us
        >>> us.wait_for_device(0, timeout=10)
        """
        _waiting.check_arguments(timeout, "auto")
        self._table.check_open()
        given = _targets.stream_of(target)
        lane = None if given is None else given._resolve()
        devices = _targets.devices_of(target) if lane is None else [lane.device]
        work = _device_wait.work_on(devices, lane, and_current=target is None)
        host_wait.sync_all(work, timeout)

    def wait_all(self, *, timeout: float | None = None, policy: WaitPolicy = "auto") -> None:
        """Block until the work queued on all user streams of all devices now has completed.

        Parameters
        ----------
        timeout : float, optional
            Seconds for all streams together, at least 0. 0 polls once; None waits indefinitely.
        policy : {"auto", "spin"}, default "auto"
            How to wait; see `wait`.

        Raises
        ------
        WaitTimeout
            Some streams did not complete in time; one error lists them all.
        WaitErrors
            The GPU failed. All streams were waited for nevertheless; those that did not complete in
            time are one `WaitTimeout` in the group.
        CaptureError
            One of the streams is being captured. The capture continues.
        ValueError, TypeError
            *timeout* is not a number of seconds, or *policy* is not one of these.
        RuntimeError
            Called from a host function or callback, which must not wait.

        Notes
        -----
        Waits for all streams at the same time. Returns at once if there are none. Blocks, but never
        inside the driver, so Ctrl-C interrupts it. Thread-safe. From DALI.

        Examples
        --------
        >>> import userstream as us
        >>> us.wait_all(timeout=10)
        """
        _waiting.check_arguments(timeout, policy)
        self._table.check_open()
        lanes = list(self._table.lanes().values())
        host_wait.sync_all(lanes, timeout, policy, grouped=True, closed_is_done=True)

    # -- without a waiting thread -----------------------------------------------------------------

    def completion(self, target: Target = None, *, name: str | None = None) -> Future[None]:
        """Return a future for the work that is queued on a device's user stream now.

        Parameters
        ----------
        target : GPU buffer, device, int, stream, or sequence or mapping, optional
            What determines the device, or the stream itself; see `wait`.
        name : str, optional
            Selects one of several user streams of a device; by default the unnamed one.

        Returns
        -------
        concurrent.futures.Future
            Its result is `None`. It has the exceptions of `wait`: `DriverError`, or `WaitErrors`
            if there are several streams. Its own ``result(timeout=)`` raises a plain
            `TimeoutError`, and waiting again works. Cancelling it cancels no work.

        Raises
        ------
        NoUserStreamError
            A device has no user stream of that name.
        CaptureError
            The stream is being captured. The capture continues.
        ClosedError
            The stream that was passed, or this registry, is closed.
        UnsupportedBufferError, HostBufferError
            *target*, or something in it, is not a GPU buffer.
        InvalidDeviceError
            There is no such device.
        ValueError, TypeError
            *name* is not a non-empty string, or is given together with a stream.

        Notes
        -----
        Does not block; thread-safe. One thread of the library watches all futures and calls their
        callbacks: keep those short. They may not wait for a future there (`RuntimeError`), and what
        they raise is logged. It tells within 5 % of the time waited and 1 ms. Driver calls:
        ``cuStreamQuery``, ``cuEventRecord``; ``cuEventQuery`` in that thread, in the relaxed
        capture mode.

        Examples
        --------
        >>> import userstream as us
        >>> stream = us.get_stream(0)
        >>> us.completion(0).result(timeout=10)
        """
        lanes = self._waited_for(target, name)
        # Takes longer to load than the rest of the waits. After the check for a forked child, where
        # a thread that is not there may have been loading it, and would be waited for.
        from userstream import _futures

        return _futures.Completion(lanes, grouped=len(lanes) > 1)

    async def wait_async(
        self, target: Target = None, *, name: str | None = None, timeout: float | None = None
    ) -> None:
        """Wait as `wait` does, without blocking the event loop.

        Parameters
        ----------
        target : GPU buffer, device, int, stream, or sequence or mapping, optional
            As for `wait`.
        name : str, optional
            As for `wait`.
        timeout : float, optional
            Seconds for all of it, at least 0; `None` waits for ever. ``asyncio.timeout`` works
            as well.

        Raises
        ------
        RuntimeError
            No asyncio event loop runs here; or it runs in a host function or a callback, which may
            not wait.
        WaitTimeout, NoUserStreamError, CaptureError, ClosedError, DriverError, WaitErrors
            As `wait`.

        Notes
        -----
        Covers what is queued when it is first awaited. Cancelling the task ends this wait alone.
        Any number of tasks, in event loops of any number of threads, share one thread of the
        library (see `completion`).

        Examples
        --------
        >>> import asyncio
        >>> import userstream as us
        >>> stream = us.get_stream(0)
        >>> asyncio.run(us.wait_async(0, timeout=10))
        """
        _waiting.check_arguments(timeout, "auto")
        lanes = self._waited_for(target, name)
        from userstream import _futures  # as in `completion`

        await _futures.wait(lanes, timeout=timeout, grouped=len(lanes) > 1)
        _holding.sweep()

    async def wait_all_async(self, *, timeout: float | None = None) -> None:
        """Wait like `wait_all`, without blocking the event loop.

        Parameters
        ----------
        timeout : float, optional
            Seconds for all streams together, at least 0; None waits indefinitely.

        Raises
        ------
        RuntimeError
            No asyncio event loop is running in this thread; or this is a host function or callback,
            which must not wait.
        WaitTimeout
            Some streams did not complete in time; one error lists them all.
        WaitErrors
            The GPU failed. All streams were waited for nevertheless.
        CaptureError
            One of the streams is being captured. The capture continues.
        ValueError, TypeError
            *timeout* is not a number of seconds.

        Notes
        -----
        Waits for the work that is queued when the coroutine is first awaited; see `wait_async`.

        Examples
        --------
        >>> import asyncio
        >>> import userstream as us
        >>> asyncio.run(us.wait_all_async(timeout=10))
        """
        _waiting.check_arguments(timeout, "auto")
        self._table.check_open()
        lanes = list(self._table.lanes().values())
        from userstream import _futures  # as in `completion`

        await _futures.wait(lanes, timeout=timeout, grouped=True, closed_is_done=True)
        _holding.sweep()

    # -- order with the producers of buffers ------------------------------------------------------

    def acquire(
        self,
        *buffers: Buffer,
        stream: StreamLike | int | None = None,
        producer: Producer = "auto",
    ) -> Stream:
        """Make later work on a stream wait for the work that produces buffers; no host wait.

        Parameters
        ----------
        *buffers : GPU buffer, or sequence or mapping of them
            Of any framework: see :doc:`/reference/buffers`.
        stream : stream, optional
            The one that uses the buffers, of any library; by default the user stream of their
            device, which is made if there is none yet.
        producer : stream, "auto", "device" or None, default "auto"
            The stream that writes all the buffers. ``"auto"`` takes the best that is known of each:
            the stream that it names, its framework's current one, or everything on its device.
            ``"device"`` asks for the latter. `None`: nothing is pending, on your word.

        Returns
        -------
        Stream
            The one that uses the buffers.

        Raises
        ------
        UnknownProducerError
            Nothing tells who writes a buffer, and to order it with the whole device is not wanted
            (`UserStream.unknown`) or needs a driver of CUDA 12.5: pass ``producer=``.
        DeviceMismatchError
            The buffers live on several devices, and no ``stream`` is given.
        UnsupportedBufferError, HostBufferError
            Something that was passed is no GPU buffer.
        CaptureError
            One stream is being captured into a graph and the other is not, or into another one; or
            the legacy default stream, or an edge of the whole device, would invalidate a capture.
            The captures go on.
        ClosedError
            A stream that was passed, or this registry, is closed.
        ValueError, TypeError
            No buffer was passed; ``stream`` or ``producer`` is not a stream.
        DriverNotFoundError, ForkedError, DriverError
            The driver is not there, may not be used, or refused.

        Notes
        -----
        It is not a lock: the producer may go on writing until `release` makes it wait. It keeps
        nothing alive; `borrow` does. There is one edge per distinct producer stream, and none where
        the producer and the consumer are the same stream. Does not block; thread-safe; the current
        device stays as it is. A user stream never joins the capture of a producer; a stream of
        your own that you pass does. With ``USERSTREAM_SYNC=1`` it waits on the host as well.

        An edge of the whole device comes after all that is queued there, by whomever. It also
        invalidates a capture under way on the device that cannot be seen: one of another thread, on
        a stream that userstream did not make. In a program that captures in other threads, set
        `UserStream.unknown` to ``"raise"`` and name such producers.

        Driver calls: ``cuStreamIsCapturing``, ``cuEventRecord`` on a pooled event,
        ``cuStreamWaitEvent``; for the whole device ``cuCtxRecordEvent``; for JAX and other types
        that are known to order a consumer themselves, ``__dlpack__(stream=)``.

        Examples
        --------
        >>> import userstream as us
        >>> from cuda.core import Device
        >>> Device(0).set_current()
        >>> producer = Device(0).create_stream()
        >>> buffer = Device(0).allocate(1024, stream=producer)
        >>> us.acquire(buffer, producer=producer) is us.get_stream(buffer)
        True
        """
        if stream is None and producer is _AUTO:
            usual = usual_streams_of(buffers, self._unnamed)
            if usual is not None:
                consumer, source, _ = usual
                if source is not None:
                    consumer._resolve().wait_for(source, may_join=False)
                return consumer
        ordering = self._any_ordering(buffers, stream, producer)
        ordering.acquire(to_be_released=False)
        return ordering.consumer

    def release(
        self,
        *buffers: Buffer,
        stream: StreamLike | int | None = None,
        producer: Producer = "auto",
    ) -> None:
        """Make the producers of buffers wait for the work queued on a stream; no host wait.

        Parameters
        ----------
        *buffers : GPU buffer, or sequence or mapping of them
            They are held until the stream has passed this point.
        stream : stream, optional
            The one that used the buffers; by default the user stream of their device.
        producer : stream, "auto", "device" or None, default "auto"
            As for `acquire`. ``"auto"`` takes the streams that are current now.

        Raises
        ------
        UnknownProducerError, DeviceMismatchError, UnsupportedBufferError, HostBufferError
            As `acquire`.
        CaptureError, ClosedError, ValueError, TypeError
            As `acquire`.
        DriverNotFoundError, ForkedError, DriverError
            As `acquire`.

        Notes
        -----
        What `borrow` does at its end. Where no stream of the producer is known, as of JAX, all that
        is queued on the device from now on waits, on streams that are made later too. Where the
        stream is being captured nothing is held: keep the buffers as long as the graph. Does not
        block; thread-safe. Driver calls: those of `acquire`, and ``cuCtxWaitEvent``. After the CUDA
        Array Interface, which asks for this edge of its consumers.

        Examples
        --------
        >>> import userstream as us
        >>> from cuda.core import Device
        >>> Device(0).set_current()
        >>> producer = Device(0).create_stream()
        >>> buffer = Device(0).allocate(1024, stream=producer)
        >>> stream = us.acquire(buffer, producer=producer)
        >>> us.release(buffer, producer=producer)
        """
        ordering = self._ordering(buffers, stream, producer)
        ordering.release(ordering.buffers)

    def borrow(
        self,
        *buffers: Buffer,
        stream: StreamLike | int | None = None,
        producer: Producer = "auto",
        activate: bool | str | Iterable[str] = False,
        keep: bool = True,
    ) -> Borrow:
        """Use buffers on a stream for the length of a block, in order with their producers.

        Parameters
        ----------
        *buffers : GPU buffer, or sequence or mapping of them
            Of any framework: see :doc:`/reference/buffers`.
        stream : stream, optional
            The one that uses the buffers, of any library; by default the user stream of their
            device, which is made if there is none yet.
        producer : stream, "auto", "device" or None, default "auto"
            As for `acquire`; asked at the beginning of the block and kept to its end.
        activate : bool, str or iterable of str, default False
            Makes the stream the current one of these frameworks inside (see `Stream.activate`);
            `True` stands for those of the buffers.
        keep : bool, default True
            Hold the buffers not only to the end of the block, but until the stream has passed it.
            With `False` it is yours to see that their memory is not freed before.

        Returns
        -------
        context manager
            Its value is the stream. At the beginning the stream waits for the producers, as with
            `acquire`; at the end, also after an exception, they wait for it, as with `release`.

        Raises
        ------
        UnknownProducerError, DeviceMismatchError, UnsupportedBufferError, HostBufferError
            As `acquire`.
        CaptureError, ClosedError, ValueError, TypeError
            As `acquire`.
        DriverNotFoundError, ForkedError, DriverError
            As `acquire`.
        RuntimeError
            The block ends in another thread than it began in, and the per-thread default stream
            takes part, or a framework's current stream was set.

        Notes
        -----
        An error at the end of the block never replaces one of your own: it becomes a note of it.
        Memory is not used again underneath: an edge alone would not see to that for memory that
        was allocated on another stream than the producer's (of PyTorch and CuPy). References are
        released by later calls, by waits, or by a thread of the library within about 5 ms. DALI
        uses the memory of a pipeline's outputs again all the same: `wait` before its next run. An
        array of JAX cannot be donated as long as it is held. May be nested, and used in many
        threads. Does not block. Driver calls: those of `acquire`, twice.

        Examples
        --------
        >>> import userstream as us
        >>> from cuda.core import Device
        >>> Device(0).set_current()
        >>> producer = Device(0).create_stream()
        >>> buffer = Device(0).allocate(1024, stream=producer)
        >>> with us.borrow(buffer, producer=producer) as stream:
        ...     buffer.fill(0, stream=stream)
        """
        return Borrow(self._ordering, (buffers, stream, producer), activate, keep)

    def hold(self, *objects: object, stream: StreamLike | int) -> None:
        """Keep objects alive until a stream has done the work that is queued on it now.

        Parameters
        ----------
        *objects : object
            Anything; usually buffers that the work uses.
        stream : stream
            Of any library.

        Raises
        ------
        CaptureError
            The stream is being captured into a graph: keep the objects as long as the graph.
        ClosedError, ForkedError, DriverError, TypeError, ValueError
            As `acquire`.

        Notes
        -----
        References are let go of by later calls, by waits, or by a thread of the library within
        about 5 ms; never by a thread of the driver. At interpreter exit what is still held stays.
        Does not block; thread-safe. Driver calls: ``cuEventRecord``, and ``cuEventQuery`` later.

        Examples
        --------
        >>> import userstream as us
        >>> stream = us.get_stream(0)
        >>> scratch = bytearray(1024)
        >>> us.hold(scratch, stream=stream)
        """
        self._table.check_open()
        _holding.keep(given_lane(stream, "stream"), objects)

    def hand_over(self, *results: Buffer, stream: StreamLike | int | None = None) -> None:
        """Hand results that were made on a stream over to the current streams of their frameworks.

        Parameters
        ----------
        *results : GPU buffer, or sequence or mapping of them
            Of PyTorch, CuPy or DALI's dynamic mode, made while the stream was `active
            <Stream.activate>`.
        stream : stream, optional
            The one on which they were made; by default the user stream of their device.

        Raises
        ------
        UnsupportedBufferError
            A result belongs to no framework that has a current stream.
        CaptureError, ClosedError, ForkedError, DriverError, TypeError, ValueError
            As `acquire`.

        Notes
        -----
        Needed for results that are used before the block ends in which they were made, or in
        another thread: their framework's current stream then waits for the stream, and PyTorch's
        allocator is told of that use (``Tensor.record_stream``). Call it where the results are to
        be used. After the block its end has done all that. Does not block; thread-safe. Driver
        calls: those of `acquire`.

        Examples
        --------
        >>> import userstream as us
        >>> us.hand_over([])  # nothing to hand over
        """
        self._table.check_open()
        hand_over(results, stream, self._user_stream)

    # -- what buffers are, and copies of them -----------------------------------------------------

    device_of: Final = staticmethod(_buffers.device_of)
    describe: Final = staticmethod(_buffers.describe)

    @overload
    def asnumpy(
        self,
        buffer: Buffer,
        *,
        out: np.ndarray,
        stream: StreamLike | int | None = None,
        producer: Producer = "auto",
        timeout: float | None = None,
    ) -> np.ndarray: ...

    @overload
    def asnumpy(
        self,
        buffer: Buffer,
        *,
        out: None = None,
        stream: StreamLike | int | None = None,
        producer: Producer = "auto",
        timeout: float | None = None,
    ) -> Any: ...

    def asnumpy(
        self,
        buffer: Buffer,
        *,
        out: np.ndarray | None = None,
        stream: StreamLike | int | None = None,
        producer: Producer = "auto",
        timeout: float | None = None,
    ) -> Any:
        """Copy a buffer to the host, in order with its producer, and wait for that copy alone.

        Parameters
        ----------
        buffer : GPU buffer, or sequence or mapping of them
            Of any framework: see :doc:`/reference/buffers`. Any strides; NumPy's types, and
            bfloat16 and float8 where ``ml_dtypes`` is installed. Host buffers are taken as well.
        out : numpy.ndarray, optional
            Where to; of the same shape and type. Page-locked memory is the quickest.
        stream : stream, optional
            The one to copy on; by default the user stream of the buffer's device.
        producer : stream, "auto", "device" or None, default "auto"
            As for `acquire`.
        timeout : float, optional
            Seconds, at least 0; `None` waits for ever.

        Returns
        -------
        numpy.ndarray, or list or dict of them
            ``out``, or a new array that has the order in memory that the buffer has. Of a list
            of tensors of DALI, a sequence or a mapping: a list, or a dict. Of a sharded array of
            JAX: the whole array. Of a host buffer ``numpy.asarray(buffer)``, which copies nothing
            where it need not, or ``numpy.from_dlpack``. Read-only where elements share memory.

        Raises
        ------
        WaitTimeout
            The copy was not done in time. ``out`` is undefined: copy again once the producer is
            done. Until the GPU has come past it, the buffer and the memory to fill are kept.
        UnsupportedBufferError
            The object is no buffer, has no shape (a bare address), has elements that NumPy lacks,
            or is masked; or its shape and strides reach out of its allocation; or it lies in memory
            so that it takes more than 65,536 copies; or its ``__dlpack__`` gives another copy at
            each call.
        HostBufferError
            It is on the host, and NumPy cannot read it.
        UnknownProducerError, DeviceMismatchError, CaptureError, ClosedError
            As `acquire`; and a copy in a graph is refused, as is a ``stream`` of another device for
            a conjugate or negated tensor of PyTorch.
        ValueError, TypeError
            ``out`` has another shape or type, is read-only or masked; as `acquire`.
        DriverNotFoundError, ForkedError, DriverError
            The driver is not there, may not be used, or refused.

        Notes
        -----
        Blocks, but never inside the driver, so Ctrl-C stops it; thread-safe. Work on other streams
        is not held up. On an error ``out`` is undefined, and after a timeout or Ctrl-C the GPU may
        still write a page-locked ``out``. Driver calls: those of `acquire`; ``cuMemcpyAsync``,
        ``cuMemcpy3DAsync``; for new memory ``cuMemAllocFromPoolAsync``, without pools
        ``cuMemHostAlloc``.

        A result is on page-locked memory, which is used again when the last array on it is gone. So
        work that still reads it, such as a copy from it that does not block, needs it kept: keep
        the array, or give it to `hold` with the stream of that work. At most an eighth of the
        machine's memory and 4 GiB are page-locked (set ``USERSTREAM_PINNED_LIMIT``, in bytes, or
        call `UserStream.set_pinned_limit`); past that results are ordinary arrays, copied through
        page-locked chunks.

        Examples
        --------
        >>> import userstream as us
        >>> from cuda.core import Device
        >>> Device(0).set_current()
        >>> theirs = Device(0).create_stream()
        >>> buffer = Device(0).allocate(4, stream=theirs)
        >>> buffer.fill(7, stream=theirs)
        >>> us.asnumpy(buffer, producer=theirs).tolist()
        [7, 7, 7, 7]
        """
        _waiting.check_arguments(timeout, "auto")
        self._table.check_open()
        return copies.asnumpy(
            buffer,
            out,
            stream=stream,
            producer=producer,
            user_stream=self._user_stream,
            unknown=self._unknown,
            timeout=timeout,
        )

    def copyto(
        self,
        dst: Buffer,
        src: Buffer,
        *,
        stream: StreamLike | int | None = None,
        producer: Producer = "auto",
        timeout: float | None = None,
    ) -> Stream:
        """Copy one buffer to another, in order with the producers of both.

        Parameters
        ----------
        dst : GPU buffer or host array
            Where to.
        src : GPU buffer or host array
            Where from: of the same type as ``dst``, and of a shape that broadcasts to its shape.
            One of the two is a GPU buffer; if both are, they may be of different frameworks and
            on different devices. NumPy's scalars are arrays without axes.
        stream : stream, optional
            The one to copy on; by default the user stream of the device of ``dst``, or of ``src``
            if ``dst`` is on the host.
        producer : stream, "auto", "device" or None, default "auto"
            As for `acquire`, of both.
        timeout : float, optional
            Seconds, at least 0; `None` waits for ever. Nothing is waited for between devices.

        Returns
        -------
        Stream
            The one on which the copy was queued.

        Raises
        ------
        WaitTimeout
            The copy was not done in time, and what ``dst`` holds is undefined: copy again.
        UnsupportedBufferError, HostBufferError
            As `asnumpy`.
        UnknownProducerError, DeviceMismatchError, CaptureError, ClosedError
            As `asnumpy`.
        ValueError, TypeError
            The shapes do not fit, or the types differ; ``dst`` is read-only (as arrays of JAX
            are), a conjugate or negated view of PyTorch, or a host object that NumPy can only
            copy; the two overlap or interleave; both are on the host, where `numpy.copyto` copies.
        DriverNotFoundError, ForkedError, DriverError
            The driver is not there, may not be used, or refused.

        Notes
        -----
        A host array may be reused when it returns: one that is copied from is copied aside first
        up to 16 MiB, and waited for above; one that is copied to is waited for. The GPU buffers
        are held until the copy is done, and their producers go on after it. Where a buffer is
        ordered by DLPack, which names no stream, all later work of the device does; if that would
        invalidate a capture that can be seen, and before CUDA 12.5, the copy is waited for instead.
        Nobody has to wait for the copy of an array of JAX, which is never written. Peer access
        between devices is left as it is. Thread-safe. Driver calls: those of `acquire` and
        `release`;
        ``cuMemcpyAsync``, ``cuMemcpy3DAsync``, ``cuMemcpyPeerAsync``, ``cuMemcpy3DPeerAsync``; for
        new page-locked memory ``cuMemAllocFromPoolAsync``, without pools ``cuMemHostAlloc``.
        After `numpy.copyto`.

        Examples
        --------
        >>> import numpy as np
        >>> import userstream as us
        >>> from cuda.core import Device
        >>> Device(0).set_current()
        >>> theirs = Device(0).create_stream()
        >>> buffer = Device(0).allocate(4, stream=theirs)
        >>> stream = us.copyto(buffer, np.arange(4, dtype=np.uint8), producer=theirs)
        >>> us.asnumpy(buffer, producer=theirs).tolist()
        [0, 1, 2, 3]
        """
        _waiting.check_arguments(timeout, "auto")
        self._table.check_open()
        return copies.copyto(
            dst,
            src,
            stream=stream,
            producer=producer,
            user_stream=self._user_stream,
            unknown=self._unknown,
            timeout=timeout,
        )

    @staticmethod
    def set_pinned_limit(nbytes: int) -> None:
        """Bound the page-locked memory on which `asnumpy` hands out results, for the process.

        Parameters
        ----------
        nbytes : int
            Bytes, those under arrays that are still in use included; 0 hands out none.

        Raises
        ------
        ValueError
            It is negative.
        TypeError
            It is no integer.

        Notes
        -----
        Memory that is free already is given back, by a thread of the library. Does not block;
        thread-safe. Launches of other threads are not held up, except where the driver has no pools
        of host memory: see :doc:`/explanation/limits`. Driver call: ``cuMemFreeAsync``; without
        pools ``cuMemFreeHost``.

        Examples
        --------
        >>> from userstream import UserStream
        >>> UserStream.set_pinned_limit(1 << 30)
        """
        pinned.set_limit(_numbers.integer(nbytes, "nbytes"))

    # -- who is meant -----------------------------------------------------------------------------

    def _waited_for(self, target: Target, name: str | None) -> list[Lane]:
        """Return the lanes that a target of `wait` names, if it is none that `_known` knows."""
        streams = self._unnamed if name is None else self._table.called(name)
        stream = _known(target, streams)
        if stream is not None:
            return [stream._resolve()]
        return self._table.waited_for(target, name)

    def _ordering(
        self, buffers: Sequence[Any], stream: StreamLike | int | None, producer: Producer
    ) -> Ordering:
        if stream is None and producer is _AUTO:
            usual = usual_streams_of(buffers, self._unnamed)
            if usual is not None:
                consumer, source, owner = usual
                ordering = Ordering(consumer, () if source is None else (source,), owner)
                ordering.buffers = buffers
                return ordering
        return self._any_ordering(buffers, stream, producer)

    def _any_ordering(
        self, buffers: Sequence[Any], stream: StreamLike | int | None, producer: Producer
    ) -> Ordering:
        self._table.check_open()
        views = _targets.views_in(buffers, named="buffers")
        return ordering_of(views, stream, producer, self._user_stream, unknown=self._unknown)

    def _user_stream(self, device: int) -> Stream:
        return self._unnamed.get(device) or self._table.find_or_create(device, None, None)


def _known(target: Target, streams: Mapping[int, Stream]) -> Stream | None:
    """Return the stream that there is for an ordinal or a buffer."""
    kind = _buffers.learned.get(type(target))
    if kind is not None:
        return streams.get(kind.locate(target))
    return streams.get(target) if type(target) is int else None


_process_registry = UserStream()
