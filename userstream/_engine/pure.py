"""What two lanes do in one step, in Python: the reference for the compiled core, and its stand-in.

An exception of a signal handler may come between any two bytecodes here, and between no two steps
of `_native.c`.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

from userstream import _driver
from userstream._engine import events

if TYPE_CHECKING:
    from collections.abc import Callable

    from userstream._engine.events import Event

# As in `_native.c`.
CAPTURED = _driver.fused.CAPTURED
DUE = -2
SWEEP_SECONDS = 200e-6  # at most so often for each stream: asking an event takes a µs


class LaneState:
    """The part of a lane that these functions read."""

    __slots__ = ("free", "held", "is_context_independent", "raw_context", "raw_handle", "swept")

    raw_handle: Any  # the handle, as `_driver.fused` takes it; 0 once it is closed
    raw_context: Any  # its context, likewise
    is_context_independent: (
        bool  # whether the handle means this stream whichever context is current
    )
    free: deque[Event]  # the spare events of its context
    held: Any  # what is held until the stream has passed a point; None at first
    swept: float  # when that was last looked through, by `time.monotonic`


class Use:
    """Objects that work on a stream may be using: made before the work is queued.

    They are held until the ticket is ended, or until the stream has passed where `finish` or
    `held_objects.hold` was called. An exception of a signal handler may come before either, at any
    bytecode. This object goes with the frame that it leaves then, which makes its ticket an orphan.
    """

    __slots__ = ("__weakref__", "ticket")

    ticket: Ticket


class Ticket(weakref.ref[Use]):
    """What a `Use` is about. It is what is in use; its objects are what is held."""

    __slots__ = ("lane", "objects", "order", "source", "thread")

    lane: Any  # of `lane`
    source: Any  # or None, for which `finish` makes an edge
    objects: object
    order: Callable[..., None] | None  # lets those wait for the lane that have to
    thread: int  # where the handle of the lane means it; 0: everywhere

    def end(self) -> None:
        """Be no orphan when the `Use` goes: the objects are held, or nothing uses them."""
        in_use.discard(self)
        use = self()
        if use is not None:
            use.ticket = _ENDED  # so this goes first, and the callback with it

    # Of equal references to equal objects one would be in a set.
    __hash__ = object.__hash__
    __eq__ = object.__eq__


_ENDED = Ticket(Use.__new__(Use))  # of nothing, and never in use

# The tickets of what the GPU may be using. They stay here even if all else forgets them: after a
# Ctrl-C, or an error before `hold` has taken over.
in_use: set[Ticket] = set()

# Those whose `Use` has gone before their end. Garbage collection may fill it between any two lines.
orphans: deque[Ticket] = deque()
_orphaned = orphans.append

# Those of lanes that hold something.
queues: set[Any] = set()

# An event, the times before and after it was recorded, and the objects.
Held = tuple["Event", float, float, object]


def use(lane: Any, source: Any, objects: object, /) -> Use:
    """Return a use of objects by a lane, for which `source` waits at the end, if it is a lane."""
    made = Use()
    # The callback is C, so no signal comes in its middle; a destructor may do no more.
    made.ticket = ticket = Ticket(made, _orphaned)
    ticket.lane, ticket.source, ticket.objects, ticket.order = lane, source, objects, None
    ticket.thread = 0 if lane.is_context_independent else threading.get_ident()
    in_use.add(ticket)
    return made


def query(lane: Any, /) -> int:
    """Query a stream; 0 if it is idle, else what `_driver.fused.stream_is_idle` takes.

    `CAPTURED` also if the lane is closed, or its handle means another stream in another context.
    """
    handle = lane.raw_handle
    return _driver.fused.query(handle) if handle and lane.is_context_independent else CAPTURED


def order(source: Any, destination: Any, /) -> int:
    """Make later work of a lane wait for what is queued on another one; 0 if that is done.

    That is the common case, in which no capture or other context is involved. Otherwise, or if no
    event is there yet, do nothing and return `CAPTURED`. Where the driver fails, the compiled core
    returns what `_driver.fused.edge_failure` makes an error of, and this raises that error.
    """
    event = _ordered(source, destination)
    if event is None:
        return CAPTURED
    source.free.append(event)  # a wait that is pending keeps the record that it saw
    return 0


def finish(lane: Any, source: Any, objects: object, /) -> int:
    """Make a source, if there is one, wait for a lane, and hold objects until that is there.

    Objects that are in use are passed as their ticket, which is ended. Returns 0, or `DUE` if
    `held_objects.sweep_if_due` is to be called too. All else is as with `order`: then nothing is
    held.
    """
    held = lane.held
    if held is None:
        return CAPTURED
    began = time.monotonic()
    event = _ordered(lane, source)
    if event is None:
        return CAPTURED
    now = time.monotonic()
    ticket = objects if isinstance(objects, Ticket) else None
    held.append((event, began, now, objects if ticket is None else ticket.objects))
    # Not whether it is the only one there, which of two threads each may find false.
    is_new = held not in queues
    queues.add(held)
    # Last: a signal before this makes them orphans, which are held once more.
    if ticket is not None:
        ticket.end()
    return DUE if is_new or now - lane.swept > SWEEP_SECONDS else 0


def _ordered(source: Any, destination: Any) -> Event | None:
    """Record an event behind the work of a lane, and let another one wait for it, if there is one.

    By cuda.core, which takes half the time of the bindings.
    """
    inside = (
        0 if source.is_context_independent else source.raw_context
    )  # what has to be current, for a default stream
    if destination is not None and not destination.is_context_independent:
        if inside and inside != destination.raw_context:
            return None
        inside = destination.raw_context
    one = source.raw_handle
    other = one if destination is None else destination.raw_handle
    # Of a closed one it is 0, which to the driver means the legacy stream.
    if not one or not other:
        return None
    if inside and not _driver.contexts.is_current(inside):
        return None
    if not _driver.fused.are_free(one, other):
        return None
    try:
        event: Event = source.free.pop()
    except IndexError:
        return None
    function, lane = "cuEventRecord", source
    try:
        events.record_by_core(source._core or source.core, event.core)
        if destination is not None:
            function, lane = "cuStreamWaitEvent", destination
            events.wait_by_core(destination._core or destination.core, event.core)
    except Exception as error:
        source.pool.give_back(event)
        raise _driver.core.core_failure(function, error, lane) from error
    return event
