"""Capturing the work of a stream into a graph.

The graph is cuda.core's: the driver is told to capture into one, as cuda.core 1.2 cannot wrap a
graph that the driver makes.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from cuda.core.graph import GraphDefinition

from userstream import _driver, _process
from userstream._stream._order import OrderedStream
from userstream.errors import CaptureError, UserStreamError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cuda.bindings import driver
    from cuda.core.graph import GraphBuilder

    from userstream._stream._base import BaseStream
    from userstream.typing import CaptureMode


class _Begun(NamedTuple):
    """A capture that was begun here."""

    graph: GraphDefinition
    thread: int | None  # that has to end it, if not any thread may
    gone: weakref.ref[BaseStream] | None  # drops this with a stream whose handle goes with it


# By the identity of the stream.
_begun: dict[tuple[int, int, int], _Begun] = {}


@dataclass(frozen=True, slots=True)
class CaptureInfo:
    """What the driver tells of the capture that a stream is part of.

    Attributes
    ----------
    state : {"active", "invalidated"}
        An invalidated capture gives no graph and still has to be ended.
    id : int or None
        The same for all streams of a capture, and never used again. `None` once invalidated.
    graph : CUgraph or None
        What is captured into. It must not be destroyed or launched. `None` once invalidated.
    dependencies : tuple of CUgraphNode
        The nodes that the next one of this stream will depend on.

    Examples
    --------
    >>> from userstream import Stream
    >>> stream = Stream.create(0)
    >>> with stream.capture():
    ...     stream.capture_info.dependencies  # nothing was queued yet
    ()
    """

    state: Literal["active", "invalidated"]
    id: int | None
    graph: driver.CUgraph | None
    dependencies: tuple[driver.CUgraphNode, ...]


class CapturedStream(OrderedStream):
    """Graph capture of a `Stream`."""

    __slots__ = ()

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
        return self._here(_driver.is_capturing, self._live(), self)

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
        facts = self._here(_driver.capture_facts, self._live(), self)
        return None if facts is None else CaptureInfo(*facts)

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
        self._here(self._begin_capture, mode)

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
        return self._here(self._end_capture)

    @contextlib.contextmanager
    def capture(self, mode: CaptureMode = "global") -> Iterator[GraphDefinition]:
        """Capture what the block queues on this stream.

        Parameters
        ----------
        mode : {"global", "thread_local", "relaxed"}, default "global"
            As `begin_capture`.

        Yields
        ------
        cuda.core.graph.GraphDefinition
            The graph, which is whole after the block. If the block raises, the capture is ended
            and the graph is of no use: do not touch it, the driver may have destroyed it.

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
        others = _begun.get(self._identity())
        try:
            yield self._here(self._begin_capture, mode)
            self.end_capture()
        except BaseException:  # Ctrl-C as well, at its begin and at its end
            # It may be over, by the same error; the block's own is the one to tell.
            with contextlib.suppress(UserStreamError):
                if _begun.get(self._identity()) is not others:
                    self.end_capture()
            raise

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
    @contextlib.contextmanager
    def capture_mode(mode: CaptureMode) -> Iterator[None]:
        """Set the calling thread's capture mode for a block.

        Parameters
        ----------
        mode : {"global", "thread_local", "relaxed"}
            Whose captures forbid this thread's calls: those of all threads and its own (CUDA's
            default), its own, or none. In a ``"relaxed"`` block a query cannot invalidate the
            capture of another stream.

        Raises
        ------
        ValueError
            ``mode`` is none.
        DriverNotFoundError, ForkedError, DriverError
            The driver is not there, may not be used, or refused.

        Notes
        -----
        The mode before comes back at the end, also if the block raises. It belongs to the thread:
        do not leave the block open across a ``yield`` or an ``await``. userstream's own waits and
        queries need none of it. Does not block. Driver call:
        ``cuThreadExchangeStreamCaptureMode``.

        Examples
        --------
        >>> from userstream import Stream
        >>> stream = Stream.create()
        >>> event = stream.record()
        >>> with Stream.create().capture(), Stream.capture_mode("relaxed"):
        ...     event.sync()
        """
        wanted = _driver.check_capture_mode(mode)
        _driver.ensure()
        with _driver.in_capture_mode(wanted):
            yield

    def _begin_capture(self, mode: CaptureMode) -> GraphDefinition:
        wanted = _driver.check_capture_mode(mode)
        handle = self._live()
        if int(handle) == _driver.LEGACY:
            raise CaptureError(
                f"{self!r} cannot be captured: CUDA allows it for no legacy default stream; "
                "capture on a stream of Stream.create()",
                stream=repr(self),
            )
        if _driver.is_capturing(handle, self):
            raise CaptureError(
                f"{self!r} is being captured already; end that capture first, or capture on "
                "another stream",
                stream=repr(self),
            )
        with _driver.core_errors("cuGraphCreate", self):
            graph = GraphDefinition()
        _process.leak_at_end(graph)
        identity = self._identity()
        begun = _Begun(
            graph,
            None if mode == "relaxed" else threading.get_ident(),
            weakref.ref(self, lambda _: _drop(identity)) if self._owned else None,
        )
        _drop(identity)  # of a stream that had this handle, and was destroyed
        try:
            _driver.begin_capture(handle, graph, wanted, self)
        except BaseException:
            if _driver.is_capturing(handle, self):  # Ctrl-C came when it had begun
                _begun.setdefault(identity, begun)
            raise
        _begun[identity] = begun
        return graph

    def _end_capture(self) -> GraphDefinition:
        handle, identity = self._live(), self._identity()
        if not _driver.is_capturing(handle, self):
            _drop(identity)  # a Ctrl-C came when it had ended
            raise CaptureError(
                f"{self!r} is not being captured; begin_capture() comes first", stream=repr(self)
            )
        begun = _begun.get(identity)
        if begun is None:
            raise CaptureError(
                f"the capture of {self!r} was not begun on this stream by userstream; it can be "
                "ended only where it was begun",
                stream=repr(self),
            )
        if begun.thread not in (None, threading.get_ident()):  # the driver would drop the capture
            raise CaptureError(
                f"the capture of {self!r} was begun by another thread, which has to end it; only "
                'with mode="relaxed" may any thread do so',
                stream=repr(self),
            )
        try:
            _driver.end_capture(handle, self)
        except BaseException:
            if not _driver.is_capturing(handle, self):
                _drop(identity)
            raise
        _begun.pop(identity, None)
        return begun.graph


def forget(stream: BaseStream) -> None:
    """Let go of the capture of a stream that is being destroyed: it ends with it."""
    _drop(stream._identity())


def _drop(identity: tuple[int, int, int]) -> None:
    """Forget a capture that gave no graph.

    The driver destroys its graph then, whoever made it (NVIDIA/cuda-python#2834, #2918). To do it
    once more, as the destructor of cuda.core's object would, may end the process.
    """
    begun = _begun.pop(identity, None)
    if begun is not None:
        _process.keep_for_ever(begun.graph)
