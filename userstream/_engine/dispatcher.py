"""The dispatcher: one thread that runs all host functions and callbacks of streams.

A stream that reaches a host function rings a bell from native code: no Python runs on a driver
thread, and no driver thread is ever blocked. The dispatcher then polls the events of the calls. It
also polls periodically, because the driver calls no host function after a GPU error.
"""

from __future__ import annotations

import atexit
import threading
from collections import deque
from typing import TYPE_CHECKING

from userstream import _driver, _process
from userstream._driver.core import Bell
from userstream._engine import host_wait
from userstream._process import Daemon, log_exception, run

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from userstream._engine.events import Pending

_LONGEST_SLEEP = 0.05  # seconds until an error of the GPU is noticed


class Call:
    """A function to run when a stream has reached a point.

    A call enters its queue before anything is enqueued on the stream. After an exception in
    between, `is_over` cleans up, on a thread where no signal handler runs.

    Attributes
    ----------
    completion : Pending or None
        The point, once it is recorded.
    finished : callable
        Called at the end of the call, whether the function ran or not.
    launched : bool or None
        Whether everything was enqueued on the stream; None while that is in progress.
    """

    __slots__ = ("_function", "_seen_done", "completion", "finished", "launched")

    def __init__(self, function: Callable[[], None]) -> None:
        self._function: Callable[[], None] | None = function  # None once called
        self._seen_done = False  # without a ring
        self.completion: Pending | None = None
        self.finished: Callable[[], None] = _nothing
        self.launched: bool | None = None

    def is_over(self, has_rung: bool) -> bool:
        """Run the function if the stream has reached the point; return whether the call is over.

        Without a ring, the first look only looks for an error of the GPU: the stream is about to
        ring. So the periodic look does not decide when a function runs.
        """
        launched, completion = self.launched, self.completion
        if launched is None:
            return False
        try:
            if launched and completion is not None:
                if not completion.is_done():
                    return False
                if not has_rung and not self._seen_done:
                    self._seen_done = True
                    return False
        except Exception as error:
            if not _driver.status.ended_context(error):  # poll again: the stream may still run
                return False
            launched = False
        if not launched:
            self._function = None  # as the driver, which calls nothing after an error
        self.completion = None
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
        self.order = _process.Lock()  # held while a call enters the queue and the stream
        self.owner: int | None = None  # the thread that holds the lock
        self.calls: deque[Call] = deque()


class Dispatcher:
    """The dispatcher's thread, and a queue of calls for each stream."""

    def __init__(self) -> None:
        self.bell = Bell()
        # Native code may ring the bell during exit, when no Python object refers to it.
        _process.keep_forever(self.bell)
        # Never held while a function runs. Reentrant, because a signal handler or a destructor may
        # run while the lock is held.
        self._lock = _process.RLock()
        self._queues: dict[Hashable, _Queue] = {}
        self._ready: deque[Callable[[], None]] = deque()
        self._daemon = Daemon(self._run, "userstream-dispatcher")
        self._ended = False

    def start(self) -> None:
        """Start the thread unless it runs."""
        with self._lock:
            if self._ended:
                raise RuntimeError("the interpreter is shutting down: functions can no longer run")
            _driver.account.on(_driver.account.HOUSEKEEPING, self._daemon.start)

    def post(self, function: Callable[[], None]) -> None:
        """Run a function on the thread as soon as possible."""
        self._ready.append(function)
        self.bell.ring()

    def launch(self, stream: Hashable, call: Call, enqueue: Callable[[Call], None]) -> None:
        """Add a call to the queue of a stream and, by `enqueue`, to the stream, in the same order.

        Not by a context manager of `contextlib`: an exception of a signal handler in its frames
        would leave the order locked as long as the traceback exists.

        Raises
        ------
        RuntimeError
            The calling thread is in the middle of another call: in a signal handler or destructor.
        """
        while not self._launch(stream, call, enqueue):
            pass

    def _launch(self, stream: Hashable, call: Call, enqueue: Callable[[Call], None]) -> bool:
        """Launch, unless the queue is forgotten meanwhile; return whether the call is launched."""
        thread = threading.get_ident()
        with self._lock:
            queue = self._queues.setdefault(stream, _Queue())
        # The lock is not reentrant: without this check, a signal handler that launches on the same
        # stream would wait for the call that it has interrupted.
        if queue.owner == thread:
            raise RuntimeError(
                "a signal handler or a destructor called launch_host_func() on a stream while "
                "its thread was in the middle of another such call; do it on another thread, "
                "or use add_callback()"
            )
        # A full stream blocks inside the driver: only callers of that stream wait here.
        with queue.order:
            try:
                queue.owner = thread  # from now on the queue is not forgotten
                with self._lock:
                    if self._queues.get(stream) is not queue:
                        return False
                queue.calls.append(call)
                enqueue(call)
                call.launched = True  # no signal is handled until the block ends
            except BaseException:
                call.launched = False
                raise
            finally:
                queue.owner = None
                self.bell.ring()
        return True

    def end(self) -> None:
        """End the thread; pending functions are dropped."""
        self._ended = True
        self.bell.ring()
        self._daemon.join()

    def _run(self) -> None:
        host_wait.forbid_waits_here()
        _driver.account.set_for_thread(_driver.account.FUTURE)
        self._relax()
        has_rung = True
        while not self._ended:
            try:
                progress = self._turn(has_rung)
            except BaseException:  # the thread must go on: a stream may wait for a function
                log_exception(
                    "the thread of host functions could not do all of its work, and continues"
                )
                self.bell.wait(_LONGEST_SLEEP)
                has_rung = True
            else:
                if not progress:
                    has_rung = self.bell.wait(_LONGEST_SLEEP if self._queues else None)

    def _relax(self) -> None:
        while not self._ended:
            try:
                _driver.streams.relax_capture_of_this_thread()
            except Exception:  # without the mode, functions of the program may break captures
                self.bell.wait(_LONGEST_SLEEP)
            else:
                break

    def _turn(self, has_rung: bool) -> bool:
        """Run ready functions and one call of each stream; return whether more may be ready."""
        progress = False
        while self._ready and not self._ended:
            _driver.account.on(_driver.account.PROGRAM, run, self._ready.popleft())
        with self._lock:
            queues = list(self._queues.items())
        for stream, queue in queues:
            if self._ended:
                break
            if queue.calls and queue.calls[0].is_over(has_rung):
                queue.calls.popleft()
                progress = True
            elif not queue.calls:
                self._forget(stream, queue)
        return progress

    def _forget(self, stream: Hashable, queue: _Queue) -> None:
        with self._lock:
            if queue.owner is None and not queue.calls:
                self._queues.pop(stream, None)


_dispatcher = Dispatcher()  # unused in a forked child, which has no streams


def started() -> Dispatcher:
    """Return the dispatcher, and start its thread if necessary."""
    _dispatcher.start()
    return _dispatcher


def _at_exit() -> None:
    _process.halt_other_threads()
    _dispatcher.end()


atexit.register(_at_exit)
