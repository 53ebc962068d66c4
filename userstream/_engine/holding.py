"""References that are held until the GPU has passed a point.

They are released by later calls, by waits and by the watcher; never by a driver thread.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, TypeAlias

from userstream import _driver, _locks, _process
from userstream._engine import events, watcher
from userstream.errors import CaptureError, ClosedError, DriverError, UserStreamError

if TYPE_CHECKING:
    from collections.abc import Callable

    from userstream._engine.events import Event
    from userstream._engine.lane import Lane

# What the GPU may be using, by its own identity, which nothing else gets meanwhile. It stays here
# even if all else forgets it: after a Ctrl-C, or an error before `hold` has taken over.
in_use: dict[int, object] = {}

# Lane and objects of each copy that one call of the driver's room has queued, and not seen to end,
# by the identity of the tuple. It is there from that call on until there is a `Use` for it, which
# after several exceptions of signal handlers in a row there may never be.
left: dict[int, tuple[Any, ...]] = {}

# What is in use, and whose `Use` has gone. Garbage collection may fill it between any two lines.
orphans: deque[_Ticket] = deque()
_orphaned = orphans.append


class Use:
    """Objects that work on a stream may be using: made before the work is queued.

    They are held until `end` is called, or until the stream has passed where `hold` was called. An
    exception of a signal handler may come before either, at any bytecode. This object goes with the
    frame that it leaves then, and a later call holds the objects until the stream has passed that.
    """

    __slots__ = ("__weakref__", "ticket")

    def __init__(self, lane: Lane, *objects: object) -> None:
        # The callback is C, so no signal comes in its middle; a destructor may do no more.
        self.ticket = ticket = _Ticket(self, _orphaned)
        ticket.lane, ticket.objects, ticket.order = lane, objects, None
        ticket.thread = 0 if lane.anywhere else threading.get_ident()
        in_use[id(ticket)] = ticket

    def end(self) -> None:
        """Release the objects: the work is over, or was never queued."""
        self.ticket.end()

    def hold(self) -> None:
        """Hold the objects until the stream has done what is queued on it now."""
        keep(self.ticket.lane, self.ticket)

    def hold_after_error(self) -> None:
        """As `hold`, unless this has ended; if that fails as well, `hold_later`."""
        if id(self.ticket) in in_use:
            try:
                self.hold()
            except UserStreamError:
                self.hold_later()

    def hold_later(self) -> None:
        """Hold the objects as soon as that is possible, which it was not just now."""
        if id(self.ticket) in in_use:
            orphans.append(self.ticket)
            _begin_watch()


class _Ticket(weakref.ref[Use]):
    """What a `Use` is about. It is what is in use; its objects are what is held."""

    __slots__ = ("lane", "objects", "order", "thread")

    lane: Lane
    objects: tuple[object, ...]
    order: Callable[..., None] | None  # lets those wait for the lane that have to
    thread: int  # where the handle of the lane means it; 0: everywhere

    def end(self) -> None:
        """Be no orphan when the `Use` goes: the objects are held, or nothing uses them."""
        in_use.pop(id(self), None)
        use = self()
        if use is not None:
            use.ticket = _ENDED  # so this goes first, and the callback with it

    def is_elsewhere(self) -> bool:
        """Tell whether in this thread the handle of the lane means another stream."""
        handle = self.lane.handle
        return (
            handle is not None
            and int(handle) == _driver.streams.PER_THREAD
            and self.thread != threading.get_ident()
        )


_ENDED = _Ticket(Use.__new__(Use))  # of nothing, and never in use
_ENDED.objects, _ENDED.order = (), None


def let_go(objects: object) -> None:
    """Forget what is in use: nothing uses it, or it is kept elsewhere."""
    if isinstance(objects, _Ticket):
        objects.end()


def keep_in_use(lane: Lane) -> None:
    """Hold what is in use on a stream that is about to be closed, and cannot be marked later."""
    _hold_left()
    for ticket in list(in_use.values()):
        if isinstance(ticket, _Ticket) and ticket.lane is lane:
            with contextlib.suppress(UserStreamError):  # then it is kept for good
                keep(lane, ticket)


def _hold_left() -> None:
    """Make orphans of what is left; what another thread is just taking over is held twice."""
    for key, (lane, *objects) in list(left.items()):
        Use(lane, *objects)  # which goes at once
        left.pop(key, None)


def _hold_orphans() -> None:
    for ticket in list(orphans):
        if id(ticket) in in_use:
            if ticket.is_elsewhere():
                continue
            try:
                _order(ticket)
                keep(ticket.lane, ticket)
            except ClosedError:  # it is no longer known when they may go
                pass
            except DriverError as error:
                if not _driver.status.ended_context(error):  # to be tried again
                    continue
                let_go(ticket)  # nothing runs there any more
            except UserStreamError:  # to be tried again
                continue
        with contextlib.suppress(ValueError):  # another thread was faster
            orphans.remove(ticket)


def _order(ticket: _Ticket) -> None:
    """Let those wait for the lane that have to; once it has worked, and it is safe to repeat."""
    if ticket.order is not None:
        try:
            ticket.order(None, after_error=True)
        except (CaptureError, DriverError) as error:
            if not _driver.status.ended_context(error):
                raise
        except (UserStreamError, RuntimeError):  # no thread is left that could wait
            pass
        ticket.order = None


_SWEEP_SECONDS = 200e-6  # at most so often for each stream: asking an event takes a µs
_IDLE_LOOKS = 20  # of the watcher, before it is told to look no more: beginning again costs more


# An event, the times before and after it was recorded, and the objects.
_Held: TypeAlias = "tuple[Event, float, float, object]"


class _Queue:
    """The objects held for a stream. Thread-safe."""

    __slots__ = ("__weakref__", "_in_order", "_lock", "_pool", "_sweeping", "held", "swept")

    def __init__(self, pool: events.EventPool, *, in_order: bool) -> None:
        self._pool = pool
        self._in_order = in_order  # whether it is one stream, which passes its events in order
        self.held: deque[_Held] = deque()
        # Reentrant: the garbage collector may run any destructor in the middle of a sweep.
        self._lock = _locks.RLock()
        self._sweeping = False
        self.swept = 0.0
        _process.leak_at_end(self)

    def __len__(self) -> int:
        return len(self.held)

    def sweep(self) -> None:
        """Release what the stream has passed."""
        # Relaxed also while the objects go: to free memory would break the captures of others.
        _driver.streams.relaxed(self._let_go)

    def _let_go(self) -> None:
        passed: list[_Held] = []
        with self._lock:
            if self._sweeping:  # by such a destructor
                return
            try:
                self._sweeping = True
                self._take_passed(passed)
            finally:
                self._sweeping = False
        for event, *_ in passed:
            self._pool.give_back(event)
        # The objects go when `passed` does, outside of the lock.

    def _take_passed(self, passed: list[_Held]) -> None:
        held = self.held
        if self._in_order and len(held) > 1:
            newest, began, *_ = last = held[-1]
            if _is_passed(newest):
                # So are all that were recorded before it; of some the order is not known.
                while (first := held[0]) is not last and first[2] < began:
                    passed.append(held.popleft())
        while held and _is_passed(held[0][0]):
            passed.append(held.popleft())


def _is_passed(event: Event) -> bool:
    try:
        return events.is_done(event, None)
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


_lock = _locks.RLock()  # for these two
queues: set[_Queue] = set()  # that hold something
_watched = False


def hold(lane: Lane, event: Event, began: float, objects: object) -> None:
    """Hold objects until an event has completed that `lane` has marked since `began`.

    The event no longer belongs to the caller.
    """
    queue = lane.held
    if queue is None:
        queue = lane.held = _Queue(lane.pool, in_order=lane.anywhere)
    now = time.monotonic()
    ticket = objects if isinstance(objects, _Ticket) else None
    queue.held.append((event, began, now, objects if ticket is None else ticket.objects))
    if now - queue.swept > _SWEEP_SECONDS:
        queue.swept = now
        queue.sweep()
    if queue not in queues or not _watched:
        with _lock:
            queues.add(queue)
        _begin_watch()
    # Last: a signal before this makes them orphans, which are held once more. One after it, but
    # before the rest, would leave them to the next `hold` on this very lane.
    if ticket is not None:
        ticket.end()


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
    return bool(queues) or any(not ticket.is_elsewhere() for ticket in list(orphans))


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
    _lock = _locks.RLock()
    queues.clear()
    orphans.clear()
    _watched = False


_process.after_fork(_in_child)
