"""Waits without a waiting thread: futures, and what asyncio makes of them."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING

from userstream import _waiting, _watcher

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    from userstream._waiting import Pending, Waitable


class Completion(Future[None]):
    """A future of the point that all the targets had reached when it was made.

    Cancelling it ends the watching and nothing else: the work goes on, and so does every other
    wait for it.
    """

    def __init__(self, targets: Sequence[Waitable], *, grouped: bool) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._settled = False
        self._grouped = grouped
        self._watches: list[_watcher.Watch] = []
        pending, failed = _waiting.start(targets)
        self._failed: list[Exception] = [*failed]
        self._pending = set(pending)
        for each in pending:
            self._watches.append(_watcher.watch(each, functools.partial(self._tell, each)))
        if not pending:
            self._finish()
        if self._settled:
            self._watches.clear()

    def late(self, timeout: float | None) -> Exception | None:
        """Return the error of a wait that ends now; `None` if this is done after all."""
        with self._lock:
            late, failed = list(self._pending), list(self._failed)
        if not late and not failed:
            return None
        return _waiting.outcome(late, failed, timeout, grouped=self._grouped)

    def result(self, timeout: float | None = None) -> None:
        """Wait for it; refused in host functions."""
        if not self.done():
            _waiting.refuse_in_host_function("result()")
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for it; refused in host functions."""
        if not self.done():
            _waiting.refuse_in_host_function("exception()")
        return super().exception(timeout)

    def cancel(self) -> bool:
        """Watch no more; tell whether that was possible, as it was not done yet."""
        if not self._settle():
            return self.cancelled()
        super().cancel()
        self.set_running_or_notify_cancel()
        for watch in self._watches:
            _watcher.unwatch(watch)
        self._watches.clear()
        return True

    def _tell(self, completion: Pending, error: Exception | None) -> None:
        with self._lock:
            self._pending.discard(completion)
            if error is not None:
                self._failed.append(error)
            last = not self._pending
        if last:
            self._finish()

    def _finish(self) -> None:
        if not self._settle():
            return
        self._watches.clear()  # which lead back here: nothing is left to the garbage collector
        if self._failed:
            self.set_exception(_waiting.outcome([], self._failed, None, grouped=self._grouped))
        else:
            self.set_result(None)

    def _settle(self) -> bool:
        """Tell whether the caller is the first, who settles the outcome."""
        with self._lock:
            settled, self._settled = self._settled, True
        return not settled


class _Mailbox:
    """Wakes an event loop once for all the futures that are done by then."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._arrived: deque[asyncio.Future[None]] = deque()
        self._called = False

    def post(self, future: asyncio.Future[None]) -> None:
        """Let the loop set a future; from any thread."""
        self._arrived.append(future)
        if not self._called:
            self._called = True
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._called = False  # first, so that no later post is left lying
        while self._arrived:
            future = self._arrived.popleft()
            if not future.done():
                future.set_result(None)


_mailboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Mailbox] = (
    weakref.WeakKeyDictionary()
)


async def wait(targets: Sequence[Waitable], *, timeout: float | None, grouped: bool) -> None:
    """Wait until each target has done what it had to do now, without blocking the event loop."""
    import asyncio

    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        raise RuntimeError(
            "this wait takes a running asyncio event loop; under trio, run the blocking one in a "
            "thread: await trio.to_thread.run_sync(userstream.wait, tensor)"
        ) from None
    mailbox = _mailboxes.setdefault(loop, _Mailbox(loop))
    arrival = loop.create_future()
    completion = Completion(targets, grouped=grouped)
    completion.add_done_callback(lambda _: mailbox.post(arrival))
    late: Exception | None = None
    try:
        if timeout is None:  # ten thousand of them are woken up at once: nothing in vain
            await arrival
        else:
            async with asyncio.timeout(timeout):
                await arrival
    except TimeoutError:  # of no other origin: nothing else is raised in there
        pass
    finally:
        if not completion.done():
            late = completion.late(timeout)
            completion.cancel()
    if late is not None:
        raise late
    if not completion.cancelled():  # as it is if it was done just now, after all
        completion.result()
