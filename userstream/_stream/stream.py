"""Class `Stream`. Its methods pass the lane of the stream to functions of the other modules."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Never, NoReturn, TypeVar, overload

from cuda.core import Device, Event

from userstream import _arguments, _driver, _engine, _process, _stream, _trace
from userstream._engine import host_wait, lanes
from userstream._engine.lane import NOT_NOW, CoreStream, Lane
from userstream._stream import factory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager
    from typing import Self, TypeAlias

    from cuda.bindings import driver
    from cuda.core import Context, DeviceResources, EventOptions
    from cuda.core.graph import GraphBuilder, GraphDefinition

    from userstream._driver.capture import CaptureInfo
    from userstream._stream.activation import Activation
    from userstream._stream.attributes import AccessPolicyWindow
    from userstream._stream.memory_operations import MemoryOperation
    from userstream.errors import DriverError
    from userstream.typing import Buffer, CaptureMode, DeviceLike, StreamLike, WaitPolicy

    _SyncPolicy: TypeAlias = Literal["auto", "spin", "yield", "blocking"]
    _Domain: TypeAlias = Literal["default", "remote"]

T = TypeVar("T")

# Methods of other libraries' streams, and their counterparts in userstream.
_COUNTERPARTS = {
    "synchronize": "sync(timeout=...)",
    "query": "is_done",
    "done": "is_done",
    "wait_stream": "wait(stream)",
    "record_event": "record()",
    "ptr": "int(stream.handle)",
    "cuda_stream": "int(stream.handle)",
    "device_id": "device.device_id",
    "device_index": "device.device_id",
    "use": "activate(...), in a with statement",
}

# Streams whose handle other code has read. A framework may keep the handle: never destroy these.
_given_away: dict[int, Stream] = {}


class Stream(CoreStream):
    """A CUDA stream.

    A `Stream` is accepted wherever a `cuda.core.Stream` or an object with ``__cuda_stream__`` is.
    Obtain one from `get_stream`, `Stream.create`, `Stream.from_handle`, `Stream.legacy_default` or
    `Stream.per_thread_default`; calling ``Stream(...)`` raises `TypeError`.

    A stream that userstream created is destroyed when its last reference goes away. If its handle
    has been read (through ``handle`` or ``__cuda_stream__``), it is kept until exit instead,
    because frameworks keep such handles. ``close`` destroys it at once. A stream that other code
    created is never destroyed.

    Notes
    -----
    Thread-safe. A stream belongs to its device whichever device is current, also in threads
    without a context. In a forked child, everything that needs CUDA raises `ForkedError`.

    Three things deliberately differ from cuda.core: a priority is clamped to the device's range,
    the ``handle`` of a closed stream raises `ClosedError` instead of being the NULL stream, and
    ``wait(None)`` is refused. `wait_event` and the methods for captures, raw memory, attributes and
    host functions have the names and parameters of the Rust crate baracuda.

    Examples
    --------
    >>> import userstream as us
    >>> with us.Stream.create(priority=-1) as stream:
    ...     stream.sync()
    """

    __slots__ = ("_lane", "_token")

    # Set by `_of` and `_default`, because cuda.core's factory does not run __init__.
    _lane: Lane | None  # None: a default stream, which has one lane per context
    _token: driver.CUstream  # the handle of a default stream

    _defaults: ClassVar[dict[int, Stream]] = {}

    # -- creation and end -------------------------------------------------------------------------

    def __init__(self, *args: object, **kwargs: object) -> None:  # noqa: ARG002
        raise TypeError(
            "Stream(...) does not create a stream: use userstream.get_stream(target), "
            "Stream.create(device), Stream.from_handle(handle), Stream.legacy_default() or "
            "Stream.per_thread_default()"
        )

    @classmethod
    def create(
        cls,
        device: DeviceLike | None = None,
        *,
        nonblocking: bool = True,
        priority: int = 0,
        flags: int | None = None,
        sms: int | Literal["rest"] | None = None,
    ) -> Self:
        """Create a stream of your own, in addition to the user streams.

        Parameters
        ----------
        device : device or int, optional
            The device to create it on; by default the calling thread's current device, which
            stays current.
        nonblocking : bool, default True
            Whether the stream runs concurrently with the legacy default stream instead of
            synchronizing with it.
        priority : int, default 0
            Lower numbers run first. Clamped to the device's range (see `priority_range`); the
            ``priority`` attribute has the result.
        flags : int or CUstream_flags, optional
            The driver's spelling of ``nonblocking``, which it must not contradict.
        sms : int or "rest", optional
            The most multiprocessors (SMs) that its work may use; see `get_stream`. By default all.

        Returns
        -------
        Stream
            A stream in the device's primary context or, with *sms*, in a green context of the
            device. ``with Stream.create() as s:`` closes it.

        Raises
        ------
        ValueError
            *flags* contradicts *nonblocking*, or contains bits that are not stream flags; *sms* is
            less than 1, more than the device has, not the part into which the process has split the
            device, or given for a blocking stream.
        NotSupportedError
            *sms* is given, and the driver is older than CUDA 12.5.
        UserStreamError
            Other causes: see :doc:`/reference/common-errors`.

        Notes
        -----
        Driver call: ``cuStreamCreateWithPriority``. Does not block, except that the first use of a
        device creates its primary context. With *sms*, the first stream of a part waits for the
        work that is pending on the device, because ``cuGreenCtxCreate`` does.

        Examples
        --------
        >>> from userstream import Stream
        >>> stream = Stream.create(0, nonblocking=False)
        >>> stream.is_nonblocking, stream.priority
        (False, 0)
        >>> stream.close()
        """
        wanted = _arguments.integer(priority, "priority")
        factory.check_flags(flags, nonblocking=nonblocking)
        limit = None if sms is None else factory.check_sms(sms, nonblocking=nonblocking)
        ordinal = _arguments.device_id_or_current(device)
        part = None if limit is None else _engine.lanes.part_of(ordinal, limit)
        return cls._of(
            lanes.create(ordinal, nonblocking=bool(nonblocking), priority=wanted, part=part)
        )

    @classmethod
    def from_handle(cls, handle: int | StreamLike, owner: object = None) -> Stream:
        """Wrap a stream that other code created; userstream never destroys it.

        Parameters
        ----------
        handle : int, CUstream or object with ``__cuda_stream__``
            The stream. 1 and 2 are the default streams. 0 is refused, because libraries disagree
            on which default stream it means.
        owner : object, optional
            An object to keep alive while the returned stream is open. By default that is *handle*
            itself, if it has ``__cuda_stream__``. Nothing is kept for 1, 2 or a `Stream`.

        Returns
        -------
        Stream
            A `Stream`, or the handle of one, gives that `Stream` itself.

        Raises
        ------
        ValueError
            *handle* is 0, negative, or too large for an address.
        UserStreamError
            Other causes: see :doc:`/reference/common-errors`.

        Notes
        -----
        The driver cannot tell whether a handle is valid: an invalid one crashes the process.
        Driver call: ``cuStreamGetCtx``. Does not block. If *handle* is a cuda.core stream,
        ownership is shared, as in cuda.core: the stream is destroyed at the last close.

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
        address = factory.address_of(handle)
        _driver.library.ensure()
        if address in (_driver.streams.LEGACY, _driver.streams.PER_THREAD):
            return cls._default(address)
        kept = handle if owner is None else owner
        return cls._of(lanes.at_handle(address, kept, shared=owner is None))

    @classmethod
    def legacy_default(cls) -> Stream:
        """Return the legacy default stream, with which a context's blocking streams synchronize.

        Returns
        -------
        Stream
            The same object on every call. It refers to the legacy default stream of whichever
            context is current when it is used (device 0 without a context).

        Notes
        -----
        The driver's ``CU_STREAM_LEGACY``. Does not block and makes no driver call.

        Examples
        --------
        >>> from userstream import Stream
        >>> int(Stream.legacy_default().handle)
        1
        """
        return cls._default(_driver.streams.LEGACY)

    @classmethod
    def per_thread_default(cls) -> Stream:
        """Return the per-thread default stream.

        Returns
        -------
        Stream
            The same object on every call. It refers to a different stream in each thread, and in
            each context that is current there (device 0 without a context).

        Notes
        -----
        The driver's ``CU_STREAM_PER_THREAD``. Does not block and makes no driver call.

        Examples
        --------
        >>> from userstream import Stream
        >>> int(Stream.per_thread_default().handle)
        2
        """
        return cls._default(_driver.streams.PER_THREAD)

    @staticmethod
    def priority_range(device: DeviceLike | None = None) -> tuple[int, int]:
        """Return the lowest and the highest stream priority of a device.

        Parameters
        ----------
        device : device or int, optional
            The calling thread's current device by default.

        Returns
        -------
        least : int
            The lowest priority, which is the larger number: 0.
        greatest : int
            The highest priority, a negative number.

        Raises
        ------
        UserStreamError
            See :doc:`/reference/common-errors`.

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
        return _driver.contexts.priority_range(
            _driver.contexts.primary_context(_arguments.device_id_or_current(device))
        )

    def close(self) -> None:
        """Close the stream: destroy it if userstream created it, else release its owner.

        Raises
        ------
        RuntimeError
            The whole process shares it: it is a default stream, or a user stream of the
            process-wide registry, which `userstream.close` empties.
        UserStreamError
            Other causes: see :doc:`/reference/common-errors`.

        Notes
        -----
        Queued work still completes. Closing a closed stream does nothing. A user stream of a
        `UserStream` of your own is removed from that registry, whose `get_stream` creates a new
        one. Driver call: ``cuStreamDestroy``. Does not block.

        Examples
        --------
        >>> from userstream import Stream
        >>> stream = Stream.create()
        >>> stream.close()
        >>> stream.is_closed
        True
        """
        factory.close(self._lane, self)
        _given_away.pop(id(self), None)
        super().close()

    def __enter__(self) -> Self:
        factory.check_own(self._lane, self)
        self._live()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._lane is not None:
            return repr(self._lane)
        kind = "legacy" if self._address() == _driver.streams.LEGACY else "per-thread"
        return f"<userstream.Stream {kind} default>"

    def __reduce__(self) -> NoReturn:
        _process.refuse_copy(
            self, "send the device or the name, and call userstream.get_stream() there"
        )

    # -- properties -------------------------------------------------------------------------------

    @property
    def handle(self) -> driver.CUstream:
        """The ``CUstream``; ``int(stream.handle)`` is its address.

        Reading it keeps a stream that userstream created alive until exit, because other code may
        keep the handle. Raises `ClosedError` if the stream is closed.

        Examples
        --------
        >>> from userstream import Stream
        >>> stream = Stream.create(0)
        >>> int(stream.handle) == stream.__cuda_stream__()[1]
        True
        """
        handle = self._live()
        if self._lane is not None and self._lane.owned:
            _given_away[id(self)] = self
        return handle

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return ``(0, address)``, the protocol by which libraries exchange streams."""
        return (0, int(self.handle))

    @property
    def device(self) -> Device:
        """The `cuda.core.Device` of this stream; for a default stream, the current device.

        Examples
        --------
        >>> import userstream as us
        >>> us.get_stream(0).device.device_id
        0
        """
        _process.check_fork()
        return Device(self._ordinal())

    @property
    def context(self) -> Context:
        """The `cuda.core.Context` of this stream; for a default stream, the current context.

        Raises `ClosedError` if the stream is closed.

        Examples
        --------
        >>> from userstream import Stream
        >>> context = Stream.create().context
        """
        return self._within(lambda lane: lane.core.context)

    @property
    def resources(self) -> DeviceResources:
        """The hardware resources that this stream may use, as `cuda.core.Stream.resources`.

        Raises `ClosedError` if the stream is closed.

        Examples
        --------
        >>> from userstream import Stream
        >>> resources = Stream.create().resources
        """
        return self._within(lambda lane: lane.core.resources)

    @property
    def name(self) -> str | None:
        """The name that was passed to `get_stream`; `None` for any other stream.

        Examples
        --------
        >>> import userstream as us
        >>> us.get_stream(0, name="copies").name
        'copies'
        """
        return None if self._lane is None else self._lane.name

    @property
    def sms(self) -> int | None:
        """The number of multiprocessors (SMs) of a stream that was created with ``sms=``.

        `None` for any other stream; ``resources`` reports the SMs of any stream.

        Examples
        --------
        >>> from userstream import Stream
        >>> Stream.create(0, sms=16).sms
        16
        >>> Stream.create(0).sms is None
        True
        """
        lane = self._lane
        return None if lane is None or lane.part is None else lane.part.sms

    @property
    def flags(self) -> int:
        """The creation flags of the stream: 1 (``CU_STREAM_NON_BLOCKING``) or 0.

        Known from its creation, so it can be read during a capture. If other code created the
        stream, the driver is asked (``cuStreamGetFlags``), which raises `CaptureError` while the
        stream is being captured, because the query would invalidate the capture.

        Examples
        --------
        >>> import userstream as us
        >>> us.get_stream(0).flags
        1
        """
        lane = self._resolve()
        if lane.flags is not None:
            lane.live()
            return lane.flags
        return lane.here(_driver.streams.stream_flags, lane.usable(NOT_NOW), lane)

    @property
    def is_nonblocking(self) -> bool:
        """True if the stream runs concurrently with the legacy default stream; see ``flags``.

        Examples
        --------
        >>> import userstream as us
        >>> us.get_stream(0).is_nonblocking
        True
        """
        return bool(self.flags & 1)

    @property
    def priority(self) -> int:
        """The priority of the stream; lower numbers run first.

        Known from its creation, like ``flags``; if other code created the stream, the driver is
        asked (``cuStreamGetPriority``).

        Examples
        --------
        >>> from userstream import Stream
        >>> Stream.create(0, priority=-1).priority
        -1
        """
        lane = self._resolve()
        if lane.priority is not None:
            lane.live()
            return lane.priority
        if not lane.is_context_independent:
            return 0  # the driver creates the default streams with priority 0
        lane.usable(NOT_NOW)
        return int(lane.core.priority)

    @property
    def stream_id(self) -> int:
        """An identifier that, unlike the handle, no other stream of the process ever has.

        Driver call: ``cuStreamGetId``, once. Raises `CaptureError` if the stream was created by
        other code and is being captured when this is first read.

        Examples
        --------
        >>> from userstream import Stream
        >>> Stream.create(0).stream_id == Stream.create(0).stream_id
        False
        """
        return self._resolve().identify()

    # -- host waits -------------------------------------------------------------------------------

    @property
    def is_done(self) -> bool:
        """True if all work queued on the stream has completed. Does not block.

        A stream on which other code keeps queuing work may never become idle; `sync` waits for the
        work that is queued now. Raises `CaptureError` while the stream is being captured, and
        `DriverError` if the GPU failed. Driver call: ``cuStreamQuery``, in the relaxed capture
        mode.

        Examples
        --------
        >>> import userstream as us
        >>> stream = us.get_stream(0)
        >>> stream.sync()
        >>> stream.is_done
        True
        """
        return self._resolve().is_idle()

    @_trace.ranged("Stream.sync")
    def sync(self, timeout: float | None = None, *, policy: WaitPolicy = "auto") -> None:
        """Block the calling thread until the work queued on this stream now has completed.

        Parameters
        ----------
        timeout : float, optional
            Seconds, at least 0. 0 polls once; None waits indefinitely.
        policy : {"auto", "spin"}, default "auto"
            ``"auto"`` polls for about 20 µs, then sleeps until a native thread that waits in the
            driver wakes it; see :doc:`/explanation/waits`. ``"spin"`` never sleeps.

        Raises
        ------
        WaitTimeout
            The work did not complete in time. Nothing was cancelled.
        UserStreamError
            Other causes: see :doc:`/reference/common-errors`.

        Notes
        -----
        Never blocks inside the driver, so Ctrl-C interrupts it. Work that other threads queue
        during the wait is not waited for. Driver calls: ``cuStreamQuery``, and if the stream is
        busy ``cuEventRecord`` and ``cuEventQuery``, in the relaxed capture mode, and
        ``cuEventSynchronize`` in the native thread. Thread-safe.

        Examples
        --------
        >>> import userstream as us
        >>> us.get_stream(0).sync(timeout=10)
        """
        host_wait.sync(self._lane or self._resolve(), timeout, policy)

    # -- order with other streams -----------------------------------------------------------------

    def wait(self, event_or_stream: Event | StreamLike, **refused: Never) -> None:
        """Make later work on this stream wait for an event or a stream, without blocking the host.

        Parameters
        ----------
        event_or_stream : Event, or stream
            An event, or a stream (anything with ``__cuda_stream__``), of any device. For a stream,
            the work that is queued on it now is waited for.
        **refused : never
            Nothing: a ``timeout`` is an argument of `sync`, which makes the host wait.

        Raises
        ------
        UnsupportedStreamError
            *event_or_stream* is neither an event nor a stream. It is a `TypeError`, and a
            `ValueError` as in cuda.core.
        CaptureError
            One of the streams is being captured, and the other is not, or is being captured into
            another graph. A stream of your own may join the other stream's capture; a user stream
            never does. Or this stream is being captured and the event was not recorded in that
            capture, which is now invalid.
        UserStreamError
            Other causes: see :doc:`/reference/common-errors`.

        Notes
        -----
        Like `cuda.core.Stream.wait`, but whichever device is current. Driver calls:
        ``cuStreamIsCapturing``, ``cuEventRecord`` on a pooled event, and ``cuStreamWaitEvent``.
        Does not block. Thread-safe. As always in CUDA, waiting for an event that was recorded in a
        capture makes the stream join that capture.

        Examples
        --------
        >>> from userstream import Stream
        >>> first, second = Stream.create(), Stream.create()
        >>> second.wait(first)
        """
        if refused:
            raise TypeError(
                f"Stream.wait() has no argument {next(iter(refused))!r}: it makes the stream wait, "
                "and not the host; to wait on the host, use stream.sync(timeout=...)"
            )
        if isinstance(event_or_stream, Event):
            _stream.events.wait(self._resolve(), event_or_stream)
        else:
            factory.check_stream(event_or_stream)
            lane = self._resolve()
            lane.live()
            # Joining a capture would put the work of all users of a shared stream into the graph.
            lane.add_edge(lane_of(event_or_stream), may_join=not lane.is_shared)

    def wait_event(self, event: Any, flags: int = 0) -> None:  # any framework's event
        """Make later work on this stream wait for an event, without blocking the host.

        Parameters
        ----------
        event : cuda.core.Event, CUevent, torch.cuda.Event or cupy.cuda.Event
            An event of any device. An event that was never recorded is not waited for.
        flags : int or CUevent_wait_flags, default 0
            1 (``CU_EVENT_WAIT_EXTERNAL``) is allowed during capture only: the wait becomes a node
            of the graph, which waits for the event at each launch.

        Raises
        ------
        ValueError
            *flags* is neither 0 nor 1, or is 1 while the stream is not being captured; or *event*
            is a null handle.
        CaptureError
            The wait invalidated the capture of this stream, because the event was recorded outside
            of the capture and *flags* is 0.
        UserStreamError
            Other causes: see :doc:`/reference/common-errors`.

        Notes
        -----
        As always in CUDA, waiting for an event that was recorded in a capture makes this stream
        join that capture; a shared user stream joins it with the work of all its users. The driver
        cannot tell beforehand. Thread-safe. Does not block. Driver call: ``cuStreamWaitEvent``.

        Examples
        --------
        >>> from userstream import Stream
        >>> first, second = Stream.create(), Stream.create()
        >>> second.wait_event(first.record())
        """
        self._within(_stream.events.wait_for_any, event, flags)

    def record(self, event: Event | None = None, options: EventOptions | None = None) -> Event:
        """Record an event after the work queued on this stream.

        Parameters
        ----------
        event : cuda.core.Event, optional
            The event to record, of this stream's context; by default a new one is created.
        options : EventOptions, optional
            Options for the new event.

        Returns
        -------
        Event
            The recorded event.

        Raises
        ------
        DeviceMismatchError
            The event belongs to another device.
        UserStreamError
            Other causes: see :doc:`/reference/common-errors`.

        Notes
        -----
        Like `cuda.core.Stream.record`, but whichever device is current. Driver calls:
        ``cuEventCreate``, ``cuEventRecord``. Does not block.

        Examples
        --------
        >>> from userstream import Stream
        >>> event = Stream.create().record()
        >>> event.sync()
        """
        return self._within(_stream.events.record, event, options)

    def activate(self, *frameworks: str) -> Activation[Self]:
        """Make this stream the frameworks' current stream inside a ``with`` block.

        Parameters
        ----------
        *frameworks : str
            Names of frameworks, such as ``"torch"`` and ``"cupy"``; :doc:`/reference/buffers` lists
            all that have a current stream. By default those that are imported, except a framework
            that needs a blocking stream (``Stream.create(nonblocking=False)``). If none is
            imported, the block changes nothing. Pass the stream to the functions of frameworks that
            have no current stream.

        Returns
        -------
        context manager
            Its value is the stream. On exit, also after an exception, each framework's previous
            current stream is restored. Without ``with`` it does nothing; a `RuntimeWarning` names
            the line when it is collected.

        Raises
        ------
        ValueError
            A framework has no current stream, is not imported, or needs a blocking stream, which
            this is not.
        RuntimeError
            On exit: the block was left in a different thread than it was entered in.
        UserStreamError
            Other causes: see :doc:`/reference/common-errors`.

        Warns
        -----
        RuntimeWarning
            On exit, if no framework was named: one was imported inside the block, so its work there
            went to its own current stream. Import it before, or name it, which raises at once.

        Notes
        -----
        Affects the calling thread and this stream's device; the current device does not change. On
        entry this stream waits for the streams that were current, and on exit they wait for this
        one, so that memory which is freed to this stream's pool is not reused too early. Results
        made inside the block can be used after it on the streams that were current before; for any
        other use see `hand_over`. Blocks must be left in the reverse order of entry: take care with
        generators and asyncio tasks. Does not block. Driver calls: those of `wait`.

        Examples
        --------
        >>> from userstream import Stream
        >>> with Stream.create(0) as stream, stream.activate():
        ...     pass  # PyTorch and CuPy work on the stream
        """
        return _stream.activation.of_user(self, frameworks)

    # -- graph capture ----------------------------------------------------------------------------

    @property
    def is_capturing(self) -> bool:
        """True if the stream is being captured into a graph, by any code. Does not block.

        Also true while a capture is invalidated but not yet ended. Harmless to every capture.
        Driver call: ``cuStreamIsCapturing``.

        Examples
        --------
        >>> from userstream import Stream
        >>> stream = Stream.create(0)
        >>> with stream.capture():
        ...     stream.is_capturing
        True
        """
        return self._within(lambda lane: _driver.capture.is_capturing(lane.live(), lane))

    @property
    def capture_info(self) -> CaptureInfo | None:
        """Information about the capture that includes the stream; `None` without a capture.

        Does not block, and is harmless to every capture. Driver call: ``cuStreamGetCaptureInfo``.

        Examples
        --------
        >>> from userstream import Stream
        >>> stream = Stream.create(0)
        >>> stream.capture_info is None
        True
        >>> with stream.capture():
        ...     stream.capture_info.state
        'active'
        """
        return self._within(lambda lane: _driver.capture.capture_info(lane.live(), lane))

    def begin_capture(self, mode: CaptureMode = "global") -> None:
        """Begin capturing submitted work into a graph instead of executing it.

        Parameters
        ----------
        mode : {"global", "thread_local", "relaxed"}, default "global"
            Which threads' potentially unsafe calls (those that might wait for work which never
            runs) are prohibited during the capture: those of all threads, of this thread, or of
            none. A prohibited call invalidates the capture.

        Raises
        ------
        CaptureError
            The stream is already being captured; or it is the legacy default stream, which CUDA
            cannot capture.
        NotSupportedError
            The driver is older than CUDA 12.3.
        UserStreamError
            Other causes: see :doc:`/reference/common-errors`.

        Notes
        -----
        Work that any thread submits to the stream is captured: use a stream of your own rather than
        a shared user stream. The thread that began the capture must end it, unless *mode* is
        ``"relaxed"``. Thread-safe. Does not block. Driver call: ``cuStreamBeginCaptureToGraph``.

        Examples
        --------
        >>> from userstream import Stream
        >>> stream = Stream.create()
        >>> stream.begin_capture()
        >>> stream.is_capturing
        True
        >>> graph = stream.end_capture()
        """
        self._within(_stream.capture.begin, mode)

    def end_capture(self) -> GraphDefinition:
        """End the capture that `begin_capture` began, and return its graph.

        Returns
        -------
        cuda.core.graph.GraphDefinition
            ``graph.instantiate()`` makes an executable graph (``upload(stream)``,
            ``launch(stream)``); this needs a current context. ``graph.debug_dot_print(path)``
            draws it.

        Raises
        ------
        CaptureError
            The stream is not being captured, or userstream did not begin the capture on this
            stream; or there is no graph, because the capture was invalidated or another stream
            joined it without being joined back. The capture has ended in these last two cases. Or
            another thread began it, and has to end it.
        UserStreamError
            Other causes: see :doc:`/reference/common-errors`.

        Notes
        -----
        Does not block. The graph keeps nothing alive that the captured work uses. Driver call:
        ``cuStreamEndCapture``.

        Examples
        --------
        >>> from cuda.core import Device
        >>> from userstream import Stream
        >>> Device(0).set_current()
        >>> stream = Stream.create()
        >>> stream.begin_capture("relaxed")
        >>> executable = stream.end_capture().instantiate()
        >>> executable.launch(stream)
        >>> stream.sync(timeout=10)
        """
        return self._within(_stream.capture.end)

    def capture(self, mode: CaptureMode = "global") -> AbstractContextManager[GraphDefinition]:
        """Capture the work that is submitted to this stream inside a ``with`` block.

        Parameters
        ----------
        mode : {"global", "thread_local", "relaxed"}, default "global"
            Which threads' potentially unsafe calls are prohibited; see `begin_capture`.

        Returns
        -------
        context manager
            Its value is the `cuda.core.graph.GraphDefinition`, which is complete after the block.
            If the block raises, the capture is ended and the graph must not be touched: the driver
            may have destroyed it.

        Raises
        ------
        CaptureError, NotSupportedError
            On entry as for `begin_capture`; on exit, the capture gave no graph (see `end_capture`).
        UserStreamError
            Other causes: see :doc:`/reference/common-errors`.

        Notes
        -----
        Does not block. Driver calls: ``cuStreamBeginCaptureToGraph``, ``cuStreamEndCapture``.

        Examples
        --------
        >>> from cuda.core import Device
        >>> from userstream import Stream
        >>> Device(0).set_current()
        >>> stream, branch = Stream.create(), Stream.create()
        >>> with stream.capture() as graph:
        ...     branch.wait(stream)  # joins the capture
        ...     stream.wait(branch)
        >>> executable = graph.instantiate()
        >>> executable.upload(stream)
        >>> executable.launch(stream)
        >>> stream.sync(timeout=10)
        """
        return _stream.capture.CaptureBlock(self._resolve(), mode)

    def create_graph_builder(self) -> GraphBuilder:
        """Return a cuda.core graph builder that captures on this stream.

        Returns
        -------
        cuda.core.graph.GraphBuilder
            Its ``begin_building`` begins the capture; its ``complete`` needs a current context.

        Raises
        ------
        UserStreamError
            See :doc:`/reference/common-errors`.

        Notes
        -----
        Like `cuda.core.Stream.create_graph_builder`; `capture` needs no builder. Does not block.
        Up to cuda.core 1.2, destroying a builder whose capture was invalidated may terminate the
        process.

        Examples
        --------
        >>> from cuda.core import Device
        >>> from userstream import Stream
        >>> Device(0).set_current()
        >>> builder = Stream.create().create_graph_builder().begin_building()
        >>> graph = builder.end_building().complete()
        """
        self._live()
        return super().create_graph_builder()

    @staticmethod
    def capture_mode(mode: CaptureMode) -> AbstractContextManager[None]:
        """Set the calling thread's capture mode inside a ``with`` block.

        Parameters
        ----------
        mode : {"global", "thread_local", "relaxed"}
            Whose captures prohibit potentially unsafe calls of this thread: its own and the global
            ones of other threads (CUDA's default), only its own, or none. In a ``"relaxed"`` block,
            a query cannot invalidate the capture of another stream.

        Returns
        -------
        context manager
            Restores the previous mode on exit, also after an exception.

        Raises
        ------
        UserStreamError
            See :doc:`/reference/common-errors`.

        Notes
        -----
        The mode belongs to the thread: do not leave the block open across a ``yield`` or an
        ``await``. userstream's own waits and queries do not need it. Does not block. Driver call:
        ``cuThreadExchangeStreamCaptureMode``.

        Examples
        --------
        >>> from userstream import Stream
        >>> stream = Stream.create()
        >>> event = stream.record()
        >>> with Stream.create().capture(), Stream.capture_mode("relaxed"):
        ...     event.sync()
        """
        return _stream.capture.thread_mode(mode)

    # -- raw memory -------------------------------------------------------------------------------

    def write_value_32(self, address: int | Buffer, value: int) -> None:
        """Enqueue a 32-bit write to memory.

        Parameters
        ----------
        address : int, CUdeviceptr or GPU buffer
            The destination: device memory or pinned host memory, aligned to 4 bytes. A buffer
            stands for its start.
        value : int
            The value to write, from 0 to 2³² - 1.

        Raises
        ------
        ValueError
            *value* does not fit into 32 bits; or the destination is misaligned, extends beyond its
            allocation, or is not in memory that the device can write this way: memory that CUDA
            does not know, that the device cannot access, managed memory, or a pool of host memory
            (where the results of `asnumpy` are).
        UserStreamError
            Other causes: see :doc:`/reference/common-errors`.

        Notes
        -----
        The results of earlier work on the stream are visible before the value is. The call
        establishes no order and keeps nothing alive: the memory must stay valid until the write has
        happened. During capture, it becomes a graph node. Thread-safe. Does not block. Driver call:
        ``cuStreamWriteValue32``, with its memory barrier.

        Examples
        --------
        >>> from cuda.core import Device
        >>> from userstream import Stream
        >>> Device(0).set_current()
        >>> writer, reader = Stream.create(), Stream.create()
        >>> word = Device(0).allocate(4, stream=writer)
        >>> writer.write_value_32(word, 0)
        >>> reader.wait(writer)
        >>> reader.wait_value_32(word, 1)  # holds the reader
        >>> writer.write_value_32(word, 1)
        >>> reader.sync(timeout=10)
        """
        operations = _stream.memory_operations
        self._within(operations.write_value, operations.WriteValue(address, value))

    def wait_value_32(self, address: int | Buffer, value: int, flags: int = 0) -> None:
        """Enqueue a wait until a 32-bit value in memory satisfies a comparison.

        Parameters
        ----------
        address : int, CUdeviceptr or GPU buffer
            The location to poll: device memory or pinned host memory, aligned to 4 bytes.
        value : int
            The value to compare with, from 0 to 2³² - 1.
        flags : WaitFlags or int, default 0 (``WaitFlags.GEQ``)
            The comparison.

        Raises
        ------
        NotSupportedError
            The device does not support ``NOR`` or ``FLUSH``.
        ValueError
            *flags* is not a `WaitFlags`; or *value* or *address* is refused, for the reasons that
            `write_value_32` lists.
        UserStreamError
            Other causes: see :doc:`/reference/common-errors`.

        Notes
        -----
        Does not block the host. If the value is never written, the stream is held indefinitely, and
        so is everything that waits for the device: freeing memory (other than a pool's),
        `wait_for_device`, and loading a module, as a kernel's first launch does. `close` returns,
        but the driver keeps the stream. The call establishes no order and keeps nothing alive.
        During capture, it becomes a graph node. Thread-safe. Driver call: ``cuStreamWaitValue32``.

        Examples
        --------
        >>> from cuda.core import Device
        >>> from userstream import Stream, WaitFlags
        >>> Device(0).set_current()
        >>> stream = Stream.create()
        >>> word = Device(0).allocate(4, stream=stream)
        >>> stream.write_value_32(word, 6)
        >>> stream.wait_value_32(word, 2, WaitFlags.AND)
        >>> stream.sync(timeout=10)
        """
        operations = _stream.memory_operations
        self._within(operations.wait_value, operations.WaitValue(address, value, flags))

    def write_value_64(self, address: int | Buffer, value: int) -> None:
        """Enqueue a 64-bit write to memory.

        Parameters
        ----------
        address : int, CUdeviceptr or GPU buffer
            The destination, as for `write_value_32`, but aligned to 8 bytes.
        value : int
            The value to write, from 0 to 2⁶⁴ - 1.

        Raises
        ------
        NotSupportedError
            The device does not support 64-bit stream memory operations.
        UserStreamError
            Other causes: see `write_value_32` and :doc:`/reference/common-errors`.

        Notes
        -----
        Behaves like `write_value_32`. Driver call: ``cuStreamWriteValue64``.

        Examples
        --------
        >>> from cuda.core import Device
        >>> from userstream import Stream
        >>> Device(0).set_current()
        >>> stream = Stream.create()
        >>> stream.write_value_64(Device(0).allocate(8, stream=stream), 1 << 40)
        """
        operations = _stream.memory_operations
        self._within(operations.write_value, operations.WriteValue(address, value, 64))

    def wait_value_64(self, address: int | Buffer, value: int, flags: int = 0) -> None:
        """Enqueue a wait until a 64-bit value in memory satisfies a comparison.

        Parameters
        ----------
        address : int, CUdeviceptr or GPU buffer
            The location to poll: device memory or pinned host memory, aligned to 8 bytes.
        value : int
            The value to compare with, from 0 to 2⁶⁴ - 1.
        flags : WaitFlags or int, default 0 (``WaitFlags.GEQ``)
            The comparison.

        Raises
        ------
        NotSupportedError
            The device does not support 64-bit stream memory operations, ``NOR`` or ``FLUSH``.
        UserStreamError
            Other causes: see `wait_value_32` and :doc:`/reference/common-errors`.

        Notes
        -----
        Behaves like `wait_value_32`. Driver call: ``cuStreamWaitValue64``.

        Examples
        --------
        >>> from cuda.core import Device
        >>> from userstream import Stream, WaitFlags
        >>> Device(0).set_current()
        >>> stream = Stream.create()
        >>> word = Device(0).allocate(8, stream=stream)
        >>> stream.write_value_64(word, 1 << 40)
        >>> stream.wait_value_64(word, 1 << 40, WaitFlags.EQ)
        >>> stream.sync(timeout=10)
        """
        operations = _stream.memory_operations
        self._within(operations.wait_value, operations.WaitValue(address, value, flags, 64))

    def batch_mem_op(self, ops: Iterable[MemoryOperation], flags: int = 0) -> None:
        """Enqueue several memory operations, in order, in one call.

        Parameters
        ----------
        ops : iterable of WriteValue, WaitValue, MemoryBarrier and FlushRemoteWrites
            1 to 255 operations.
        flags : int, default 0
            Must be 0: the driver defines no flags yet.

        Raises
        ------
        NotSupportedError
            The device does not support one of the operations.
        ValueError
            *ops* does not have 1 to 255 operations, one of them is refused (for the reasons that
            `write_value_32` and `wait_value_32` list), or *flags* is not 0. Nothing is enqueued.
        UserStreamError
            Other causes: see :doc:`/reference/common-errors`.

        Notes
        -----
        Behaves like `write_value_32` and `wait_value_32`. Driver call: ``cuStreamBatchMemOp``.

        Examples
        --------
        >>> from cuda.core import Device
        >>> from userstream import Stream, WaitValue, WriteValue
        >>> Device(0).set_current()
        >>> stream = Stream.create()
        >>> word = Device(0).allocate(4, stream=stream)
        >>> stream.batch_mem_op([WriteValue(word, 1), WaitValue(word, 1)])
        >>> stream.sync(timeout=10)
        """
        self._within(_stream.memory_operations.submit, ops, flags)

    def memcpy_dtod(self, dst: int | Buffer, src: int | Buffer, nbytes: int | None = None) -> None:
        """Enqueue a copy within the memory of this stream's device.

        Parameters
        ----------
        dst, src : int, CUdeviceptr or GPU buffer
            Destination and source, in device or managed memory. Buffers must be contiguous.
        nbytes : int, optional
            The number of bytes; by default the size of the buffers, which must then be equal.

        Raises
        ------
        ValueError
            The sizes differ, or no size is known; the destination and the source overlap; a buffer
            is not contiguous; or one of them is in host memory or in memory that CUDA does not
            know, or extends beyond its allocation.
        DeviceMismatchError
            One of them is in the memory of another device.
        UserStreamError
            Other causes: see :doc:`/reference/common-errors`.

        Notes
        -----
        As low-level as the driver's function: the copy is ordered after earlier work on this stream
        only, and neither buffer is kept alive. During capture, it becomes a graph node.
        Thread-safe. Does not block. Driver call: ``cuMemcpyDtoDAsync``.

        Examples
        --------
        >>> from cuda.core import Device
        >>> from userstream import Stream
        >>> Device(0).set_current()
        >>> stream = Stream.create()
        >>> first, second = (Device(0).allocate(64, stream=stream) for _ in range(2))
        >>> stream.memcpy_dtod(first, second)
        >>> stream.memcpy_dtod(first.handle, second.handle, 16)
        >>> stream.sync(timeout=10)
        """
        self._within(_stream.memory_operations.copy, dst, src, nbytes)

    def attach_mem_async(
        self, memory: int | Buffer, to: Literal["global", "host", "single"] = "single"
    ) -> None:
        """Enqueue the attachment of managed memory.

        Parameters
        ----------
        memory : int, CUdeviceptr or buffer
            The start of a managed allocation, which is attached as a whole.
        to : {"global", "host", "single"}, default "single"
            Who may access the memory: every stream of every device, only the host, or only this
            stream.

        Raises
        ------
        ValueError
            *memory* is not the start of a managed allocation; or *to* is ``"single"`` on the legacy
            default stream, which CUDA does not allow.
        CaptureError
            The stream is being captured: CUDA cannot capture this operation.
        UserStreamError
            Other causes: see :doc:`/reference/common-errors`.

        Notes
        -----
        Has an effect only on devices without concurrent managed access. Thread-safe. Does not
        block. Driver call: ``cuStreamAttachMemAsync``.

        Examples
        --------
        >>> from cuda.bindings import driver
        >>> from cuda.core import Device
        >>> from userstream import Stream
        >>> Device(0).set_current()
        >>> status, pointer = driver.cuMemAllocManaged(64, 1)
        >>> stream = Stream.create()
        >>> stream.attach_mem_async(pointer)
        >>> stream.sync(timeout=10)
        """
        self._within(_stream.memory_operations.attach, memory, to)

    # -- attributes -------------------------------------------------------------------------------

    @overload
    def get_attribute(self, name: Literal["access_policy_window"]) -> AccessPolicyWindow: ...
    @overload
    def get_attribute(self, name: Literal["mem_sync_domain"]) -> _Domain: ...
    @overload
    def get_attribute(self, name: Literal["mem_sync_domain_map"]) -> tuple[int, int]: ...
    @overload
    def get_attribute(self, name: Literal["priority"]) -> int: ...
    @overload
    def get_attribute(self, name: Literal["sync_policy"]) -> _SyncPolicy | None: ...
    def get_attribute(self, name: _driver.streams.Attribute) -> Any:
        """Return an attribute of this stream.

        Parameters
        ----------
        name : str
            ``"access_policy_window"``, ``"mem_sync_domain"``, ``"mem_sync_domain_map"``,
            ``"priority"`` or ``"sync_policy"``; see `set_attribute`.

        Returns
        -------
        AccessPolicyWindow, str, tuple of int, int or None
            The value, as `set_attribute` accepts it. The exception is ``"sync_policy"`` of a new
            stream: None, which cannot be set.

        Raises
        ------
        CaptureError
            The stream is being captured, or it is the legacy default stream during a capture.
        UserStreamError
            Other causes: see :doc:`/reference/common-errors`.

        Notes
        -----
        Thread-safe. Does not block. Driver call: ``cuStreamGetAttribute``.

        Examples
        --------
        >>> from userstream import Stream
        >>> Stream.create(0).get_attribute("mem_sync_domain")
        'default'
        """
        return self._within(_stream.attributes.get, name)

    @overload
    def set_attribute(
        self, name: Literal["access_policy_window"], value: AccessPolicyWindow
    ) -> None: ...
    @overload
    def set_attribute(self, name: Literal["mem_sync_domain"], value: _Domain) -> None: ...
    @overload
    def set_attribute(
        self, name: Literal["mem_sync_domain_map"], value: tuple[int, int]
    ) -> None: ...
    @overload
    def set_attribute(self, name: Literal["priority"], value: int) -> None: ...
    @overload
    def set_attribute(self, name: Literal["sync_policy"], value: _SyncPolicy) -> None: ...
    def set_attribute(self, name: _driver.streams.Attribute, value: Any) -> None:
        """Set an attribute of this stream, for work that is submitted from now on.

        Parameters
        ----------
        name : str
            The attribute.
        value : AccessPolicyWindow, str, tuple of int or int
            For ``"access_policy_window"``, an `AccessPolicyWindow`. For ``"sync_policy"``, how the
            driver's own synchronization waits: ``"auto"``, ``"spin"``, ``"yield"`` or
            ``"blocking"``. For ``"mem_sync_domain"``, ``"default"`` or ``"remote"``, and for
            ``"mem_sync_domain_map"`` the device's domains that these two map to. For
            ``"priority"``, a number in `priority_range`; drivers may refuse to change it.

        Raises
        ------
        ValueError
            *value* is not valid for the attribute; or a window does not begin in memory that CUDA
            knows, or is larger than its buffer.
        NotSupportedError
            The device does not support access-policy windows.
        CaptureError
            The stream is being captured, or it is the legacy default stream during a capture.
        UserStreamError
            Other causes: see :doc:`/reference/common-errors`.

        Notes
        -----
        A user stream's attributes are shared, like the stream. The synchronization policy does not
        affect `sync` and `wait`, which never block inside the driver. Thread-safe. Does not block.
        Driver call: ``cuStreamSetAttribute``.

        Examples
        --------
        >>> from userstream import Stream
        >>> stream = Stream.create(0)
        >>> stream.set_attribute("sync_policy", "blocking")
        >>> stream.get_attribute("sync_policy")
        'blocking'
        """
        self._within(_stream.attributes.assign, name, value)

    def copy_attributes_from(self, other: StreamLike) -> None:
        """Copy the attributes of another stream to this one.

        Parameters
        ----------
        other : stream
            Any object with ``__cuda_stream__``, of the same context as this stream.

        Raises
        ------
        DeviceMismatchError, ValueError
            *other* belongs to another device, or to another context of the device.
        CaptureError
            One of them is being captured, or is the legacy default stream during a capture.
        UserStreamError
            Other causes: see :doc:`/reference/common-errors`.

        Notes
        -----
        If *other* is a default stream, it is the one of this stream's context. Thread-safe. Does
        not block. Driver call: ``cuStreamCopyAttributes``.

        Examples
        --------
        >>> from userstream import Stream
        >>> first, second = Stream.create(0), Stream.create(0)
        >>> first.set_attribute("sync_policy", "spin")
        >>> second.copy_attributes_from(first)
        >>> second.get_attribute("sync_policy")
        'spin'
        """
        factory.refuse_number(other)
        self._within(_stream.attributes.copy, other, _address_of)

    # -- Python functions -------------------------------------------------------------------------

    def launch_host_func(
        self, fn: Callable[..., object], *args: Any, blocking: bool = True
    ) -> None:
        """Enqueue a call of a Python function.

        Parameters
        ----------
        fn : callable
            Called as ``fn(*args)``; its return value is ignored.
        *args
            Its arguments.
        blocking : bool, default True
            Whether later work on the stream waits until *fn* has returned, as with the driver's
            ``cuLaunchHostFunc``.

        Raises
        ------
        CaptureError
            The stream is being captured, or it is the legacy default stream during a capture.
        RuntimeError
            Called from a host function or callback, which might have to wait for itself; or from a
            signal handler or a destructor that interrupted another such call on this stream.
        UserStreamError
            Other causes: see :doc:`/reference/common-errors`.

        Notes
        -----
        All functions and callbacks run on one thread of userstream, one at a time, and those of a
        stream in stream order. They never block a driver thread, nor run on one: the stream itself
        waits for a value in memory. So *fn* may use the GIL, locks and CUDA, but it must not wait
        for the GPU: userstream's waits raise `RuntimeError` there, and a framework's wait for the
        held stream never returns. Whatever waits for the whole device (`wait_for_device`, loading a
        module) also waits for *fn*, and must not hold the GIL while it does. The thread's current
        device is the one that an earlier function has set: set the one that you need.

        Exceptions of *fn* go to `sys.unraisablehook`, and the stream continues. After a GPU error
        *fn* is not called, as with the driver; use `add_callback` to be notified. At interpreter
        exit, pending functions are dropped. *fn* and its arguments are kept alive until it has run.

        Does not block. Thread-safe. Driver calls: ``cuEventRecord``, ``cuLaunchHostFunc`` with a
        native function, and ``cuStreamWaitValue32``.

        Examples
        --------
        >>> from userstream import Stream
        >>> stream = Stream.create()
        >>> called = []
        >>> stream.launch_host_func(called.append, "half way")
        >>> stream.sync(timeout=10)
        >>> called
        ['half way']
        """
        self._within(_stream.host_functions.launch, fn, args, bool(blocking))

    def add_callback(self, fn: Callable[[Self, DriverError | None], object]) -> None:
        """Call a Python function when the work queued now has completed or failed.

        Parameters
        ----------
        fn : callable
            Called as ``fn(stream, error)``, with this stream, and None or the GPU's `DriverError`.
            Its return value is ignored.

        Raises
        ------
        CaptureError
            The stream is being captured, or it is the legacy default stream during a capture.
        UserStreamError
            Other causes: see :doc:`/reference/common-errors`.

        Notes
        -----
        Unlike the driver's ``cuStreamAddCallback``, which NVIDIA intends to remove, it does not
        hold up later work on the stream. *fn* runs on the same thread as the functions of
        `launch_host_func`, under the same rules, except that it may add callbacks. At interpreter
        exit, pending callbacks are dropped. The stream and *fn* are kept alive until *fn* has run.
        Does not block. Thread-safe. Driver calls: ``cuEventRecord``, ``cuEventQuery``.

        Examples
        --------
        >>> import threading
        >>> from userstream import Stream
        >>> done = threading.Event()
        >>> Stream.create().add_callback(lambda stream, error: done.set())
        >>> done.wait(10)
        True
        """
        _stream.host_functions.add_callback(self._resolve(), self, fn)

    if not TYPE_CHECKING:  # type checkers would accept any name

        def __getattr__(self, name: str) -> NoReturn:  # called for missing names only
            _raise_no_attribute(self, name)

    # -- from a stream to its lane ----------------------------------------------------------------

    @classmethod
    def _of(cls, lane: Lane) -> Self:
        """Return the `Stream` object of a lane, creating it if necessary."""
        known = None if lane.shown is None else lane.shown()
        if isinstance(known, cls):
            return known
        stream = cls._init(lane.core)  # lane and stream share ownership through cuda.core
        stream._lane = lane
        lane.shown = weakref.ref(stream)
        return stream

    @classmethod
    def _default(cls, handle: int) -> Stream:
        """Return the default stream with a given handle, the same object on every call."""
        try:
            return cls._defaults[handle]
        except KeyError:
            legacy = handle == _driver.streams.LEGACY
            stream = Stream._legacy_default() if legacy else Stream._per_thread_default()
            stream._lane, stream._token = None, CoreStream.handle.__get__(stream)
            # Another thread may have stored a stream first.
            return cls._defaults.setdefault(handle, stream)

    def _resolve(self, device: int | None = None) -> Lane:
        """Return the lane of the stream; *device* selects a default stream's lane."""
        lane = self._lane
        if lane is not None and (lane.is_context_independent or device is None):
            return lane
        return lanes.default(self._address(), device)

    def _within(self, function: Callable[..., T], *args: object) -> T:
        """Call a function of an open lane, whose context is current during the call."""
        lane = self._resolve()
        lane.live()
        return lane.within(function, lane, *args)

    def _settled(self, device: int | None = None) -> Self:
        """Return an open stream with a fixed lane: a default stream is resolved now."""
        lane = self._resolve(device)
        lane.live()
        return self if lane is self._lane else self._of(lane)

    def _live(self) -> driver.CUstream:
        """Return the handle of an open stream, without keeping the stream alive until exit."""
        if self._lane is not None:
            return self._lane.live()
        _process.check_fork()
        return self._token

    def _address(self) -> int:
        return int(self._live())

    def _ordinal(self) -> int:
        """Return the ordinal of the stream's device; for a default stream, the current device."""
        if self._lane is not None:
            return self._lane.device
        _driver.library.ensure()
        return _driver.contexts.current_device()


def lane_of(given: StreamLike, device: int | None = None) -> Lane:
    """Return the lane of a stream of any library; *device* selects a default stream's lane."""
    if isinstance(given, Stream):
        lane = given._resolve(device)
        lane.live()
        return lane
    address = factory.address_of_stream(given)
    _driver.library.ensure()
    if address in (_driver.streams.LEGACY, _driver.streams.PER_THREAD):
        return lanes.default(address, device)
    return lanes.at_handle(address, given)


def _address_of(given: Any) -> int:
    return given._address() if isinstance(given, Stream) else factory.address_of_stream(given)


def _raise_no_attribute(stream: object, name: str) -> NoReturn:
    """Raise the `AttributeError` for a name that a stream does not have."""
    message = f"{type(stream).__name__!r} object has no attribute {name!r}"
    counterpart = _COUNTERPARTS.get(name)
    if counterpart is not None:
        shown = counterpart if counterpart.startswith("int") else f"stream.{counterpart}"
        message += f"; in userstream that is {shown}"
    raise AttributeError(message, name=name, obj=stream)
