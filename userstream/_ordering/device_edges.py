"""Edges between a stream and everything on a device, for buffers whose producer is unknown.

An event of ``cuCtxRecordEvent`` covers what is queued on every stream of a context, whichever
library created it. ``cuCtxWaitEvent`` makes everything that is queued there afterwards wait for an
event, even on streams that are created later, and nothing that was queued before. Neither waits on
the host. Both invalidate any capture in the context, whatever its mode.
"""

from __future__ import annotations

import itertools
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING

from userstream import _driver, _hooks, _process
from userstream._buffers import frameworks
from userstream._engine import host_wait, lanes
from userstream._ordering import settings
from userstream.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from cuda.bindings import driver

    from userstream._engine.lane import Lane

# Events by device. Each is in use only from its record to the wait that follows: a wait that is
# pending keeps the record that it saw.
_spare: dict[int, deque[driver.CUevent]] = {}

# What helps against it, by whether USERSTREAM_ORDER wants these edges whatever the producer.
_INSTEAD = {
    False: "pass producer=, the stream that writes the buffer, or use the buffer before or after "
    "the capture",
    True: "unset USERSTREAM_ORDER, or use the buffer before or after the capture",
}
_BREAKS = {
    by_device: f", which ordering with everything on the device would invalidate: {instead}"
    for by_device, instead in _INSTEAD.items()
}


def refuse_captures(devices: Iterable[int], consumer: Lane) -> None:
    """Raise `CaptureError` if a capture can be seen, before an edge would invalidate it."""
    breaks = _BREAKS[settings.BY_DEVICE]
    if consumer.capture_status() != _driver.streams.NOT_CAPTURING:
        raise CaptureError(
            f"{consumer!r} is being captured into a graph, which cannot depend on all other work "
            f"on the device: {_INSTEAD[settings.BY_DEVICE]}",
            stream=repr(consumer),
        )
    for device in devices:
        host_wait.refuse_captures(device, _driver.contexts.primary_context(device), breaks)
        # A framework captures on its current stream. If that is a non-blocking one, the legacy
        # stream does not tell.
        for framework in frameworks():
            if framework.captures and framework.is_usable():
                handle, _owner = framework.current_stream(device)
                if isinstance(handle, int) and handle > _driver.streams.PER_THREAD:
                    lanes.of_framework(handle, device).usable(breaks)


def from_device(device: int, consumer: Lane) -> None:
    """Make later work on a stream wait for everything that is queued on a device now."""
    context = _driver.contexts.primary_context(device)
    spare = _spare.setdefault(device, deque())
    taken: list[driver.CUevent] = []
    try:
        # One call of C: a signal after a `pop` would lose the event, which no destructor frees.
        try:
            taken.extend(itertools.islice(iter(spare.pop, None), 1))
        except IndexError:
            taken.append(_driver.streams.create_event(context))
        event = taken[0]
        with _told():
            _driver.streams.record_context(context, event)
        consumer.here(_driver.streams.wait_for_event, consumer.live(), int(event), 0, consumer)
        if _hooks.edge_added:
            _hooks.report_edge(consumer, f"everything on device {device}")
    finally:  # after Ctrl-C as well: a wait that is pending keeps the record that it saw
        spare.extend(taken)


def to_device(device: int, event: int) -> None:
    """Make everything that is queued on a device from now on wait for an event."""
    with _told():
        _driver.streams.let_context_wait(_driver.contexts.primary_context(device), event)
    if _hooks.edge_added:
        _hooks.report_edge(f"everything on device {device}", "the stream that used the buffers")


@contextmanager
def _told() -> Iterator[None]:
    """Explain what invalidated a capture that could not be seen, and how to avoid it."""
    try:
        yield
    except CaptureError as error:
        instead = (
            "unset USERSTREAM_ORDER"
            if settings.BY_DEVICE
            else "pass producer=, or set UserStream.unknown (USERSTREAM_UNKNOWN) to 'raise'"
        )
        error.add_note(
            "this was to order a buffer with everything on its device, which invalidates a capture "
            f"there: {instead}"
        )
        raise


_process.after_fork(_spare.clear)
