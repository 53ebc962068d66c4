"""A semaphore of the C library, which native code can post without the interpreter."""

from __future__ import annotations

import ctypes
import functools
import time

from userstream import _process

_libc = ctypes.CDLL(None)
_SIZE = 64  # more than a sem_t has anywhere


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
