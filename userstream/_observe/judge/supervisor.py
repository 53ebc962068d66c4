"""The process of ``userstream observe``: runs a program, and judges the logs that it writes.

`command` replaces itself by this process, which has one thread and imports the judge and the
standard library alone. The program is its child. Only a parent can report after a program was
killed, and know its exit status; and whatever the program does to its files, signals, threads and
modules changes nothing here.
"""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from .__main__ import FOUND, after, fails, save_all
from .findings import Findings, Report
from .found import Baseline
from .lines import render, style_of
from .log import LogError
from .processes import RECORD, Descendants, OutOfMemory, Process, Program, die_of, is_alive
from .workers import MOST, Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

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
        descendants.look(logs.processes, logs.judges)

    try:
        status = program.wait(look)
        logs.find()
        descendants.look(logs.processes, logs.judges, now=True)
        notes = _notes(options.name, status, is_out_of_memory=memory.happened())
        missed = [*descendants.missed(logs.processes), *_refusals(logs)] if options.children else []
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
    count = len(logs.processes)
    if not count:
        said = "no process used CUDA: nothing was recorded"
    else:
        processes = "1 process" if count == 1 else f"{count} processes"
        said = f"recorded {processes}: judge with `{options.called} judge {options.log}`"
    return [said, *notes, *(f"not seen: {each}" for each in missed)]


def _report(options: Options, logs: Logs, status: int, notes: list[str], missed: list[str]) -> int:
    """Write the reports, and then print; return the exit status."""
    findings = [each for each in logs.answers.values() if isinstance(each, Findings)]
    failed = [
        f"process {process.pid}: {logs.answers[name]}"
        for process, name in logs.processes.items()
        if isinstance(logs.answers.get(name), Exception)
    ]
    if not findings:
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

_NAME = re.compile(r"(\d+)-(\d+)\.(uslog|why)")
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
        self.processes: dict[Process, str] = {}  # the recorded ones, with the names of their logs
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
            elif process not in self.processes:
                self.processes[process] = entry.name
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
    pid, start = name.partition(".")[0].split("-")
    return Process(int(pid), int(start))
