"""What `os.fork` and interpreter exit do to CUDA objects.

CUDA does not survive a fork, and a destructor that calls the driver while the interpreter goes
down may hang. So the streams that are alive then are leaked: nothing is waited for or destroyed.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import weakref
from typing import TYPE_CHECKING

from userstream.errors import ForkedError

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

# True in a forked child of a process that had used the driver. Read on every path, so a plain flag.
forked = False

_driver_used = False
_ending = False
_tracked: set[_Tracked] = set()
_after_fork: list[Callable[[], None]] = []


class _Tracked(weakref.ref[object]):
    """A reference that is itself in a set, whatever it refers to is equal to."""

    __slots__ = ()
    __hash__ = object.__hash__
    __eq__ = object.__eq__


def note_driver_used() -> None:
    """From now on a forked child of this process cannot use CUDA."""
    global _driver_used  # noqa: PLW0603 -- one fact about the whole process
    _driver_used = True


def check_fork() -> None:
    """Raise `ForkedError` in a child of a process that had used the driver."""
    if forked:
        raise ForkedError(
            "this process was forked after CUDA was used, and CUDA does not survive a fork; start "
            'workers with the "spawn" or "forkserver" method of multiprocessing'
        )


def leak_at_end(obj: object) -> None:
    """See to it that no destructor of `obj` runs in a forked child or during interpreter exit."""
    if _ending:
        keep_for_ever(obj)
        return
    # The callback is C: a Ctrl-C in one of Python would be lost, and the entry would stay.
    _tracked.add(_Tracked(obj, _tracked.discard))


def tracked() -> list[object]:
    """Return what `leak_at_end` was told of and is still alive."""
    return [obj for reference in list(_tracked) if (obj := reference()) is not None]


def keep_for_ever(obj: object) -> None:
    """See to it that no destructor of `obj` ever runs."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(obj))


def after_fork(callback: Callable[[], None]) -> None:
    """Call `callback` in a forked child of a process that had used the driver."""
    _after_fork.append(callback)


def refuse_copy(obj: object, instead: str) -> NoReturn:
    """Refuse to copy or pickle what is of this process alone; for a ``__reduce__``."""
    raise TypeError(
        f"{obj!r} cannot be copied or pickled: it belongs to the process that made it; {instead}"
    )


def _leak() -> None:
    global _ending  # noqa: PLW0603 -- one fact about the whole process
    _ending = True  # what is made from now on is leaked as well
    for obj in tracked():
        keep_for_ever(obj)
    _tracked.clear()


def _in_child() -> None:
    global forked  # noqa: PLW0603 -- one fact about the whole process
    if _driver_used:
        forked = True
        _leak()
        for callback in _after_fork:
            callback()


os.register_at_fork(after_in_child=_in_child)
atexit.register(_leak)
