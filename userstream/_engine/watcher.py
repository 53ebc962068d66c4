"""The watcher: one thread that reports when the GPU has reached points of any streams.

It sleeps while there is nothing to watch. The events of one stream complete in the order in which
they were recorded, so it polls the oldest event of each stream, then those after it.
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

# So many watches of a stream are looked at, and told of, before it is another stream's turn.
_AT_ONCE = 100


class Watch:
    """A completion to watch, and the function to call with this watch and the error, if any."""

    __slots__ = ("completion", "queue", "tell")

    def __init__(
        self, completion: Pending, tell: Callable[[Watch, Exception | None], None]
    ) -> None:
        self.completion = completion
        self.tell = tell
        self.queue = id(completion.target if completion.ordered else self)


class Watcher:
    """The thread, and per stream the watches in the order of their events.

    Threads that record on one stream at the same time may arrive here in another order. So every
    event is polled: one that comes after a completed event may not have completed.

    The queues are the thread's alone. A destructor or a signal handler may ask for something in the
    middle of anything, in this thread too: so a request for a change is left in a deque, and the
    wake-up is a plain lock, which forgets none. Neither takes more than one step.
    """

    def __init__(self) -> None:
        self._queues: defaultdict[int, OrderedDict[Watch, None]] = defaultdict(OrderedDict)
        # What is to be watched (True) and what no more, in the order in which it was asked for.
        self._asked: deque[tuple[bool, Sequence[Watch]]] = deque()
        self._called = _process.Lock()  # released to wake the thread up
        self._called.acquire()
        self._starting = _process.RLock()
        self._added = 0.0  # the time of the last one
        self._pause = 0.0  # for how long the thread sleeps now
        self._depth = 1  # how many of each stream it looks at
        self._daemon = Daemon(self._run, "userstream-watcher")
        self._ended = False

    def add(self, watches: Sequence[Watch]) -> None:
        """Report each of these once, on the watcher's thread, when it has completed or failed."""
        with self._starting:
            try:  # first: nothing must be watched that this refuses
                if self._ended:
                    raise RuntimeError(
                        "the interpreter is shutting down: nothing is watched any longer"
                    )
                self._daemon.start()
            except BaseException:  # the thread did not take them over, so their events are ours
                for watch in watches:
                    watch.completion.abandon()
                raise
            self._asked.append((True, watches))
        self._added = time.monotonic()
        if self._pause > _SHORTEST_SLEEP:  # else it comes soon enough
            self._wake()

    def drop(self, watches: Sequence[Watch]) -> None:
        """Stop watching these. A report that is under way still arrives."""
        # Their events are the thread's, which may be looking at them right now.
        self._asked.append((False, watches))
        if self._pause > _LONGEST_SLEEP:
            self._wake()

    def end(self) -> None:
        """End the thread; nothing is reported any more."""
        with self._starting:
            self._ended = True
        self._wake()
        self._daemon.join()

    def is_current(self) -> bool:
        """Tell whether the calling thread is this one."""
        return self._daemon.is_current()

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # it was called already
            self._called.release()

    def _sleep(self, seconds: float) -> None:
        self._pause = seconds
        if not self._asked and not self._ended:  # asked last: from now on they call
            self._called.acquire(timeout=seconds)
        self._pause = 0.0

    def _run(self) -> None:
        _driver.account.set_for_thread(_driver.account.FUTURE)
        self._relax()
        while not self._ended:
            try:
                self._turn()
            except BaseException:  # whatever it is, no waiter may wait in vain
                survive("the watcher of streams could not look at all of them, and continues")
                self._called.acquire(timeout=_LONGEST_SLEEP)

    def _relax(self) -> None:
        """Make sure that polling an event invalidates no capture."""
        while not self._ended:
            try:
                _driver.streams.relax_capture_of_this_thread()
            except Exception as error:  # to be tried again for the next watch
                self._fail(error)
                self._sleep(threading.TIMEOUT_MAX)
            else:
                break

    def _turn(self) -> None:
        """Poll the oldest watches of each stream, and sleep if none is over."""
        # A function of its own, so that nothing is kept alive through the sleep.
        self._take_over()
        if not self._queues:
            self._depth = 1
            self._sleep(threading.TIMEOUT_MAX)
        elif sum(map(self._look, self._oldest())):
            self._depth = _AT_ONCE  # those behind are likely to be over as well
        else:
            self._depth = 1
            youngest = time.monotonic() - self._added
            self._sleep(min(max(youngest * _SLEEP_SHARE, _SHORTEST_SLEEP), _LONGEST_SLEEP))

    def _take_over(self) -> None:
        """Take over what other threads asked for."""
        while self._asked:
            wanted, watches = self._asked[0]  # it goes when it is done: once more does no harm
            for watch in watches:
                if wanted:
                    self._queues[watch.queue][watch] = None
                elif self._take(watch):
                    _abandon(watch)
            self._asked.popleft()

    def _take(self, watch: Watch) -> bool:
        """Take a watch out of its queue; return whether it was there."""
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
        """Report the watches of a stream that are over; return whether there are any."""
        over: list[tuple[Watch, Exception | None]] = []
        for watch in watches:
            try:
                if not watch.completion.is_done():
                    break
                over.append((watch, None))
            except Exception as error:  # whatever it is, no waiter may wait forever
                _abandon(watch)
                over.append((watch, error))
        if over:
            _tell(over)
            for watch, _ in over:
                self._take(watch)
        return bool(over)

    def _fail(self, error: Exception) -> None:
        """Fail all watches: the thread cannot start."""
        self._take_over()
        watches = [watch for queue in self._queues.values() for watch in queue]
        for watch in watches:
            _abandon(watch)
        _tell([(watch, error) for watch in watches])
        self._queues.clear()


def _abandon(watch: Watch) -> None:
    try:
        watch.completion.abandon()
    except BaseException:  # one event is lost; without this the thread, and every other wait
        survive("an event of %r was lost", watch.completion.target)


def _tell(over: list[tuple[Watch, Exception | None]]) -> None:
    for watch, error in over:
        try:
            # A callback of the program may query streams on its own account.
            _driver.account.on(_driver.account.PROGRAM, watch.tell, watch, error)
        except BaseException:  # a callback's, SystemExit say: the others are still to be told
            survive("a callback failed when %r was done", watch.completion.target)


_watcher = Watcher()


def is_current() -> bool:
    """Tell whether the calling thread is the watcher's."""
    return _watcher.is_current()


def watch(watches: Sequence[Watch]) -> None:
    """Report each of these once, on the watcher's thread, when it has completed or failed."""
    _watcher.add(watches)


def unwatch(watches: Sequence[Watch]) -> None:
    """Stop watching these. A report that is under way still arrives."""
    _watcher.drop(watches)


def _in_child() -> None:
    global _watcher  # noqa: PLW0603 -- its thread, and who holds its lock, stayed in the parent
    _watcher = Watcher()


def _at_exit() -> None:
    _process.begin_end()
    _watcher.end()


_process.after_fork(_in_child)
atexit.register(_at_exit)
