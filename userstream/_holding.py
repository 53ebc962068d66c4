"""References that are held until the GPU has passed a point.

They are let go of by later calls, by waits and by the watcher; never by a thread of the driver.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from userstream import _driver, _events, _process, _watcher
from userstream.errors import UserStreamError

if TYPE_CHECKING:
    from cuda.core import Event

    from userstream._stream._edges import EdgeStream

_SWEEP_SECONDS = 200e-6  # at most so often for each stream: asking an event takes half a µs
_MOST_UNSWEPT = 64


class _Held(NamedTuple):
    event: Event
    pool: _events.EventPool
    objects: object


class _Queue:
    """What is held for a stream, the oldest first."""

    __slots__ = ("__weakref__", "_held", "_lock", "_swept")

    def __init__(self) -> None:
        self._held: deque[_Held] = deque()
        # Reentrant: the garbage collector may run anybody's destructor in the middle.
        self._lock = threading.RLock()
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
        passed: list[_Held] = []
        with self._lock:
            _driver.relaxed(self._take_passed, passed)
        # Here, outside of the lock, the objects go.

    def _take_passed(self, passed: list[_Held]) -> None:
        while self._held:
            oldest = self._held[0]
            try:
                if not _events.is_done(oldest.event, None):
                    return
                failed = False
            except UserStreamError:
                failed = True  # nothing runs there any more
            if not self._held or self._held[0] is not oldest:
                continue  # such a destructor was here
            passed.append(self._held.popleft())
            if not failed:
                oldest.pool.give_back(oldest.event)


class _Sweeper:
    """What the watcher sees: it is done when nothing is held."""

    target = None
    ordered = False

    def is_done(self) -> bool:
        global _watched  # noqa: PLW0603 -- one watcher, one flag
        # First the flag, then the look: what is added in between is watched anew.
        _watched = False
        with contextlib.suppress(UserStreamError):  # to be tried again
            sweep()
        _watched = any(map(len, list(_queues.values())))
        return not _watched

    def abandon(self) -> None:
        pass


_queues: dict[tuple[int, int], _Queue] = {}  # by handle and context
_watched = False


def hold(stream: EdgeStream, event: Event, objects: object) -> None:
    """Hold objects until an event that `stream` has marked has completed; takes the event."""
    global _watched  # noqa: PLW0603 -- one watcher, one flag
    key = int(stream._live()), int(stream._context)
    queue = _queues.get(key)
    if queue is None:
        queue = _queues.setdefault(key, _Queue())
    queue.add(_Held(event, stream._pool, objects))
    if not _watched:
        _watched = True
        _watcher.watch(_Sweeper(), lambda _: None)


def sweep() -> None:
    """Let go of what is not needed any more."""
    for queue in list(_queues.values()):
        if queue:
            queue.sweep()


def _in_child() -> None:
    global _watched  # noqa: PLW0603 -- one watcher, one flag
    _queues.clear()
    _watched = False


_process.after_fork(_in_child)
