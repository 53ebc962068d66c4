"""The process of ``userstream observe``: runs a program, and judges the logs that it writes.

`command` replaces itself by this process, which has one thread and imports the judge and the
standard library alone. The program is its child. Only a parent can report after a program was
killed, and know its exit status; and whatever the program does to its files, signals, threads and
modules changes nothing here.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from .__main__ import FOUND, after, fails, save_all
from .descendants import RECORD, Descendants
from .findings import Findings, Report
from .found import Baseline
from .lines import render, style_of
from .logs import Logs
from .program import OutOfMemory, Program, die_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_FAILED = 67  # the exit status of a program that succeeded, if a log could not be judged
_STDERR = 2
_PROGRESS = 5.0  # seconds until the first line about the progress
_SELDOM = 60.0  # seconds between two of them, at most


class Options(NamedTuple):
    """What `command` has read."""

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
    """Run the program of the options in a file; end as it ended, or with 66 if it has races."""
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
    program = Program(options.program, environment, children=options.children)
    descendants = Descendants(program.pid, simulated=options.simulated)
    progress = _Progress(logs)

    def look() -> None:
        if options.log is None:
            logs.look()
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
    """Return sentences about the end of the program, if it is none that goes without saying."""
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
    """Return what is said after a run that was only recorded."""
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
        """Say how far the judges are, if that is due."""
        now = time.monotonic()
        if not self._is_terminal or now < self._due:
            return
        self._pause = min(2 * self._pause, _SELDOM)
        self._due = now + self._pause
        _say([self._line(now)])

    def _line(self, now: float) -> str:
        calls, races = self._logs.progress()
        return f"observed for {now - self._began:.0f} s: {calls:,} calls judged, {races:,} races"
