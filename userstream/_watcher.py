"""The watcher: one thread that tells, without a waiting thread each, when the GPU got there.

It sleeps while there is nothing to watch. The events of one stream complete in the order in which
they were recorded, so only the oldest of each stream is looked at.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING

from userstream import _driver, _process

if TYPE_CHECKING:
    from collections.abc import Callable

    from userstream._waiting import Pending

# A watch is late by at most this share of its length, or by the shortest sleep.
_SLEEP_SHARE = 0.05
_SHORTEST_SLEEP = 5e-4
_LONGEST_SLEEP = 5e-3


class Watch:
    """A completion that is watched, and whom to tell."""

    __slots__ = ("completion", "queue", "since", "tell")

    def __init__(self, completion: Pending, tell: Callable[[Exception | None], None]) -> None:
        self.completion = completion
        self.tell = tell
        self.since = time.monotonic()
        self.queue = id(completion.target if completion.ordered else self)


class Watcher:
    """The thread, and per stream the watches in the order of their events."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queues: dict[int, OrderedDict[Watch, None]] = {}
        self._dropped: list[Watch] = []
        self._running = False
        self._ended = False

    def add(self, completion: Pending, tell: Callable[[Exception | None], None]) -> Watch:
        """Call `tell` in the watcher's thread, once: when the completion is done or has failed."""
        watch = Watch(completion, tell)
        with self._changed:
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="userstream-watcher", daemon=True).start()
            queue = self._queues.setdefault(watch.queue, OrderedDict())
            queue[watch] = None
            if len(queue) == 1:
                self._changed.notify()
        return watch

    def drop(self, watch: Watch) -> None:
        """Tell nobody, if nobody was told yet."""
        with self._changed:
            if self._take(watch):
                # Its event is the thread's, which may be looking at it right now.
                self._dropped.append(watch)
                self._changed.notify()

    def end(self) -> None:
        """Let the thread end; nothing is told any more."""
        with self._changed:
            self._ended = True
            self._changed.notify()

    def _take(self, watch: Watch) -> bool:
        """Take a watch out of its queue; tell whether it was there."""
        queue = self._queues.get(watch.queue)
        if queue is None or watch not in queue:
            return False
        del queue[watch]
        if not queue:
            del self._queues[watch.queue]
        return True

    def _run(self) -> None:
        try:
            _driver.relax_capture_of_this_thread()
        except Exception as error:
            self._fail(error)
            return
        while not self._ended:
            self._turn()

    def _turn(self) -> None:
        """Look at the oldest of each stream, and sleep if none of them was over."""
        # A function of its own, so that nothing is kept alive through the sleep in `_oldest`.
        watches = self._oldest()
        if watches and sum(map(self._look, watches)) == 0:
            youngest = time.monotonic() - max(watch.since for watch in watches)
            pause = min(max(youngest * _SLEEP_SHARE, _SHORTEST_SLEEP), _LONGEST_SLEEP)
            with self._changed:
                self._changed.wait(pause)

    def _oldest(self) -> list[Watch]:
        """Wait until there is something to watch; return the oldest watch of each stream."""
        with self._changed:
            while not self._ended:
                while self._dropped:
                    self._dropped.pop().completion.abandon()
                if self._queues:
                    return [next(iter(queue)) for queue in list(self._queues.values())]
                self._changed.wait()
            return []

    def _look(self, watch: Watch) -> bool:
        """Tell whom it concerns if a watch is over; return whether it is."""
        error: Exception | None = None
        try:
            if not watch.completion.is_done():
                return False
        except Exception as failure:  # whatever it is, nobody may wait for ever
            watch.completion.abandon()
            error = failure
        with self._changed:
            concerns = self._take(watch)
        if concerns:
            watch.tell(error)
        return True

    def _fail(self, error: Exception) -> None:
        """Let nobody wait for a thread that could not begin; the next watch starts another."""
        with self._changed:
            watches = [watch for queue in self._queues.values() for watch in queue]
            self._queues.clear()
            self._running = False
        for watch in watches:
            watch.completion.abandon()
            watch.tell(error)


_watcher = Watcher()


def watch(completion: Pending, tell: Callable[[Exception | None], None]) -> Watch:
    """Call `tell` in the watcher's thread, once: when the completion is done or has failed."""
    return _watcher.add(completion, tell)


def unwatch(watch: Watch) -> None:
    """Tell nobody, if nobody was told yet."""
    _watcher.drop(watch)


def _in_child() -> None:
    global _watcher  # noqa: PLW0603 -- its thread, and who holds its lock, stayed in the parent
    _watcher = Watcher()


def _at_exit() -> None:
    _watcher.end()


_process.after_fork(_in_child)
atexit.register(_at_exit)
