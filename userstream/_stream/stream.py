"""`Stream`: what users hold. Each method hands a lane on to a function of a room beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn, overload

from cuda.core import Device, Event

from userstream import _devices, _driver, _numbers, _process
from userstream._engine import host_wait
from userstream._engine.core import CoreStream
from userstream._engine.lane import NOT_NOW, Lane
from userstream._stream import (
    activation,
    attributes,
    capture,
    events,
    factory,
    host_functions,
    raw_memory,
)
from userstream._stream.operations import WaitFlags, WaitValue, WriteValue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager
    from types import TracebackType
    from typing import Self, TypeAlias

    from cuda.bindings import driver
    from cuda.core import Context, DeviceResources, EventOptions
    from cuda.core.graph import GraphBuilder, GraphDefinition

    from userstream._stream.access_policy import AccessPolicyWindow
    from userstream._stream.activation import Activation
    from userstream._stream.capture import CaptureInfo
    from userstream._stream.operations import MemoryOperation
    from userstream.errors import DriverError
    from userstream.typing import Buffer, CaptureMode, DeviceLike, StreamLike, WaitPolicy

    _SyncPolicy: TypeAlias = Literal["auto", "spin", "yield", "blocking"]
    _Domain: TypeAlias = Literal["default", "remote"]

# Streams whose handle was given away: a framework may keep it, so they live until exit.
_given_away: dict[int, Stream] = {}


class Stream(CoreStream):
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

    __slots__ = ("_lane", "_token")

    # Set by `_of` and `_default`, as cuda.core's factory runs no __init__.
    _lane: Lane | None  # None: a default stream, which is another lane in each context
    _token: driver.CUstream  # the handle of such a stream

    _defaults: ClassVar[dict[int, Stream]] = {}

    # -- how one comes into being -----------------------------------------------------------------

    def __init__(self, *args: object, **kwargs: object) -> None:  # noqa: ARG002
        raise TypeError(
            "Stream(...) makes no stream: use userstream.get_stream(target), "
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
        factory.check_flags(flags, nonblocking=nonblocking)
        ordinal = _devices.device_id_or_current(device)
        return cls._of(factory.create(ordinal, nonblocking=bool(nonblocking), priority=wanted))

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
        address = factory.address_of(handle)
        _driver.ensure()
        if address in (_driver.LEGACY, _driver.PER_THREAD):
            return cls._default(address)
        kept = handle if owner is None else owner
        return cls._of(factory.at_handle(address, kept, shared=owner is None))

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
        return cls._default(_driver.LEGACY)

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
        return cls._default(_driver.PER_THREAD)

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

    def close(self) -> None:
        """Close the stream: destroy it if userstream created it, let go of its owner if not.

        Raises
        ------
        RuntimeError
            It is a default stream, which all code of the process shares.

        Notes
        -----
        Work that is queued still completes. Closing again does nothing. A user stream leaves its
        registry, and `get_stream` makes a new one. Driver call: ``cuStreamDestroy``; does not
        block.

        Examples
        --------
        >>> from userstream import Stream
        >>> stream = Stream.create()
        >>> stream.close()
        >>> stream.is_closed
        True
        """
        lane = self._lane
        if lane is None or not lane.anywhere:
            raise RuntimeError(f"{self!r} is shared by the whole process and cannot be closed")
        if lane.handle is not None:
            factory.close(lane)
        _given_away.pop(id(self), None)
        super().close()

    def __enter__(self) -> Self:
        if self._lane is None or not self._lane.owned or self._lane.is_shared:
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

    def __repr__(self) -> str:
        if self._lane is not None:
            return repr(self._lane)
        kind = "legacy" if self._address() == _driver.LEGACY else "per-thread"
        return f"<userstream.Stream {kind} default>"

    def __reduce__(self) -> NoReturn:
        _process.refuse_copy(
            self, "send the device or the name, and call userstream.get_stream() there"
        )

    # -- what it is -------------------------------------------------------------------------------

    @property
    def handle(self) -> driver.CUstream:
        """The ``CUstream``; ``int(stream.handle)`` is its address.

        Reading it keeps a stream that userstream created alive until exit, because whoever takes
        the handle may keep it. Raises `ClosedError` once the stream is closed.

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
        """The `cuda.core.Device` of this stream; of a default stream, the current one.

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
        """The `cuda.core.Context` of this stream; of a default stream, the current one.

        Raises `ClosedError` once the stream is closed.

        Examples
        --------
        >>> from userstream import Stream
        >>> context = Stream.create().context
        """
        lane = self._resolve()
        lane.live()
        return lane.within(getattr, lane.core, "context")

    @property
    def resources(self) -> DeviceResources:
        """The hardware that the work of this stream may use, as `cuda.core.Stream.resources`.

        Raises `ClosedError` once the stream is closed.

        Examples
        --------
        >>> from userstream import Stream
        >>> resources = Stream.create().resources
        """
        lane = self._resolve()
        lane.live()
        return lane.within(getattr, lane.core, "resources")

    @property
    def name(self) -> str | None:
        """The name under which `get_stream` made it; `None` for any other stream.

        Examples
        --------
        >>> import userstream as us
        >>> us.get_stream(0, name="copies").name
        'copies'
        """
        return None if self._lane is None else self._lane.name

    @property
    def flags(self) -> int:
        """The flags it was created with: 1 (``CU_STREAM_NON_BLOCKING``) or 0.

        Driver call: ``cuStreamGetFlags``. Raises `CaptureError` while the stream is being
        captured, because the driver invalidates the capture of a stream that is asked.

        Examples
        --------
        >>> import userstream as us
        >>> us.get_stream(0).flags
        1
        """
        lane = self._resolve()
        return lane.here(_driver.stream_flags, lane.usable(NOT_NOW), lane)

    @property
    def is_nonblocking(self) -> bool:
        """Whether it runs beside the legacy default stream; as ``flags``.

        Examples
        --------
        >>> import userstream as us
        >>> us.get_stream(0).is_nonblocking
        True
        """
        return bool(self.flags & 1)

    @property
    def priority(self) -> int:
        """Its priority; lower numbers run first.

        Driver call: ``cuStreamGetPriority``. Raises `CaptureError` while the stream is being
        captured, as ``flags``.

        Examples
        --------
        >>> from userstream import Stream
        >>> Stream.create(0, priority=-1).priority
        -1
        """
        lane = self._resolve()
        if not lane.anywhere:
            return 0  # the driver makes the default streams so
        lane.usable(NOT_NOW)
        return int(lane.core.priority)

    @property
    def stream_id(self) -> int:
        """A number that no other stream of this process ever has, unlike the handle.

        Driver call: ``cuStreamGetId``, once. Raises `CaptureError` for a stream of somebody else
        that is being captured when it is asked first.

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
        """Whether all the work queued on it is done. Does not block.

        A stream that others keep feeding may never be done; `sync` waits for what is there now.
        Raises `CaptureError` while the stream is being captured, and `DriverError` if the GPU
        failed. Driver call: ``cuStreamQuery``, without harm to anybody's capture.

        Examples
        --------
        >>> import userstream as us
        >>> stream = us.get_stream(0)
        >>> stream.sync()
        >>> stream.is_done
        True
        """
        return self._resolve().is_idle()

    def sync(self, *, timeout: float | None = None, policy: WaitPolicy = "auto") -> None:
        """Wait on the host for the work that is queued on this stream now.

        Parameters
        ----------
        timeout : float, optional
            Seconds, at least 0; 0 asks once, `None` waits for ever.
        policy : {"auto", "spin"}, default "auto"
            ``"auto"`` polls for 250 µs and then sleeps between polls, for 5 % of the time waited
            so far and 5 ms at most. ``"spin"`` never sleeps.

        Raises
        ------
        WaitTimeout
            The work was not done in time. Nothing was cancelled.
        CaptureError
            The stream is being captured; the capture goes on.
        ClosedError
            The stream is closed.
        DriverError
            The GPU failed.
        RuntimeError
            Called in a host function or callback, which may not wait.
        TypeError, ValueError
            ``timeout`` or ``policy`` is none.

        Notes
        -----
        Blocks, but never inside the driver: Ctrl-C stops it. Work that other threads queue
        afterwards is not waited for. Driver calls: ``cuStreamQuery``, and if the stream is busy
        ``cuEventRecord`` and ``cuEventQuery``, in the relaxed capture mode.

        Examples
        --------
        >>> import userstream as us
        >>> us.get_stream(0).sync(timeout=10)
        """
        host_wait.sync(self._lane or self._resolve(), timeout, policy)

    # -- its order with others --------------------------------------------------------------------

    def wait(self, event_or_stream: Event | StreamLike) -> None:
        """Make later work on this stream wait for an event or a stream; no host wait.

        Parameters
        ----------
        event_or_stream : Event, or stream
            An event, or a stream (anything with ``__cuda_stream__``), of any device. Of a stream,
            the work queued now is waited for.

        Raises
        ------
        TypeError
            It is neither.
        ValueError
            The event is closed.
        ClosedError
            One of the streams is closed.
        CaptureError
            One of the streams is being captured, and the other one is not or into another graph.
            A stream of your own may join the capture of the other one; a user stream never does.
            Or this stream is being captured and the event was not recorded in that capture, which
            is invalid then.
        DriverError
            The driver refused.

        Notes
        -----
        As `cuda.core.Stream.wait`, also when another device is current. Driver calls:
        ``cuStreamIsCapturing``, ``cuEventRecord`` on a pooled event, and ``cuStreamWaitEvent``.
        Does not block; thread-safe. An event that was recorded in a capture pulls the stream into
        it, as CUDA has it.

        Examples
        --------
        >>> from userstream import Stream
        >>> first, second = Stream.create(), Stream.create()
        >>> second.wait(first)
        """
        lane = self._resolve()
        if isinstance(event_or_stream, Event):
            events.wait(lane, event_or_stream)
        elif hasattr(event_or_stream, "__cuda_stream__"):
            lane.live()
            lane.wait_for(lane_of(event_or_stream), may_join=not lane.is_shared)
        else:
            raise TypeError(
                "Stream.wait takes an event or a stream (an object with __cuda_stream__), not "
                f"{type(event_or_stream).__name__}; for a buffer, acquire() waits for its producer"
            )

    def wait_event(self, event: Any, flags: int = 0) -> None:  # any framework's event
        """Make later work on this stream wait for an event; no host wait.

        Parameters
        ----------
        event : cuda.core.Event, CUevent, torch.cuda.Event or cupy.cuda.Event
            Of any device. One that was never recorded is not waited for.
        flags : int or CUevent_wait_flags, default 0
            1 (``CU_EVENT_WAIT_EXTERNAL``), under capture only: the launched graph waits for the
            event, instead of the capture joining the one that the event was recorded in.

        Raises
        ------
        TypeError
            ``event`` is no event, or ``flags`` no number.
        ValueError
            ``flags`` is neither 0 nor 1, or 1 while the stream is not being captured; or the
            event is closed.
        CaptureError
            The legacy default stream would break a capture; or the wait did: without the flag, an
            event that was recorded outside a capture cannot be waited for in it.
        ClosedError, ForkedError, DriverError
            The stream is closed, CUDA may not be used, or the driver refused.

        Notes
        -----
        Waiting for an event that was recorded in a capture pulls this stream into the capture, as
        CUDA has it: on a shared user stream, with the work of everybody. The driver cannot be
        asked beforehand. Thread-safe; does not block. Driver call: ``cuStreamWaitEvent``. After
        baracuda's ``wait_event``.

        Examples
        --------
        >>> from userstream import Stream
        >>> first, second = Stream.create(), Stream.create()
        >>> second.wait_event(first.record())
        """
        events.wait_for_any(self._resolve(), event, flags)

    def record(self, event: Event | None = None, options: EventOptions | None = None) -> Event:
        """Record an event behind the work queued on this stream.

        Parameters
        ----------
        event : Event, optional
            Recorded again; a new one by default. One of cuda.core, of the context of this stream.
        options : EventOptions, optional
            Of the new event.

        Returns
        -------
        Event
            The event.

        Raises
        ------
        TypeError
            ``event`` is none of cuda.core.
        ValueError
            The event is closed.
        DeviceMismatchError
            The event is of another device.
        CaptureError
            The legacy default stream would break a capture.
        ClosedError, ForkedError, DriverError
            The stream is closed, CUDA may not be used, or the driver refused.

        Notes
        -----
        As `cuda.core.Stream.record`, also when another device is current. Driver calls:
        ``cuEventCreate``, ``cuEventRecord``. Does not block.

        Examples
        --------
        >>> from userstream import Stream
        >>> event = Stream.create().record()
        >>> event.sync()
        """
        return events.record(self._resolve(), event, options)

    def activate(self, *frameworks: str) -> Activation[Self]:
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
        found = activation.called(frameworks) if frameworks else activation.usable()
        return activation.Activation(self, found)

    # -- graph capture ----------------------------------------------------------------------------

    @property
    def is_capturing(self) -> bool:
        """Whether it is being captured into a graph, by whomever. Does not block.

        True of an invalidated capture too, until that is ended. Harmless to any capture. Driver
        call: ``cuStreamIsCapturing``.

        Examples
        --------
        >>> from userstream import Stream
        >>> stream = Stream.create(0)
        >>> with stream.capture():
        ...     stream.is_capturing
        True
        """
        lane = self._resolve()
        return lane.within(_driver.is_capturing, lane.live(), lane)

    @property
    def capture_info(self) -> CaptureInfo | None:
        """What the driver tells of the capture that it is part of; `None` if it is of none.

        Does not block, and is harmless to any capture. Driver call: ``cuStreamGetCaptureInfo``.

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
        return capture.facts(self._resolve())

    def begin_capture(self, mode: CaptureMode = "global") -> None:
        """Note the work that is queued from now on in a graph, instead of doing it.

        Parameters
        ----------
        mode : {"global", "thread_local", "relaxed"}, default "global"
            Which calls are forbidden meanwhile, because they might wait for work that never runs:
            of all threads, of this thread, or none. A forbidden call invalidates the capture.

        Raises
        ------
        CaptureError
            It is being captured already; or it is the legacy default stream, of which CUDA allows
            no capture.
        NotSupportedError
            The driver is older than CUDA 12.3.
        ValueError
            ``mode`` is none.
        ClosedError, ForkedError, DriverError
            The stream is closed, CUDA may not be used, or the driver refused.

        Notes
        -----
        Work that any thread queues on the stream is captured: capture on a stream of your own
        rather than on the shared user stream. The thread that began ends it, unless the mode is
        relaxed. Thread-safe; does not block. Driver call: ``cuStreamBeginCaptureToGraph``. After
        baracuda's ``begin_capture``.

        Examples
        --------
        >>> from userstream import Stream
        >>> stream = Stream.create()
        >>> stream.begin_capture()
        >>> stream.is_capturing
        True
        >>> graph = stream.end_capture()
        """
        capture.begin(self._resolve(), mode)

    def end_capture(self) -> GraphDefinition:
        """End the capture that `begin_capture` began, and return its graph.

        Returns
        -------
        cuda.core.graph.GraphDefinition
            ``graph.instantiate()`` makes it executable (``upload(stream)``, ``launch(stream)``);
            it takes a current context. And ``graph.debug_dot_print(path)`` draws it.

        Raises
        ------
        CaptureError
            Nothing is captured on this stream, or the capture was not begun here; or it gave no
            graph: it was invalidated, streams that joined it were not joined again, or another
            thread began it. It is over then, except in the last case.
        ClosedError, ForkedError, DriverError
            The stream is closed, CUDA may not be used, or the driver refused.

        Notes
        -----
        Does not block. The graph keeps alive nothing that the captured work uses. Driver call:
        ``cuStreamEndCapture``. After baracuda's ``end_capture``.

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
        return capture.end(self._resolve())

    def capture(self, mode: CaptureMode = "global") -> AbstractContextManager[GraphDefinition]:
        """Capture what the block queues on this stream.

        Parameters
        ----------
        mode : {"global", "thread_local", "relaxed"}, default "global"
            As `begin_capture`.

        Returns
        -------
        context manager
            Its value is the `cuda.core.graph.GraphDefinition`, which is complete after the block.
            If the block raises, the capture is ended and the graph must not be touched: the driver
            may have destroyed it.

        Raises
        ------
        CaptureError, NotSupportedError, ValueError, ClosedError, ForkedError, DriverError
            As `begin_capture` and `end_capture`.

        Notes
        -----
        Does not block. Driver calls: ``cuStreamBeginCaptureToGraph``, ``cuStreamEndCapture``.
        After baracuda's ``capture``.

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
        return capture.block(self._resolve(), mode)

    def create_graph_builder(self) -> GraphBuilder:
        """Return a builder of cuda.core's, which captures on this stream.

        Returns
        -------
        cuda.core.graph.GraphBuilder
            Its ``begin_building`` begins the capture; its ``complete`` takes a current context.

        Raises
        ------
        ClosedError, ForkedError
            The stream is closed, or CUDA may not be used.

        Notes
        -----
        As `cuda.core.Stream.create_graph_builder`; `capture` takes no builder. Does not block. Up
        to cuda.core 1.2 a builder whose capture was invalidated may end the process when it goes.

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
        """Set the calling thread's capture mode for a block.

        Parameters
        ----------
        mode : {"global", "thread_local", "relaxed"}
            Whose captures forbid this thread's calls: those of all threads and its own (CUDA's
            default), its own, or none. In a ``"relaxed"`` block a query cannot invalidate the
            capture of another stream.

        Returns
        -------
        context manager
            It restores the previous mode at the end of the block, also if the block raises.

        Raises
        ------
        ValueError
            ``mode`` is none.
        DriverNotFoundError, ForkedError, DriverError
            The driver is not there, may not be used, or refused.

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
        return capture.thread_mode(mode)

    # -- raw memory -------------------------------------------------------------------------------

    def write_value_32(self, address: int | Buffer, value: int) -> None:
        """Write a value of 32 bits to memory when the stream gets there.

        Parameters
        ----------
        address : int, CUdeviceptr or GPU buffer
            Where: device memory or pinned host memory, at a multiple of 4. Of a buffer, its start.
        value : int
            What, from 0 to 2³² - 1.

        Raises
        ------
        ValueError
            ``value`` does not fit; or the address is not aligned, in no memory that CUDA knows, in
            managed memory or a pool of host memory (as results of `asnumpy` are), in memory that
            the device cannot access, or ends behind its allocation.
        TypeError
            ``value`` or ``address`` is none.
        CaptureError
            The legacy default stream would break a capture.
        ClosedError, ForkedError, DriverError
            The stream is closed, CUDA may not be used, or the driver refused.

        Notes
        -----
        Earlier work of the stream is visible before the value is. Orders no buffer and keeps none
        alive: the memory must stay until the stream got there. Under capture it becomes a node.
        Thread-safe; does not block. Driver call: ``cuStreamWriteValue32``, with its memory
        barrier. After baracuda's ``write_value_32``.

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
        raw_memory.write_value(self._resolve(), WriteValue(address, value))

    def wait_value_32(self, address: int | Buffer, value: int, flags: int = WaitFlags.GEQ) -> None:
        """Hold the stream until the value of 32 bits in memory compares with one.

        Parameters
        ----------
        address : int, CUdeviceptr or GPU buffer
            As for `write_value_32`.
        value : int
            What to compare with, from 0 to 2³² - 1.
        flags : WaitFlags or int, default WaitFlags.GEQ
            How to compare.

        Raises
        ------
        NotSupportedError
            The device lacks ``NOR`` or ``FLUSH``.
        ValueError, TypeError, CaptureError, ClosedError, ForkedError, DriverError
            As `write_value_32`; or ``flags`` is none.

        Notes
        -----
        No host wait. If nobody writes the value the stream is held for ever, and then freeing
        memory (not that of a pool), `wait_for_device` and loading a module (as the first launch of
        a kernel does) wait for ever as well; `close` returns, but the driver keeps the stream.
        Orders no buffer and keeps none alive. Under capture it becomes a node. Thread-safe; does
        not block. Driver call: ``cuStreamWaitValue32``. After baracuda's ``wait_value_32``.

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
        raw_memory.wait_value(self._resolve(), WaitValue(address, value, flags))

    def write_value_64(self, address: int | Buffer, value: int) -> None:
        """Write a value of 64 bits to memory when the stream gets there.

        Parameters
        ----------
        address : int, CUdeviceptr or GPU buffer
            As for `write_value_32`, at a multiple of 8.
        value : int
            What, from 0 to 2⁶⁴ - 1.

        Raises
        ------
        NotSupportedError
            The device has no such operations on 64 bits.
        ValueError, TypeError, CaptureError, ClosedError, ForkedError, DriverError
            As `write_value_32`.

        Notes
        -----
        As `write_value_32`. Driver call: ``cuStreamWriteValue64``.

        Examples
        --------
        >>> from cuda.core import Device
        >>> from userstream import Stream
        >>> Device(0).set_current()
        >>> stream = Stream.create()
        >>> stream.write_value_64(Device(0).allocate(8, stream=stream), 1 << 40)
        """
        raw_memory.write_value(self._resolve(), WriteValue(address, value, 64))

    def wait_value_64(self, address: int | Buffer, value: int, flags: int = WaitFlags.GEQ) -> None:
        """Hold the stream until the value of 64 bits in memory compares with one.

        Parameters
        ----------
        address : int, CUdeviceptr or GPU buffer
            As for `write_value_32`, at a multiple of 8.
        value : int
            What to compare with, from 0 to 2⁶⁴ - 1.
        flags : WaitFlags or int, default WaitFlags.GEQ
            How to compare.

        Raises
        ------
        NotSupportedError
            The device has no such operations on 64 bits, or lacks ``NOR`` or ``FLUSH``.
        ValueError, TypeError, CaptureError, ClosedError, ForkedError, DriverError
            As `wait_value_32`.

        Notes
        -----
        As `wait_value_32`. Driver call: ``cuStreamWaitValue64``.

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
        raw_memory.wait_value(self._resolve(), WaitValue(address, value, flags, 64))

    def batch_mem_op(self, ops: Iterable[MemoryOperation], flags: int = 0) -> None:
        """Do several memory operations in order, as one.

        Parameters
        ----------
        ops : iterable of WriteValue, WaitValue, MemoryBarrier and FlushRemoteWrites
            1 to 255 of them.
        flags : int, default 0
            The driver has none yet.

        Raises
        ------
        NotSupportedError
            The device lacks one of the operations.
        ValueError, TypeError, CaptureError, ClosedError, ForkedError, DriverError
            As `write_value_32` and `wait_value_32`, for any of the operations; none is done then.

        Notes
        -----
        As `write_value_32` and `wait_value_32`. Driver call: ``cuStreamBatchMemOp``. After
        baracuda's ``batch_mem_op``.

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
        raw_memory.submit(self._resolve(), ops, flags)

    def memcpy_dtod(self, dst: int | Buffer, src: int | Buffer, nbytes: int | None = None) -> None:
        """Copy bytes between two places in the memory of this stream's device.

        Parameters
        ----------
        dst, src : int, CUdeviceptr or GPU buffer
            To and from where; device memory or managed memory. Buffers must be contiguous.
        nbytes : int, optional
            How many. By default the size of the buffers, which must then agree.

        Raises
        ------
        ValueError
            The sizes do not agree, or none is given; a place is in no memory that CUDA knows, in
            host memory, or ends behind its allocation; the places overlap; a buffer is not
            contiguous.
        DeviceMismatchError
            A place is in the memory of another device.
        TypeError, UnsupportedBufferError, HostBufferError
            An argument is no address and no buffer, or ``nbytes`` is no number.
        CaptureError
            The legacy default stream would break a capture.
        ClosedError, ForkedError, DriverError
            The stream is closed, CUDA may not be used, or the driver refused.

        Notes
        -----
        Raw as the driver's: it is ordered after nothing but the earlier work of this stream, and
        keeps neither buffer alive. Under capture it becomes a node. Thread-safe; does not block.
        Driver call: ``cuMemcpyDtoDAsync``. After baracuda's ``memcpy_dtod``.

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
        raw_memory.copy(self._resolve(), dst, src, nbytes)

    def attach_mem_async(
        self, memory: int | Buffer, to: Literal["global", "host", "single"] = "single"
    ) -> None:
        """Attach managed memory, from when the stream gets there.

        Parameters
        ----------
        memory : int, CUdeviceptr or buffer
            The start of an allocation of managed memory; the whole of it is attached.
        to : {"global", "host", "single"}, default "single"
            Who may access it: every stream of every device, only the host, or only this stream.

        Raises
        ------
        ValueError
            ``to`` is none; or it is not the start of an allocation of managed memory; or ``to``
            is ``"single"`` and this is the legacy default stream, which CUDA does not allow.
        TypeError, UnsupportedBufferError
            ``memory`` is no address and no buffer.
        CaptureError
            The stream is being captured, which CUDA does not allow here.
        ClosedError, ForkedError, DriverError
            The stream is closed, CUDA may not be used, or the driver refused.

        Notes
        -----
        Only devices without concurrent managed access take notice. Orders nothing else.
        Thread-safe; does not block. Driver call: ``cuStreamAttachMemAsync``. After baracuda's
        ``attach_mem_async``.

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
        raw_memory.attach(self._resolve(), memory, to)

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
    def get_attribute(self, name: _driver.Attribute) -> Any:
        """Return an attribute of this stream.

        Parameters
        ----------
        name : str
            ``"access_policy_window"``, ``"mem_sync_domain"``, ``"mem_sync_domain_map"``,
            ``"priority"`` or ``"sync_policy"``; see `set_attribute`.

        Returns
        -------
        AccessPolicyWindow, str, tuple of int, int or None
            As `set_attribute` takes it. But the synchronization policy of a new stream has no name:
            `None`, which cannot be set.

        Raises
        ------
        ValueError
            There is no such attribute.
        CaptureError
            The stream is being captured, or is the legacy default stream beside a capture.
        ClosedError, ForkedError, DriverError
            The stream is closed, CUDA may not be used, or the driver refused.

        Notes
        -----
        Thread-safe; does not block. Driver call: ``cuStreamGetAttribute``. After baracuda's
        ``get_attribute``.

        Examples
        --------
        >>> from userstream import Stream
        >>> Stream.create(0).get_attribute("mem_sync_domain")
        'default'
        """
        return attributes.get(self._resolve(), name)

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
    def set_attribute(self, name: _driver.Attribute, value: Any) -> None:
        """Set an attribute of this stream, for the work that is queued from now on.

        Parameters
        ----------
        name : str
            Which attribute.
        value : AccessPolicyWindow, str, tuple of int or int
            Of ``"access_policy_window"`` an `AccessPolicyWindow`. Of ``"sync_policy"``, how the
            driver's own waits wait: ``"auto"``, ``"spin"``, ``"yield"`` or ``"blocking"``. Of
            ``"mem_sync_domain"``, ``"default"`` or ``"remote"``, and of
            ``"mem_sync_domain_map"`` the numbers of the device's domains that these two stand
            for. Of ``"priority"`` a number that `priority_range` allows; drivers may refuse to
            change it.

        Raises
        ------
        ValueError, TypeError
            There is no such attribute, or ``value`` is none for it; a window begins in no memory
            that CUDA knows, or is larger than its buffer.
        NotSupportedError
            The device has no access-policy windows.
        CaptureError
            The stream is being captured, or is the legacy default stream beside a capture.
        ClosedError, ForkedError, DriverError
            The stream is closed, CUDA may not be used, or the driver refused.

        Notes
        -----
        A user stream is shared: so are its attributes. `sync` and `wait` take no notice of the
        synchronization policy, as they never wait inside the driver. Thread-safe; does not block.
        Driver call: ``cuStreamSetAttribute``. After baracuda's ``set_attribute``.

        Examples
        --------
        >>> from userstream import Stream
        >>> stream = Stream.create(0)
        >>> stream.set_attribute("sync_policy", "blocking")
        >>> stream.get_attribute("sync_policy")
        'blocking'
        """
        attributes.assign(self._resolve(), name, value)

    def copy_attributes_from(self, other: StreamLike) -> None:
        """Give this stream the attributes of another one.

        Parameters
        ----------
        other : stream
            Anything with ``__cuda_stream__``, of the same context as this stream.

        Raises
        ------
        DeviceMismatchError
            The other stream is of another device.
        ValueError
            The other stream is of another context of the device.
        TypeError
            ``other`` is no stream.
        CaptureError
            One of them is being captured, or is the legacy default stream beside a capture.
        ClosedError, ForkedError, DriverError
            One of them is closed, CUDA may not be used, or the driver refused.

        Notes
        -----
        A default stream as ``other`` stands for the one of this stream's context. Thread-safe;
        does not block. Driver call: ``cuStreamCopyAttributes``. After baracuda's
        ``copy_attributes_from``.

        Examples
        --------
        >>> from userstream import Stream
        >>> first, second = Stream.create(0), Stream.create(0)
        >>> first.set_attribute("sync_policy", "spin")
        >>> second.copy_attributes_from(first)
        >>> second.get_attribute("sync_policy")
        'spin'
        """
        attributes.copy(self._resolve(), other, _address_of)

    # -- Python functions -------------------------------------------------------------------------

    def launch_host_func(
        self, fn: Callable[..., object], *args: Any, blocking: bool = True
    ) -> None:
        """Call a Python function when the stream gets there.

        Parameters
        ----------
        fn : callable
            Called as ``fn(*args)``; what it returns is dropped.
        *args
            Its arguments.
        blocking : bool, default True
            Whether later work of the stream waits until it has returned, as with the driver.

        Raises
        ------
        TypeError
            ``fn`` cannot be called, or is a coroutine function.
        CaptureError
            The stream is being captured, or is the legacy default stream beside a capture.
        RuntimeError
            Called from a host function or callback, which might have to wait for itself; or by a
            signal handler or a destructor, in the middle of another such call on this stream.
        ClosedError, ForkedError, DriverError
            The stream is closed, CUDA may not be used, or the driver refused.

        Notes
        -----
        All functions and callbacks run on one thread of userstream's, one after the other, those
        of a stream in its order. No thread of the driver is blocked and none runs Python: what
        holds the stream is a value that it waits for. So a function may take the GIL and locks,
        and may call CUDA; but it may not wait for the GPU. userstream's waits raise
        `RuntimeError` there; a framework's that waits for a held stream never returns. While a
        stream is held, what waits for the device (`wait_for_device`, loading a module) waits
        for the function too, and must not hold the GIL meanwhile. The thread has whatever current
        device an earlier function left it: set yours first.

        What the function raises is given to `sys.unraisablehook`, and the stream goes on. After
        an error of the GPU it is not called, as with the driver; a callback is told
        (`add_callback`). At interpreter exit, functions that did not run yet are dropped. The
        function and its arguments are kept alive until it ran.

        Does not block; thread-safe. Driver calls: ``cuEventRecord``, ``cuLaunchHostFunc`` of a
        native function, and ``cuStreamWaitValue32``. After baracuda's ``launch_host_func``.

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
        host_functions.launch(self._resolve(), fn, args, blocking=bool(blocking))

    def add_callback(self, fn: Callable[[Self, DriverError | None], object]) -> None:
        """Call a Python function when the work queued until now is done, or has failed.

        Parameters
        ----------
        fn : callable
            Called as ``fn(stream, error)``: with this stream, and `None` or the `DriverError` of
            the GPU. What it returns is dropped.

        Raises
        ------
        TypeError
            ``fn`` cannot be called, or is a coroutine function.
        CaptureError
            The stream is being captured, or is the legacy default stream beside a capture.
        ClosedError, ForkedError, DriverError
            The stream is closed, CUDA may not be used, or the driver refused.

        Notes
        -----
        Unlike with the driver's ``cuStreamAddCallback``, which NVIDIA will remove, later work of
        the stream does not wait for the function. It runs on the same thread as the functions of
        `launch_host_func`, under the same rules, but may add callbacks. At interpreter exit,
        callbacks that did not run yet are dropped. The stream and the function are kept alive
        until then. Does not block; thread-safe. Driver calls: ``cuEventRecord``,
        ``cuEventQuery``.

        Examples
        --------
        >>> import threading
        >>> from userstream import Stream
        >>> done = threading.Event()
        >>> Stream.create().add_callback(lambda stream, error: done.set())
        >>> done.wait(10)
        True
        """
        host_functions.add_callback(self._resolve(), self, fn)

    # -- from a stream to its lane ---------------------------------------------------------------

    @classmethod
    def _of(cls, lane: Lane) -> Self:
        """Return the stream that shows a lane."""
        stream = factory.shown(cls, lane)
        stream._lane = lane
        return stream

    @classmethod
    def _default(cls, handle: int) -> Stream:
        """Return the default stream of whichever context is current, the same one every time."""
        try:
            return cls._defaults[handle]
        except KeyError:
            stream = factory.default_of(Stream, handle)
            stream._lane, stream._token = None, CoreStream.handle.__get__(stream)
            return cls._defaults.setdefault(handle, stream)

    def _resolve(self, device: int | None = None) -> Lane:
        """Return the lane that this is now; of a default stream that on a device, if given."""
        lane = self._lane
        if lane is None:
            return factory.default(self._address(), device)
        return lane if lane.anywhere or device is None else factory.default(self._address(), device)

    def _settled(self, device: int | None = None) -> Self:
        """Return the open stream of one lane that this is now."""
        lane = self._resolve(device)
        lane.live()
        return self if lane is self._lane else self._of(lane)

    def _live(self) -> driver.CUstream:
        """Return the handle of an open stream, which does not count as given away."""
        if self._lane is not None:
            return self._lane.live()
        _process.check_fork()
        return self._token

    def _address(self) -> int:
        return int(self._live())

    def _ordinal(self) -> int:
        """Return the ordinal of its device; of a default stream, of the current one."""
        if self._lane is not None:
            return self._lane.device
        _driver.ensure()
        return _driver.current_device()


def lane_of(given: int | StreamLike, device: int | None = None) -> Lane:
    """Return the lane of a stream of anybody: of a default stream on a device, if one is given."""
    if isinstance(given, Stream):
        lane = given._resolve(device)
        lane.live()
        return lane
    address = factory.address_of(given)
    _driver.ensure()
    if address in (_driver.LEGACY, _driver.PER_THREAD):
        return factory.default(address, device)
    return factory.at_handle(address, given)


def _address_of(given: Any) -> int:
    return given._address() if isinstance(given, Stream) else factory.address_of(given)
