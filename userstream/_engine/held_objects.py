"""References that are held until the GPU has passed a point.

They are released by later calls, by waits and by the watcher; never by a driver thread.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from userstream import _driver, _process
from userstream._driver import core
from userstream._driver.core import Ticket, in_use, use
from userstream._engine import events, watcher
from userstream.errors import CaptureError, ClosedError, DriverError, UserStreamError

if TYPE_CHECKING:
    from userstream._driver.core import Use
    from userstream._engine.events import Event
    from userstream._engine.lane import Lane

# Lane and objects of each copy that one call of the driver's room has queued, and not seen to end,
# by the identity of the tuple. It is there from that call on until there is a `Use` for it, which
# after several exceptions of signal handlers in a row there may never be.
left: dict[int, tuple[Any, ...]] = {}

# Tickets of uses that have gone before their end, and the queues that hold something.
orphans = core.orphans
queues: set[_Queue] = core.queues


def hold_after_error(use: Use) -> None:
    """Hold the objects of a use unless it has ended; if that fails as well, `hold_later`."""
    if use.ticket in in_use:
        try:
            keep(use.ticket.lane, use.ticket)
        except UserStreamError:
            hold_later(use)


def hold_later(use: Use) -> None:
    """Hold the objects of a use as soon as that is possible, unless they are held by now."""
    if use.ticket in in_use:
        orphans.append(use.ticket)
    _begin_watch()


def end_ticket(objects: object) -> None:
    """End a ticket, if it is one: nothing uses its objects, or they are held elsewhere."""
    if isinstance(objects, Ticket):
        objects.end()


def keep_in_use(lane: Lane) -> None:
    """Hold what is in use on a stream that is about to be closed, and cannot be marked later."""
    _hold_left()
    for ticket in list(in_use):
        if ticket.lane is lane:
            with contextlib.suppress(UserStreamError):  # then it is kept for good
                keep(lane, ticket)


def _hold_left() -> None:
    """Make orphans of what is left; what another thread is just taking over is held twice."""
    for key, (lane, *objects) in list(left.items()):
        use(lane, None, objects)  # which goes at once
        left.pop(key, None)


def _hold_orphans() -> None:
    for ticket in list(orphans):
        if ticket in in_use:
            if _is_elsewhere(ticket):
                continue
            try:
                _order(ticket)
                keep(ticket.lane, ticket)
            except ClosedError:  # it is no longer known when they may go
                pass
            except DriverError as error:
                if not _driver.status.ended_context(error):  # to be tried again
                    continue
                end_ticket(ticket)  # nothing runs there any more
            except UserStreamError:  # to be tried again
                continue
        with contextlib.suppress(ValueError):  # another thread was faster
            orphans.remove(ticket)


def _is_elsewhere(ticket: Ticket) -> bool:
    """Tell whether in this thread the handle of the lane means another stream."""
    handle = ticket.lane.handle
    return (
        handle is not None
        and int(handle) == _driver.streams.PER_THREAD
        and ticket.thread != threading.get_ident()
    )


def _order(ticket: Ticket) -> None:
    """Let those wait for the lane that have to; once it has worked, and it is safe to repeat."""
    try:
        if ticket.order is not None:
            ticket.order(None, after_error=True)
        elif ticket.source is not None:
            ticket.source.add_edge(ticket.lane, may_join=False)
    except (CaptureError, DriverError) as error:
        if not _driver.status.ended_context(error):
            raise
    except (UserStreamError, RuntimeError):  # no thread is left that could wait
        pass
    ticket.order = ticket.source = None


_IDLE_LOOKS = 20  # of the watcher, before it is told to look no more: beginning again costs more


# An event, the times before and after it was recorded, and the objects.
Held = tuple[events.Event, float, float, object]


class _Queue(deque[Held]):
    """The objects held for a stream, the oldest first. Thread-safe."""

    __slots__ = ("_in_order", "_lock", "_pool", "_sweeping")

    def __init__(self, pool: events.EventPool, *, in_order: bool) -> None:
        self._pool = pool
        self._in_order = in_order  # whether it is one stream, which passes its events in order
        # Reentrant: the garbage collector may run any destructor in the middle of a sweep.
        self._lock = _process.RLock()
        self._sweeping = False
        _process.leak_at_end(self)

    # Two that are equal by what they hold would be one in a set.
    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__

    def sweep(self) -> None:
        """Release what the stream has passed."""
        # Relaxed also while the objects go: to free memory would break the captures of others.
        _driver.streams.relaxed(self._let_go)

    def _let_go(self) -> None:
        passed: list[Held] = []
        with self._lock:
            if self._sweeping:  # by such a destructor
                return
            try:
                self._sweeping = True
                self._take_passed(passed)
            finally:
                self._sweeping = False
        self._pool.give_back(*[event for event, *_ in passed])
        # The objects go when `passed` does, outside of the lock.

    def _take_passed(self, passed: list[Held]) -> None:
        if self._in_order and len(self) > 1:
            newest, began, *_ = last = self[-1]
            if _is_passed(newest):
                # So are all that were recorded before it; of some the order is not known.
                while (first := self[0]) is not last and first[2] < began:
                    passed.append(self.popleft())
        while self and _is_passed(self[0][0]):
            passed.append(self.popleft())


def _is_passed(event: Event) -> bool:
    try:
        return _driver.account.on(_driver.account.HOUSEKEEPING, events.is_done, event, None)
    except DriverError as error:  # else to be asked again
        return _driver.status.ended_context(error)
    except CaptureError:  # one began just before the event was recorded: a later event will tell
        return False


class _Sweeper:
    """What the watcher sees: it is done when nothing is held, and nothing is to be."""

    target = None
    ordered = False

    def __init__(self) -> None:
        self._idle = 0

    def is_done(self) -> bool:
        with contextlib.suppress(UserStreamError):  # to be tried again
            sweep()
        self._idle = 0 if _has_work() else self._idle + 1
        return self._idle >= _IDLE_LOOKS and _end_watch()

    def abandon(self) -> None:
        pass


_lock = _process.RLock()  # for the queues, and for this
_watched = False


def hold(lane: Lane, event: Event, began: float, objects: object) -> None:
    """Hold objects until an event has completed that `lane` has marked since `began`.

    The event no longer belongs to the caller.
    """
    queue = lane.held
    if queue is None:
        with _lock:  # or of two threads one would look after the queue of the other
            queue = lane.held
            if queue is None:
                queue = lane.held = _Queue(lane.pool, in_order=lane.is_context_independent)
    ticket = objects if isinstance(objects, Ticket) else None
    queue.append((event, began, time.monotonic(), objects if ticket is None else ticket.objects))
    queues.add(queue)
    sweep_if_due(lane)
    # Last: a signal before this makes them orphans, which are held once more. One after it, but
    # before the rest, would leave them to the next `hold` on this very lane.
    if ticket is not None:
        ticket.end()


def sweep_if_due(lane: Lane) -> None:
    """Start the watcher if it is not running, and sweep the lane's held objects if due."""
    if not _watched:  # first: to look may fail
        _begin_watch()
    now = time.monotonic()
    if now - lane.swept > core.SWEEP_SECONDS:
        lane.swept = now
        lane.held.sweep()


def keep(lane: Lane, objects: object) -> None:
    """Keep objects alive until all work queued on a lane now has completed."""
    began = time.monotonic()
    event, capture = lane.mark()
    if capture != _driver.streams.NOT_CAPTURING:
        lane.pool.give_back(event)
        raise CaptureError(
            f"{lane!r} is being captured into a graph, and what is captured never completes: "
            "keep the objects as long as the graph",
            stream=repr(lane),
        )
    hold(lane, event, began, objects)


def _has_work() -> bool:
    """Tell whether there is something that the watcher can release."""
    return bool(queues) or any(not _is_elsewhere(ticket) for ticket in list(orphans))


def _begin_watch() -> None:
    global _watched
    try:
        with _lock:
            watched, _watched = _watched, True
        if not watched:
            watcher.watch([watcher.Watch(_Sweeper(), lambda _, error: _unwatched(error))])
    except RuntimeError as error:  # no thread can be started: later calls let go all the same
        _unwatched(error)
    except BaseException as error:  # Ctrl-C
        _unwatched(error)
        raise


def _end_watch() -> bool:
    global _watched  # noqa: PLW0603 -- one watcher, one flag
    with _lock:
        # First: who holds something adds it, and then looks whether it is watched.
        _watched = False
        _watched = _has_work()
        return not _watched


def _unwatched(error: BaseException | None) -> None:
    global _watched  # noqa: PLW0603 -- one watcher, one flag
    if error is not None:  # the next call begins anew
        with _lock:
            _watched = False


def sweep() -> None:
    """Release what is no longer needed."""
    if left:
        _hold_left()
    if orphans:
        _hold_orphans()
    if not queues:  # a wait on an idle stream comes by here
        return
    with _lock:
        held = list(queues)
    for queue in held:
        queue.sweep()
        with _lock:
            queues.discard(queue)
            if queue:  # asked last: `hold` adds to the queue first, and then looks whether it is in
                queues.add(queue)


def _in_child() -> None:
    global _lock, _watched  # noqa: PLW0603 -- a thread that is not here may have held it
    _lock = _process.RLock()
    queues.clear()
    orphans.clear()
    _watched = False


_process.after_fork(_in_child)
