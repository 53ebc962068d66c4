"""Objects that are kept alive until the GPU has passed a point.

Later calls, waits and the watcher release the objects; a driver thread never does.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

from userstream import _driver, _process
from userstream._driver import core
from userstream._driver.core import HeldQueue, Point, Ticket, in_use
from userstream._engine import watcher
from userstream.errors import CaptureError, ClosedError, DriverError, UserStreamError

if TYPE_CHECKING:
    from userstream._driver.core import Bell, Use
    from userstream._engine.lane import Lane

orphans = core.orphans
queues = core.queues


def hold_later(use: Use) -> None:
    """Make a use that has not ended an orphan: the next sweeps try to hold its objects."""
    if use.ticket in in_use:
        orphans.append(use.ticket)
    _begin_watch()


def end_ticket(objects: object) -> None:
    """End a ticket, if it is one: nothing uses its objects, or they are held elsewhere."""
    if isinstance(objects, Ticket):
        objects.end()


def keep_in_use(lane: Lane) -> None:
    """Hold the objects of all uses of a stream that is about to be closed."""
    for ticket in list(in_use):
        if ticket.lane is lane:
            with contextlib.suppress(UserStreamError):  # then the objects are kept forever
                keep(lane, ticket)


def _hold_orphans() -> None:
    """Order and hold the objects of orphans: uses that an exception has cut short."""
    for ticket in list(orphans):
        if ticket in in_use:
            if _is_elsewhere(ticket):
                continue
            try:
                _order(ticket)
                keep(ticket.lane, ticket)
            except ClosedError:  # no event tells any more when the objects may be freed
                pass
            except DriverError as error:
                if not _driver.status.ended_context(error):  # try again in the next sweep
                    continue
                end_ticket(ticket)  # nothing runs there any more
            except UserStreamError:  # try again in the next sweep
                continue
        with contextlib.suppress(ValueError):  # another thread was faster
            orphans.remove(ticket)


def _is_elsewhere(ticket: Ticket) -> bool:
    """Return whether the handle of the lane names another stream in the calling thread."""
    handle = ticket.lane.handle
    return (
        handle is not None
        and int(handle) == _driver.streams.PER_THREAD
        and ticket.thread != threading.get_ident()
    )


def _order(ticket: Ticket) -> None:
    """Record the release edge of a ticket. Idempotent once it has succeeded."""
    ordering = ticket.source
    try:
        if ordering is not None:
            ordering.release(None, after_error=True)
    except (CaptureError, DriverError) as error:
        if not _driver.status.ended_context(error):
            raise
    except (UserStreamError, RuntimeError):  # no thread remains that could wait for the lane
        pass
    ticket.source = None


_IDLE_POLLS = 20  # of the watcher before it stops polling: to start again costs more


def _sweep(queue: HeldQueue) -> None:
    """Release the objects of a queue that the GPU no longer uses."""
    core.sweep(queue)
    if queue and not _watched:
        _begin_watch()


class _Sweeper:
    """A point that the watcher polls to sweep; it is done when nothing is held for some polls."""

    target = None
    in_order = False

    def __init__(self) -> None:
        self._idle = 0

    def is_done(self) -> bool:
        with contextlib.suppress(UserStreamError):  # to be tried again
            sweep()
        self._idle = 0 if _has_work() else self._idle + 1
        return self._idle >= _IDLE_POLLS and _end_watch()

    def notify(self, _bell: Bell) -> bool:
        return False

    def _report(self, _over: list[watcher.Watch], error: Exception | None) -> None:
        """Listen to the watch of this point."""
        _unwatched(error)


_lock = _process.RLock()  # for the queues, and for this
_watched = False


def hold(lane: Lane, point: Point, objects: object) -> None:
    """Keep objects alive until the GPU has passed a point of a lane."""
    queue = lane.held
    if queue is None:
        with _lock:  # two queues of one lane would be one too many: only one is swept
            queue = lane.held
            if queue is None:
                queue = HeldQueue()
                _process.leak_at_end(queue)
                lane.held = queue
    ticket = objects if isinstance(objects, Ticket) else None
    queue.hold(point, objects if ticket is None else ticket.objects)
    queues.add(queue)
    sweep_if_due(lane)
    # Last: an exception of a signal handler before this line makes the ticket an orphan, whose
    # objects are held once more. With the ticket ended earlier, such an exception could leave the
    # queue out of `queues`, and nothing would sweep it.
    if ticket is not None:
        ticket.end()


def sweep_if_due(lane: Lane) -> None:
    """Start the watcher if it is not running, and sweep the lane's held objects if due."""
    if not _watched:  # before the sweep, which may fail
        _begin_watch()
    now = time.monotonic()
    if now - lane.swept > core.SWEEP_SECONDS:
        lane.swept = now
        _sweep(lane.held)


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
    hold(lane, Point(lane.pool, event, lane, began), objects)


def _has_work() -> bool:
    """Return whether there is something that the watcher can release."""
    return bool(queues) or any(not _is_elsewhere(ticket) for ticket in list(orphans))


def _begin_watch() -> None:
    global _watched
    try:
        with _lock:
            watched, _watched = _watched, True
        if not watched:
            sweeper = _Sweeper()
            watcher.watch([watcher.Watch(sweeper, sweeper)])
    except RuntimeError as error:  # no thread can be started: later calls sweep as well
        _unwatched(error)
    except BaseException as error:
        _unwatched(error)
        raise


def _end_watch() -> bool:
    global _watched  # noqa: PLW0603 -- one watcher, one flag
    with _lock:
        # Clear the flag before the look: `hold` adds a queue first, and then reads the flag.
        _watched = False
        _watched = _has_work()
        return not _watched


def _unwatched(error: BaseException | None) -> None:
    global _watched  # noqa: PLW0603 -- one watcher, one flag
    if error is not None:  # the next `hold` starts a new watch
        with _lock:
            _watched = False


def sweep() -> None:
    """Release the objects of all lanes that the GPU no longer uses."""
    if orphans:
        _hold_orphans()
    for queue in list(queues):
        _sweep(queue)


def _in_child() -> None:
    global _lock, _watched  # noqa: PLW0603 -- a thread of the parent may hold the lock
    _lock = _process.RLock()
    queues.clear()
    orphans.clear()
    _watched = False


_process.after_fork(_in_child)
