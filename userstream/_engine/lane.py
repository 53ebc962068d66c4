"""A lane: one stream of the driver, in one context.

Users hold a `Stream`; the library works on lanes. Most streams are one lane all their life. A
default stream is a different lane in every context: it is resolved to one at the beginning of each
call, and nothing after that depends on which context is current.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, TypeVar

import cuda.core

from userstream import _driver, _process
from userstream._driver import core
from userstream._engine import events
from userstream.errors import CaptureError, ClosedError

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable
    from typing import Self

    from cuda.bindings import driver
    from cuda.bindings.driver import CUstreamCaptureStatus
    from cuda.core import Context, Device, Event, EventOptions, StreamOptions

    from userstream.typing import StreamLike


T = TypeVar("T")

# `cuda.core.Stream`, with the members that userstream uses. cuda.core chooses its modules for the
# installed CUDA major at import time, which no type checker can follow: the base class would be
# unknown, and with it all of `Stream`.
if TYPE_CHECKING:

    class CoreStream:
        """A queue of GPU work."""

        @classmethod
        def _init(
            cls,
            obj: StreamLike | None = None,
            options: StreamOptions | None = None,
            device_id: int | None = None,
            ctx: Context | None = None,
        ) -> Self: ...
        @classmethod
        def _legacy_default(cls) -> Self: ...
        @classmethod
        def _per_thread_default(cls) -> Self: ...
        @property
        def handle(self) -> driver.CUstream:
            """The ``CUstream``."""

        def __cuda_stream__(self) -> tuple[int, int]: ...
        @property
        def device(self) -> Device:
            """The device of the stream."""

        @property
        def context(self) -> Context:
            """The context of the stream."""

        @property
        def resources(self) -> Any:  # cuda.core.DeviceResources
            """The resources of the device that the stream may use."""

        @property
        def priority(self) -> int:
            """Its priority; lower numbers run first."""

        @property
        def is_nonblocking(self) -> bool:
            """Whether it runs concurrently with the legacy default stream."""

        @property
        def is_closed(self) -> bool:
            """Whether it was closed."""

        def close(self) -> None:
            """Close the stream."""

        def sync(self) -> None:
            """Block until the work queued on it has completed."""

        def wait(self, event_or_stream: Event | StreamLike) -> None:
            """Make later work on it wait for an event or a stream."""

        def record(self, event: Event | None = None, options: EventOptions | None = None) -> Event:
            """Record an event after the work queued on it."""

        def create_graph_builder(self) -> Any:  # cuda.core.graph.GraphBuilder
            """Make a builder that captures this stream into a graph."""

else:
    CoreStream = cuda.core.Stream


class _Foreign:
    """What `cuda.core.Stream._init` accepts as a stream that other code created."""

    __slots__ = ("handle", "owner")

    def __init__(self, handle: int, owner: object) -> None:
        self.handle = handle
        self.owner = owner

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.handle)


def foreign(handle: int, owner: object) -> CoreStream:
    """Wrap a stream that other code created, and keep its owner alive; calls no driver."""
    return CoreStream._init(_Foreign(handle, owner))


NOT_NOW = "; ask before or after the capture"  # the end of a refusal

_NONE = _driver.streams.NOT_CAPTURING


class Part:
    """Some of the multiprocessors of a device."""

    __slots__ = ("_resource", "device", "sms")

    def __init__(self, device: int, resource: driver.CUdevResource) -> None:
        self.device = device
        self.sms = _driver.green_contexts.count(resource)
        self._resource = resource

    def context(self) -> driver.CUcontext:
        """Return the green context, which is created once and kept for the process."""
        known = _contexts.get(self)
        if known is not None:
            return known
        # No lock is held, because creation takes a millisecond: a second thread destroys its own.
        green, context = _driver.green_contexts.create(self._resource, self.device)
        kept = _contexts.setdefault(self, context)
        if kept is not context:
            _driver.green_contexts.destroy(green)
        return kept


_contexts: dict[Part, driver.CUcontext] = {}


class Lane(core.LaneState):
    """One stream of the driver in one context, whichever library created it.

    Attributes
    ----------
    handle : CUstream or None
        None once closed.
    raw_handle, raw_context, is_context_independent
        The handle, 0 once closed, and the context, as `_driver.core` takes them; and whether the
        handle means this stream whichever context is current, which it does not for the default
        streams. See `LaneState` in `_driver/native/core.h`.
    flags, priority : int or None
        What a stream of ours was created with. The driver would invalidate a capture of the stream
        to answer that. None for others, whose handles may belong to another stream by tomorrow.
    part : Part or None
        What of the device its work may run on, if it was made for less than the whole; the driver
        has it in a green context. `context` is the primary one all the same.
    shown : weakref to a `Stream`, or None
        The object that represents this lane to users, so that a handle gives that object again.
    """

    __slots__ = (
        "__weakref__",
        "_core",
        "_owner",
        "context",
        "device",
        "flags",
        "handle",
        "name",
        "on_close",
        "owned",
        "part",
        "priority",
        "shown",
        "stream_id",
    )

    def __init__(
        self,
        handle: driver.CUstream,
        device: int,
        context: driver.CUcontext,
        *,
        owner: object = None,
        core: CoreStream | None = None,
        name: str | None = None,
        owned: bool = False,
    ) -> None:
        self.handle: driver.CUstream | None = handle
        self._owner = owner  # what keeps the stream of other code alive
        self._core = core
        self.context = context
        self.raw_context = int(context)
        self.device = device
        self.name = name  # under which a registry has it
        self.owned = owned  # made by userstream, so the driver's stream goes with it
        self.raw_handle = int(handle)
        self.is_context_independent = int(handle) not in (
            _driver.streams.LEGACY,
            _driver.streams.PER_THREAD,
        )
        self.part: Part | None = None
        self.pool = events.pool_of(context)
        self.stream_id: int | None = None  # asked for once
        self.flags: int | None = None
        self.priority: int | None = None
        self.held = None
        self.swept = 0.0
        self.on_close: Callable[[Lane], None] | None = None  # a registry's
        self.shown: weakref.ref[CoreStream] | None = None
        # CUDA does not survive a fork, and at exit may be gone before this. Without the line the
        # destructor of `core` calls the driver then, and a forked child crashes when it drops a
        # stream that it inherited.
        _process.leak_at_end(self)

    def __repr__(self) -> str:
        if not self.is_context_independent:
            legacy = self.handle is None or int(self.handle) == _driver.streams.LEGACY
            kind = "legacy" if legacy else "per-thread"
            return f"<userstream.Stream device={self.device} {kind} default>"
        name = "" if self.name is None else f" name={self.name!r}"
        part = "" if self.part is None else f" sms={self.part.sms}"
        number = "" if self.stream_id is None else f" id={self.stream_id}"
        state = "closed" if self.handle is None else f"handle={int(self.handle):#x}"
        return f"<userstream.Stream device={self.device}{name}{part}{number} {state}>"

    @property
    def core(self) -> CoreStream:
        """The stream as cuda.core has it, which records and waits faster than the bindings.

        It is not the `Stream` that shows this lane, but shares the driver's stream with it. If the
        lane referred to the `Stream`, which refers to the lane, only the garbage collector would
        destroy both: at any time, in any thread's capture. That of other code is made when it is
        needed, which an edge does not.
        """
        core = self._core
        if core is None:
            core = self._core = foreign(int(self.live()), self._owner)
        return core

    @property
    def is_shared(self) -> bool:
        """Whether it is a user stream, on which any code may be at work."""
        return self.on_close is not None

    def live(self) -> driver.CUstream:
        """Return the handle of an open stream."""
        if _process.halted:
            _process.check_fork()
        handle = self.handle
        if handle is None:
            raise ClosedError(
                f"{self!r} is closed; get_stream() or Stream.create() makes a new one",
                device=self.device,
                stream=repr(self),
            )
        return handle

    def usable(self, unless_captured: str | None = None) -> driver.CUstream:
        """Return the handle if the stream can be used now: the rule about captures, for every use.

        Parameters
        ----------
        unless_captured : str, optional
            The reason why this use is not possible while the stream is being captured; the error
            message continues with it after "is being captured". By default the use is possible,
            and what is enqueued becomes a graph node.

        Raises
        ------
        CaptureError
            The stream is being captured, which this use does not allow; or it is the legacy
            default stream, any use of which invalidates the capture of a blocking stream.
        """
        handle = self.live()
        if unless_captured is not None:
            self.here(_driver.streams.refuse_capturing, handle, self, unless_captured)
        elif not self.is_context_independent:
            self.here(_driver.streams.capture_status, handle, self)
        return handle

    def identify(self) -> int:
        """Return the driver's identifier of the stream, which is never reused."""
        self.live()
        if self.stream_id is not None:
            return self.stream_id
        number = self.here(_driver.streams.stream_id, self.usable(NOT_NOW), self)
        if self.is_context_independent:  # the per-thread ones of two threads have two
            self.stream_id = number
        return number

    def here(self, function: Callable[..., T], *args: object) -> T:
        """Call a function where the handle means this stream."""
        return function(*args) if self.is_context_independent else self.within(function, *args)

    def within(self, function: Callable[..., T], *args: object) -> T:
        """Call a function with the context of this stream current."""
        return _driver.contexts.within(self.context, function, *args)

    def identity(self) -> tuple[int, int, int]:
        """Return what distinguishes the driver's streams; two lanes may stand for one of them."""
        handle = int(self.live())
        thread = threading.get_ident() if handle == _driver.streams.PER_THREAD else 0
        return (int(self.context), handle, thread)

    def is_same(self, other: Lane) -> bool:
        """Tell whether another lane stands for the same stream of the driver."""
        return self is other or (
            self.handle == other.handle
            and (self.is_context_independent or int(self.context) == int(other.context))
        )

    def is_in(self, context: driver.CUcontext) -> bool:
        """Tell whether it is open and in that context."""
        return self.handle is not None and int(self.context) == int(context)

    def close(self) -> None:
        """Drop the stream: the driver destroys it if userstream made it."""
        self.handle, self.raw_handle, self._owner = None, 0, None
        if self._core is not None:
            self._core.close()

    # -- what waits for it on the host ------------------------------------------------------------

    def is_idle(self) -> bool:
        """Return whether all work queued here has completed; refuse a captured stream."""
        if _process.halted:
            _process.check_fork()
        result = core.query(self)  # 0 where `wait` has nothing to wait for
        if not result:
            return True
        handle = self.raw_handle or self.live()
        if not self.is_context_independent:
            return self.within(_driver.streams.stream_is_idle, handle, self)
        return _driver.streams.stream_is_idle(handle, self, result)

    def completion(self) -> events.StreamPoint:
        """Record the point that the stream has reached, to be polled."""
        self.live()
        event = self.here(core.record, self)
        # Points of one stream complete in order. The per-thread default stream is one per thread.
        return events.StreamPoint(self.pool, self, self.is_context_independent, event)

    # -- its order with others --------------------------------------------------------------------

    def add_edge(self, source: Lane, *, may_join: bool) -> None:
        """Make later work here wait for the work queued on another stream.

        `may_join` is whether this stream may become part of a capture of the other one.
        """
        result = core.order(source, self)
        if result:
            self.add_checked_edge(source, result, may_join=may_join)

    def add_checked_edge(self, source: Lane, result: int, *, may_join: bool) -> None:
        """Add the edge after the fast path `core.order` declined, or raise its error."""
        if result != core.CAPTURED:
            raise _driver.core.edge_failure(result, source, self)
        event, capture = source.mark()
        try:
            self.wait_for_event(event, source, capture, may_join=may_join)
        finally:
            source.pool.give_back(event)

    def capture_status(self) -> CUstreamCaptureStatus:
        """Return whether it is being captured; refuse the legacy stream during a capture."""
        return self.here(_driver.streams.capture_status, self.live(), self)

    def mark(self) -> tuple[int, CUstreamCaptureStatus]:
        """Record a pooled event after the work queued here; return the capture status as well."""
        capture = self.capture_status()
        return self.here(core.record, self), capture

    def wait_for_event(
        self, event: int, source: Lane, capture: CUstreamCaptureStatus, *, may_join: bool
    ) -> None:
        """Make later work here wait for an event that another stream's `mark` returned."""
        here = self.capture_status()
        if here != _NONE or capture != _NONE:
            _check_captures(source, capture, self, here, may_join=may_join)
        wait = _driver.event_waits.wait_for_event
        self.here(wait, self.live(), event, 0, self)


def _check_captures(
    source: Lane,
    there: CUstreamCaptureStatus,
    destination: Lane,
    here: CUstreamCaptureStatus,
    *,
    may_join: bool,
) -> None:
    """Raise `CaptureError` for an edge that CUDA forbids, or that would be a surprise."""
    if there == _NONE:
        raise CaptureError(
            f"{destination!r} is being captured into a graph, and {source!r} is not: a graph "
            "cannot depend on work outside of it; order the streams before the capture begins, "
            "and pass producer=None in it",
            stream=repr(destination),
        )
    if here == _NONE:
        if may_join:
            return
        raise CaptureError(
            f"{source!r} is being captured into a graph, and {destination!r} is not: it would "
            "become part of that graph, with all that others do on it; pass a stream of your own "
            "(Stream.create) instead, or capture on both",
            stream=repr(source),
        )
    one, other = (
        each.here(_driver.capture.capture_facts, each.live(), each)
        for each in (source, destination)
    )
    if one is None or other is None or one.id is None or one.id != other.id:
        raise CaptureError(
            f"{source!r} and {destination!r} are being captured into two graphs, which cannot "
            "depend on each other, or their capture was invalidated",
            stream=repr(source),
        )
