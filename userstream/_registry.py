"""Class `UserStream`, a registry of user streams; its methods are the public functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, overload

from userstream import (
    _arguments,
    _buffers,
    _copies,
    _engine,
    _hooks,
    _ordering,
    _process,
    _targets,
    _trace,
)
from userstream._driver import core
from userstream._engine import held_objects, host_wait
from userstream._ordering import settings
from userstream._table import Table, known_stream
from userstream.errors import WaitErrors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Self

    import numpy as np
    from numpy.typing import DTypeLike

    from userstream._engine.futures import Completion
    from userstream._ordering.borrow import Borrow
    from userstream._stream.stream import Stream
    from userstream._table import Unknown
    from userstream.typing import (
        AccessMode,
        Buffer,
        Buffers,
        Producer,
        StreamLike,
        Target,
        WaitPolicy,
        _Array,
        _Several,
    )

    _Key = TypeVar("_Key")

_AUTO: Final = "auto"
_WRITE: Final = "write"


class UserStream:
    """A registry of user streams, one per device and name.

    The functions of the `userstream` module are the methods of the process-wide registry,
    ``UserStream.get()``. A library or a test that needs streams of its own creates another registry
    with ``UserStream()``. Used as a context manager, a registry waits for its streams on exit and
    is then closed permanently.

    Parameters
    ----------
    unknown : {"device", "raise"}, optional
        The rule for buffers whose producer is unknown: see `UserStream.unknown`.

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

    __slots__ = ("__weakref__", "_table", "_unnamed", "_uses")

    def __init__(self, *, unknown: Unknown | None = None) -> None:
        checked = settings.UNKNOWN if unknown is None else settings.check_unknown(unknown)
        self._table = Table(checked)
        # For the fast paths: attributes of the table that are never replaced.
        self._unnamed, self._uses = self._table.unnamed, self._table.uses

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
        """The rule for buffers whose producer is unknown: ``"device"`` or ``"raise"``.

        ``"device"`` orders them with everything on their device, in both directions, which
        invalidates any graph capture in progress there, in any thread. ``"raise"`` raises
        `UnknownProducerError` instead, for programs that capture graphs in other threads, unless
        ``USERSTREAM_ORDER=device`` orders every buffer so. The default is the value of
        ``USERSTREAM_UNKNOWN``, or ``"device"``. Can be set; other values raise `ValueError`.

        Examples
        --------
        >>> from userstream import UserStream
        >>> UserStream.get().unknown
        'device'
        >>> UserStream(unknown="raise").unknown
        'raise'
        """
        return self._table.unknown

    @unknown.setter
    def unknown(self, value: Unknown) -> None:
        self._table.unknown = settings.check_unknown(value)

    # -- user streams -----------------------------------------------------------------------------

    def get_stream(
        self,
        target: Target = None,
        *,
        name: str | None = None,
        priority: int | None = None,
        sms: int | Literal["rest"] | None = None,
    ) -> Stream:
        """Return the user stream of a device, creating it on first use.

        Parameters
        ----------
        target : GPU buffer, sequence or mapping of them, device, int or stream, optional
            What determines the device: a buffer of any framework, several buffers on the same
            device, a device, its ordinal, or ``"cuda:1"``; by default the calling thread's current
            device (device 0 without a context, like ``cudaGetDevice``). A stream is returned as it
            is.
        name : str, optional
            Selects one of several user streams of a device; by default the unnamed one.
        priority : int, optional
            Lower numbers run first. Clamped to the device's range. By default the priority of the
            existing stream, or 0 for a new one.
        sms : int or "rest", optional
            The most multiprocessors (SMs) that its work may use, rounded up to what the device can
            be split into; ``stream.sms`` has the result. ``"rest"`` means the SMs that such a part
            leaves over. By default those of the existing stream, or all for a new one.

        Returns
        -------
        Stream
            A non-blocking stream: the same object on every call, in every thread.

        Raises
        ------
        DeviceMismatchError
            The buffers are on several devices.
        InvalidDeviceError
            There is no such device, or *target* does not determine one.
        ValueError
            The stream exists with another priority or *sms*; *sms* is less than 1, more than the
            device has, or not the part into which the process has split the device; or *name*,
            *priority* or *sms* is given together with a stream.
        NotSupportedError
            *sms* is given, and the driver is older than CUDA 12.5.
        UserStreamError
            Other causes: see :doc:`/reference/common-errors`.

        Notes
        -----
        Thread-safe; takes no lock if the stream exists. Does not block, except that the first use
        of a device creates its primary context. This call orders nothing: the stream may run ahead
        of the work that fills the buffer. The current device and context do not change. Driver
        call, once: ``cuStreamCreateWithPriority``. From DALI: one non-blocking stream of default
        priority per device, created on demand.

        With *sms*, the stream is created in a green context, which takes 1 to 2 ms and is kept for
        the life of the process. A process splits a device once, so all parts of one size are the
        same SMs, and the rest has none of them. It is an upper limit and not a reservation: work of
        other streams may run on the same SMs.

        Examples
        --------
        >>> import userstream as us
        >>> stream = us.get_stream(0)
        >>> stream is us.get_stream(0)
        True
        >>> us.get_stream(0, name="io", priority=-1).name
        'io'
        >>> us.get_stream(0, name="preprocess", sms=16).sms
        16
        """
        # Fast path: the stream exists.
        streams = self._unnamed if name is None else self._table.streams_named(name)
        if priority is None and sms is None:
            # Inlined `known_stream`: this path runs in every call but the first.
            if type(target) is int:
                stream = streams.get(target)
            else:
                kind = _buffers.view_classes.get(type(target)) or _buffers.kind_of(target)
                stream = None if kind is None else streams.get(kind.locate(target))
            if stream is not None:
                return stream
        return self._table.find_or_create(target, name, priority, sms)

    def streams(self) -> Mapping[tuple[int, str | None], Stream]:
        """Return the existing user streams.

        Returns
        -------
        Mapping
            A read-only snapshot that maps (device ordinal, name) to `Stream`.

        Raises
        ------
        UserStreamError
            See :doc:`/reference/common-errors`.

        Notes
        -----
        Does not block. Thread-safe.

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
        UserStreamError
            Other causes: see :doc:`/reference/common-errors`.

        Notes
        -----
        Streams that are still referenced are not destroyed: they remain usable, and meanwhile
        `get_stream` returns them again, unless another priority or part of the device is requested.
        The others are destroyed, unless their handle has been read (see `Stream`). The process-wide
        registry also frees the page-locked memory of `asnumpy` that no array uses. Closing it is up
        to the application: a library creates a registry of its own.
        Blocks, but never inside the driver. Thread-safe.

        Examples
        --------
        >>> from userstream import UserStream
        >>> mine = UserStream()
        >>> stream = mine.get_stream(0)
        >>> mine.close()
        >>> len(mine.streams())
        0
        """
        host_wait.check_arguments(timeout, "auto")
        lanes = self._table.lanes()
        try:
            host_wait.sync_all(list(lanes.values()), timeout, grouped=True, closed_is_done=True)
        except WaitErrors:
            self._table.empty(lanes, lost=True)
            raise
        self._table.empty(lanes)
        self._uses.forget_acquired()
        if self is _process_registry:
            _copies.staging.trim()

    def __enter__(self) -> Self:
        self._table.check_open()
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self.close()
        finally:  # after a timeout or Ctrl-C too: a closed registry creates no new streams
            self._table.close()

    def __reduce__(self) -> tuple[Callable[[], UserStream], tuple[()]]:
        if self is not _process_registry:
            _process.refuse_copy(
                self, "send a function that calls userstream there: each process has a registry"
            )
        return UserStream.get, ()  # for the functions of the package, which are bound methods

    def __repr__(self) -> str:
        which = " of the process" if self is _process_registry else ""
        return f"<userstream.UserStream{which}: {self._table}>"

    # -- host waits -------------------------------------------------------------------------------

    @_trace.ranged("wait")
    def wait(
        self,
        *targets: Target,
        name: str | None = None,
        timeout: float | None = None,
        policy: WaitPolicy = "auto",
    ) -> None:
        """Block until the work queued on a device's user stream now has completed.

        Parameters
        ----------
        *targets : GPU buffer, device, int, stream, or sequence or mapping
            What determines the device, as for `get_stream`; for buffers on several devices, the
            user streams of all of them are waited for. A stream is waited for itself, whether it is
            registered or not. A sequence or mapping holds either buffers or streams. Without a
            target, the current device.
        name : str, optional
            Selects one of several user streams of a device; by default the unnamed one.
        timeout : float, optional
            Seconds for all streams together, at least 0. 0 polls once; None waits indefinitely.
        policy : {"auto", "spin"}, default "auto"
            ``"auto"`` polls for about 20 µs, then sleeps until a native thread that waits in the
            driver wakes it; see :doc:`/explanation/waits`. ``"spin"`` never sleeps.

        Raises
        ------
        NoUserStreamError
            A device has no user stream of that name.
        WaitTimeout
            The work did not complete in time. Nothing was cancelled; you can wait again.
        UserStreamError
            Other causes: see :doc:`/reference/common-errors`.

        Notes
        -----
        Waits for your own work: not for that of the buffer's producer, nor for work that is queued
        during the wait. For a buffer and without *name*, that is the user stream of its device, and
        every other stream on which this registry acquired or borrowed the same object, unless it
        has passed the release. Blocks, but never inside the driver, so Ctrl-C interrupts it.
        Thread-safe. Graph captures are not affected. Driver calls: ``cuStreamQuery``, and if the
        stream is busy ``cuEventRecord`` and ``cuEventQuery``, and ``cuEventSynchronize`` in the
        native thread. From DALI: a device without a user stream is an error.

        Examples
        --------
        >>> import userstream as us
        >>> stream = us.get_stream(0)
        >>> us.wait(0, timeout=10)
        """
        streams = self._unnamed if name is None else self._table.streams_named(name)
        stream = None
        if len(targets) == 1 and (name is not None or not self._uses.pending):
            stream = known_stream(targets[0], streams)
        if stream is not None:
            host_wait.sync(stream._lane or stream._resolve(), timeout, policy)
            return
        host_wait.check_arguments(timeout, policy)
        lanes = self._table.lanes_to_wait_for(targets, name)
        if len(lanes) == 1:
            host_wait.sync(lanes[0], timeout, policy)
        else:
            host_wait.sync_all(lanes, timeout, policy)

    @_trace.ranged("wait_for_device")
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
        UserStreamError
            Other causes: see :doc:`/reference/common-errors`.

        Notes
        -----
        Covers the primary context with all its green contexts and, if it is a different one, the
        context of the stream that was passed or the current context. A device that has not been
        used is not initialized. Blocks, but never inside the driver, so Ctrl-C interrupts it.
        Thread-safe. Driver calls: ``cuCtxRecordEvent`` and those of `wait`; before CUDA 12.5,
        ``cuCtxSynchronize`` in a thread that continues after a timeout. From DALI, with a timeout
        added.

        Examples
        --------
        >>> import userstream as us
        >>> us.wait_for_device(0, timeout=10)
        """
        host_wait.check_arguments(timeout, "auto")
        self._table.check_open()
        given = _targets.stream_of(target)
        lane = None if given is None else given._resolve()
        devices = _targets.devices_of(target) if lane is None else [lane.device]
        work = host_wait.work_on(devices, lane, and_current=target is None)
        host_wait.sync_all(work, timeout)

    @_trace.ranged("wait_all")
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
        UserStreamError
            Other causes: see :doc:`/reference/common-errors`.

        Notes
        -----
        Waits for all streams at the same time. Returns at once if there are none. Blocks, but never
        inside the driver, so Ctrl-C interrupts it. Thread-safe. From DALI.

        Examples
        --------
        >>> import userstream as us
        >>> us.wait_all(timeout=10)
        """
        host_wait.check_arguments(timeout, policy)
        self._table.check_open()
        lanes = list(self._table.lanes().values())
        host_wait.sync_all(lanes, timeout, policy, grouped=True, closed_is_done=True)

    # -- without a waiting thread -----------------------------------------------------------------

    def completion(self, *targets: Target, name: str | None = None) -> Completion[None]:
        """Return a future for the work that is queued on a device's user stream now.

        Parameters
        ----------
        *targets : GPU buffer, device, int, stream, or sequence or mapping
            What determines the device, or the stream itself; see `wait`.
        name : str, optional
            Selects one of several user streams of a device; by default the unnamed one.

        Returns
        -------
        Completion
            A `concurrent.futures.Future` that can be awaited as well. Its result is None. Its
            exception is that of `wait`: a `DriverError`, or `WaitErrors` if there are several
            streams. ``result(timeout=)`` raises `WaitTimeout`, after which you can wait again.
            Cancelling the future cancels no work.

        Raises
        ------
        NoUserStreamError
            A device has no user stream of that name.
        CaptureError
            The stream is being captured. The capture continues.
        UserStreamError
            Other causes: see :doc:`/reference/common-errors`.

        Notes
        -----
        Does not block. Thread-safe. One thread of the library watches all futures and runs their
        callbacks: keep those short. A callback that is added to a future that is done runs at once,
        in the calling thread. A callback must not wait for a future (`RuntimeError`), and its
        exceptions are logged. Completion is reported within 5 % of the elapsed time plus 1 ms.
        Driver calls: ``cuStreamQuery``, ``cuEventRecord``; in that thread ``cuEventQuery``, in the
        relaxed capture mode.

        Examples
        --------
        >>> import userstream as us
        >>> stream = us.get_stream(0)
        >>> us.completion(0).result(timeout=10)
        """
        lanes = self._table.lanes_to_wait_for(targets, name)
        # After the fork check: a thread of the parent may have held the lock of this import, and
        # the child would wait forever.
        return _engine.futures.completion(lanes, None)

    async def wait_async(
        self, *targets: Target, name: str | None = None, timeout: float | None = None
    ) -> None:
        """Wait like `wait`, without blocking the event loop.

        Parameters
        ----------
        *targets : GPU buffer, device, int, stream, or sequence or mapping
            What determines the device, or the stream itself; see `wait`.
        name : str, optional
            Selects one of several user streams of a device; by default the unnamed one.
        timeout : float, optional
            Seconds for all streams together, at least 0; None waits indefinitely.
            ``asyncio.timeout`` works as well.

        Raises
        ------
        RuntimeError
            No asyncio event loop is running in this thread.
        WaitTimeout, NoUserStreamError
            As for `wait`.
        UserStreamError
            Other causes: see :doc:`/reference/common-errors`.

        Notes
        -----
        Waits for the work that is queued when the coroutine is first awaited. Cancelling the task
        ends this wait only. Any number of tasks, in the event loops of any number of threads, share
        one thread of the library (see `completion`).

        Examples
        --------
        >>> import asyncio
        >>> import userstream as us
        >>> stream = us.get_stream(0)
        >>> asyncio.run(us.wait_async(0, timeout=10))
        """
        host_wait.check_arguments(timeout, "auto")
        lanes = self._table.lanes_to_wait_for(targets, name)
        await _engine.futures.wait(lanes, timeout=timeout, grouped=len(lanes) > 1)
        if held_objects.queues or held_objects.orphans:
            held_objects.sweep()

    async def wait_all_async(self, *, timeout: float | None = None) -> None:
        """Wait like `wait_all`, without blocking the event loop.

        Parameters
        ----------
        timeout : float, optional
            Seconds for all streams together, at least 0; None waits indefinitely.

        Raises
        ------
        RuntimeError
            No asyncio event loop is running in this thread.
        WaitTimeout, WaitErrors
            As for `wait_all`.
        UserStreamError
            Other causes: see :doc:`/reference/common-errors`.

        Notes
        -----
        Waits for the work that is queued when the coroutine is first awaited; see `wait_async`.

        Examples
        --------
        >>> import asyncio
        >>> import userstream as us
        >>> asyncio.run(us.wait_all_async(timeout=10))
        """
        host_wait.check_arguments(timeout, "auto")
        self._table.check_open()
        lanes = list(self._table.lanes().values())
        await _engine.futures.wait(lanes, timeout=timeout, grouped=True, closed_is_done=True)
        held_objects.sweep()

    # -- order with the producers of buffers ------------------------------------------------------

    @_trace.ranged("acquire")
    def acquire(
        self,
        *buffers: Buffers,
        stream: StreamLike | None = None,
        name: str | None = None,
        producer: Producer = "auto",
        mode: AccessMode = "write",
    ) -> Stream:
        """Make later work on a stream wait for the work that produces buffers.

        Parameters
        ----------
        *buffers : GPU buffer, or sequence or mapping of them
            Buffers of any framework; see :doc:`/reference/buffers`.
        stream : stream, optional
            The stream, of any library, that will use the buffers; by default the user stream of
            their device, which is created on first use.
        name : str, optional
            Selects a named user stream of that device instead; not together with *stream*.
        producer : stream, "auto", "device" or None, default "auto"
            Who writes the buffers. A stream is the producer of all of them. ``"auto"`` uses what is
            known of each buffer: the stream that it names, its framework's current stream, or else
            everything on its device. ``"device"`` means everything on the device. None means that,
            on your word, no work is pending.
        mode : "write" or "read", default "write"
            ``"read"`` declares that the work on the stream only reads the buffers, up to `release`.
            See `borrow`.

        Returns
        -------
        Stream
            The stream that will use the buffers.

        Raises
        ------
        UnknownProducerError
            The producer of a buffer is unknown, and ordering it with the whole device is disabled
            (`UserStream.unknown`) or needs a CUDA 12.5 driver: pass ``producer=``.
        UserStreamError
            Other causes: see :doc:`/reference/common-errors`.

        Notes
        -----
        This is not a lock: the producer may continue to write until `release` makes it wait.
        Nothing is kept alive; `borrow` does that. There is one edge for each distinct producer
        stream, and none if the producer is the consumer itself. A user stream never joins a
        producer's capture; a stream of your own that you pass does. Does not block the host, except
        with ``USERSTREAM_SYNC=1``. Thread-safe. The current device does not change.

        Ordering with the whole device covers everything queued there by any code. It also
        invalidates captures on the device that cannot be seen: those of other threads on streams
        that userstream did not create. In a program that captures in other threads, set
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
        reads = mode is not _WRITE and _ordering.borrow.reads_only(mode)
        ordering = _ordering.resolver.resolve(buffers, self._table, stream, name, producer)
        result = core.acquire(ordering)
        if result:
            ordering.acquire(to_be_released=False, result=result)
        if ordering.buffer_use is not None:
            self._uses.keep_acquired(ordering.buffer_use)
        consumer = ordering.consumer
        for listener in _hooks.buffers_acquired:
            listener(consumer, buffers, reads)
        return consumer

    @_trace.ranged("release")
    def release(
        self,
        *buffers: Buffers,
        stream: StreamLike | None = None,
        name: str | None = None,
        producer: Producer = "auto",
    ) -> None:
        """Make the producers of buffers wait for the work queued on a stream.

        Parameters
        ----------
        *buffers : GPU buffer, or sequence or mapping of them
            Buffers of any framework. They are kept alive until the stream has passed this point.
        stream : stream, optional
            The stream that used the buffers; by default the user stream of their device.
        name : str, optional
            Selects a named user stream of that device instead; not together with *stream*.
        producer : stream, "auto", "device" or None, default "auto"
            Who may write the buffers next; see `acquire`. ``"auto"`` uses the streams that are
            current now.

        Raises
        ------
        UserStreamError
            See :doc:`/reference/common-errors`.

        Notes
        -----
        `borrow` does this at its end. If no producer stream is known, as for JAX, everything that
        is queued on the device from now on waits, also on streams that are created later. If the
        stream is being captured, the buffers are not kept alive: keep them as long as the graph.
        Does not block. Thread-safe. Driver calls: those of `acquire`, and ``cuCtxWaitEvent``. The
        CUDA Array Interface asks its consumers for this edge.

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
        ordering = _ordering.resolver.resolve(buffers, self._table, stream, name, producer)
        for listener in _hooks.buffers_released:
            listener(ordering.consumer, ordering.buffers)
        buffer_use = ordering.buffer_use
        if buffer_use is None:
            ordering.release(ordering.buffers)
        else:
            self._uses.end_acquired(buffer_use)
            ordering.release((ordering.buffers, buffer_use))

    def borrow(
        self,
        *buffers: Buffers,
        stream: StreamLike | None = None,
        name: str | None = None,
        producer: Producer = "auto",
        mode: AccessMode = "write",
        activate: bool | str | Iterable[str] = False,
        keep: bool = True,
    ) -> Borrow:
        """Use buffers on a stream inside a ``with`` block, in order with their producers.

        Parameters
        ----------
        *buffers : GPU buffer, or sequence or mapping of them
            Buffers of any framework; see :doc:`/reference/buffers`.
        stream : stream, optional
            The stream, of any library, that uses the buffers; by default the user stream of their
            device, which is created on first use.
        name : str, optional
            Selects a named user stream of that device instead; not together with *stream*.
        producer : stream, "auto", "device" or None, default "auto"
            Who writes the buffers; see `acquire`. Determined on entry, and used on exit as well.
        mode : "write" or "read", default "write"
            ``"read"`` declares that the block only reads the buffers. It does not affect the order,
            only `observe`, which then knows that no kernel launched by this thread on the stream
            writes them, instead of having to learn or assume that. ``"write"`` declares nothing.
            Of nested blocks, the innermost counts.
        activate : bool, str or iterable of str, default False
            Frameworks whose current stream this stream becomes inside the block (see
            `Stream.activate`); True means those of the buffers.
        keep : bool, default True
            Whether to keep the buffers alive until the stream has passed the end of the block. With
            False, you have to make sure that their memory is not freed before that.

        Returns
        -------
        context manager
            Its value is the stream. On entry the stream waits for the producers, as with `acquire`;
            on exit, also after an exception, they wait for the stream, as with `release`. Without
            ``with`` it does nothing; a `RuntimeWarning` names the line when it is collected.

        Raises
        ------
        RuntimeError
            The block was left in a different thread than it was entered in, although the per-thread
            default stream takes part or a framework's current stream was set.
        UserStreamError
            Other causes: see :doc:`/reference/common-errors`.

        Notes
        -----
        An error on exit never replaces an exception of the block: it is added to it as a note. The
        buffers' memory is not reused while the stream may use it; an edge alone does not guarantee
        that for memory that was allocated on another stream than the producer's (PyTorch, CuPy).
        References are released by later calls, by waits, or by a thread of the library within about
        5 ms. DALI reuses the memory of a pipeline's outputs nevertheless: call `wait` before its
        next run. A JAX array cannot be donated while it is kept. Blocks can be nested and used in
        any number of threads. Does not block. Driver calls: those of `acquire`, twice.

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
        borrow = _ordering.borrow
        kind = borrow.Borrow if mode is _WRITE else borrow.kind_of_borrow(mode)
        return kind((buffers, self._table, stream, name, producer), activate, keep)

    @overload
    def hold(self, *objects: object, stream: StreamLike) -> None: ...

    @overload
    def hold(self, *objects: Buffers, name: str | None = None) -> None: ...

    def hold(
        self, *objects: Any, stream: StreamLike | None = None, name: str | None = None
    ) -> None:
        """Keep objects alive until a stream has completed the work that is queued on it now.

        Parameters
        ----------
        *objects : object
            Any objects; usually buffers that the work uses. Without *stream*, buffers.
        stream : stream, optional
            A stream of any library; by default the streams for which `wait` would wait if it were
            passed these buffers.
        name : str, optional
            Selects a named user stream of that device instead; not together with *stream*.

        Raises
        ------
        CaptureError
            The stream is being captured: keep the objects as long as the graph.
        NoUserStreamError
            There is no such user stream.
        UserStreamError
            Other causes: see :doc:`/reference/common-errors`.

        Notes
        -----
        References are released by later calls, by waits, or by a thread of the library within about
        5 ms; never by a driver thread. At interpreter exit, objects that are still held are not
        released. Does not block. Thread-safe. Driver calls: ``cuEventRecord``, and ``cuEventQuery``
        later.

        Examples
        --------
        >>> import userstream as us
        >>> stream = us.get_stream(0)
        >>> scratch = bytearray(1024)
        >>> us.hold(scratch, stream=stream)
        """
        self._table.check_open()
        self._table.check_name(name, stream)
        if stream is not None:
            held_by = [_ordering.resolver.given_lane(stream, "stream")]
        else:
            _targets.views_in(objects, named="objects")  # raises for an object that is no buffer
            held_by = self._table.lanes_to_wait_for(objects, name) if objects else []
        for lane in held_by:
            held_objects.keep(lane, objects)

    def hand_over(
        self, *results: Buffers, stream: StreamLike | None = None, name: str | None = None
    ) -> None:
        """Hand over results that were produced on a stream to their frameworks' current streams.

        Parameters
        ----------
        *results : GPU buffer, or sequence or mapping of them
            Results of frameworks that were produced while the stream was
            `active <Stream.activate>` for these.
        stream : stream, optional
            The stream on which they were produced; by default the user stream of their device.
        name : str, optional
            Selects a named user stream of that device instead; not together with *stream*.

        Raises
        ------
        UnsupportedBufferError
            A result belongs to a framework that has no current stream.
        UserStreamError
            Other causes: see :doc:`/reference/common-errors`.

        Notes
        -----
        Needed for results that are used before the end of the block in which they were produced, or
        in another thread: the framework's current stream then waits for *stream*, and PyTorch's
        allocator is informed of that use (``Tensor.record_stream``). Call it where the results will
        be used. It is not needed after the block, whose end does the same. Does not block.
        Thread-safe. Driver calls: those of `acquire`.

        Examples
        --------
        >>> import userstream as us
        >>> us.hand_over([])  # nothing to hand over
        """
        self._table.check_open()
        self._table.check_name(name, stream)
        _ordering.borrow.hand_over(results, stream, self._table, name)

    # -- buffers and copies --------------------------------------------------------------

    device_of: Final = staticmethod(_buffers.device_of)
    describe: Final = staticmethod(_buffers.describe)

    @overload
    def asnumpy(
        self,
        buffer: _Array,
        *,
        out: np.ndarray | None = None,
        stream: StreamLike | None = None,
        name: str | None = None,
        producer: Producer = "auto",
        timeout: float | None = None,
    ) -> np.ndarray: ...

    @overload
    def asnumpy(
        self,
        buffer: _Several | Sequence[_Array],
        *,
        out: None = None,
        stream: StreamLike | None = None,
        name: str | None = None,
        producer: Producer = "auto",
        timeout: float | None = None,
    ) -> list[np.ndarray]: ...

    @overload
    def asnumpy(
        self,
        buffer: Mapping[_Key, _Array],
        *,
        out: None = None,
        stream: StreamLike | None = None,
        name: str | None = None,
        producer: Producer = "auto",
        timeout: float | None = None,
    ) -> dict[_Key, np.ndarray]: ...

    @overload
    def asnumpy(
        self,
        buffer: Buffers,
        *,
        out: np.ndarray | None = None,
        stream: StreamLike | None = None,
        name: str | None = None,
        producer: Producer = "auto",
        timeout: float | None = None,
    ) -> Any: ...

    @_trace.ranged("asnumpy")
    def asnumpy(
        self,
        buffer: Buffers,
        *,
        out: np.ndarray | None = None,
        stream: StreamLike | None = None,
        name: str | None = None,
        producer: Producer = "auto",
        timeout: float | None = None,
    ) -> Any:
        """Copy a buffer to the host, in order with its producer, and wait for that copy only.

        Parameters
        ----------
        buffer : GPU buffer, or sequence or mapping of them
            Buffers of any framework (see :doc:`/reference/buffers`), with any strides and NumPy's
            dtypes; also bfloat16 and float8 if ``ml_dtypes`` is installed. Host buffers are
            accepted as well.
        out : numpy.ndarray, optional
            Destination; must match the buffer's shape and dtype. Page-locked memory is fastest.
        stream : stream, optional
            The stream to copy on; by default the user stream of the buffer's device.
        name : str, optional
            Selects a named user stream of that device instead; not together with *stream*.
        producer : stream, "auto", "device" or None, default "auto"
            Who writes the buffer; see `acquire`.
        timeout : float, optional
            Seconds, at least 0; None waits indefinitely.

        Returns
        -------
        numpy.ndarray, or list or dict of them
            *out*, or a new array with the buffer's memory order. A sequence, a mapping or a DALI
            list of tensors gives a list or a dict. A sharded JAX array gives the whole array. A
            host buffer gives ``numpy.asarray(buffer)``, which copies only if necessary, or
            ``numpy.from_dlpack(buffer)``. Arrays whose elements share memory are read-only.

        Raises
        ------
        WaitTimeout
            The copy did not complete in time, and *out* is undefined: copy again once the producer
            has finished. The memory involved is kept alive until the GPU no longer uses it.
        UnsupportedBufferError
            The object is not a buffer, has no shape (a bare address), has elements that NumPy does
            not support, or is masked; its shape and strides extend beyond its allocation; or its
            layout would take more than 65,536 copies.
        HostBufferError
            The buffer is in host memory that NumPy cannot read.
        DeviceMismatchError
            *stream* is on another device than a conjugate or negated PyTorch tensor.
        CaptureError
            *stream* or the producer is being captured: a copy cannot be part of a graph.
        ValueError, TypeError
            *out* has another shape or dtype, or is read-only or masked.
        UserStreamError
            Other causes: see :doc:`/reference/common-errors`.

        Notes
        -----
        Blocks, but never inside the driver, so Ctrl-C interrupts it. Thread-safe. Work on other
        streams is not delayed. After an error *out* is undefined, and after a timeout or Ctrl-C the
        GPU may still write to a page-locked *out*. Driver calls: those of `acquire`;
        ``cuMemcpyAsync``, ``cuMemcpy3DAsync``; for new memory ``cuMemAllocFromPoolAsync``, without
        pools ``cuMemHostAlloc``.

        Results are in page-locked memory, which is reused once no array refers to it. Asynchronous
        work that still reads a result needs it kept alive: keep the array, or pass it to `hold`
        with the stream of that work. At most an eighth of the machine's memory and 4 GiB are
        page-locked (set ``USERSTREAM_PINNED_LIMIT``, in bytes, or call
        `UserStream.set_pinned_limit`); beyond that, results are ordinary arrays, copied through
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
        if timeout is not None:
            host_wait.check_arguments(timeout, "auto")
        return _copies.copies.asnumpy(buffer, out, (self._table, stream, name, producer), timeout)

    @overload
    def asnumpy_async(
        self,
        buffer: _Array,
        *,
        out: np.ndarray | None = None,
        stream: StreamLike | None = None,
        name: str | None = None,
        producer: Producer = "auto",
    ) -> Completion[np.ndarray]: ...

    @overload
    def asnumpy_async(
        self,
        buffer: _Several | Sequence[_Array],
        *,
        out: None = None,
        stream: StreamLike | None = None,
        name: str | None = None,
        producer: Producer = "auto",
    ) -> Completion[list[np.ndarray]]: ...

    @overload
    def asnumpy_async(
        self,
        buffer: Mapping[_Key, _Array],
        *,
        out: None = None,
        stream: StreamLike | None = None,
        name: str | None = None,
        producer: Producer = "auto",
    ) -> Completion[dict[_Key, np.ndarray]]: ...

    @overload
    def asnumpy_async(
        self,
        buffer: Buffers,
        *,
        out: np.ndarray | None = None,
        stream: StreamLike | None = None,
        name: str | None = None,
        producer: Producer = "auto",
    ) -> Completion[Any]: ...

    @_trace.ranged("asnumpy_async")
    def asnumpy_async(
        self,
        buffer: Buffers,
        *,
        out: np.ndarray | None = None,
        stream: StreamLike | None = None,
        name: str | None = None,
        producer: Producer = "auto",
    ) -> Completion[Any]:
        """Queue a copy of a buffer to the host, in order with its producer, without waiting.

        Parameters
        ----------
        buffer : GPU buffer, or sequence or mapping of them
            As for `asnumpy`. One completion covers all of them.
        out : numpy.ndarray, optional
            Destination in page-locked memory, from `pinned_empty` or elsewhere; must match the
            buffer's shape and dtype.
        stream : stream, optional
            The stream to copy on; by default the user stream of the buffer's device.
        name : str, optional
            Selects a named user stream of that device instead; not together with *stream*.
        producer : stream, "auto", "device" or None, default "auto"
            Who writes the buffer; see `acquire`.

        Returns
        -------
        Completion
            A `concurrent.futures.Future` that can be awaited as well. Its result is what `asnumpy`
            returns, and its exception a `DriverError`, or `WaitErrors` if there are several
            streams. ``result(timeout=)`` raises `WaitTimeout`, after which you can wait again.
            Cancelling it cancels no copy.

        Raises
        ------
        MemoryError
            The results would exceed the limit of page-locked memory (``USERSTREAM_PINNED_LIMIT``):
            release earlier ones first.
        ValueError, TypeError
            *out* is not page-locked, or is not as `asnumpy` requires.
        UserStreamError
            Other causes: see `asnumpy` and :doc:`/reference/common-errors`.

        Notes
        -----
        The producer waits for the copy, so the buffer may be dropped or overwritten immediately. Do
        not read or write *out* before the completion is done. All memory involved is kept until the
        GPU no longer uses it, even if the completion is dropped or cancelled, the stream is closed,
        or a signal handler raises. Does not wait for the GPU. The first copy of a size allocates
        memory, and the first one on a device creates a stream: see :doc:`/explanation/limits`.
        Thread-safe. Driver calls: those of `borrow`; ``cuMemcpyAsync``, ``cuMemcpy3DAsync``; those
        of `completion`; for new memory those of `pinned_empty`.

        Examples
        --------
        >>> import userstream as us
        >>> from cuda.core import Device
        >>> Device(0).set_current()
        >>> theirs = Device(0).create_stream()
        >>> buffer = Device(0).allocate(4, stream=theirs)
        >>> buffer.fill(7, stream=theirs)
        >>> copy = us.asnumpy_async(buffer, producer=theirs)
        >>> copy.result(timeout=10).tolist()  # in a coroutine: await copy
        [7, 7, 7, 7]
        """
        result, points = _copies.copies.asnumpy_async(
            buffer, out, (self._table, stream, name, producer)
        )
        return _engine.futures.Completion(points, [], result, grouped=len(points) > 1)

    @_trace.ranged("copyto")
    def copyto(
        self,
        dst: Buffer,
        src: Buffer | np.generic,
        *,
        stream: StreamLike | None = None,
        name: str | None = None,
        producer: Producer = "auto",
        timeout: float | None = None,
        wait: bool = True,
    ) -> Stream:
        """Copy one buffer to another, in order with the producers of both.

        Parameters
        ----------
        dst : GPU buffer or host array
            Destination.
        src : GPU buffer or host array
            Source; must have the dtype of *dst* and a shape that broadcasts to that of *dst*. At
            least one of the two is a GPU buffer; two GPU buffers may belong to different frameworks
            and devices. NumPy scalars are zero-dimensional arrays.
        stream : stream, optional
            The stream to copy on; by default the user stream of the device of *dst*, or of *src*
            if *dst* is on the host.
        name : str, optional
            Selects a named user stream of that device instead; not together with *stream*.
        producer : stream, "auto", "device" or None, default "auto"
            Who writes the two buffers; see `acquire`.
        timeout : float, optional
            Seconds, at least 0; None waits indefinitely. Copies between devices do not wait.
        wait : bool, default True
            Whether to wait until a host array can be reused. False is for page-locked host arrays
            (`pinned_empty`): the copy is queued, and they must not be read or written before it is
            done; ``wait(stream)`` and ``completion(stream)`` report that.

        Returns
        -------
        Stream
            The stream on which the copy was queued.

        Raises
        ------
        WaitTimeout
            The copy did not complete in time, and the contents of *dst* are undefined: copy again.
        UnsupportedBufferError, HostBufferError
            *dst* or *src* is not a buffer that can be copied; see `asnumpy`. Or *dst* cannot be
            written, because its ``__dlpack__`` returns a new copy at each call.
        CaptureError
            *stream* or a producer is being captured: a copy cannot be part of a graph. Or the copy
            is done, but ordering with the whole device invalidated a capture that cannot be seen.
        ValueError, TypeError
            The shapes do not match or the dtypes differ; *dst* is read-only (as JAX arrays are), a
            conjugate or negated PyTorch view, or a host object that NumPy can only copy; the two
            overlap or interleave; both are on the host (use `numpy.copyto`); or *wait* is False,
            and the host array is not page-locked or *timeout* is given.
        UserStreamError
            Other causes: see `asnumpy` and :doc:`/reference/common-errors`.

        Notes
        -----
        A host array can be reused when the call returns: up to 16 MiB, a source is first copied to
        staging memory (page-locked only if the stream is busy); for larger sources, and for
        destinations, the call waits for the copy. Page-locked arrays (`pinned_empty`) need no
        staging. GPU buffers are kept alive until the copy has completed, and their producers wait
        for it. If a buffer is ordered by DLPack, which names no stream, all later work on the
        device waits; if that would invalidate a capture that can be seen, and before CUDA 12.5, the
        call waits for the copy instead. JAX arrays are never written, so nothing waits for their
        copies. Peer access between devices does not change. Thread-safe. Driver calls: those of
        `acquire` and `release`; ``cuMemcpyAsync``, ``cuMemcpy3DAsync``, ``cuMemcpyPeerAsync``,
        ``cuMemcpy3DPeerAsync``; for new page-locked memory ``cuMemAllocFromPoolAsync``, without
        pools ``cuMemHostAlloc``. After `numpy.copyto`.

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
        if timeout is not None:
            host_wait.check_arguments(timeout, "auto")
            if not wait:
                raise ValueError("wait=False waits for nothing: pass timeout= to what waits for it")
        return _copies.copies.copyto(
            dst, src, (self._table, stream, name, producer), timeout, wait=wait
        )

    def pinned_empty(self, shape: int | Sequence[int], dtype: DTypeLike = float) -> np.ndarray:
        """Return a new NumPy array in page-locked memory, with undefined contents.

        Parameters
        ----------
        shape : int or sequence of int
            As for `numpy.empty`.
        dtype : data-type, default float
            As for `numpy.empty`; without Python objects.

        Returns
        -------
        numpy.ndarray
            A writable array in C order. `asnumpy` and `copyto` copy to it and from it directly.

        Raises
        ------
        MemoryError
            It would exceed the limit of page-locked memory; the message says how to raise it.
        ValueError, TypeError
            *shape* is not a shape or has a negative length, or *dtype* contains Python objects.
        UserStreamError
            Other causes: see :doc:`/reference/common-errors`.

        Notes
        -----
        The memory comes from the same cache as the results of `asnumpy`, and counts towards its
        limit (``USERSTREAM_PINNED_LIMIT``, `UserStream.set_pinned_limit`). It is reused once no
        array refers to it, views included, and every copy by userstream to or from it has
        completed. Other work that uses it needs the array kept alive; `hold` does that. All devices
        can use it; it lies on the host's NUMA node nearest to the current device. Does not wait for
        the GPU. Thread-safe. Driver calls, for new memory: ``cuMemAllocFromPoolAsync``, without
        pools ``cuMemHostAlloc``. After `numpy.empty`.

        Examples
        --------
        >>> import userstream as us
        >>> place = us.pinned_empty((2, 3), "f4")
        >>> place.shape, place.dtype
        ((2, 3), dtype('float32'))
        """
        self._table.check_open()
        return _copies.pinned.empty(shape, dtype)

    def pinned_like(self, prototype: Buffer, dtype: DTypeLike | None = None) -> np.ndarray:
        """Return a new page-locked array with the shape and dtype of a buffer or an array.

        Parameters
        ----------
        prototype : GPU buffer or host array
            Determines the shape, the dtype and the order of the axes in memory.
        dtype : data-type, optional
            Overrides the dtype.

        Returns
        -------
        numpy.ndarray
            A writable array without gaps, with undefined contents; see `pinned_empty`.

        Raises
        ------
        UnsupportedBufferError, HostBufferError
            *prototype* is not an array; see `asnumpy`.
        MemoryError, TypeError
            As for `pinned_empty`.
        UserStreamError
            Other causes: see :doc:`/reference/common-errors`.

        Notes
        -----
        Neither copies nor waits. Thread-safe. After `numpy.empty_like`.

        Examples
        --------
        >>> import numpy as np
        >>> import userstream as us
        >>> us.pinned_like(np.ones((2, 3), "f4")).shape
        (2, 3)
        """
        self._table.check_open()
        return _copies.pinned.empty_like(prototype, dtype)

    @staticmethod
    def set_pinned_limit(nbytes: int) -> None:
        """Limit the page-locked memory of `asnumpy` and `pinned_empty`, process-wide.

        Parameters
        ----------
        nbytes : int
            Bytes, including those of arrays that are still in use; with 0 the results of `asnumpy`
            are ordinary memory, and `pinned_empty` raises `MemoryError`.

        Raises
        ------
        ValueError, TypeError
            *nbytes* is negative, or not an integer.

        Notes
        -----
        Page-locked memory that is not in use is freed, by a thread of the library. Does not block.
        Thread-safe. Launches of other threads are not delayed, except where the driver has no pools
        of host memory: see :doc:`/explanation/limits`. Driver call: ``cuMemFreeAsync``; without
        pools ``cuMemFreeHost``.

        Examples
        --------
        >>> from userstream import UserStream
        >>> UserStream.set_pinned_limit(1 << 30)
        """
        _copies.pinned.set_limit(_arguments.integer(nbytes, "nbytes"))


_process_registry = UserStream()
_process_registry._table.is_process_wide = True
