"""Helpers that look at the thread which watches pending work."""

from __future__ import annotations

import threading

from helpers import eventually
from userstream import testing
from userstream._engine import watcher


def is_idle() -> bool:
    """Tell whether the watcher has nothing left to watch or to give up."""
    running = watcher._watcher
    return not running._queues and not running._asked


def sleeps_for_long() -> bool:
    """Tell whether the watcher sleeps until there is something to watch."""
    return watcher._watcher._pause == threading.TIMEOUT_MAX


def finish_meanwhile(latch: testing.latch) -> None:
    """Release a stream, and block the event loop until the watcher has told of it all."""
    latch.release()
    assert eventually(lambda: is_idle() and sleeps_for_long())
