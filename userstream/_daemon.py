"""A thread of the library's own: begun when it is first needed, and let end when Python ends."""

from __future__ import annotations

import ctypes
import threading
from typing import TYPE_CHECKING

from userstream import _process

if TYPE_CHECKING:
    from collections.abc import Callable

_LAST_MOMENT = 1.0  # seconds


class Daemon:
    """A daemon thread that is begun when it is needed, and again if it has ended."""

    __slots__ = ("_name", "_run", "_thread")

    def __init__(self, run: Callable[[], object], name: str) -> None:
        self._run = run
        self._name = name
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Make sure that the thread runs; call it under a lock."""
        # `_go` forgets a thread that ends. Not `is_alive`: up to Python 3.12, a Ctrl-C inside
        # it marks a running thread as ended, and a second one would do the same work beside it.
        if self._thread is not None:  # this may be a signal handler in the middle of `start`
            return
        if _process.is_ending():  # what loads its module only now was told of no end
            raise RuntimeError(f"the interpreter is shutting down: {self._name} has ended")
        # First: a Ctrl-C may come when the thread is on its way.
        self._thread = thread = threading.Thread(target=self._go, name=self._name, daemon=True)
        try:
            thread.start()
        except BaseException:
            if thread.ident is None:  # there are too many threads, say; the next call tries again
                self._thread = None
            raise

    def _go(self) -> None:
        if not self.is_current():  # a Ctrl-C came as it began, and `start` gave it up
            return
        _process.go_on_at_end()
        try:
            self._run()
        finally:
            self._thread = None

    def is_current(self) -> bool:
        """Tell whether the calling thread is this one."""
        thread = self._thread
        return thread is not None and thread.ident == threading.get_ident()

    def join(self) -> None:
        """Wait a moment for the thread, which was told to end; for `atexit`.

        Python up to 3.13 ends daemon threads by force. One that is just then in the C++ of
        cuda.core, where streams and events are made and destroyed, takes the process along.
        """
        thread = self._thread
        if thread is not None and thread.ident != threading.get_ident():
            thread.join(_LAST_MOMENT)


def run(function: Callable[[], object]) -> None:
    """Call a function; let `sys.unraisablehook` report what it raises, be it `SystemExit`."""
    ctypes.PYFUNCTYPE(None)(function)()


def survive(message: str, *args: object) -> None:
    """Log the exception that is being handled, after which a thread of ours continues."""

    def say() -> None:
        import logging  # takes longer to load than all of this

        logging.getLogger("userstream").exception(message, *args)

    run(say)  # a handler of the user's may raise in turn, and so may a `repr`
