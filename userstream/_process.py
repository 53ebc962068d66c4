"""Fork, interpreter exit, daemon threads, locks, subinterpreters and lazily loaded modules.

CUDA does not survive a fork, and a destructor that calls the driver while the interpreter shuts
down may hang. So streams that are alive then are leaked: nothing is waited for or destroyed.
``tests/processes/state_after_fork.txt`` lists every piece of state of a process, and its fate in a
forked child.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import importlib
import os
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

from userstream.errors import ForkedError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType, ModuleType
    from typing import NoReturn

# `userstream/__init__.py` imports this module first: NumPy and cuda.bindings would refuse a
# subinterpreter with messages of their own. Python 3.11 has no such function; there cuda.bindings
# refuses.
if not getattr(_thread, "_is_main_interpreter", lambda: True)():
    raise ImportError(
        "userstream cannot be imported in a subinterpreter, as NumPy and cuda.bindings cannot: "
        "use threads or processes"
    )

# A subinterpreter cannot import ctypes, so the check comes first.
import ctypes

# True in a forked child of a process that had used the driver.
forked = False

# True in such a child, and in every process once Python ends: see `check_fork`. Every call reads
# this flag, so it is a plain global.
halted = False

_EXIT_SECONDS = 0.5  # for other threads to leave CUDA when Python ends
_PARK_SECONDS = 10.0  # meanwhile Python exits, or needs what the thread has locked
_JOIN_SECONDS = 1.0  # for a daemon thread to end when Python ends
_PACKAGE = os.path.dirname(__file__) + os.sep
_TESTING = os.path.join(_PACKAGE, "testing", "")

_driver_used = False
_ending = False
_tracked: set[_Tracked] = set()
_unhalted: set[int] = set()  # the threads that continue when Python exits
_after_fork: list[Callable[[], None]] = []
_last: list[Callable[[], object]] = []


# -- lazily loaded modules ------------------------------------------------------------------------


def lazy_modules(package: str, *names: str) -> Callable[[str], ModuleType]:
    """Return the ``__getattr__`` of a package that imports these of its modules on first use.

    Most programs need none of these modules, so `import userstream` is faster.
    """

    def __getattr__(name: str) -> ModuleType:  # noqa: N807
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if forked:  # a thread of the parent may hold the lock of this import for ever
            check_fork()
        # The import makes the module an attribute, so this function is called once per module. If a
        # signal handler raises during the import, the next use imports again.
        return importlib.import_module(f"{package}.{name}")

    return __getattr__


# -- locks ----------------------------------------------------------------------------------------

if sys.version_info < (3, 14):
    from threading import Lock as Lock  # noqa: PLC0414 -- exported to type checkers
    from threading import RLock as RLock  # noqa: PLC0414 -- exported to type checkers
else:
    # Python 3.14 calls `__enter__` like any function and then looks for signals. With a lock of
    # `threading`, an exception of a signal handler there leaves the lock held: the block has not
    # begun, so nothing releases the lock. No signal is handled as an iterator advances, nor as a
    # function of Python returns.

    _RLock: Any = type(threading.RLock())

    class Lock:
        """A `threading.Lock` that a ``with`` block releases wherever a signal handler raises."""

        __slots__ = ("__exit__", "acquire", "release")  # C: no signal is handled as a block ends

        def __init__(self) -> None:
            lock = threading.Lock()
            self.acquire, self.release, self.__exit__ = lock.acquire, lock.release, lock.__exit__

        def __enter__(self) -> None:
            for _ in iter(self.acquire, None):
                return

    class RLock(_RLock):
        """A `threading.RLock` that a ``with`` block releases wherever a signal handler raises."""

        def __enter__(self) -> None:
            for _ in iter(self.acquire, None):
                return


def fence() -> None:
    """Make earlier writes of the calling thread visible before its later writes.

    A reader that waits for one word and then reads other memory, as a GPU does, may otherwise see
    the word first on processors that reorder writes, such as ARM. Writes before a lock is released
    are visible before the next lock is taken.
    """
    with Lock():
        pass
    with Lock():
        pass


# -- fork and exit --------------------------------------------------------------------------------


class _Tracked(weakref.ref[object]):
    """Weak reference that hashes by identity."""

    __slots__ = ()
    __hash__ = object.__hash__
    __eq__ = object.__eq__


def note_driver_used() -> None:
    """Record that the driver was used: a forked child of this process cannot use CUDA."""
    global _driver_used  # noqa: PLW0603 -- one fact about the whole process
    _driver_used = True


def check_fork() -> None:
    """Raise `ForkedError` in a child of a process that had used the driver.

    When Python ends, a daemon thread that calls this function does not return.
    """
    if forked:
        raise ForkedError(
            "this process was forked after CUDA was used, and CUDA does not survive a fork; start "
            'workers with the "spawn" or "forkserver" method of multiprocessing'
        )
    if halted and threading.get_ident() not in _unhalted:
        _park()


def _park() -> None:
    # Python 3.14 parks a thread that asks for the GIL then. Older versions end the thread by force,
    # and inside the C++ of cuda.core that ends the process: "terminate called".
    time.sleep(_PARK_SECONDS)


def exempt_from_parking() -> None:
    """Exempt the calling thread, one of userstream's own, from parking in `check_fork` at exit."""
    _unhalted.add(threading.get_ident())


def halt_other_threads() -> None:
    """Keep all other threads out of CUDA from now on; called at exit before the threads end."""
    global halted  # noqa: PLW0603 -- one fact about the whole process
    exempt_from_parking()
    if not halted:
        halted = True
        deadline = time.monotonic() + _EXIT_SECONDS
        while _is_a_thread_inside() and time.monotonic() < deadline:
            time.sleep(1e-3)


def _is_a_thread_inside() -> bool:
    """Return whether a thread that is not parked runs code of userstream."""
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


def leak_at_end(obj: object) -> None:
    """Prevent the destructor of `obj` from running in a forked child or at interpreter exit."""
    if _ending:
        keep_forever(obj)
        return
    # The callback is in C: an exception of a signal handler in a Python callback would be lost, and
    # the entry would stay.
    _tracked.add(_Tracked(obj, _tracked.discard))


def tracked() -> list[object]:
    """Return the living objects that were passed to `leak_at_end`."""
    return [obj for reference in list(_tracked) if (obj := reference()) is not None]


def keep_forever(obj: object) -> None:
    """Prevent the destructor of `obj` from ever running."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(obj))


def after_fork(callback: Callable[[], None]) -> None:
    """Call `callback` in a forked child of a process that had used the driver."""
    _after_fork.append(callback)


def call_at_exit(callback: Callable[[], object]) -> None:
    """Call `callback` when Python ends, after the threads of userstream have ended."""
    _last.append(callback)


def refuse_copy(obj: object, instead: str) -> NoReturn:
    """Refuse to copy or pickle an object that belongs to this process; for a ``__reduce__``."""
    raise TypeError(
        f"{obj!r} cannot be copied or pickled: it belongs to the process that made it; {instead}"
    )


def _leak() -> None:
    global _ending  # noqa: PLW0603 -- one fact about the whole process
    _ending = True  # objects made from now on are leaked as well
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


def _at_exit() -> None:  # registered first, so called after the functions that end our threads
    _leak()
    for callback in _last:
        callback()


# -- daemon threads --------------------------------------------------------------------------------


def check_ending(name: str) -> None:
    """Raise if Python ends: the thread of that name would not run any more."""
    if _ending:  # a module that is loaded only now missed the end of the threads
        raise RuntimeError(f"the interpreter is shutting down: {name} has ended")


def start_thread(thread: threading.Thread) -> None:
    """Start a thread, out of reach of the exceptions of signal handlers.

    Such an exception inside `threading.Thread.start` removes the entry of the new thread, which
    then ends with `KeyError` before it has run. Signal handlers run on the main thread only, so
    another thread makes the call. An exception that comes here leaves a thread that will run.
    """
    failure: BaseException | None = None

    def start() -> None:
        nonlocal failure
        try:
            thread.start()
        except BaseException as error:
            failure = error
        finally:
            started.release()

    started = _thread.allocate_lock()
    started.acquire()
    _thread.start_new_thread(start, ())
    started.acquire()
    if failure is not None:
        raise failure


class Daemon:
    """A daemon thread that starts when it is first needed, and again if it has ended."""

    __slots__ = ("_name", "_run", "_starting", "_thread")

    def __init__(self, run: Callable[[], object], name: str) -> None:
        self._run = run
        self._name = name
        self._starting: set[threading.Thread] = set()  # who removes a thread decides its fate
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread unless the thread is running; the caller holds a lock."""
        # `_go` sets `_thread` to None as the thread ends. Do not use `is_alive`: up to Python
        # 3.12, an exception of a signal handler inside `is_alive` marks a running thread as ended,
        # and a second thread would do the same work beside it.
        if self._thread is not None:  # also in a signal handler in the middle of `start`
            return
        check_ending(self._name)
        thread = threading.Thread(target=self._go, name=self._name, daemon=True)
        self._starting.add(thread)
        self._thread = thread
        try:
            start_thread(thread)
        except BaseException:
            with contextlib.suppress(KeyError):  # it runs
                self._starting.remove(thread)
                self._thread = None  # too many threads, say: the next call tries again
            raise

    def _go(self) -> None:
        try:
            self._starting.remove(threading.current_thread())
        except KeyError:  # `start` was interrupted, and gave this thread up
            return
        exempt_from_parking()
        try:
            self._run()
        finally:
            self._thread = None

    def is_current(self) -> bool:
        """Return whether the calling thread is this daemon thread."""
        thread = self._thread
        return thread is not None and thread.ident == threading.get_ident()

    def join(self) -> None:
        """Wait up to a second for the thread, which was told to end; called at exit.

        Python up to 3.13 ends daemon threads by force. A thread that is then in the C++ of
        cuda.core, which creates and destroys streams and events, aborts the process.
        """
        thread = self._thread
        if thread is not None and thread.ident != threading.get_ident():
            thread.join(_JOIN_SECONDS)


def run(function: Callable[[], object]) -> None:
    """Call a function whose exceptions, `SystemExit` included, go to `sys.unraisablehook`."""
    ctypes.PYFUNCTYPE(None)(function)()


def log_exception(message: str, *args: object) -> None:
    """Log the exception that is being handled; raise nothing, so that a thread can continue."""

    def say() -> None:
        import logging  # imported on first use to keep "import userstream" fast

        logging.getLogger("userstream").exception(message, *args)

    run(say)  # a handler of the program or a `repr` may raise as well


os.register_at_fork(after_in_child=_in_child)
atexit.register(_at_exit)
