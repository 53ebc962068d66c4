"""The watcher: one thread that polls points of all streams and reports their completion.

The thread sleeps while there is nothing to watch. The events of one stream complete in the order of
their records, so the thread polls the oldest events of each stream first.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import threading
import time
from collections import OrderedDict, defaultdict, deque
from typing import TYPE_CHECKING

from userstream import _driver, _process
from userstream._process import Daemon, survive

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from userstream._engine.events import Pending

# A watch is late by at most this share of its length, or by the shortest sleep.
_SLEEP_SHARE = 0.05
_SHORTEST_SLEEP = 5e-4
_LONGEST_SLEEP = 5e-3

# The most watches of a stream that are polled and reported before the next stream's turn.
_AT_ONCE = 100


class Watch:
    """A point to poll, and the function to call once with this watch and the error or `None`."""

    __slots__ = ("completion", "queue", "tell")

    def __init__(
        self, completion: Pending, tell: Callable[[Watch, Exception | None], None]
    ) -> None:
        self.completion = completion
        self.tell = tell
        self.queue = id(completion.target if completion.ordered else self)


class Watcher:
    """The watcher's thread, and a queue of watches for each stream.

    Threads that record on one stream at the same time may add their watches in another order. So
    every event is polled: an event behind a completed one may be pending.

    Only the thread changes the queues. A destructor or a signal handler may add or drop watches in
    the middle of any code, also of this thread. So a request is one append to a deque, and a
    wake-up is one release of a lock: neither can be interrupted halfway, and no lock is waited for.
    """

    def __init__(self) -> None:
        self._queues: defaultdict[int, OrderedDict[Watch, None]] = defaultdict(OrderedDict)
        # Requests in their order: watches to add (True) or to drop (False).
        self._asked: deque[tuple[bool, Sequence[Watch]]] = deque()
        self._called = _process.Lock()  # released to wake the thread up
        self._called.acquire()
        self._starting = _process.RLock()
        self._added = 0.0  # the time of the last `add`
        self._pause = 0.0  # the length of the present sleep
        self._depth = 1  # the number of watches of each stream that a turn polls
        self._daemon = Daemon(self._run, "userstream-watcher")
        self._ended = False

    def add(self, watches: Sequence[Watch]) -> None:
        """Report each watch once, on the watcher's thread, when its point completes or fails."""
        with self._starting:
            try:  # before the request: a refused watch must not be polled
                if self._ended:
                    raise RuntimeError(
                        "the interpreter is shutting down: nothing is watched any longer"
                    )
                self._daemon.start()
            except BaseException:  # the thread never sees the watches, so abandon them here
                for watch in watches:
                    watch.completion.abandon()
                raise
            self._asked.append((True, watches))
        self._added = time.monotonic()
        if self._pause > _SHORTEST_SLEEP:  # otherwise the thread wakes up soon enough
            self._wake()

    def drop(self, watches: Sequence[Watch]) -> None:
        """Stop watching. A report that has begun still arrives."""
        # Only the thread may abandon the events: it may be polling them now.
        self._asked.append((False, watches))
        if self._pause > _LONGEST_SLEEP:
            self._wake()

    def end(self) -> None:
        """End the thread; pending watches are never reported."""
        with self._starting:
            self._ended = True
        self._wake()
        self._daemon.join()

    def is_current(self) -> bool:
        """Return whether the calling thread is the watcher's."""
        return self._daemon.is_current()

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # the lock is released already
            self._called.release()

    def _sleep(self, seconds: float) -> None:
        self._pause = seconds
        # Look after `_pause` is set: a request that comes later wakes the thread up.
        if not self._asked and not self._ended:
            self._called.acquire(timeout=seconds)
        self._pause = 0.0

    def _run(self) -> None:
        _driver.account.set_for_thread(_driver.account.FUTURE)
        self._relax()
        while not self._ended:
            try:
                self._turn()
            except BaseException:  # the thread must go on, or every waiter waits forever
                survive("the watcher of streams could not look at all of them, and continues")
                self._called.acquire(timeout=_LONGEST_SLEEP)

    def _relax(self) -> None:
        """Relax the capture mode: callbacks and destructors on this thread may free memory."""
        while not self._ended:
            try:
                _driver.streams.relax_capture_of_this_thread()
            except Exception as error:  # try again for the next watch
                self._fail(error)
                self._sleep(threading.TIMEOUT_MAX)
            else:
                break

    def _turn(self) -> None:
        """Poll the oldest watches of each stream, and sleep if none is over."""
        # Not inlined in `_run`: local variables would keep objects alive during the sleep.
        self._take_over()
        if not self._queues:
            self._depth = 1
            self._sleep(threading.TIMEOUT_MAX)
        elif sum(map(self._look, self._oldest())):
            self._depth = _AT_ONCE  # the watches behind are likely to be over as well
        else:
            self._depth = 1
            youngest = time.monotonic() - self._added
            self._sleep(min(max(youngest * _SLEEP_SHARE, _SHORTEST_SLEEP), _LONGEST_SLEEP))

    def _take_over(self) -> None:
        """Apply the requests of other threads to the queues."""
        while self._asked:
            # Popped when it is applied: to apply a request again after an exception is harmless.
            wanted, watches = self._asked[0]
            for watch in watches:
                if wanted:
                    self._queues[watch.queue][watch] = None
                elif self._take(watch):
                    _abandon(watch)
            self._asked.popleft()

    def _take(self, watch: Watch) -> bool:
        """Remove a watch from its queue; return whether the watch was there."""
        queue = self._queues.get(watch.queue)
        if queue is None or watch not in queue:
            return False
        del queue[watch]
        if not queue:
            del self._queues[watch.queue]
        return True

    def _oldest(self) -> list[list[Watch]]:
        """Return the oldest watches of each stream."""
        return [list(itertools.islice(queue, self._depth)) for queue in self._queues.values()]

    def _look(self, watches: list[Watch]) -> bool:
        """Report the watches of a stream that are over; return whether any is."""
        over: list[tuple[Watch, Exception | None]] = []
        for watch in watches:
            try:
                if not watch.completion.is_done():
                    break
                over.append((watch, None))
            except Exception as error:  # report any error: no waiter may wait forever
                _abandon(watch)
                over.append((watch, error))
        if over:
            _tell(over)
            for watch, _ in over:
                self._take(watch)
        return bool(over)

    def _fail(self, error: Exception) -> None:
        """Report an error to all watches: the thread cannot poll."""
        self._take_over()
        watches = [watch for queue in self._queues.values() for watch in queue]
        for watch in watches:
            _abandon(watch)
        _tell([(watch, error) for watch in watches])
        self._queues.clear()


def _abandon(watch: Watch) -> None:
    try:
        watch.completion.abandon()
    except BaseException:  # lose one event instead of the thread, and with it every other wait
        survive("an event of %r was lost", watch.completion.target)


def _tell(over: list[tuple[Watch, Exception | None]]) -> None:
    for watch, error in over:
        try:
            # A callback of the program may query streams on its own account.
            _driver.account.on(_driver.account.PROGRAM, watch.tell, watch, error)
        except BaseException:  # of a callback, SystemExit say: report to the others all the same
            survive("a callback failed when %r was done", watch.completion.target)


_watcher = Watcher()


def is_current() -> bool:
    """Return whether the calling thread is the watcher's."""
    return _watcher.is_current()


def watch(watches: Sequence[Watch]) -> None:
    """Report each watch once, on the watcher's thread, when its point completes or fails."""
    _watcher.add(watches)


def unwatch(watches: Sequence[Watch]) -> None:
    """Stop watching. A report that has begun still arrives."""
    _watcher.drop(watches)


def _in_child() -> None:
    global _watcher  # noqa: PLW0603 -- its thread and the holder of its lock stayed in the parent
    _watcher = Watcher()


def _at_exit() -> None:
    _process.begin_end()
    _watcher.end()


_process.after_fork(_in_child)
atexit.register(_at_exit)
