"""A line of the logger for each edge between streams: ``USERSTREAM_LOG_EDGES=1``.

The functions that make edges are replaced when userstream is imported: on the path of every borrow
even a check for a listener would be felt.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from typing import TYPE_CHECKING, Any

import userstream._engine.lane as lanes
from userstream._buffers import type_name
from userstream._copies import short
from userstream._driver import core
from userstream._ordering import device_edges, ordering
from userstream._stream import events

if TYPE_CHECKING:
    from collections.abc import Callable

    from userstream._engine.lane import Lane

_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_logger = logging.getLogger("userstream")


def log() -> None:
    """Let each function that makes an edge say so."""
    order, finish = core.order, core.finish

    def ordered(source: Lane, destination: Lane) -> int:
        result = order(source, destination)
        if not result:  # else the edge is made by `wait_for_event`
            _say(destination, source)
        return result

    def finished(lane: Lane, source: Lane | None, objects: object) -> int:
        result = finish(lane, source, objects)
        if source is not None and result in (0, core.DUE):
            _say(source, lane)
        return result

    vars(core).update(order=ordered, finish=finished)
    _also(lanes.Lane, "wait_for_event", lambda lane, _event, source, *_: (lane, source))
    _also(events, "wait", lambda lane, event: (lane, event))
    everything = "everything on device {}".format
    _also(device_edges, "from_device", lambda device, lane: (lane, everything(device)))
    _also(
        device_edges,
        "to_device",
        lambda device, _event: (everything(device), "the stream that used the buffers"),
    )
    _also(
        ordering.Ordering,
        "_export",
        lambda self, view: (self.lane, f"what __dlpack__ of a {type_name(view.buffer)} names"),
    )
    # The short way of copies is one call of the core, which does not tell whether it made an edge.
    short.to_host = lambda *_: None


def _also(where: Any, name: str, ends: Callable[..., tuple[object, object]]) -> None:
    """Replace a function by one that also says which edge it has made."""
    function = getattr(where, name)

    @functools.wraps(function)
    def logged(*arguments: Any, **more: Any) -> Any:
        result = function(*arguments, **more)
        _say(*ends(*arguments))
        return result

    setattr(where, name, logged)


def _say(destination: object, source: object) -> None:
    if not _logger.isEnabledFor(logging.DEBUG):
        return
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    _logger.debug(
        "%s waits for %s, at %s:%d",
        destination,
        source,
        frame.f_code.co_filename,
        frame.f_lineno,
    )
