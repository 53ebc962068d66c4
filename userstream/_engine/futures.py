"""Waits that block no thread: `Completion`, a future, and coroutines for asyncio."""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import time
import weakref
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from userstream import _driver, _hooks, _process
from userstream._engine import host_wait, watcher
from userstream._engine.events import LONGEST_SLEEP
from userstream._process import log_exception

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Generator, Iterable, Sequence

    from userstream._engine.events import Pending
    from userstream._engine.host_wait import Waitable
    from userstream._engine.watcher import Watch
    from userstream.errors import DriverError

_LONGEST_LOCK = 1.0  # seconds that the watcher waits for the lock of a future
_AT_ONCE = 64  # futures of an event loop that are set before the loop runs their tasks

_RLock: Any = type(_process.RLock())

T = TypeVar("T")


class _Condition(_RLock):  # type: ignore[misc]
    """The lock of a `Completion`, and a gate that opens at the end of the future.

    `threading.Condition` would be unsafe. Its ``__enter__`` is Python code: an exception of a
    signal handler in there leaves the lock held, for which the watcher would wait, and with the
    watcher every other future. Its ``wait`` releases the lock before its ``try``: an exception in
    between becomes a RuntimeError.
    """

    def __init__(self) -> None:
        self._gate = _process.Lock()  # open once the future is over
        self._gate.acquire()

    def notify_all(self) -> None:
        """Wake up the threads in `wait_outside`."""
        with contextlib.suppress(RuntimeError):  # the gate is open already
            self._gate.release()

    def wait_outside(self, seconds: float) -> None:
        """Block until the future is over or time is up. The caller does not hold the lock."""
        if self._gate.acquire(timeout=seconds):
            # Wake up the next waiter. After an exception of a signal handler here, that waiter
            # looks again when its time is up.
            self.notify_all()


class Completion(Future[T]):
    """A future for work that is queued on the GPU: what `completion` and `asnumpy_async` return.

    It is a `concurrent.futures.Future`, and in a coroutine it can be awaited, by any number of
    tasks. Cancelling it only ends the watching: the work continues, and so does every other wait
    for it. Nothing that the work uses is freed before it ends, even if the completion is cancelled
    or dropped.

    Notes
    -----
    Cancelling a task that awaits it, or a timeout of `asyncio.timeout`, ends that wait only: the
    completion can be awaited again.

    Examples
    --------
    >>> import asyncio
    >>> import userstream as us
    >>> done = us.completion(us.get_stream(0))
    >>> done.result(timeout=10)
    >>> async def main():
    ...     await us.completion(0)
    >>> asyncio.run(main())
    """

    __module__ = "userstream"

    # The attributes of a Future, which `__getattr__` makes when somebody asks for one of them.
    _condition: Any
    _done_callbacks: list[Any]

    _error: Exception | None = None
    _watches: Sequence[Watch] = ()

    def __init__(
        self, points: list[Pending], failed: list[DriverError], value: T, *, grouped: bool
    ) -> None:
        self._points = points  # that are pending; only replaced
        self._value: Any = value  # None once cancelled
        self._failed = failed
        self._grouped = grouped
        if not points:
            self._settle([])

    def __getattr__(self, name: str) -> Any:
        if name not in _FUTURE_ATTRIBUTES:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self._begin_watch()
        return self.__dict__[name]

    def _is_watched(self) -> bool:
        return "_condition" in self.__dict__

    def _begin_watch(self) -> None:
        """Make the attributes of a future, and let the watcher set them once the work is done."""
        if _process.halted:
            _process.check_fork()
        try:
            with _lock:
                if self._is_watched():
                    return
                points = self._points
                self._watches = [watcher.Watch(point, self) for point in points]
                self.__dict__.update(
                    _condition=_Condition(),
                    _state="PENDING" if points else "FINISHED",
                    _result=None if points else self._value,
                    _exception=self._error,
                    _waiters=[],
                    _done_callbacks=[],
                )
            if points:
                watcher.watch(self._watches)
            else:
                self._condition.notify_all()
        except BaseException:  # no thread can be started: not watched, so that the next call tries
            for name in _FUTURE_ATTRIBUTES:
                self.__dict__.pop(name, None)
            raise

    def _settle(self, failed: list[DriverError]) -> None:
        """Record that all points are passed or have failed, unless the watcher reports that."""
        with _lock:
            if self._is_watched():
                return
            self._failed += failed
            if self._failed:
                self._error = host_wait.outcome([], self._failed, None, grouped=self._grouped)
            self._points = []

    def done(self) -> bool:
        """Return whether the work is done, has failed, or is no longer watched.

        Returns
        -------
        bool
            Whether `result` returns or raises immediately.

        Examples
        --------
        >>> import userstream as us
        >>> stream = us.get_stream(0)
        >>> us.wait(stream)
        >>> us.completion(stream).done()
        True
        """
        if self._is_watched():
            return super().done()
        if self._points:
            if _process.halted:
                _process.check_fork()
            failed: list[DriverError] = []
            if host_wait.still_pending(self._points, failed):
                return False
            self._settle(failed)
        return True

    def cancelled(self) -> bool:
        """Return whether the completion was cancelled.

        Returns
        -------
        bool
            Whether `cancel` has returned True.

        Examples
        --------
        >>> import userstream as us
        >>> us.completion(us.get_stream(0)).cancelled()
        False
        """
        return self._is_watched() and super().cancelled()

    def result(self, timeout: float | None = None) -> T:
        """Wait for the work, and return the result.

        Parameters
        ----------
        timeout : float, optional
            Seconds; None waits indefinitely.

        Returns
        -------
        object
            For `asnumpy_async`, the array or the container of arrays; for `completion`, None.

        Raises
        ------
        WaitTimeout
            The work did not complete in time. Nothing was cancelled; you can wait again.
        concurrent.futures.CancelledError
            The completion was cancelled.
        DriverError, WaitErrors
            The GPU failed; `WaitErrors` if there are several streams.
        RuntimeError
            Called from a host function or the callback of a completion, which must not wait.

        Notes
        -----
        Never blocks inside the driver, so Ctrl-C interrupts it. Thread-safe.

        Examples
        --------
        >>> import userstream as us
        >>> us.completion(us.get_stream(0)).result(timeout=10)
        """
        self._wait("result()", timeout)
        if self._is_watched():
            return super().result(0)
        if self._error is not None:
            raise self._error
        value: T = self._value
        return value

    def __array__(self, *_arguments: Any, **_keywords: Any) -> NoReturn:
        """Raise `TypeError`: the array of a future may not exist yet."""
        raise TypeError(
            "this is a Completion, and its array may not be there yet: wait for it with "
            "completion.result(timeout=...), or await it"
        )

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the work, and return the GPU's error, if there was one.

        Parameters
        ----------
        timeout : float, optional
            Seconds; None waits indefinitely.

        Returns
        -------
        Exception or None
            What `result` would raise.

        Raises
        ------
        WaitTimeout
            The work did not complete in time. Nothing was cancelled; you can wait again.
        concurrent.futures.CancelledError
            The completion was cancelled.
        RuntimeError
            Called from a host function or the callback of a completion, which must not wait.

        Examples
        --------
        >>> import userstream as us
        >>> us.completion(us.get_stream(0)).exception(timeout=10) is None
        True
        """
        self._wait("exception()", timeout)
        return super().exception(0) if self._is_watched() else self._error

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        """Call a function when the work is done, has failed, or is no longer watched.

        Parameters
        ----------
        fn : callable
            Called as ``fn(future)``, on a thread of userstream, or immediately if the future is
            done. Exceptions that it raises on that thread, including `SystemExit`, are logged.

        Raises
        ------
        TypeError
            Called by `asyncio.wait`, which takes futures of asyncio only: pass
            ``asyncio.ensure_future(completion)``.

        Examples
        --------
        >>> import threading
        >>> import userstream as us
        >>> stream, done = us.get_stream(0), threading.Event()
        >>> us.completion(stream).add_done_callback(lambda future: done.set())
        >>> done.wait(10)
        True
        """
        # asyncio.wait passes a callback that must run on the thread of the event loop. On the
        # watcher's thread the callback would not wake the loop, and the wait would never end.
        if getattr(fn, "__module__", None) == "asyncio.tasks":
            raise TypeError(
                "asyncio.wait takes tasks and futures of asyncio, not a completion: pass "
                "asyncio.ensure_future(completion), or await asyncio.gather(*completions)"
            )
        super().add_done_callback(functools.partial(_call_back, fn))

    def cancel(self) -> bool:
        """Stop watching the work, which continues.

        Returns
        -------
        bool
            Whether the future is cancelled; False if it was done.

        Examples
        --------
        >>> import userstream as us
        >>> stream = us.get_stream(0)
        >>> future = us.completion(stream)
        >>> future.cancel() or future.done()
        True
        """
        if self.done() or not super().cancel():
            return self.cancelled()
        with self._condition:
            if self._state == "CANCELLED":  # not if an earlier call has notified already
                self.set_running_or_notify_cancel()
        watcher.unwatch(self._watches)
        self._points, self._value, self._watches = [], None, ()
        return True

    def __await__(self) -> Generator[Any, None, T]:
        return self._awaited().__await__()

    async def _awaited(self) -> T:
        import asyncio

        if not self.done():
            refuse_here("an await")
            loop = _running_loop()
            mailbox = _mailboxes.setdefault(loop, _Mailbox())
            arrival = loop.create_future()

            def wake(_: object) -> None:
                mailbox.post([arrival], None)

            # Not asyncio.wrap_future: a cancelled task would cancel the future for all others.
            Future.add_done_callback(self, wake)
            try:
                await arrival
            finally:
                self._forget(wake)
        if self.cancelled():
            raise asyncio.CancelledError
        return self.result()

    def _forget(self, wake: Callable[[object], None]) -> None:
        """Remove the callback of a task that gave up, unless the future is over."""
        if not self.done():  # otherwise a thread may be calling the callbacks
            with self._condition:
                if not self.done():
                    self._done_callbacks.remove(wake)

    def __reduce__(self) -> NoReturn:
        _process.refuse_copy(self, "send its result() or exception() instead")

    def _wait(self, what: str, timeout: float | None) -> None:
        host_wait.check_arguments(timeout, "auto")
        if self.done():
            return
        refuse_here(what)
        if _hooks.host_waits:
            _hooks.waiting(self._wait_here, timeout)
        else:
            self._wait_here(timeout)

    def _wait_here(self, timeout: float | None) -> None:
        deadline = host_wait.Deadline(timeout)
        while not self.done():
            if _process.halted:
                _process.check_fork()
            left = deadline.remaining()
            points = self._points
            if left == 0 and points:
                raise host_wait.late([point.target for point in points], timeout)
            if self._is_watched():
                self._condition.wait_outside(
                    LONGEST_SLEEP if left is None else min(left, LONGEST_SLEEP)
                )
                continue
            failed: list[DriverError] = []
            if not host_wait.poll(points, failed, time.perf_counter(), left, "auto"):
                self._settle(failed)

    def _report(self, over: list[Watch], error: DriverError | None) -> None:
        """Note which points are passed; the watcher calls this method."""
        passed = {watch.point for watch in over}
        if error is not None:
            self._failed += [error] * len(over)
        pending = [point for point in self._points if point not in passed]
        if not pending:
            # An exception of a signal handler may have cut off `_begin_watch` after the watcher had
            # the watches: the future is not watched, or the next call has it watched once more.
            self._settle([])
        self._points = pending
        if pending:
            return
        self._watches = ()  # they refer to this future: without the cycle it needs no collection
        # An exception of a signal handler in `concurrent.futures.wait` may leave the lock held
        # forever. Give up this future, so that the watcher serves the others.
        if not self._condition.acquire(timeout=_LONGEST_LOCK):
            raise RuntimeError("a future cannot be completed: a thread keeps it locked")
        # Locked from the check to the result: a cancellation in between would make `set_result`
        # raise InvalidStateError, and the watcher would log a failure.
        try:
            if super().done():
                return
            if self._failed:
                self.set_exception(host_wait.outcome([], self._failed, None, grouped=self._grouped))
            else:
                self.set_result(self._value)
        finally:
            self._condition.release()


_FUTURE_ATTRIBUTES = (
    "_condition",
    "_state",
    "_result",
    "_exception",
    "_waiters",
    "_done_callbacks",
)
_lock = _process.RLock()  # for the first use of the attributes of a future


def completion(targets: Sequence[Waitable], value: T) -> Completion[T]:
    """Return a future for the work that is queued on targets now; its result is a value."""
    pending, failed = _driver.account.on(_driver.account.FUTURE, host_wait.start, targets)
    return Completion(pending, failed, value, grouped=len(targets) > 1)


def _call_back(fn: Callable[[Future[T]], object], future: Future[T]) -> None:
    try:
        fn(future)
    except BaseException:
        if not watcher.is_current():  # the caller of `cancel` gets the exception, as usual
            raise
        log_exception("a callback of %r failed", future)  # and call the other callbacks


def refuse_here(what: str) -> None:
    """Raise `RuntimeError` on the threads of host functions and of the watcher."""
    host_wait.refuse_in_host_function(what)
    if watcher.is_current():
        raise RuntimeError(
            f"{what} was called in a callback of a future, or in a destructor, on the thread that "
            "reports completion, which would wait for itself; do it on another thread"
        )


class _Awaited(watcher.Watch):
    """A watch that sets the result of an asyncio future, or its exception."""

    __slots__ = ("future",)

    def __init__(
        self, point: Pending, mailbox: _Mailbox, future: asyncio.Future[Exception | None]
    ) -> None:
        super().__init__(point, mailbox)
        self.future = future

    def has_arrived(self) -> bool:
        """Return whether the watcher has reported the point."""
        return self.future.done() and not self.future.cancelled()


_began = operator.attrgetter("point.began")


class _Mailbox:
    """Wakes up an event loop once for all futures that are over by then. Takes no lock."""

    def __init__(self) -> None:
        self._arrived: deque[tuple[deque[asyncio.Future[Any]], Exception | None]] = deque()
        self._called = -math.inf  # the time of a call that the loop has not made yet

    def _report(self, over: list[_Awaited], error: Exception | None) -> None:
        """Set the futures of watches; the watcher calls this method."""
        # In the order of the waits, not by streams: tasks that began one after another are next to
        # each other in memory, and resume in half of the time.
        self.post([watch.future for watch in sorted(over, key=_began)], error)

    def post(self, arrived: Iterable[asyncio.Future[Any]], error: Exception | None) -> None:
        """Make the loop of futures set their results to an error or `None`. Thread-safe."""
        batch = deque(arrived)
        loop = batch[0].get_loop()
        self._arrived.append((batch, error))
        # Checked after the arrival, so that a running `_deliver` or this call finds the futures. A
        # call that was lost counts as none after a while.
        if time.monotonic() - self._called > LONGEST_SLEEP:
            self._call(loop)

    def _call(self, loop: asyncio.AbstractEventLoop) -> None:
        self._called = time.monotonic()
        with contextlib.suppress(RuntimeError):  # the loop is closed, nobody waits
            # Twice: an exception of a signal handler may end a callback before or in `_deliver`,
            # and all tasks with post would wait forever.
            loop.call_soon_threadsafe(self._deliver, loop)
            loop.call_soon_threadsafe(self._deliver, loop)

    def _deliver(self, loop: asyncio.AbstractEventLoop) -> None:
        self._called = -math.inf  # before the loop: a future that arrives later needs a new call
        # Some at a time, so that the first tasks need not wait for the last future.
        left = _AT_ONCE
        while self._arrived:
            batch, error = self._arrived[0]
            while batch:
                if not left:
                    loop.call_soon(self._deliver, loop)
                    return
                left -= 1
                if not batch[0].done():  # done: its task was cancelled
                    batch[0].set_result(error)
                batch.popleft()  # last: after an exception of a signal handler, try again
            self._arrived.popleft()


# Weak values: a mailbox that no task waits for is freed, so no loop is kept alive.
_mailboxes: weakref.WeakValueDictionary[asyncio.AbstractEventLoop, _Mailbox] = (
    weakref.WeakValueDictionary()
)


async def wait(
    targets: Sequence[Waitable],
    *,
    timeout: float | None,
    grouped: bool,
    closed_is_done: bool = False,
) -> None:
    """Wait for the work that is queued on each target now, without blocking the event loop."""
    import asyncio

    refuse_here("a wait")
    # Few objects stay alive during the wait: when thousands of tasks resume, none is in a cache.
    watches, errors = _begin(targets, closed_is_done)
    late: Sequence[_Awaited] = ()
    try:
        if timeout is None:  # asyncio.timeout costs as much as the rest of a wake-up
            for watch in watches:
                await watch.future
        else:
            async with asyncio.timeout(timeout):
                for watch in watches:
                    await watch.future
    except BaseException as stop:
        late = [watch for watch in watches if not watch.has_arrived()]
        watcher.unwatch(late)
        if not isinstance(stop, TimeoutError):
            raise
    for watch in watches:
        if watch.has_arrived() and (error := watch.future.result()) is not None:
            errors = (*errors, error)
    if late or errors:
        points = [watch.point for watch in late]
        raise host_wait.outcome(points, errors, timeout, grouped=grouped)


def _begin(
    targets: Sequence[Waitable], closed_is_done: bool
) -> tuple[Sequence[_Awaited], Sequence[Exception]]:
    """Watch the work that is queued on each target now; return the watches and the failures."""
    loop = _running_loop()
    mailbox = _mailboxes.setdefault(loop, _Mailbox())
    pending, failed = _driver.account.on(
        _driver.account.FUTURE, host_wait.start, targets, closed_is_done
    )
    watches = tuple(_Awaited(point, mailbox, loop.create_future()) for point in pending)
    if watches:
        watcher.watch(watches)
    return watches, tuple(failed)


def _running_loop() -> asyncio.AbstractEventLoop:
    import asyncio

    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise RuntimeError(
            "this wait needs a running asyncio event loop: await it in a coroutine, or call the "
            "blocking one; under trio in a thread: await trio.to_thread.run_sync(userstream.wait, "
            "tensor)"
        ) from None
