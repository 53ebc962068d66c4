"""The program that `supervisor` runs: started, sent the signals of its parent, and waited for."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

ONLY = "USERSTREAM_RECORD_ONLY"  # the process that is recorded, if its children are not

_LOOK = 0.1  # seconds between two calls of the function that looks after the logs
_NOT_FOUND, _NOT_STARTED = 127, 126  # exit statuses of shells
_SET_PDEATHSIG, _SET_DUMPABLE, _SET_CHILD_SUBREAPER = 1, 4, 36  # of prctl
# What the kernel sends for faults of this process, what stops and continues processes, and what is
# about the terminal, the files and the children of this process. All others are for the program.
_OWN_SIGNALS = {
    *(signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGSYS),
    *(signal.SIGKILL, signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU),
    *(signal.SIGCONT, signal.SIGWINCH, signal.SIGPIPE, signal.SIGURG, signal.SIGCHLD),
}

_STDERR = 2

_prctl = ctypes.CDLL(None).prctl


class Program:
    """A child process that runs a command with the files of this process."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], *, children: bool
    ) -> None:
        self._signals = {*signal.valid_signals()} - _OWN_SIGNALS
        # This process has one thread: signals wait until `wait` takes them.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*self._signals, signal.SIGCHLD})
        _prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        parent = os.getpid()
        self.pid = os.fork()
        if not self.pid:
            _become(command, environment, parent, mask, children=children)
        _give_files_away()

    def wait(self, look: Callable[[], None]) -> int:
        """Wait for the end; call `look` meanwhile. Return the exit status, negative of a signal."""
        looked = time.monotonic()
        while True:
            told = signal.sigtimedwait({*self._signals, signal.SIGCHLD}, _LOOK)
            if told is not None and told.si_signo != signal.SIGCHLD:
                self._forward(told)
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() - looked >= _LOOK:
                look()
                looked = time.monotonic()

    def _forward(self, told: signal.struct_siginfo) -> None:
        """Send a signal to the program, unless the program got it as well."""
        # A key of the terminal goes to its whole process group, and so does os.killpg(0, ...).
        if told.si_code <= 0 and told.si_pid != self.pid:
            os.kill(self.pid, told.si_signo)

    def is_interrupted(self, seconds: float) -> bool:
        """Wait some time, after the end of the program; return whether it is to be cut short."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            told = signal.sigtimedwait({*self._signals, signal.SIGCHLD}, left)
            if told is not None and told.si_signo in (signal.SIGINT, signal.SIGTERM):
                return True
        return False


def _become(
    command: Sequence[str],
    environment: Mapping[str, str],
    parent: int,
    mask: set[int],
    *,
    children: bool,
) -> NoReturn:
    """Become the program, in the new process."""
    try:
        _prctl(_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:  # it has died before the line above
            os._exit(_NOT_STARTED)
        for each in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
            signal.signal(each, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        only = {} if children else {ONLY: str(os.getpid())}
        os.execvpe(command[0], [*command], {**os.environ, **environment, **only})
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode(errors="backslashreplace"))
        os._exit(_NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_STARTED)
    finally:
        os._exit(_NOT_STARTED)


def _give_files_away() -> None:
    """Keep nothing but stderr: a reader of the program's output waits for the program alone."""
    null = os.open(os.devnull, os.O_RDWR)
    for each in map(int, os.listdir("/proc/self/fd")):
        if each < _STDERR:
            os.dup2(null, each)
        elif each > _STDERR:
            with suppress(OSError):  # that of the list
                os.close(each)


def die_of(number: int) -> NoReturn:
    """End this process by a signal, as the program ended, without a second core dump."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _prctl(_SET_DUMPABLE, 0, 0, 0, 0)
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    sys.exit(128 + number)  # not reached: no signal that ends a process leaves it here


class OutOfMemory:
    """Counts the processes that the kernel has killed because memory ran out."""

    def __init__(self) -> None:
        self._before = _killed_for_memory()

    def happened(self) -> bool:
        """Return whether there was one since this object was made, in the same control group."""
        return _killed_for_memory() > self._before


def _killed_for_memory() -> int:
    try:
        with open("/proc/self/cgroup", encoding="utf-8") as file:
            group = next(line[3:].strip() for line in file if line.startswith("0::"))
        with open(f"/sys/fs/cgroup{group}/memory.events", encoding="utf-8") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("oom_kill "))
    except (OSError, StopIteration, ValueError):  # version 1 of control groups, or none
        return 0
