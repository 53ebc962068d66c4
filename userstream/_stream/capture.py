"""Capture of the work of a stream into a graph.

The graph belongs to cuda.core, and the driver captures into it: cuda.core 1.2 cannot wrap a graph
that the driver creates.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from cuda.core.graph import GraphDefinition

from userstream import _driver, _process, _unentered
from userstream.errors import CaptureError, UserStreamError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from userstream._engine.lane import Lane
    from userstream.typing import CaptureMode


class _Begun(NamedTuple):
    """A capture that userstream began."""

    graph: GraphDefinition
    thread: int | None  # the thread that must end the capture; None if any thread may
    gone: weakref.ref[Lane] | None  # its callback drops this record when an owned stream dies


# By the identity of the stream.
_begun: dict[tuple[int, int, int], _Begun] = {}


class CaptureBlock:
    """The context manager of `Stream.capture`."""

    __slots__ = ("_block", "_unentered")

    def __init__(self, lane: Lane, mode: CaptureMode) -> None:
        # A generator: if Ctrl-C arrives before `__exit__` begins, closing the generator on its
        # destruction still ends the capture.
        self._block = _block(lane, mode)
        self._unentered: _unentered.Unentered | None = None
        self._unentered = _unentered.armed("a capture", 2)  # 2: the caller of Stream.capture

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"capture() is a context manager and has no {name!r}: write `with stream.capture() as "
            "graph:`, and use the graph after the block",
            name=name,
            obj=self,
        )

    def __enter__(self) -> GraphDefinition:
        if self._unentered is not None:
            _unentered.disarm(self._unentered)
            self._unentered = None
        return self._block.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._block.__exit__(kind, error, traceback)


@contextlib.contextmanager
def _block(lane: Lane, mode: CaptureMode) -> Iterator[GraphDefinition]:
    others = _begun.get(lane.identity())
    try:
        yield lane.within(begin, lane, mode)
        lane.within(end, lane)
    except BaseException:  # including Ctrl-C while the capture begins or ends
        # The same error may have ended the capture: report the error of the block, not of `end`.
        with contextlib.suppress(UserStreamError):
            if _begun.get(lane.identity()) is not others:
                lane.within(end, lane)
        raise


@contextlib.contextmanager
def thread_mode(mode: CaptureMode) -> Iterator[None]:
    """Set the calling thread's capture mode inside a ``with`` block."""
    wanted = _driver.capture.check_capture_mode(mode)
    _driver.library.ensure()
    with _driver.capture.in_capture_mode(wanted):
        yield


def begin(lane: Lane, mode: CaptureMode) -> GraphDefinition:
    """Begin capturing submitted work into a graph; the lane's context is current."""
    wanted = _driver.capture.check_capture_mode(mode)
    handle = lane.live()
    if int(handle) == _driver.streams.LEGACY:
        raise CaptureError(
            f"{lane!r} cannot be captured: CUDA does not allow it for the legacy default stream; "
            "capture on a stream of Stream.create()",
            stream=repr(lane),
        )
    if _driver.capture.is_capturing(handle, lane):
        raise CaptureError(
            f"{lane!r} is already being captured; end that capture first, or capture on another "
            "stream",
            stream=repr(lane),
        )
    with _driver.streams.cuda_core_errors("cuGraphCreate", lane):
        graph = GraphDefinition()
    # The graph's destructor calls the driver, which may hang in a forked child or at exit.
    _process.leak_at_end(graph)
    identity = lane.identity()
    begun = _Begun(
        graph,
        None if mode == "relaxed" else threading.get_ident(),
        weakref.ref(lane, lambda _: _drop(identity)) if lane.owned else None,
    )
    _drop(identity)  # left by a destroyed stream with the same handle
    try:
        _driver.capture.begin_capture(handle, graph, wanted, lane)
    except BaseException:
        if _driver.capture.is_capturing(handle, lane):  # Ctrl-C arrived after the capture had begun
            _begun.setdefault(identity, begun)
        raise
    _begun[identity] = begun
    return graph


def end(lane: Lane) -> GraphDefinition:
    """End a capture that `begin` began, and return its graph; the lane's context is current."""
    handle, identity = lane.live(), lane.identity()
    if not _driver.capture.is_capturing(handle, lane):
        _drop(identity)  # Ctrl-C may have arrived after the capture had ended
        raise CaptureError(
            f"{lane!r} is not being captured; call begin_capture() first", stream=repr(lane)
        )
    begun = _begun.get(identity)
    if begun is None:
        raise CaptureError(
            f"the capture of {lane!r} was not begun on this stream by userstream; it can be "
            "ended only where it was begun",
            stream=repr(lane),
        )
    if begun.thread not in (None, threading.get_ident()):  # the driver would invalidate the capture
        raise CaptureError(
            f"the capture of {lane!r} was begun by another thread, which has to end it; only "
            'with mode="relaxed" may any thread do so',
            stream=repr(lane),
        )
    try:
        _driver.capture.end_capture(handle, lane)
    except BaseException:
        # The capture failed, or Ctrl-C arrived just after the call: the graph may be destroyed.
        if not _driver.capture.is_capturing(handle, lane):
            _drop(identity)
        raise
    _begun.pop(identity, None)
    return begun.graph


def forget(lane: Lane) -> None:
    """Forget the capture of a stream that is being destroyed, which ends the capture."""
    _drop(lane.identity())


def _drop(identity: tuple[int, int, int]) -> None:
    """Forget a capture that produced no graph.

    The driver then destroys its graph, whichever library made it (NVIDIA/cuda-python#2834, #2918).
    Destroying it again, as the destructor of cuda.core's object would, may end the process.
    """
    begun = _begun.pop(identity, None)
    if begun is not None:
        _process.keep_forever(begun.graph)
