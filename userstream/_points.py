"""The points that several targets had reached, watched until the last of them is done."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from userstream import _waiting, _watcher

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from userstream._waiting import Waitable


class Points:
    """The points that all the targets had reached when this was made.

    When the last is done, `tell` is called once, with what went wrong or `None`: in the watcher's
    thread, or at once if nothing is pending.
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
        pending, failed = _waiting.start(targets, closed_is_done=closed_is_done)
        self._failed: list[Exception] = [*failed]
        self._grouped = grouped
        # Reentrant, as a destructor or a signal handler may stop it in the middle of this.
        self._lock = threading.RLock()
        self._tell = tell
        watches = [_watcher.Watch(each, self._arrive) for each in pending]
        self._pending = dict.fromkeys(watches)
        if watches:
            _watcher.watch(watches)
        else:
            self._finish()

    def late(self, timeout: float | None) -> Exception | None:
        """Return the error of a wait that ends now; `None` if all went well after all."""
        with self._lock:
            late, failed = [watch.completion for watch in self._pending], [*self._failed]
        if not late and not failed:
            return None
        return _waiting.outcome(late, failed, timeout, grouped=self._grouped)

    def stop(self) -> bool:
        """Tell nobody any more; return whether something was still pending."""
        with self._lock:
            if not self._pending:
                return False
            watches, self._pending = [*self._pending], {}
            del self._tell
        _watcher.unwatch(watches)
        return True

    def _arrive(self, watch: _watcher.Watch, error: Exception | None) -> None:
        with self._lock:
            if watch not in self._pending:  # stopped meanwhile
                return
            del self._pending[watch]
            if error is not None:
                self._failed.append(error)
            if self._pending:
                return
        self._finish()

    def _finish(self) -> None:
        # Like the watches, `tell` leads back here: nothing is left to the garbage collector.
        tell = self._tell
        del self._tell
        if self._failed:
            tell(_waiting.outcome([], self._failed, None, grouped=self._grouped))
        else:
            tell(None)
