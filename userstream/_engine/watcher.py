"""The watcher: one thread that polls points of all streams and reports their completion.

The thread sleeps until its bell rings, or, where no bell rings for a point, polls again and again.
The points of one stream complete in the order of their records, so the thread looks at the oldest
point of each stream first.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections import defaultdict, deque
from typing import TYPE_CHECKING, TypeAlias

from userstream import _driver, _process
from userstream._driver import core
from userstream._driver.core import Bell, Point
from userstream._engine.events import LONGEST_SLEEP
from userstream._process import Daemon, log_exception

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, Protocol

    from userstream._engine.events import Pending

    class Listener(Protocol):
        """An object that is told which of its watches are over, and the error that ended them."""

        def _report(self, over: list[Any], error: Any, /) -> object: ...


# Without a bell, a report is late by at most this share of its watch, or by the shortest pause.
_PAUSE_SHARE = 0.05
_SHORTEST_PAUSE = 5e-4
_LONGEST_PAUSE = 5e-3


class Watch:
    """A point to poll, and the listener to tell once, with the error or `None`."""

    __slots__ = ("listener", "point")

    def __init__(self, point: Pending, listener: Listener) -> None:
        self.point = point
        self.listener = listener


def _queue_of(watch: Watch) -> object:
    """Return the key of the queue of a watch: its stream, or itself if it completes in no order."""
    point = watch.point
    return point.target if point.in_order else watch


# Watches of one stream that are over, and the error that ended them.
_Found: TypeAlias = "tuple[list[Watch], Exception | None]"


class Watcher:
    """The watcher's thread, and a queue of watches for each stream.

    Only the thread changes the queues. A destructor or a signal handler may add or drop watches in
    the middle of any code, also of this thread. So a request is one append to a deque, and a
    wake-up is one call of C: neither can be interrupted halfway, and no lock is waited for.
    """

    def __init__(self) -> None:
        self._queues: defaultdict[object, dict[Watch, None]] = defaultdict(dict)
        # Requests in their order: watches to add (True) or to drop (False).
        self._asked: deque[tuple[bool, Sequence[Watch]]] = deque()
        self._bell = Bell()
        self._ringing: dict[object, Pending] = {}  # the oldest points, by queue, that ring the bell
        self._starting = _process.RLock()
        self._added = 0.0  # the time of the last `add`
        self._pause = 0.0  # the length of the present sleep
        self._daemon = Daemon(self._run, "userstream-watcher")
        self._ended = False

    def add(self, watches: Sequence[Watch]) -> None:
        """Report each watch once, on the watcher's thread, when its point completes or fails."""
        with self._starting:
            # Before the request: a refused watch must not be polled.
            if self._ended:
                raise RuntimeError(
                    "the interpreter is shutting down: nothing is watched any longer"
                )
            _driver.account.on(_driver.account.HOUSEKEEPING, self._daemon.start)
            self._asked.append((True, watches))
        self._added = time.monotonic()
        # After the request, which the thread finds before it sleeps again. It wakes up soon enough,
        # or with the oldest watch of a queue.
        if self._pause > _SHORTEST_PAUSE and any(
            _queue_of(watch) not in self._ringing for watch in watches
        ):
            self._bell.ring()

    def drop(self, watches: Sequence[Watch]) -> None:
        """Stop watching. A report that has begun still arrives."""
        self._asked.append((False, watches))
        self._bell.ring()

    def end(self) -> None:
        """End the thread; pending watches are never reported."""
        with self._starting:
            self._ended = True
        self._bell.ring()
        self._daemon.join()

    def is_current(self) -> bool:
        """Return whether the calling thread is the watcher's."""
        return self._daemon.is_current()

    def _run(self) -> None:
        _driver.account.set_for_thread(_driver.account.FUTURE)
        self._relax()
        while not self._ended:
            try:
                pause = self._turn()
            except BaseException:  # the thread must go on, or every waiter waits forever
                log_exception("the watcher of streams could not look at all of them, and continues")
                pause = _LONGEST_PAUSE
            if pause:
                self._sleep(pause)

    def _sleep(self, seconds: float) -> None:
        self._pause = seconds
        # Look after `_pause` is set: a request that comes later rings the bell.
        if not self._asked and not self._ended:
            self._bell.wait(seconds)
        self._pause = 0.0

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

    def _turn(self) -> float:
        """Report watches that are over; return the seconds to sleep."""
        # Not inlined in `_run`: local variables would keep objects alive during the sleep.
        self._take_over()
        if not self._queues:
            self._ringing = {}
            return threading.TIMEOUT_MAX
        # Ask about all streams before the first report. A woken event loop keeps the GIL up to 5 ms
        # from this thread (`sys.getswitchinterval()`), which releases the GIL with each question.
        found = [each for queue in list(self._queues.values()) if (each := self._look(queue))]
        if found:
            self._report(found)
            return 0
        oldest = {key: next(iter(queue)).point for key, queue in self._queues.items()}
        self._ringing = {
            key: point
            for key, point in oldest.items()
            if self._ringing.get(key) is point or point.notify(self._bell)
        }
        if len(self._ringing) == len(self._queues):
            return LONGEST_SLEEP
        youngest = time.monotonic() - self._added
        return min(max(youngest * _PAUSE_SHARE, _SHORTEST_PAUSE), _LONGEST_PAUSE)

    def _take_over(self) -> None:
        """Apply the requests of other threads to the queues."""
        while self._asked:
            # Popped when it is applied: to apply a request again after an exception is harmless.
            wanted, watches = self._asked[0]
            for watch in watches:
                if wanted:
                    self._queues[_queue_of(watch)][watch] = None
                else:
                    self._remove(watch)
            self._asked.popleft()

    def _remove(self, watch: Watch) -> None:
        key = _queue_of(watch)
        queue = self._queues.get(key)
        if queue is not None:
            queue.pop(watch, None)
            if not queue:
                del self._queues[key]

    def _look(self, queue: dict[Watch, None]) -> _Found | None:
        """Return the watches of a stream that are over, or the oldest and its error, or `None`."""
        oldest = next(iter(queue))
        try:
            if not oldest.point.is_done():
                return None
        except Exception as failure:  # report any error: no waiter may wait forever
            return [oldest], failure
        # Those behind are likely to be over as well. The watches of a queue with several are those
        # of a stream, whose points are of one class.
        watches = list(queue)
        if len(watches) > 1:
            points = [watch.point for watch in watches if isinstance(watch.point, Point)]
            del watches[max(1, core.passed(points)) :]
        return watches, None

    def _report(self, found: list[_Found]) -> None:
        """Report watches to their listeners, and remove them from their queues."""
        _tell([watch for over, error in found if error is None for watch in over], None)
        for over, error in found:
            if error is not None:
                _tell(over, error)
            key = _queue_of(over[0])
            if len(over) == len(self._queues[key]):  # nearly always; this thread alone changes it
                del self._queues[key]
            else:
                for watch in over:
                    self._remove(watch)

    def _fail(self, error: Exception) -> None:
        """Report an error to all watches: the thread cannot poll."""
        self._take_over()
        _tell([watch for queue in self._queues.values() for watch in queue], error)
        self._queues.clear()


def _tell(over: list[Watch], error: Exception | None) -> None:
    """Report finished watches, in one call for each listener."""
    listeners: defaultdict[Listener, list[Watch]] = defaultdict(list)
    for watch in over:
        listeners[watch.listener].append(watch)
    for listener, watches in listeners.items():
        try:
            # A callback of the program may query streams on its own account.
            _driver.account.on(_driver.account.PROGRAM, listener._report, watches, error)
        except BaseException:  # of a callback, SystemExit say: report to the others all the same
            log_exception("a callback failed when %r was done", watches[0].point.target)


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
    _process.halt_other_threads()
    _watcher.end()


_process.after_fork(_in_child)
atexit.register(_at_exit)
