"""The process of ``userstream observe``: runs a program, and judges the logs that it writes.

`command` replaces itself by this process, which has one thread and imports the judge and the
standard library alone. The program is its child. Only a parent can report after a program was
killed, and know its exit status; and whatever the program does to its files, signals, threads and
modules changes nothing here.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from .__main__ import FOUND, after, fails, save_all
from .finding_types import Baseline
from .findings import Findings, Report
from .lines import printable, render, style_of
from .log import LogError
from .workers import MOST, Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Container, Mapping, Sequence

_FAILED = 67  # the exit status of a program that succeeded, if a log could not be judged
_STDERR = 2
_PROGRESS = 5.0  # seconds until the first line about the progress
_SELDOM = 60.0  # seconds between two of them, at most


class Options(NamedTuple):
    """Options of the command line that `command` has parsed."""

    called: str  # how the command was called, such as "userstream"
    program: Sequence[str]  # the command to run
    name: str  # of the program, for people
    environment: Mapping[str, str]  # what the program gets beside that of this process
    children: bool  # whether those of the program are recorded as well
    simulated: bool
    log: str | None  # a directory, if the logs are only recorded
    reports: Sequence[str]
    judge: Mapping[str, Any]  # arguments of `Judge`
    operations: int  # that the reports show
    baseline: str | None
    fail_on: Sequence[str]


def main(descriptor: int) -> NoReturn:
    """Run the program of an options file; exit like the program, or with 66 if it has races."""
    with open(descriptor, encoding="utf-8") as file:
        options = Options(**json.load(file))
    directory = options.log or tempfile.mkdtemp(prefix="userstream-")
    try:
        status = _run(options, directory)
    finally:
        if options.log is None:
            shutil.rmtree(directory, ignore_errors=True)
    if status < 0:
        die_of(-status)
    sys.exit(status)


def _run(options: Options, directory: str) -> int:
    logs = Logs(
        directory,
        options.judge,
        operations=options.operations,
        keep=options.log is not None,
    )
    environment = {**options.environment, RECORD: os.path.abspath(directory)}
    memory = OutOfMemory()
    program = Program(
        options.program, environment, children=options.children, reports=options.log is None
    )
    descendants = Descendants(program.pid, simulated=options.simulated)
    progress = _Progress(logs)

    def look() -> None:
        if options.log is None:
            logs.look()
            if program.is_asked():
                logs.ask()
            _say(logs.hangs())
            progress.look()
        else:
            logs.find()
        descendants.look(logs.processes.values(), logs.judges)

    try:
        status = program.wait(look)
        logs.find()
        descendants.look(logs.processes.values(), logs.judges, now=True)
        notes = _notes(options.name, status, is_out_of_memory=memory.happened())
        missed = descendants.missed(logs.processes.values()) + _refusals(logs)
        missed = missed if options.children else []
        if options.log is not None:
            _say(_recorded(options, logs, notes, missed))
            return status
        logs.finish(program.is_interrupted, progress.look)
    finally:
        logs.close()
    return _report(options, logs, status, notes, missed)


def _notes(name: str, status: int, *, is_out_of_memory: bool) -> list[str]:
    """Return sentences about an unusual end of the program."""
    if not status:
        return []
    if status > 0:
        return [f"{name} ended with exit status {status}"]
    signal_name = signal.Signals(-status).name if -status in signal.valid_signals() else "?"
    memory = ": memory ran out" if status == -signal.SIGKILL and is_out_of_memory else ""
    return [f"{name} was killed by signal {-status} ({signal_name}){memory}"]


def _refusals(logs: Logs) -> list[str]:
    return [f"process {process.pid}: {why}" for process, why in logs.refused.items()]


def _recorded(
    options: Options, logs: Logs, notes: Sequence[str], missed: Sequence[str]
) -> list[str]:
    """Return the message after a run that was only recorded."""
    count = len({*logs.processes.values()})
    if not count:
        said = "no process used CUDA: nothing was recorded"
    else:
        processes = "1 process" if count == 1 else f"{count} processes"
        said = f"recorded {processes}: judge with `{options.called} judge {options.log}`"
    told = [said, *notes, *(f"not seen: {each}" for each in missed)]
    return [printable(line) for each in told for line in each.split("\n")]


def _report(options: Options, logs: Logs, status: int, notes: list[str], missed: list[str]) -> int:
    """Write the reports, and then print; return the exit status."""
    findings = [each for each in logs.answers.values() if isinstance(each, Findings)]
    failed = [
        f"process {process.pid}: {logs.answers[name]}"
        for name, process in logs.processes.items()
        if isinstance(logs.answers.get(name), Exception)
    ]
    if not findings and not failed:
        notes.append("no process used CUDA: nothing was observed")
    report = Report(
        findings,
        possible=options.judge["possible"],
        notes=notes,
        not_seen=[*failed, *missed],
    )
    problems = save_all(report, options.reports)
    baseline = None if options.baseline is None else Baseline(options.baseline)
    _say(
        [
            render(report.lines(), style_of(_STDERR)),
            *after(report, baseline),
            *(f"{options.called} observe: {problem}" for problem in problems),
        ]
    )
    if status:
        return status
    if fails(report, frozenset(options.fail_on), baseline):
        return FOUND
    return _FAILED if failed else 0


def _say(lines: Sequence[str]) -> None:
    """Write to stderr, of which the reader may have gone away."""
    data = "".join(f"{line}\n" for line in lines).encode("utf-8", "backslashreplace")
    while data:
        try:
            data = data[os.write(_STDERR, data) :]
        except BlockingIOError:  # the program has left it in this mode
            select.select((), [_STDERR], ())
        except OSError:
            return


class _Progress:
    """Says how far a long run is, on a terminal: seldom, as the program writes there as well."""

    def __init__(self, logs: Logs) -> None:
        self._logs = logs
        self._began = time.monotonic()
        self._pause = _PROGRESS
        self._due = self._began + _PROGRESS
        self._is_terminal = os.isatty(_STDERR)

    def look(self) -> None:
        """Print the progress of the judges, if a message is due."""
        now = time.monotonic()
        if not self._is_terminal or now < self._due:
            return
        self._pause = min(2 * self._pause, _SELDOM)
        self._due = now + self._pause
        _say([self._line(now)])

    def _line(self, now: float) -> str:
        calls, races = self._logs.progress()
        return f"observed for {now - self._began:.0f} s: {calls:,} calls judged, {races:,} races"


# -- The logs of a run, which are judged while they grow -------------------------------------------

# The process, when it began, and of a log after an `exec` its number.
_NAME = re.compile(r"(\d+)-(\d+)(?:-\d+)?\.(uslog|why)")
_LEFT = 1.0  # seconds that processes which outlive the program have to end their logs
_PAUSE = 0.02


class Logs:
    """The logs in a directory, each judged by a process of its own.

    Parameters
    ----------
    directory : str
        Where the processes of the program write their logs.
    options : mapping
        The arguments of `Judge`.
    operations : int
        How many operations the timelines of all logs may have together.
    keep : bool
        Whether the logs stay there; otherwise each is removed once it was judged.
    """

    def __init__(
        self, directory: str, options: Mapping[str, Any], *, operations: int, keep: bool
    ) -> None:
        self._directory = directory
        self._options = options
        self._operations = operations
        self._keep = keep
        self._waiting: list[str] = []
        self._running: dict[str, Worker] = {}
        self._asked: set[str] = set()  # those that were told that their log does not grow any more
        self._hangs: list[tuple[int, str]] = []  # reports, with their processes
        self.answers: dict[str, Findings | LogError] = {}
        self.processes: dict[str, Process] = {}  # the recorded ones, by the names of their logs
        self.refused: dict[Process, str] = {}  # those that could not record, and why

    def look(self) -> None:
        """Start judges for new logs, and read the answers of all judges."""
        self.find()
        while self._waiting and len(self._running) < MOST:
            name = self._waiting.pop(0)
            self._running[name] = Worker(os.path.join(self._directory, name), self._options)
        for name, worker in [*self._running.items()]:
            if not is_alive(_process_of(name)):
                self._finish(name)
            is_done = worker.look()
            self._hangs += [(_process_of(name).pid, text) for text in worker.hangs]
            worker.hangs.clear()
            if is_done:
                self._take(name, worker)

    def find(self) -> None:
        """Look for new logs, and for reasons why processes have none."""
        for entry in os.scandir(self._directory):
            match = _NAME.fullmatch(entry.name)
            if match is None:
                continue
            process = _process_of(entry.name)
            if match[3] == "why":
                with suppress(OSError), open(entry.path, encoding="utf-8") as file:
                    self.refused[process] = file.read().strip()
            elif entry.name not in self.processes:
                self.processes[entry.name] = process
                self._waiting.append(entry.name)

    def finish(self, is_interrupted: Callable[[float], bool], progress: Callable[[], None]) -> None:
        """Judge the remaining logs until an interrupt."""
        deadline = time.monotonic() + _LEFT
        while True:
            self.look()
            progress()
            if not self._running and not self._waiting:
                return
            if time.monotonic() > deadline:
                for name in self._running:
                    self._finish(name)
            if is_interrupted(_PAUSE):
                break
        for name in (*self._running, *self._waiting):
            self.answers[name] = LogError("it was not judged to its end: interrupted")
        self.close()

    def close(self) -> None:
        """End all judges."""
        for worker in self._running.values():
            worker.close()
        self._running.clear()

    def ask(self) -> None:
        """Ask the judges for reports of streams that make no progress."""
        for worker in self._running.values():
            worker.ask()

    def hangs(self) -> list[str]:
        """Return the reports that have come since the last call, each with its process."""
        told = [f"process {pid}: {text}" for pid, text in self._hangs]
        self._hangs.clear()
        return told

    @property
    def judges(self) -> set[int]:
        """The processes of the judges."""
        return {worker.pid for worker in self._running.values()}

    def progress(self) -> tuple[int, int]:
        """Return the numbers of calls judged and of races found until now."""
        found = [each for each in self.answers.values() if isinstance(each, Findings)]
        running = self._running.values()
        calls = sum(sum(each.calls.values()) for each in found)
        races = sum(len(each.races) for each in found)
        return (
            calls + sum(worker.calls for worker in running),
            races + sum(worker.races for worker in running),
        )

    def _finish(self, name: str) -> None:
        if name not in self._asked:
            self._asked.add(name)
            self._running[name].finish(self._operations // len(self.processes))

    def _take(self, name: str, worker: Worker) -> None:
        assert worker.answer is not None
        path = os.path.join(self._directory, name)
        if os.path.getsize(path) or isinstance(worker.answer, Findings):
            self.answers[name] = worker.answer
        worker.close()
        del self._running[name]
        if not self._keep:
            os.unlink(path)


def _process_of(name: str) -> Process:
    pid, start = name.partition(".")[0].split("-")[:2]
    return Process(int(pid), int(start))


# -- the program -----------------------------------------------------------------------------------

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
    """Close all files but stderr, so that only the program keeps pipes to its readers open."""
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
