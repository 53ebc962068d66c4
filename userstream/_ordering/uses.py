"""On which streams a registry uses a buffer, so that a wait for the buffer covers them."""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any

from cuda.bindings import driver

from userstream import _driver, _targets
from userstream._engine import held_objects
from userstream.errors import UserStreamError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from userstream._engine.lane import Lane

_MOST_ACQUIRED = 256


class Pending:
    """A use of buffers on a stream. It is held with them, until the stream has passed its end."""

    __slots__ = ("__weakref__", "buffers", "lane")

    def __init__(self, buffers: Iterable[object], lane: Lane) -> None:
        self.buffers = frozenset(map(_key, buffers))
        self.lane = weakref.ref(lane)  # a stream without references is destroyed all the same


class Uses:
    """The uses of a registry that are pending elsewhere than on an unnamed user stream."""

    __slots__ = ("_acquired", "pending")

    def __init__(self) -> None:
        # A use goes when the last one drops it. That takes it out by a call of C, in which no
        # signal comes: what is raised in the callback of a weak reference is lost.
        self.pending: set[weakref.ref[Pending]] = set()
        self._acquired: dict[int, Pending] = {}  # and not released, the oldest first

    def begin(self, buffers: Iterable[object], lane: Lane) -> Pending:
        """Note that a stream uses buffers, as long as what is returned lives."""
        use = Pending(buffers, lane)
        self.pending.add(weakref.ref(use, self.pending.discard))
        return use

    def acquired(self, use: Pending) -> None:
        """Keep a use that has no end yet."""
        self._acquired[id(use)] = use
        while len(self._acquired) > _MOST_ACQUIRED:
            # These may never be released. They last at least as long as what is queued until now.
            oldest = self._acquired.pop(next(iter(self._acquired)))
            lane = oldest.lane()
            if lane is not None:
                with contextlib.suppress(UserStreamError):
                    held_objects.keep(lane, oldest)

    def released(self, use: Pending) -> None:
        """Forget what was acquired before and ends with this use."""
        for key, other in list(self._acquired.items()):
            if other.lane() is use.lane() and other.buffers <= use.buffers:
                self._acquired.pop(key, None)

    def forget(self) -> None:
        """Forget what was acquired and not released."""
        self._acquired.clear()

    def lanes_of(self, target: Any) -> list[Lane]:
        """Return the lanes of the streams that have not passed their use of a buffer."""
        if not self.pending:
            return []
        wanted = set(map(_key, _targets.buffers_in(target)))
        if not wanted:
            return []
        held_objects.sweep()  # what was passed just now
        for key, acquired in list(self._acquired.items()):
            lane = acquired.lane()
            if lane is None or lane.handle is None:  # that can no longer be released
                self._acquired.pop(key, None)
        found: dict[int, Lane] = {}
        for reference in list(self.pending):
            use = reference()
            lane = None if use is None or wanted.isdisjoint(use.buffers) else use.lane()
            # What is captured is not pending, and what was queued on a closed stream is lost.
            if lane is None or lane.handle is None:
                continue
            if lane.capture_status() == _driver.streams.NOT_CAPTURING:
                found[id(lane)] = lane
        return list(found.values())


def _key(buffer: object) -> int:
    """Return what is the same for the same buffer: itself, as it is held meanwhile."""
    return int(buffer) if isinstance(buffer, driver.CUdeviceptr) else id(buffer)
