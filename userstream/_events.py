"""Pooled events: no call creates an event that an earlier call left behind.

One free list per context serves two uses. An *edge* event orders one stream after another and is
free again as soon as the wait is queued: a wait that is pending keeps the record that it saw. A
*completion* event is polled by the host and is free again once it has completed.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict, deque
from typing import TYPE_CHECKING

from userstream import _driver, _process
from userstream.errors import UserStreamError

if TYPE_CHECKING:
    from collections.abc import Callable

    from cuda.bindings import driver

# By the address of the context. Deques, because their ends are safe to use without a lock.
_free: defaultdict[int, deque[driver.CUevent]] = defaultdict(deque)
# Completion events whose waiter gave up; they may not be recorded again before they completed.
_abandoned: defaultdict[int, deque[driver.CUevent]] = defaultdict(deque)


def _take(context: driver.CUcontext) -> driver.CUevent:
    key = int(context)
    _reclaim(key)
    try:
        return _free[key].pop()
    except IndexError:
        return _driver.create_event(context)


def _give_back(key: int, event: driver.CUevent) -> None:
    # The address of somebody else's context may be that of another one tomorrow.
    if _driver.device_of_primary(key) is None:
        _driver.destroy_event(event)
    else:
        _free[key].append(event)


def _reclaim(key: int) -> None:
    """Free the oldest abandoned event if it has completed; one a call keeps up with the waits."""
    abandoned = _abandoned.get(key)
    if not abandoned:
        return
    try:
        event = abandoned.popleft()
    except IndexError:  # another thread was faster
        return
    try:
        done = _driver.relaxed(_driver.event_is_done, event, None)
    except UserStreamError:  # it is of no use, and none of the caller's business
        with contextlib.suppress(UserStreamError):
            _driver.destroy_event(event)
    else:
        if done:
            _give_back(key, event)
        else:
            abandoned.append(event)


def edge(
    source: driver.CUstream,
    context: driver.CUcontext,
    destination: driver.CUstream,
    streams: tuple[object, object],
) -> None:
    """Order `destination` after the work queued on `source`, a stream of `context`; no host wait.

    `streams` are the source and the destination as an error shows them.
    """
    _driver.refuse_implicit(source, streams[0])
    _driver.refuse_implicit(destination, streams[1])
    event = _take(context)
    try:
        _driver.record_event(event, source, streams[0])
        _driver.wait_event(destination, event, streams[1])
    finally:
        _give_back(int(context), event)


class Completion:
    """The point up to which a stream, or a whole context, had work when this was recorded."""

    __slots__ = ("_context", "_event", "ordered", "target")

    def __init__(
        self, context: driver.CUcontext, event: driver.CUevent, target: object, *, ordered: bool
    ) -> None:
        self._context = int(context)
        # None once it was given back: an interrupted waiter may not give it back again.
        self._event: driver.CUevent | None = event
        self.target = target
        self.ordered = ordered

    def is_done(self) -> bool:
        """Poll; call it under `_driver.relaxed`, and no more once it said yes."""
        event = self._event
        if not _driver.event_is_done(event, self.target):
            return False
        self._event = None
        _give_back(self._context, event)
        return True

    def abandon(self) -> None:
        """Give up waiting; the event is used again once it has completed."""
        event, self._event = self._event, None
        if event is not None:
            _abandoned[self._context].append(event)


def record_stream(
    handle: driver.CUstream, context: driver.CUcontext, stream: object, *, ordered: bool = True
) -> Completion:
    """Mark the point that the work on `stream`, of `context`, has reached."""
    event = _recorded(context, lambda event: _driver.record_event(event, handle, stream))
    return Completion(context, event, stream, ordered=ordered)


def record_context(context: driver.CUcontext, device: object) -> Completion:
    """Mark the point that all the work of `context` has reached."""
    event = _recorded(context, lambda event: _driver.record_context(context, event))
    return Completion(context, event, device, ordered=False)


def _recorded(
    context: driver.CUcontext, record: Callable[[driver.CUevent], None]
) -> driver.CUevent:
    event = _take(context)
    try:
        record(event)
    except BaseException:
        _give_back(int(context), event)
        raise
    return event


def _forget() -> None:
    _free.clear()
    _abandoned.clear()


_process.after_fork(_forget)
