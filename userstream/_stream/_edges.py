"""Edges: how one stream is ordered after another, with no host wait and no harm to a capture."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from userstream import _driver, _events, _holding
from userstream._stream._base import BaseStream
from userstream.errors import CaptureError

if TYPE_CHECKING:
    from typing import Self

    from cuda.bindings.driver import CUstreamCaptureStatus
    from cuda.core import Event

_NONE = _driver.NOT_CAPTURING


class EdgeStream(BaseStream):
    """The edges of a `Stream`."""

    __slots__ = ()

    def _wait_for(self, source: EdgeStream, *, may_join: bool) -> None:
        """Make later work here wait for the work queued on another stream.

        `may_join` is whether this stream may become part of a capture of the other one.
        """
        event = usual_edge(source, self)
        if event is not None:
            source._pool.give_back(event)
            return
        source = source._settled()
        event, capture = source._mark()
        try:
            self._follow(event, source, capture, may_join=may_join)
        finally:
            source._pool.give_back(event)

    def _capture_status(self) -> CUstreamCaptureStatus:
        return _driver.capture_status(self._live(), self)

    def _mark(self) -> tuple[Event, CUstreamCaptureStatus]:
        """Record a pooled event behind the work queued here; tell whether that was captured."""
        capture = self._capture_status()
        return self._pool.record(self), capture

    def _follow(
        self, event: Event, source: EdgeStream, capture: CUstreamCaptureStatus, *, may_join: bool
    ) -> None:
        """Make later work here wait for what another stream's `_mark` returned."""
        here = self._capture_status()
        if here != _NONE or capture != _NONE:
            _check_captures(source, capture, self, here, may_join=may_join)
        _events.wait(self, event)

    def _hold(self, objects: object) -> None:
        """Keep objects alive until the work queued here now is done, whatever it is."""
        began = time.monotonic()
        event, capture = self._mark()
        if capture != _NONE:
            self._pool.give_back(event)
            raise CaptureError(
                f"{self!r} is being captured into a graph, and what is captured never completes: "
                "keep the objects as long as the graph",
                stream=repr(self),
            )
        _holding.hold(self, event, began, objects)

    def _settled(self) -> Self:
        """Return the stream of one context that it stands for now."""
        return self

    def _is_same(self, other: EdgeStream) -> bool:
        """Tell whether another object stands for the same stream of the driver."""
        return self is other or self == other

    def _is_shared(self) -> bool:
        """Tell whether it is a user stream, on which anybody may be at work."""
        return self._on_close is not None


def usual_edge(source: EdgeStream, destination: EdgeStream) -> Event | None:
    """Order two streams where no capture and no other context stands in the way.

    Otherwise it does nothing and returns `None`. The event is the caller's, to be given back.
    """
    if (
        (destination._anywhere or _driver.is_current(destination._context))
        and (source._anywhere or _driver.is_current(source._context))
        and _driver.both_free(
            source._handle or source._live(), destination._handle or destination._live()
        )
    ):
        return source._pool.edge(source, destination)
    return None


def _check_captures(
    source: EdgeStream,
    there: CUstreamCaptureStatus,
    destination: EdgeStream,
    here: CUstreamCaptureStatus,
    *,
    may_join: bool,
) -> None:
    """Raise `CaptureError` for an edge that CUDA forbids, or that would surprise."""
    if there == _NONE:
        raise CaptureError(
            f"{destination!r} is being captured into a graph, and {source!r} is not: a graph "
            "cannot depend on work outside of it; order the streams before the capture begins",
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
        each._here(_driver.capture_facts, each._live(), each) for each in (source, destination)
    )
    if one is None or other is None or one.id is None or one.id != other.id:
        raise CaptureError(
            f"{source!r} and {destination!r} are being captured into two graphs, which cannot "
            "depend on each other, or their capture was invalidated",
            stream=repr(source),
        )
