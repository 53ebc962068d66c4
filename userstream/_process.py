"""What `os.fork` and interpreter exit do to CUDA objects, and to the state of the process.

CUDA does not survive a fork, and a destructor that calls the driver while the interpreter goes
down may hang. So the streams that are alive then are leaked: nothing is waited for or destroyed.

All that a process has once, by module, and what becomes of it in a forked child of one that had
used the driver. A lock that such a child comes by is made anew, as a thread that is not there may
hold it. What only calls come by that are refused there stays as it is. A test compares the names
with the code.

    _process
        forked halted: set. _ending: set, and what is made from then on is leaked as well
        _tracked: leaked, and emptied. _unhalted _driver_used _after_fork _last: stay
    _driver/library
        _ready _version ordinals _uuids: facts, which stay; who asks is refused
    _driver/contexts
        _primary devices_of_primaries: stay, out of reach
    _driver/capture_mode
        exchange: a fact, which stays
    _driver/green_contexts
        primaries: facts, which stay
    _driver/host_pools
        _pools: stays, out of reach
    _driver/pure
        _spare: stays, as it is host memory. _leases: stay, and put back what nobody lends again
    _engine/events
        _pools: emptied; the events are leaked
    _engine/watcher
        _watcher: a new one, with nothing to watch; its thread is not begun
    _engine/waiting
        host_functions_thread: stays; no thread of the child has that identifier
    _engine/dispatcher
        _dispatcher: stays, out of reach
    _engine/futures
        _mailboxes: stays; no event loop of the parent runs
    _engine/holding
        _lock: a new one. _watched: not any more
        left: stays, so that nothing in it is destroyed
    _engine/pure
        queues orphans: emptied. _ENDED: a constant
        in_use: stays, so that nothing in it is destroyed
    _engine/lanes
        of_frameworks: emptied. _ours _defaults _core_contexts: stay, out of reach
    _engine/parts
        _splits _contexts: stay, out of reach
    _copies/pinned
        _accounts: a new one. _blocks _free _leaving _coming _going _total: emptied, nothing freed
        _limit: a setting, which stays
    _copies/staging
        _turns _spare: emptied
    _buffers/__init__
        learned _strangers: facts, which stay
    _buffers/jax
        _ordinals: facts, which stay
    _buffers/torch
        _forms: facts, which stay
    _buffers/view
        UNKNOWN DOUBTED: constants
    _ordering/device_edges
        _spare: emptied
    _ordering/producers
        _logged: stays; nothing is said twice
    _stream/capture
        _begun: stays, out of reach
    _stream/gate
        _pools: stays, out of reach
    _stream/stream
        _given_away: stays, so that nothing in it is destroyed
    _table
        _tables: stays; each table is emptied, so that the next call meets the check
    _registry
        _process_registry: stays, with an empty table
    _unentered
        spare: stays; what is in it warns of nothing
    _observe/logger
        _lock _logger: stay, out of reach
    _observe/memory
        _NONE: a constant
    _observe/observation
        _turn: a new one. _active: none
    testing/_simulated
        _lock _library _settings when_loaded: stay
    testing/_kernels
        _lock _serving _by_name _by_id: its own hook sees to them, as a child may simulate anew
    testing/_latch
        _words _held: stay; a child leaves the latches of its parent alone
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING

from userstream.errors import ForkedError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import NoReturn

# True in a forked child of a process that had used the driver.
forked = False

# True there and once Python ends: `check_fork` says more. Read on every path, so a plain flag.
halted = False

_LAST_MOMENT = 0.5  # seconds for threads to come out of CUDA when Python ends
_PARKED = 10.0  # seconds; Python exits meanwhile, or needs what the thread has locked
_PACKAGE = os.path.dirname(__file__) + os.sep
_TESTING = os.path.join(_PACKAGE, "testing", "")

_driver_used = False
_ending = False
_tracked: set[_Tracked] = set()
_unhalted: set[int] = set()  # the threads that continue when Python exits
_after_fork: list[Callable[[], None]] = []
_last: list[Callable[[], object]] = []


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
    """Raise `ForkedError` in a child of a process that had used the driver.

    When Python ends, it is a daemon thread that comes here, and that stays here.
    """
    if forked:
        raise ForkedError(
            "this process was forked after CUDA was used, and CUDA does not survive a fork; start "
            'workers with the "spawn" or "forkserver" method of multiprocessing'
        )
    if halted and threading.get_ident() not in _unhalted:
        _park()


def _park() -> None:
    # As Python does from 3.14 on with a thread that comes for the GIL. Older ones end it by force,
    # and inside the C++ of cuda.core that ends the process: "terminate called".
    time.sleep(_PARKED)


def go_on_at_end() -> None:
    """Let the calling thread continue when Python exits: one of ours, which is told to end."""
    _unhalted.add(threading.get_ident())


def begin_end() -> None:
    """Keep all other threads out of CUDA from now on; for `atexit`, before anything is ended."""
    global halted  # noqa: PLW0603 -- one fact about the whole process
    go_on_at_end()
    if not halted:
        halted = True
        deadline = time.monotonic() + _LAST_MOMENT
        while _is_anybody_inside() and time.monotonic() < deadline:
            time.sleep(1e-3)


def _is_anybody_inside() -> bool:
    """Tell whether a thread is in userstream that is not parked yet."""
    for thread, top in sys._current_frames().items():
        if thread in _unhalted or top.f_code is _park.__code__:
            continue
        frame: FrameType | None = top
        while frame is not None:
            file = frame.f_code.co_filename
            if file.startswith(_PACKAGE) and not file.startswith(_TESTING):
                return True
            frame = frame.f_back
    return False


def is_ending() -> bool:
    """Tell whether Python ends, and all threads of ours have ended."""
    return _ending


def leak_at_end(obj: object) -> None:
    """See to it that no destructor of `obj` runs in a forked child or during interpreter exit."""
    if _ending:
        keep_forever(obj)
        return
    # The callback is C: a Ctrl-C in one of Python would be lost, and the entry would stay.
    _tracked.add(_Tracked(obj, _tracked.discard))


def tracked() -> list[object]:
    """Return what `leak_at_end` was told of and is still alive."""
    return [obj for reference in list(_tracked) if (obj := reference()) is not None]


def keep_forever(obj: object) -> None:
    """See to it that no destructor of `obj` ever runs."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(obj))


def after_fork(callback: Callable[[], None]) -> None:
    """Call `callback` in a forked child of a process that had used the driver."""
    _after_fork.append(callback)


def at_last(callback: Callable[[], object]) -> None:
    """Call `callback` when Python ends and all threads of ours have ended."""
    _last.append(callback)


def refuse_copy(obj: object, instead: str) -> NoReturn:
    """Refuse to copy or pickle what is of this process alone; for a ``__reduce__``."""
    raise TypeError(
        f"{obj!r} cannot be copied or pickled: it belongs to the process that made it; {instead}"
    )


def _leak() -> None:
    global _ending  # noqa: PLW0603 -- one fact about the whole process
    _ending = True  # what is made from now on is leaked as well
    for obj in tracked():
        keep_forever(obj)
    _tracked.clear()


def _in_child() -> None:
    global forked, halted  # noqa: PLW0603 -- facts about the whole process
    if _driver_used:
        forked = halted = True
        _leak()
        for callback in _after_fork:
            callback()


def _at_exit() -> None:  # registered before what ends our threads, and thus called after that
    _leak()
    for callback in _last:
        callback()


os.register_at_fork(after_in_child=_in_child)
atexit.register(_at_exit)
