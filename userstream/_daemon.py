"""A thread of the library's own: begun when it is first needed, and let end when Python ends."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_LAST_MOMENT = 1.0  # seconds


class Daemon:
    """A daemon thread that is begun at most once, unless it says that it could not begin."""

    __slots__ = ("_name", "_run", "_thread")

    def __init__(self, run: Callable[[], object], name: str) -> None:
        self._run = run
        self._name = name
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Make sure that the thread runs; call it under a lock."""
        if self._thread is not None:
            return
        # First: a Ctrl-C may come when the thread is on its way.
        self._thread = thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        try:
            thread.start()
        except BaseException:
            if thread.ident is None:  # there are too many threads, say; the next call tries again
                self._thread = None
            raise

    def forget(self) -> None:
        """Let the next `start` begin another one; call it under the lock of `start`."""
        self._thread = None

    def join(self) -> None:
        """Wait a moment for the thread, which was told to end; for `atexit`.

        Python up to 3.13 ends daemon threads by force. One that is just then in the C++ of
        cuda.core, where streams and events are made and destroyed, takes the process along.
        """
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_LAST_MOMENT)
