"""Waits without a waiting thread: futures, and what asyncio makes of them."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from concurrent.futures import Future
from typing import TYPE_CHECKING, NoReturn

from userstream import _process, _waiting
from userstream._points import Points

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    from userstream._waiting import Waitable


class Completion(Future[None]):
    """A future of the point that all the targets had reached when it was made.

    Cancelling it ends the watching and nothing else: the work goes on, and so does every other
    wait for it.
    """

    def __init__(self, targets: Sequence[Waitable], *, grouped: bool) -> None:
        super().__init__()
        self._points = Points(targets, self._finish, grouped=grouped)

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
        if not self._points.stop():
            return self.cancelled()
        super().cancel()
        self.set_running_or_notify_cancel()
        return True

    def __reduce__(self) -> NoReturn:
        _process.refuse_copy(
            self, "send its result or its exception(), or let the other process wait for it here"
        )

    def _finish(self, error: Exception | None) -> None:
        if error is None:
            self.set_result(None)
        else:
            self.set_exception(error)


class _Mailbox:
    """Wakes an event loop once for all the futures that are over by then."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arrived: list[tuple[asyncio.Future[None], Exception | None]] = []

    def post(self, future: asyncio.Future[None], error: Exception | None) -> None:
        """Let the loop of a future settle it; from any thread."""
        with self._lock:
            if not self._arrived:  # called before it is put in: a Ctrl-C in between does no harm
                with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits
                    future.get_loop().call_soon_threadsafe(self._deliver)
            self._arrived.append((future, error))

    def _deliver(self) -> None:
        with self._lock:
            arrived, self._arrived = self._arrived, []
        for future, error in arrived:
            if future.done():  # its task was cancelled
                continue
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)


# A mailbox goes when nobody waits for its post, so no loop is kept alive.
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
    """Wait until each target has done what it had to do now, without blocking the event loop."""
    import asyncio

    _waiting.refuse_in_host_function("a wait")
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        raise RuntimeError(
            "this wait takes a running asyncio event loop: await it in a coroutine, or call the "
            "blocking one; under trio in a thread: await trio.to_thread.run_sync(userstream.wait, "
            "tensor)"
        ) from None
    mailbox = _mailboxes.setdefault(loop, _Mailbox())
    arrival = loop.create_future()
    post = functools.partial(mailbox.post, arrival)
    points = Points(targets, post, grouped=grouped, closed_is_done=closed_is_done)
    late: Exception | None = None
    try:
        if timeout is None:  # ten thousand of them are woken up at once: nothing in vain
            await arrival
        else:
            async with asyncio.timeout(timeout):
                await arrival
    except TimeoutError:  # of no other origin: the GPU's errors are no such
        late = points.late(timeout)
    finally:
        points.stop()
    if late is not None:
        raise late
