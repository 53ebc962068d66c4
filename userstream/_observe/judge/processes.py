"""The program that `supervisor` runs, and the processes below it."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import signal
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Container, Mapping, Sequence

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
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        children: bool,
        reports: bool,
    ) -> None:
        self._reports = reports  # SIGUSR1 asks for a report
        self._is_asked = False
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
        """Send a signal to the program, unless the program also received that signal."""
        # A key of the terminal goes to its whole process group, and so does os.killpg(0, ...).
        if told.si_code <= 0 and told.si_pid != self.pid:
            if told.si_signo == signal.SIGUSR1 and self._reports:
                self._is_asked = True
                if not self._expects(told.si_signo):
                    return
            os.kill(self.pid, told.si_signo)

    def is_asked(self) -> bool:
        """Return whether this process was asked for a report since the last call."""
        is_asked, self._is_asked = self._is_asked, False
        return is_asked

    def _expects(self, number: int) -> bool:
        """Return whether the program blocks, ignores or handles a signal, and so survives."""
        try:
            with open(f"/proc/{self.pid}/status", encoding="ascii", errors="replace") as file:
                masks = [line.split()[1] for line in file if re.match("Sig(Blk|Ign|Cgt):", line)]
        except OSError:
            return False
        return any(int(mask, 16) >> number - 1 & 1 for mask in masks)

    def is_interrupted(self, seconds: float) -> bool:
        """Wait some time after the end of the program; return whether to stop waiting."""
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
        """Return whether such a kill happened in the control group since the object was created."""
        return _killed_for_memory() > self._before


def _killed_for_memory() -> int:
    try:
        with open("/proc/self/cgroup", encoding="utf-8") as file:
            group = next(line[3:].strip() for line in file if line.startswith("0::"))
        with open(f"/sys/fs/cgroup{group}/memory.events", encoding="utf-8") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("oom_kill "))
    except (OSError, StopIteration, ValueError):  # version 1 of control groups, or none
        return 0


# -- Processes below this one, and those that used CUDA without being recorded ---------------------

RECORD = "USERSTREAM_RECORD"  # the directory of logs, in the environment of a recorded process
INJECTION = "CUDA_INJECTION64_PATH"  # the library that the driver loads: the recorder

_EVERY = 0.25  # seconds between two looks at the processes, if these are quick
_SHARE = 0.02  # of one core, that looks may take at most
_LATER = 0.5  # of its age: when a process that has not used CUDA is looked at again


class Process(NamedTuple):
    """A process; the time of its begin tells it from a later one with the same number."""

    pid: int
    start: int  # ticks of the clock since the boot


class _Entry(NamedTuple):
    parent: int
    state: str


class Descendants:
    """Looks at all descendants now and then. Children that were left to this process are reaped."""

    def __init__(self, program: int, *, simulated: bool) -> None:
        self._program = program
        self._simulated = simulated
        self._due = 0.0
        self._first: dict[Process, float] = {}  # when each was seen first
        self._next: dict[Process, float] = {}  # when to look at it again
        self._missed: dict[Process, str] = {}

    def look(
        self, recorded: Container[Process], own: Collection[int], *, now: bool = False
    ) -> None:
        """Look for unrecorded processes that use CUDA, if a look is due or `now` is set."""
        began = time.monotonic()
        if began < self._due and not now:
            return
        found = _processes()
        below = _below(os.getpid(), found, own)
        for process in below:
            if found[process].parent == os.getpid() and process.pid != self._program:
                with suppress(ChildProcessError):
                    os.waitpid(process.pid, os.WNOHANG)
            first = self._first.setdefault(process, began)
            if process in recorded or process in self._missed:
                continue
            if now or began >= self._next.get(process, 0):
                self._next[process] = began + max(_EVERY, _LATER * (began - first))
                self._inspect(process, found)
        for gone in self._first.keys() - set(below):
            del self._first[gone]
            self._next.pop(gone, None)
        took = time.monotonic() - began
        self._due = began + max(_EVERY, took / _SHARE)

    def missed(self, recorded: Container[Process]) -> list[str]:
        """Return sentences about the processes that used CUDA and have no log."""
        return [said for process, said in self._missed.items() if process not in recorded]

    def _inspect(self, process: Process, found: dict[Process, _Entry]) -> None:
        with suppress(OSError):  # it has ended
            if not self._uses_cuda(process.pid):
                return
            parent = found[process].parent
            # What a process has open and loaded, its forked child has as well, but cannot use.
            if _command(parent) == _command(process.pid) and self._uses_cuda(parent):
                return
            name = " ".join(os.path.basename(each) for each in _command(process.pid)[:2])
            self._missed[process] = (
                f"process {process.pid} ({name}) used CUDA and was not recorded: "
                f"{_reason(process.pid)}"
            )

    def _uses_cuda(self, pid: int) -> bool:
        if not self._simulated:
            files = (_target(f"/proc/{pid}/fd/{each}") for each in os.listdir(f"/proc/{pid}/fd"))
            if not any(file.startswith("/dev/nvidia") for file in files):
                return False
        with open(f"/proc/{pid}/maps", errors="replace", encoding="utf-8") as maps:
            return any("/libcuda.so" in line for line in maps)


def _target(link: str) -> str:
    try:
        return os.readlink(link)
    except OSError:  # closed meanwhile
        return ""


def is_alive(process: Process) -> bool:
    """Return whether a process has not ended."""
    found = _read(process.pid)
    return found is not None and found[0] == process and found[1].state not in "ZX"


def _processes() -> dict[Process, _Entry]:
    found = (_read(int(name)) for name in os.listdir("/proc") if name.isdecimal())
    return dict(each for each in found if each is not None)


def _read(pid: int) -> tuple[Process, _Entry] | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # After the name of the program, which may contain anything.
            state, parent, *rest = file.read().rpartition(b")")[2].split()
    except (OSError, ValueError):
        return None
    return Process(pid, int(rest[17])), _Entry(int(parent), state.decode())


def _below(root: int, found: dict[Process, _Entry], own: Collection[int]) -> list[Process]:
    """Return the processes below one, without those in `own`."""
    children: dict[int, list[Process]] = {}
    for process, entry in found.items():
        children.setdefault(entry.parent, []).append(process)
    below: list[Process] = []
    todo = [root]
    while todo:
        for child in children.get(todo.pop(), ()):
            if child.pid not in own:
                below.append(child)
                todo.append(child.pid)
    return below


def _command(pid: int) -> list[str]:
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return os.fsdecode(file.read()).split("\0")


def _reason(pid: int) -> str:
    with open(f"/proc/{pid}/environ", "rb") as file:
        pairs = (line.partition("=")[::2] for line in os.fsdecode(file.read()).split("\0"))
        environment = dict(pairs)
    if RECORD not in environment:
        return f"its environment lacks {RECORD} and {INJECTION}, which `observe` sets"
    if environment.get(INJECTION) != os.environ.get(INJECTION):
        return f"its {INJECTION} names another tool: {environment.get(INJECTION) or 'none'}"
    return "its recorder did not start"
