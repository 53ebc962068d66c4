"""Locks that a `with` block gives back, wherever in it a signal comes; a fence made of them."""

from __future__ import annotations

import sys
import threading
from typing import Any

__all__ = ["Lock", "RLock", "fence"]

if sys.version_info < (3, 14):
    from threading import Lock, RLock
else:
    # `__enter__` is called as any function is, after which 3.14 looks for signals: with a lock of
    # `threading`, a Ctrl-C there comes when the lock is taken and the block has not begun, and
    # nothing gives it back. None comes with the next element of an iterator, nor where a function
    # of Python returns.

    _RLock: Any = type(threading.RLock())

    class Lock:
        """As that of `threading`."""

        __slots__ = ("__exit__", "acquire", "release")  # C: no signal comes as a block ends

        def __init__(self) -> None:
            lock = threading.Lock()
            self.acquire, self.release, self.__exit__ = lock.acquire, lock.release, lock.__exit__

        def __enter__(self) -> None:
            for _ in iter(self.acquire, None):
                return

    class RLock(_RLock):
        """As that of `threading`."""

        def __enter__(self) -> None:
            for _ in iter(self.acquire, None):
                return


def fence() -> None:
    """Let what this thread has written be there before what it writes from now on.

    Who waits for a word and then reads other memory, as a GPU does, may see the word first on
    processors that may write in another order, such as those of ARM. What was written before a
    lock is given back is there before the next one is taken.
    """
    with Lock():
        pass
    with Lock():
        pass
