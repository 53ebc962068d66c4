"""References that are held until the GPU has passed a point.

They are let go of by later calls, by waits and by the watcher; never by a thread of the driver.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, TypeAlias

from userstream import _driver, _events, _process, _watcher
from userstream.errors import UserStreamError

if TYPE_CHECKING:
    from cuda.core import Event

    from userstream._stream._edges import EdgeStream

_SWEEP_SECONDS = 200e-6  # at most so often for each stream: asking an event takes half a µs
_MOST_UNSWEPT = 64
_IDLE_LOOKS = 20  # of the watcher, before it is told to look no more: beginning again costs more


# A point, the pool of its event, and what is held up to there.
_Held: TypeAlias = "tuple[Event, _events.EventPool, object]"


class _Queue:
    """What is held for a stream, the oldest first."""

    __slots__ = ("__weakref__", "_held", "_lock", "_sweeping", "_swept")

    def __init__(self) -> None:
        self._held: deque[_Held] = deque()
        # Reentrant: the garbage collector may run anybody's destructor in the middle of a sweep.
        self._lock = threading.RLock()
        self._sweeping = False
        self._swept = 0.0
        _process.leak_at_end(self)

    def __len__(self) -> int:
        return len(self._held)

    def add(self, held: _Held) -> None:
        self._held.append(held)
        now = time.monotonic()
        if now - self._swept > _SWEEP_SECONDS or len(self._held) > _MOST_UNSWEPT:
            self._swept = now
            self.sweep()

    def sweep(self) -> None:
        """Let go of what the stream has passed."""
        passed: list[object] = []
        with self._lock:
            if self._sweeping:
                return
            self._sweeping = True
            try:
                _driver.relaxed(self._take_passed, passed)
            finally:
                self._sweeping = False
        # Here, outside of the lock, the objects go.

    def _take_passed(self, passed: list[object]) -> None:
        # One stream passes its events in their order: if the newest is done, they all are.
        if self._held and _is_passed(self._held[-1]):
            for _ in range(len(self._held)):
                self._take(passed)
        while len(self._held) > 1 and _is_passed(self._held[0]):
            self._take(passed)

    def _take(self, passed: list[object]) -> None:
        event, pool, objects = self._held.popleft()
        passed.append(objects)
        pool.give_back(event)


def _is_passed(held: _Held) -> bool:
    try:
        return _events.is_done(held[0], None)
    except UserStreamError:  # the GPU failed, and nothing runs there any more
        return True


class _Sweeper:
    """What the watcher sees: it is done when nothing is held."""

    target = None
    ordered = False

    def __init__(self) -> None:
        self._idle = 0

    def is_done(self) -> bool:
        global _watched  # noqa: PLW0603 -- one watcher, one flag
        with contextlib.suppress(UserStreamError):  # to be tried again
            sweep()
        self._idle = 0 if _anything_held() else self._idle + 1
        if self._idle < _IDLE_LOOKS:
            return False
        # First the flag, then the last look: what is added in between is watched anew.
        _watched = False
        _watched = _anything_held()
        return not _watched

    def abandon(self) -> None:
        pass


_queues: dict[tuple[int, int, int], _Queue] = {}  # by the identity of the stream
_watched = False


def hold(stream: EdgeStream, event: Event, objects: object) -> None:
    """Hold objects until an event that `stream` has marked has completed; takes the event."""
    global _watched  # noqa: PLW0603 -- one watcher, one flag
    queue = stream._held
    if queue is None:
        identity = stream._identity()
        queue = _queues.setdefault(identity, _Queue())
        if stream._anywhere:  # what a default stream is differs between threads
            stream._held = queue
    queue.add((event, stream._pool, objects))
    if not _watched:
        _watched = True
        _watcher.watch(_Sweeper(), _unwatched)


def _unwatched(error: Exception | None) -> None:
    global _watched  # noqa: PLW0603 -- one watcher, one flag
    if error is not None:  # the next call begins anew
        _watched = False


def _anything_held() -> bool:
    return any(map(len, list(_queues.values())))


def sweep() -> None:
    """Let go of what is not needed any more."""
    if not _watched:  # nothing is held; a wait on an idle stream comes by here
        return
    for queue in list(_queues.values()):
        if queue:
            queue.sweep()


def _in_child() -> None:
    global _watched  # noqa: PLW0603 -- one watcher, one flag
    _queues.clear()
    _watched = False


_process.after_fork(_in_child)
