"""A lane: one stream of the driver, in one context.

Users hold a `Stream`; the library works on lanes. Most streams have one lane for their lifetime. A
default stream has a different lane in every context: each call resolves the stream to a lane first,
and nothing after that depends on the current context.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, TypeVar

import cuda.core

from userstream import _driver, _hooks, _process
from userstream._driver import core
from userstream._engine import events
from userstream.errors import CaptureError, ClosedError

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable
    from typing import Self

    from cuda.bindings import driver
    from cuda.bindings.driver import CUstreamCaptureStatus
    from cuda.core import Context, Event, EventOptions, StreamOptions

    from userstream._driver.core import Point
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
        def context(self) -> Context:
            """The context of the stream."""

        @property
        def resources(self) -> Any:  # cuda.core.DeviceResources
            """The resources of the device that the stream may use."""

        @property
        def priority(self) -> int:
            """The priority of the stream; lower numbers run first."""

        @property
        def is_closed(self) -> bool:
            """True once the stream is closed."""

        def close(self) -> None:
            """Close the stream."""

        def record(self, event: Event | None = None, options: EventOptions | None = None) -> Event:
            """Record an event after the work queued on the stream."""

        def create_graph_builder(self) -> Any:  # cuda.core.graph.GraphBuilder
            """Make a builder that captures this stream into a graph."""

else:
    CoreStream = cuda.core.Stream


class _Foreign:
    """A stream of other code, as `cuda.core.Stream._init` accepts it."""

    __slots__ = ("handle", "owner")

    def __init__(self, handle: int, owner: object) -> None:
        self.handle = handle
        self.owner = owner

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.handle)


def _core_stream(handle: int, owner: object) -> CoreStream:
    """Return a cuda.core stream for a handle, which keeps the owner alive; no driver call."""
    return CoreStream._init(_Foreign(handle, owner))


NOT_NOW = "; ask before or after the capture"  # the end of a refusal

_NONE = _driver.streams.NOT_CAPTURING


class Part:
    """A subset of the multiprocessors (SMs) of a device, to which streams can be limited."""

    __slots__ = ("_resource", "device", "sms")

    def __init__(self, device: int, resource: driver.CUdevResource) -> None:
        self.device = device
        self.sms = _driver.contexts.multiprocessor_count(resource)
        self._resource = resource

    def context(self) -> driver.CUcontext:
        """Return the green context, which is created once and kept for the process."""
        known = _contexts.get(self)
        if known is not None:
            return known
        # No lock is held, because creation takes a millisecond: a second thread destroys its own.
        green, context = _driver.contexts.create_green_context(self._resource, self.device)
        kept = _contexts.setdefault(self, context)
        if kept is not context:
            _driver.contexts.destroy_green_context(green)
        return kept


_contexts: dict[Part, driver.CUcontext] = {}


class Lane(core.LaneState):
    """One stream of the driver in one context, created by userstream or by other code.

    Attributes
    ----------
    handle : CUstream or None
        None once the lane is closed.
    raw_handle, raw_context, is_context_independent
        The handle (0 once the lane is closed) and the context as ints, and whether the handle names
        this stream in every context. The handles of default streams do not. See `LaneState` in
        `_driver/native/core.h`.
    flags, priority : int or None
        The values that userstream created the stream with, because a query would invalidate a
        capture of the stream. None for streams of other code: the driver may reuse their handles.
    part : Part or None
        The part of the device to which the stream is limited, if any. Such a stream is in a green
        context, but `context` is the primary context.
    shown : weakref to a `Stream`, or None
        The `Stream` of this lane, so that users get the same object for the same handle.
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
        self._owner = owner  # keeps the stream of other code alive
        self._core = core
        self.context = context
        self.raw_context = int(context)
        self.device = device
        self.name = name  # the name in a registry
        self.owned = owned  # created by userstream, which destroys the driver's stream as well
        self.raw_handle = int(handle)
        self.is_context_independent = int(handle) not in (
            _driver.streams.LEGACY,
            _driver.streams.PER_THREAD,
        )
        self.part: Part | None = None
        self.pool = events.pools.get(self.raw_context) or events.pool_of(context)
        self.stream_id: int | None = None  # cached
        self.flags: int | None = None
        self.priority: int | None = None
        self.held = None
        self.swept = 0.0
        self.on_close: Callable[[Lane], None] | None = None  # set by a registry
        self.shown: weakref.ref[CoreStream] | None = None
        if core is not None:
            _process.leak_at_end(self)  # see the property `core`

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
        """A cuda.core stream that shares the driver's stream with the `Stream` of this lane.

        The `Stream` refers to the lane. If the lane referred to the `Stream`, only the garbage
        collector would destroy both, at any time, also during a capture of another thread. The
        object for a stream of other code is created on first use; edges do not need the object.
        """
        core = self._core
        if core is None:
            core = self._core = _core_stream(int(self.live()), self._owner)
            # Without this line the destructor of `core` calls the driver in a forked child or at
            # exit, where CUDA may be gone: a child crashes when it drops an inherited stream.
            _process.leak_at_end(self)
        return core

    @property
    def is_shared(self) -> bool:
        """Whether this is a user stream, which any code may use."""
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
        """Return the handle if captures allow the use of the stream now.

        Parameters
        ----------
        unless_captured : str, optional
            The reason why this use is not possible in a capture of the stream. The error message
            continues with the reason after "is being captured". By default the use is possible,
            and enqueued work becomes graph nodes.

        Raises
        ------
        CaptureError
            The stream is being captured, and this use does not allow captures; or the stream is
            the legacy default stream, whose use would invalidate the capture of a blocking stream.
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
        if self.is_context_independent:  # a per-thread stream has one per thread
            self.stream_id = number
        return number

    def here(self, function: Callable[..., T], *args: object) -> T:
        """Call a function in a context in which the handle names this stream."""
        return function(*args) if self.is_context_independent else self.within(function, *args)

    def within(self, function: Callable[..., T], *args: object) -> T:
        """Call a function with the context of this stream current."""
        return _driver.contexts.within(self.context, function, *args)

    def identity(self) -> tuple[int, int, int]:
        """Return a key that is equal for lanes of the same stream of the driver."""
        handle = int(self.live())
        thread = threading.get_ident() if handle == _driver.streams.PER_THREAD else 0
        return (int(self.context), handle, thread)

    def is_same(self, other: Lane) -> bool:
        """Return whether another lane is of the same stream of the driver."""
        return self is other or (
            self.handle == other.handle
            and (self.is_context_independent or int(self.context) == int(other.context))
        )

    def close(self) -> None:
        """Close the lane; the driver destroys a stream that userstream created."""
        self.handle, self.raw_handle, self._owner = None, 0, None
        if self._core is not None:
            self._core.close()

    # -- host waits -------------------------------------------------------------------------------

    def is_idle(self, result: int | None = None) -> bool:
        """Return whether all queued work has completed; raise `CaptureError` in a capture.

        `result` is the result of `core.query`, if it was called already.
        """
        if result is None:
            if _process.halted:
                _process.check_fork()
            result = core.query(self)  # 0: idle
        if not result:
            return True
        handle = self.raw_handle or self.live()
        if not self.is_context_independent:
            return self.within(_driver.streams.stream_is_idle, handle, self)
        return _driver.streams.stream_is_idle(handle, self, result)

    def completion(self, may_block: bool = True) -> Point:
        """Record an event behind the queued work; return the point to wait for.

        With `may_block`, the event is the one for which a bell rings, unless that is in use.
        """
        self.live()
        return self.here(core.point, self, may_block)

    # -- edges ------------------------------------------------------------------------------------

    def add_edge(self, source: Lane, *, may_join: bool) -> None:
        """Make later work here wait for the work queued on another stream.

        `may_join` allows this stream to become part of a capture of the other one.
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
        """Return the capture status; refuse the legacy stream during a capture."""
        return self.here(_driver.streams.capture_status, self.live(), self)

    def mark(self) -> tuple[int, CUstreamCaptureStatus]:
        """Record an event behind the queued work; return the event and the capture status."""
        event = core.mark(self)
        if event is not None:
            return event, _NONE
        capture = self.capture_status()
        return self.here(core.record, self), capture

    def wait_for_event(
        self, event: int, source: Lane, capture: CUstreamCaptureStatus, *, may_join: bool
    ) -> None:
        """Make later work here wait for an event that `mark` of another lane returned."""
        here = self.capture_status()
        if here != _NONE or capture != _NONE:
            _check_captures(source, capture, self, here, may_join=may_join)
        core.wait_for(self, event)
        if _hooks.edge_added:
            _hooks.report_edge(self, source)


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
        each.here(_driver.capture.capture_info, each.live(), each) for each in (source, destination)
    )
    if one is None or other is None or one.id is None or one.id != other.id:
        raise CaptureError(
            f"{source!r} and {destination!r} are being captured into two graphs, which cannot "
            "depend on each other, or their capture was invalidated",
            stream=repr(source),
        )
