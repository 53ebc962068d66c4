"""Helpers that look at the thread which watches pending work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import userstream as us
from helpers import eventually
from userstream import testing
from userstream._driver.core import Point
from userstream._engine import watcher


class Listener:
    """Calls a function with each watch that is over, and its error."""

    def __init__(self, tell: Callable[[watcher.Watch, Exception | None], object]) -> None:
        self.tell = tell

    def _report(self, over: list[watcher.Watch], error: Exception | None) -> None:
        for watch in over:
            self.tell(watch, error)


def blocking_point(stream: us.Stream) -> Point:
    """Return a point of a held stream for which a bell can ring."""
    for _ in range(1000):  # an earlier test may still use the event of the context
        point = stream._resolve().completion()
        if point.is_blocking:
            return point
        time.sleep(0.01)
    raise AssertionError("the blocking event of the context is still in use")


def is_idle() -> bool:
    """Return whether the watcher has nothing to watch."""
    running = watcher._watcher
    return not running._queues and not running._asked


def sleeps_for_long() -> bool:
    """Return whether the watcher sleeps until there is something to watch."""
    return watcher._watcher._pause == threading.TIMEOUT_MAX


def watched(target: Any) -> us.Completion[None]:
    """Return a completion that the watcher watches, as it does once there is a callback."""
    future = us.completion(target)
    future.add_done_callback(lambda _: None)
    return future


def finish_meanwhile(latch: testing.latch) -> None:
    """Release a stream, and block the event loop until the watcher has told of it all."""
    latch.release()
    assert eventually(lambda: is_idle() and sleeps_for_long())
