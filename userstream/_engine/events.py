"""Pools of events, and the points of streams that host waits poll.

Calls reuse the events of earlier calls instead of creating their own: see `native/events.c`. An
event is an int, the handle of the driver.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from userstream import _driver, _process
from userstream._driver import core

if TYPE_CHECKING:
    from cuda.bindings import driver

    from userstream._driver.core import EventPool


class Pending(Protocol):
    """A point that a target of waits had reached; see `StreamPoint`."""

    target: Any
    ordered: bool  # whether the point completes no sooner than earlier points of the target

    def is_done(self) -> bool: ...
    def abandon(self) -> None: ...


pools: dict[int, EventPool] = {}  # by the address of a primary context


def pool_of(context: driver.CUcontext) -> EventPool:
    """Return the event pool of a context."""
    address = int(context)
    pool = pools.get(address)
    if pool is not None:
        return pool
    # A foreign context may be destroyed at any time, and its events with it: do not keep them.
    if _driver.contexts.device_of_primary(address) is None:
        return core.make_pool(address, False)
    return pools.setdefault(address, core.make_pool(address, True))


class StreamPoint:
    """The point that a target's queue had reached when an event was recorded.

    Parameters
    ----------
    pool : EventPool
        The pool that the event is from.
    target : Lane or DeviceWork
        The stream, or all the work on a device.
    ordered : bool
        Whether earlier points of the target complete no later than this one.
    event : int
        The event, which belongs to this object from now on.
    """

    __slots__ = ("_event", "_pool", "ordered", "target")

    def __init__(self, pool: EventPool, target: Any, ordered: bool, event: int) -> None:
        self._event: int | None = event  # None once the event is back in the pool
        self._pool = pool
        self.target = target
        self.ordered = ordered

    def is_done(self) -> bool:
        """Return whether the GPU has passed the point; `True` forever after the first `True`."""
        event = self._event
        if event is None:
            return True
        if not core.is_complete(event, self.target):
            return False
        self._event = None
        self._pool.give_back(event)
        return True

    def abandon(self) -> None:
        """Stop waiting; the pool reuses the event once it has completed."""
        event, self._event = self._event, None
        if event is not None:
            self._pool.abandon(event)


_process.after_fork(pools.clear)
