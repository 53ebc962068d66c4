"""Pooled events: calls reuse the events of earlier calls instead of creating their own.

There is one pool per context, for two uses. An *edge* event orders one stream after another and is
free again as soon as the waits are queued: a wait that is pending keeps the record that it saw. A
*completion* event is polled by the host and is free again once it has completed.
"""

from __future__ import annotations

import contextlib
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

import cuda.core

from userstream import _driver, _process
from userstream.errors import UserStreamError

if TYPE_CHECKING:
    from cuda.bindings import driver

# cuda.core's methods, not those of a subclass: they take a tenth of the time of the bindings.
record_by_core = cuda.core.Stream.record
wait_by_core = cuda.core.Stream.wait


class Pending(Protocol):
    """The point that a `Waitable` had reached; see `events.StreamPoint`."""

    target: Any
    ordered: bool  # whether it is done no sooner than what the target had to do before it

    def is_done(self) -> bool: ...
    def abandon(self) -> None: ...


class Recordable(Protocol):
    """The part of a lane that events need."""

    @property
    def core(self) -> Any: ...


class Event:
    """An event of a pool."""

    __slots__ = ("core", "handle", "raw_handle")

    def __init__(self, core: cuda.core.Event) -> None:
        self.core = core  # which destroys it
        self.handle: driver.CUevent = core.handle  # kept, as asking takes a µs
        self.raw_handle = int(self.handle)


class EventPool:
    """Events of one context. Thread-safe without a lock: the ends of a deque are.

    A pool that does not keep its events destroys each one that is given back; pending operations
    of the driver are not affected.
    """

    __slots__ = ("_context", "_keeps", "abandoned", "free")

    def __init__(self, context: driver.CUcontext, *, keeps: bool) -> None:
        self._context = context
        self._keeps = keeps
        self.free: deque[Event] = deque()
        # Completion events whose waiter gave up; recorded again only once they have completed.
        self.abandoned: deque[Event] = deque()

    def record(self, stream: Recordable) -> Event:
        """Record an event after the work queued on a stream of this context."""
        event = self.spare()
        if event is None:
            return _driver.contexts.within(self._context, self._create, stream)
        try:
            record_by_core(stream.core, event.core)
        except Exception as error:
            self.give_back(event)
            raise _driver.streams.cuda_core_failure("cuEventRecord", error, stream) from error
        return event

    def spare(self) -> Event | None:
        """Return an event, which its owner records; `None` if there is none."""
        if self.abandoned:
            self._reclaim()
        try:
            return self.free.pop()
        except IndexError:
            return None

    def give_back(self, *events: Event) -> None:
        """Return events that are not polled, or that are not recorded or have completed."""
        if self._keeps:
            self.free.extend(events)

    def abandon(self, event: Event) -> None:
        """Return an event that may not have completed."""
        if self._keeps:
            self.abandoned.append(event)

    def _create(self, stream: Recordable) -> Event:
        # Up to cuda.core 1.2 an event is made in the current context.
        try:
            event = record_by_core(stream.core)
        except Exception as error:
            raise _driver.streams.cuda_core_failure("cuEventRecord", error, stream) from error
        _process.leak_at_end(event)
        return Event(event)

    def _reclaim(self) -> None:
        """Free the oldest abandoned event if it is done; one a call keeps up with the waits."""
        try:
            event = self.abandoned.popleft()
        except IndexError:  # another thread was faster
            return
        # One that failed is of no use any more, and none of the caller's business.
        with contextlib.suppress(UserStreamError):
            done = _driver.account.on(
                _driver.account.HOUSEKEEPING, _driver.streams.relaxed, is_done, event, None
            )
            (self.free if done else self.abandoned).append(event)


_pools: dict[int, EventPool] = {}  # by the address of a primary context


def pool_of(context: driver.CUcontext) -> EventPool:
    """Return the event pool of a context."""
    address = int(context)
    pool = _pools.get(address)
    if pool is not None:
        return pool
    # A foreign context may be destroyed at any time, and its events with it: they are not kept.
    if _driver.contexts.device_of_primary(address) is None:
        return EventPool(context, keeps=False)
    return _pools.setdefault(address, EventPool(context, keeps=True))


def wait(stream: Recordable, event: cuda.core.Event) -> None:
    """Make later work on a stream wait for an event, without blocking the host."""
    try:
        wait_by_core(stream.core, event)
    except Exception as error:
        raise _driver.streams.cuda_core_failure("cuStreamWaitEvent", error, stream) from error


def is_done(event: Event, stream: object) -> bool:
    """Poll an event; call it under `_driver.streams.relaxed`."""
    try:
        return event.core.is_done  # type: ignore[no-any-return]
    except Exception as error:
        raise _driver.streams.cuda_core_failure("cuEventQuery", error, stream) from error


class StreamPoint:
    """The point that a stream's queue had reached when this was recorded."""

    __slots__ = ("_event", "_pool", "ordered", "target")

    def __init__(
        self, pool: EventPool, stream: Recordable, ordered: bool, recorded: Event | None = None
    ) -> None:
        # None once it was given back: an interrupted waiter may not give it back again.
        self._event: Event | None = pool.record(stream) if recorded is None else recorded
        self._pool = pool
        self.target = stream
        self.ordered = ordered

    def is_done(self) -> bool:
        """Poll; call it under `_driver.streams.relaxed`. Once it said yes, it says so always."""
        event = self._event
        if event is None:
            return True
        if not is_done(event, self.target):
            return False
        self._event = None
        self._pool.give_back(event)
        return True

    def abandon(self) -> None:
        """Give up waiting; the event is used again once it has completed."""
        event, self._event = self._event, None
        if event is not None:
            self._pool.abandon(event)


_process.after_fork(_pools.clear)
