"""Waits that block no thread: `Completion`, a future, and coroutines for asyncio."""

from __future__ import annotations

import contextlib
import functools
import math
import time
import weakref
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from userstream import _driver, _process
from userstream._engine import host_wait, watcher
from userstream._process import survive

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Generator, Sequence

    from userstream._engine.host_wait import Waitable

_LONGEST_WAIT = 0.05  # seconds until a waiter looks again without a wake-up
_LONGEST_LOCK = 1.0  # seconds that the watcher waits for the lock of a future

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


class Points:
    """The points that several targets had reached when this object was created.

    Once the GPU has passed all points, `tell` is called once with the error or `None`: on the
    watcher's thread, or by the constructor if nothing is pending.
    """

    __slots__ = ("_failed", "_grouped", "_lock", "_pending", "_tell")

    def __init__(
        self,
        targets: Sequence[Waitable],
        tell: Callable[[Exception | None], None],
        *,
        grouped: bool,
        closed_is_done: bool = False,
    ) -> None:
        pending, failed = _driver.account.on(
            _driver.account.FUTURE, host_wait.start, targets, closed_is_done
        )
        self._failed: list[Exception] = [*failed]
        self._grouped = grouped
        # Reentrant, because a destructor or a signal handler may call `stop` while it is held.
        self._lock = _process.RLock()
        self._tell = tell
        watches = [watcher.Watch(each, self._arrive) for each in pending]
        self._pending = dict.fromkeys(watches)
        if watches:
            watcher.watch(watches)
        else:
            self._finish()

    def late(self, timeout: float | None) -> Exception | None:
        """Return the error of a wait that ends now, or `None` if all points are passed."""
        with self._lock:
            late, failed = [watch.completion for watch in self._pending], [*self._failed]
        if not late and not failed:
            return None
        return host_wait.outcome(late, failed, timeout, grouped=self._grouped)

    def overdue(self, timeout: float | None) -> TimeoutError:
        """Return the timeout error of a wait that ends now, also if targets have failed."""
        with self._lock:
            pending = [watch.completion.target for watch in self._pending]
        if pending:
            return host_wait.late(pending, timeout)
        return TimeoutError("all of the work is done, which is about to be reported: ask again")

    def stop(self) -> bool:
        """Stop watching; return whether a point was pending."""
        with self._lock:
            if not self._pending:
                return False
            watches, self._pending = [*self._pending], {}
            del self._tell
        watcher.unwatch(watches)
        return True

    def _arrive(self, watch: watcher.Watch, error: Exception | None) -> None:
        with self._lock:
            if watch not in self._pending:  # stopped in the meantime
                return
            del self._pending[watch]
            if error is not None:
                self._failed.append(error)
            if self._pending:
                return
        self._finish()

    def _finish(self) -> None:
        # `tell` and the watches refer to this object: break the cycle, so that no garbage
        # collection is needed.
        tell = self._tell
        del self._tell
        if self._failed:
            tell(host_wait.outcome([], self._failed, None, grouped=self._grouped))
        else:
            tell(None)


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

    _condition: Any
    _done_callbacks: list[Any]

    def __init__(self, targets: Sequence[Waitable], value: T, *, grouped: bool) -> None:
        super().__init__()
        self._condition = _Condition()
        self._value: list[T] = [value]  # emptied at the end of the future
        self._points = Points(targets, self._finish, grouped=grouped)

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
        return super().result(0)

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
        return super().exception(0)

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
        if not super().cancel():
            return False
        with self._condition:
            if self._state == "CANCELLED":  # not if an earlier call has notified already
                self.set_running_or_notify_cancel()
        self._points.stop()
        self._value.clear()
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
                mailbox.post(arrival, None)

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
        deadline = host_wait.Deadline(timeout)
        while not self.done():
            if _process.halted:
                _process.check_fork()
            left = deadline.left()
            if left == 0:
                raise self._points.overdue(timeout)
            self._condition.wait_outside(
                _LONGEST_WAIT if left is None else min(left, _LONGEST_WAIT)
            )

    def _finish(self, error: Exception | None) -> None:
        # An exception of a signal handler in `concurrent.futures.wait` may leave the lock held
        # forever. Give up this future, so that the watcher serves the others.
        if not self._condition.acquire(timeout=_LONGEST_LOCK):
            raise RuntimeError("a future cannot be completed: a thread keeps it locked")
        # Locked from the check to the result: a cancellation in between would make `set_result`
        # raise InvalidStateError, and the watcher would log a failure.
        try:
            if self.cancelled():
                return
            if error is None:
                self.set_result(self._value[0])
            else:
                self.set_exception(error)
            self._value.clear()
        finally:
            self._condition.release()


def _call_back(fn: Callable[[Future[T]], object], future: Future[T]) -> None:
    try:
        fn(future)
    except BaseException:
        if not watcher.is_current():  # the caller of `cancel` gets the exception, as usual
            raise
        survive("a callback of %r failed", future)  # and call the other callbacks


def refuse_here(what: str) -> None:
    """Raise `RuntimeError` on the threads of host functions and of the watcher."""
    host_wait.refuse_in_host_function(what)
    if watcher.is_current():
        raise RuntimeError(
            f"{what} was called in a callback of a future, or in a destructor, on the thread that "
            "reports completion, which would wait for itself; do it on another thread"
        )


class _Mailbox:
    """Wakes up an event loop once for all futures that are over by then. Takes no lock."""

    def __init__(self) -> None:
        self._arrived: deque[tuple[asyncio.Future[None], Exception | None]] = deque()
        self._called = -math.inf  # the time of a call that the loop has not made yet

    def post(self, future: asyncio.Future[None], error: Exception | None) -> None:
        """Make the loop of a future set its result or error. Thread-safe."""
        self._arrived.append((future, error))
        # Checked after the append, so that a running `_deliver` or this call finds the future. A
        # call that was lost counts as none after a while.
        if time.monotonic() - self._called > _LONGEST_WAIT:
            self._call(future.get_loop())

    def _call(self, loop: asyncio.AbstractEventLoop) -> None:
        self._called = time.monotonic()
        try:
            # Twice: an exception of a signal handler may end a callback before or in `_deliver`,
            # and all tasks with post would wait forever.
            loop.call_soon_threadsafe(self._deliver)
            loop.call_soon_threadsafe(self._deliver)
        except BaseException as error:
            self._called = -math.inf
            if not isinstance(
                error, RuntimeError
            ):  # RuntimeError: the loop is closed, nobody waits
                raise

    def _deliver(self) -> None:
        self._called = -math.inf  # before the loop: a future that arrives later needs a new call
        while self._arrived:
            future, error = self._arrived[0]
            if not future.done():  # done: its task was cancelled
                if error is None:
                    future.set_result(None)
                else:
                    future.set_exception(error)
            self._arrived.popleft()  # last: after an exception of a signal handler, try again


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
    loop = _running_loop()
    mailbox = _mailboxes.setdefault(loop, _Mailbox())
    arrival = loop.create_future()
    post = functools.partial(mailbox.post, arrival)
    points = Points(targets, post, grouped=grouped, closed_is_done=closed_is_done)
    late: Exception | None = None
    try:
        if timeout is None:  # asyncio.timeout costs as much as the rest of a wake-up
            await arrival
        else:
            async with asyncio.timeout(timeout):
                await arrival
    except TimeoutError:  # only from asyncio.timeout: no error of the GPU is a TimeoutError
        late = points.late(timeout)
    finally:
        points.stop()
    if late is not None:
        raise late


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
