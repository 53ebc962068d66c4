"""The dispatcher: the one thread on which host functions and callbacks run.

A stream that reaches a host function posts a semaphore from native code: no Python runs on a driver
thread, and no driver thread is ever blocked. The dispatcher wakes up and finds the events that have
completed. It also checks periodically, because the driver calls nothing after a GPU error.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from userstream import _driver, _process
from userstream._engine import host_wait
from userstream._process import Daemon, run, survive

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from userstream._engine.events import Pending

_libc = ctypes.CDLL(None)
_SIZE = 64  # more than a sem_t has anywhere
_LONGEST_SLEEP = 0.05  # seconds until an error of the GPU is noticed


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Semaphore:
    """Wakes a thread. ``post_function(address)`` posts it from native code.

    Attributes
    ----------
    post : callable
        Lets `wait` return. It is C, so no signal comes before it has done that.
    """

    post_function = ctypes.cast(_libc.sem_post, ctypes.c_void_p).value

    def __init__(self) -> None:
        self._memory = ctypes.create_string_buffer(_SIZE)
        # Native code may post it during exit, when nothing here refers to it any more.
        _process.keep_forever(self._memory)
        self.address = ctypes.addressof(self._memory)
        _libc.sem_init(self._memory, 0, 0)
        self.post = functools.partial(_libc.sem_post, self._memory)

    def wait(self, seconds: float | None) -> None:
        """Return once it has been posted, or when the time is up; all posts so far are consumed."""
        if seconds is None:
            _libc.sem_wait(self._memory)
        else:
            deadline = time.time_ns() + int(seconds * 1e9)  # the clock of sem_timedwait
            until = _Timespec(*divmod(deadline, 10**9))
            _libc.sem_timedwait(self._memory, ctypes.byref(until))
        while _libc.sem_trywait(self._memory) == 0:
            pass


class Call:
    """A function to run when a stream has reached a point.

    It is in its queue before the stream is told of anything. Whatever exception comes meanwhile,
    `is_over` cleans up, on a thread where no signal handler runs.

    Attributes
    ----------
    completion : Pending or None
        The point, once it is recorded.
    finished : callable
        Called in the end, whether the function ran or not.
    launched : bool or None
        Whether the stream was told of all; None while that is under way.
    """

    __slots__ = ("_function", "completion", "finished", "launched")

    def __init__(self, function: Callable[[], None]) -> None:
        self._function: Callable[[], None] | None = function  # None once it was called
        self.completion: Pending | None = None
        self.finished: Callable[[], None] = _nothing
        self.launched: bool | None = None

    def is_over(self) -> bool:
        """Run the function if the point is reached; return whether the call is over."""
        launched, completion = self.launched, self.completion
        if launched is None:
            return False
        try:
            if launched and completion is not None and not completion.is_done():
                return False
        except Exception as error:
            if not _driver.status.ended_context(
                error
            ):  # to be asked again: the stream may be on its way
                return False
            launched = False
        if not launched:
            self._function = None  # like the driver, call nothing
            if completion is not None:
                completion.abandon()
        function, self._function = self._function, None
        if function is not None:
            _driver.account.on(_driver.account.PROGRAM, run, function)
        self.finished()
        return True


def _nothing() -> None:
    pass


class _Queue:
    """The calls of one stream, in stream order."""

    __slots__ = ("calls", "order", "owner")

    def __init__(self) -> None:
        self.order = _process.Lock()  # held while the stream and the queue are given a call
        self.owner: int | None = None  # the thread that holds it
        self.calls: deque[Call] = deque()


class Dispatcher:
    """The thread, and the functions that it has to run."""

    def __init__(self) -> None:
        self.semaphore = Semaphore()
        # Held for moments, never while a function runs. Reentrant, as a signal handler or any
        # destructor may run in the middle of one.
        self._lock = _process.RLock()
        self._queues: dict[Hashable, _Queue] = {}
        self._ready: deque[Callable[[], None]] = deque()
        self._daemon = Daemon(self._run, "userstream-dispatcher")
        self._ended = False

    def start(self) -> None:
        """Start the thread unless it is running."""
        with self._lock:
            if self._ended:
                raise RuntimeError("the interpreter is shutting down: functions can no longer run")
            self._daemon.start()

    def post(self, function: Callable[[], None]) -> None:
        """Run a function on the thread as soon as possible."""
        self._ready.append(function)
        self.semaphore.post()

    def launch(self, stream: Hashable, call: Call, enqueue: Callable[[Call], None]) -> None:
        """Give a call to a stream, by a function, and to its queue, both in the same order.

        No context manager of `contextlib`: a signal in its frames would leave the order locked for
        as long as the traceback exists.

        Raises
        ------
        RuntimeError
            The calling thread is in the middle of that: this is a signal handler or a destructor.
        """
        while not self._launch(stream, call, enqueue):
            pass

    def _launch(self, stream: Hashable, call: Call, enqueue: Callable[[Call], None]) -> bool:
        """Do that, unless the queue is forgotten meanwhile; return whether it is done."""
        thread = threading.get_ident()
        with self._lock:
            queue = self._queues.setdefault(stream, _Queue())
        # Its lock is not reentrant: without this check, a signal handler that launches on the same
        # stream would wait for the very call that it has interrupted.
        if queue.owner == thread:
            raise RuntimeError(
                "a signal handler or a destructor called launch_host_func() on a stream while "
                "its thread was in the middle of another such call; do it on another thread, "
                "or use add_callback()"
            )
        # A stream that is full blocks inside the driver: only its own users wait here.
        with queue.order:
            try:
                queue.owner = thread  # so it is not forgotten any more
                with self._lock:
                    if self._queues.get(stream) is not queue:
                        return False
                queue.calls.append(call)
                enqueue(call)
                call.launched = True  # no signal comes from here to the end of the block
            except BaseException:
                call.launched = False
                raise
            finally:
                queue.owner = None
                self.semaphore.post()
        return True

    def end(self) -> None:
        """End the thread; pending functions are dropped."""
        self._ended = True
        self.semaphore.post()
        self._daemon.join()

    def _run(self) -> None:
        host_wait.forbid_waits_here()
        _driver.account.set_for_thread(_driver.account.FUTURE)
        self._relax()
        while not self._ended:
            try:
                progress = self._turn()
            except BaseException:  # whatever it is, a stream may be waiting for a function
                survive("the thread of host functions could not do all of its work, and continues")
                self.semaphore.wait(_LONGEST_SLEEP)
            else:
                if not progress:
                    self.semaphore.wait(_LONGEST_SLEEP if self._queues else None)

    def _relax(self) -> None:
        while not self._ended:
            try:
                _driver.streams.relax_capture_of_this_thread()
            except Exception:  # without it, to look at events breaks captures
                self.semaphore.wait(_LONGEST_SLEEP)
            else:
                break

    def _turn(self) -> bool:
        """Run what is ready, one call of each stream; return whether there may be more."""
        progress = False
        while self._ready and not self._ended:
            _driver.account.on(_driver.account.PROGRAM, run, self._ready.popleft())
        with self._lock:
            queues = list(self._queues.items())
        for stream, queue in queues:
            if self._ended:
                break
            if queue.calls and queue.calls[0].is_over():
                queue.calls.popleft()
                progress = True
            elif not queue.calls:
                self._forget(stream, queue)
        return progress

    def _forget(self, stream: Hashable, queue: _Queue) -> None:
        with self._lock:
            if queue.owner is None and not queue.calls:
                self._queues.pop(stream, None)


_dispatcher = Dispatcher()  # of no use in a forked child, where no stream is


def started() -> Dispatcher:
    """Return the dispatcher, with its thread started."""
    _dispatcher.start()
    return _dispatcher


def _at_exit() -> None:
    _process.begin_end()
    _dispatcher.end()


atexit.register(_at_exit)
