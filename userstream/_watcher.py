"""The watcher: one thread that tells, without a waiting thread each, when the GPU got there.

It sleeps while there is nothing to watch. The events of one stream complete in the order in which
they were recorded, so it looks at the oldest of each stream, and behind it once that is over.
"""

from __future__ import annotations

import atexit
import itertools
import threading
import time
from collections import OrderedDict, defaultdict
from typing import TYPE_CHECKING

from userstream import _driver, _process
from userstream._daemon import Daemon

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from userstream._waiting import Pending

# A watch is late by at most this share of its length, or by the shortest sleep.
_SLEEP_SHARE = 0.05
_SHORTEST_SLEEP = 5e-4
_LONGEST_SLEEP = 5e-3

# So many watches of a stream are looked at, and told of, before it is another stream's turn.
_AT_ONCE = 100


class Watch:
    """A completion that is watched, and whom to tell: of the watch, and of the error if any."""

    __slots__ = ("completion", "queue", "tell")

    def __init__(
        self, completion: Pending, tell: Callable[[Watch, Exception | None], None]
    ) -> None:
        self.completion = completion
        self.tell = tell
        self.queue = id(completion.target if completion.ordered else self)


class Watcher:
    """The thread, and per stream the watches in the order of their events.

    Threads that record on one stream at the same time may come here in another order. So every
    event is asked for itself: what is behind an event that is over may not be.
    """

    def __init__(self) -> None:
        # Entered itself, as Python code of the condition's would do so: a Ctrl-C in there keeps it.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._queues: defaultdict[int, OrderedDict[Watch, None]] = defaultdict(OrderedDict)
        self._dropped: list[Watch] = []
        self._added = 0.0  # the time of the last one
        self._pause = 0.0  # for how long the thread sleeps now
        self._depth = 1  # how many of each stream it looks at
        self._daemon = Daemon(self._run, "userstream-watcher")
        self._ended = False

    def add(self, watches: Sequence[Watch]) -> None:
        """Tell in the watcher's thread of each of these: once, when it is done or has failed."""
        with self._lock:
            try:  # first: nobody is told of what this refuses
                if self._ended:
                    raise RuntimeError("the interpreter is going down: nothing is watched any more")
                self._daemon.start()
            except BaseException:
                for watch in watches:
                    watch.completion.abandon()
                raise
            for watch in watches:
                self._queues[watch.queue][watch] = None
            self._added = time.monotonic()
            if self._pause > _SHORTEST_SLEEP:  # else it comes soon enough
                self._changed.notify_all()  # a Ctrl-C in `notify` leaves it one to wake in vain

    def drop(self, watches: Sequence[Watch]) -> None:
        """Look at these no more. Whoever is told at this moment is told still."""
        with self._lock:
            # Their events are the thread's, which may be looking at them right now.
            self._dropped += [watch for watch in watches if self._take(watch)]

    def end(self) -> None:
        """Let the thread end; nothing is told any more."""
        with self._lock:
            self._ended = True
            self._changed.notify_all()  # as in `add`
        self._daemon.join()

    def _take(self, watch: Watch) -> bool:
        """Take a watch out of its queue; return whether it was there."""
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
        if sum(map(self._look, self._oldest())):
            self._depth = _AT_ONCE  # those behind are likely to be over as well
            return
        self._depth = 1
        with self._lock:
            youngest = time.monotonic() - self._added
            self._sleep(min(max(youngest * _SLEEP_SHARE, _SHORTEST_SLEEP), _LONGEST_SLEEP))

    def _oldest(self) -> list[list[Watch]]:
        """Wait until there is something to watch; return the oldest watches of each stream."""
        with self._lock:
            while not self._ended:
                while self._dropped:
                    self._dropped.pop().completion.abandon()
                if self._queues:
                    queues = list(self._queues.values())
                    return [list(itertools.islice(queue, self._depth)) for queue in queues]
                self._sleep(threading.TIMEOUT_MAX)
            return []

    def _sleep(self, seconds: float) -> None:
        self._pause = seconds
        self._changed.wait(seconds)
        self._pause = 0.0

    def _look(self, watches: list[Watch]) -> bool:
        """Tell of the watches of a stream that are over; return whether there are any."""
        over: list[tuple[Watch, Exception | None]] = []
        for watch in watches:
            try:
                if not watch.completion.is_done():
                    break
                over.append((watch, None))
            except Exception as error:  # whatever it is, nobody may wait for ever
                watch.completion.abandon()
                over.append((watch, error))
        if over:
            with self._lock:
                for watch, _ in over:
                    self._take(watch)
            _tell(over)
        return bool(over)

    def _fail(self, error: Exception) -> None:
        """Let nobody wait for a thread that could not begin; the next watch starts another."""
        with self._lock:
            watches = [watch for queue in self._queues.values() for watch in queue]
            self._queues.clear()
            self._daemon.forget()
        for watch in watches:
            watch.completion.abandon()
        _tell([(watch, error) for watch in watches])


def _tell(over: list[tuple[Watch, Exception | None]]) -> None:
    for watch, error in over:
        try:
            watch.tell(watch, error)
        except BaseException:  # a callback's, SystemExit say: the others are still to be told
            import logging

            logger = logging.getLogger("userstream")
            logger.exception("a callback failed when %r was done", watch.completion.target)


_watcher = Watcher()


def watch(watches: Sequence[Watch]) -> None:
    """Tell in the watcher's thread of each of these: once, when it is done or has failed."""
    _watcher.add(watches)


def unwatch(watches: Sequence[Watch]) -> None:
    """Look at these no more. Whoever is told at this moment is told still."""
    _watcher.drop(watches)


def _in_child() -> None:
    global _watcher  # noqa: PLW0603 -- its thread, and who holds its lock, stayed in the parent
    _watcher = Watcher()


def _at_exit() -> None:
    _watcher.end()


_process.after_fork(_in_child)
atexit.register(_at_exit)
