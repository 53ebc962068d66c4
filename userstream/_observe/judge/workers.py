"""Judges in processes of their own, one for each log.

A process gets the path of a log, and on its stdin a line of JSON, the arguments of `Judge`. It
judges what the log has and what it gets, up to the record that ends a log, or until another line of
its stdin says that the log gets nothing more: the number of operations that are shown. It answers
with lines of JSON: `progress`, the numbers of calls and races until now, `hang`, a report of
streams that do not go on, and at last the findings, or an `error`. A line `hang` on stdin asks for
such a report; there is one as well if nothing moves for the seconds of the argument `hang_after`.

The judge of an observation gets the log behind the arguments on its stdin, and answers questions in
the log as well: the `number` of the question, and the `findings` until there.
"""

from __future__ import annotations

import gc
import json
import os
import select
import subprocess
import sys
import time
import traceback
from contextlib import ExitStack, suppress
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import Judge, judged
from .finding_types import Suppression
from .findings import Findings, from_json
from .log import LogError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any, BinaryIO


_PACKAGE = Path(__file__).parent
# The package alone, without userstream and site-packages: it starts within 30 ms.
_IMPORT = (
    f"import sys; sys.path.append({str(_PACKAGE.parent)!r}); from {_PACKAGE.name}.workers import"
)
_START = f"{_IMPORT} main; main()"
ANSWER = f"{_IMPORT} answer; answer()"
MOST = max(4, os.cpu_count() or 1)  # at a time
# A timeline in JSON is megabytes, and would leave holes in a heap that never shrinks.
_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(128 << 10)}  # of glibc: else it grows by itself
_PAUSE_OF_PARENT = 0.005  # seconds between two looks at a judge that was told to finish


def started(*arguments: str, stdin: int, stdout: int) -> subprocess.Popen[bytes]:
    """Start a process that judges; the first argument is its program."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", *arguments],
        stdin=stdin,
        stdout=stdout,
        env={**_ENVIRONMENT, **os.environ},
        start_new_session=True,  # Ctrl-C in the terminal is not for it
    )


class Worker:
    """A process that judges a log while it grows."""

    def __init__(self, log: str, options: Mapping[str, Any]) -> None:
        self.log = log
        self.calls = self.races = 0  # until now
        self.answer: Findings | LogError | None = None
        self.hangs: list[str] = []  # reports that nobody has taken yet
        self._said = bytearray()
        self._process = started(_START, log, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._tell(json.dumps(options))

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    def finish(self, operations: int) -> None:
        """End the log of the process, and set the number of operations to show."""
        self._tell(str(operations))

    def ask(self) -> None:
        """Ask for a report of streams that make no progress."""
        self._tell("hang")

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, as `look` will find
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()

    def look(self) -> bool:
        """Read the output of the process; return whether the answer has come."""
        assert self._process.stdout is not None
        while self.answer is None and (said := self._process.stdout.read(1 << 20)) is not None:
            self._said += said
            if b"\n" in said:
                *lines, self._said = self._said.split(b"\n")
                for line in lines:
                    self._take(line)
            elif not said:
                status = self._process.wait()
                self.answer = LogError(f"its judge ended too early (exit status {status})")
        return self.answer is not None

    def _take(self, line: bytearray) -> None:
        told = from_json(line)
        if isinstance(told, Findings):
            self.answer = told
            self.calls = sum(told.calls.values())
        elif "error" in told:
            self.answer = LogError(told["error"])
        elif "hang" in told:
            self.hangs.append(told["hang"])
        else:
            self.calls, self.races = told["progress"]

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        with self._process:  # closes the pipes, and waits
            pass


def judge_logs(
    logs: Sequence[str], options: Mapping[str, Any], operations: int
) -> list[Findings | LogError]:
    """Judge complete logs, several at a time; return an answer for each log."""
    answers: dict[str, Findings | LogError] = {}
    waiting = list(logs)[::-1]
    with ExitStack() as stack:
        running: list[Worker] = []
        while waiting or running:
            while waiting and len(running) < MOST:
                worker = Worker(waiting.pop(), options)
                stack.callback(worker.close)
                worker.finish(operations)
                running.append(worker)
            for worker in [each for each in running if each.look()]:
                assert worker.answer is not None
                answers[worker.log] = worker.answer
                running.remove(worker)
            time.sleep(_PAUSE_OF_PARENT)
    return [answers[log] for log in logs]


# -- In the process of a judge ---------------------------------------------------------------------

_PAUSE = 0.02  # seconds between two looks at a log that has not grown
_PROGRESS = 0.2  # seconds between two lines of progress, or two looks at the streams
# Objects between two collections, and collections of each generation before the next. The judge
# makes several objects for a call, and hardly a cycle: the default takes a tenth of its time.
_COLLECTED = (20_000, 4, 4)
HANG = b"hang\n"


def main() -> None:
    """Judge the log that the command line names, and answer on stdout."""
    commands = FileIO(0)  # without a buffer: `select` does not see what is in one
    path, options = sys.argv[1], json.loads(commands.readline())
    hang_after = options.pop("hang_after", None)
    judge = _judge(options)
    judge.hangs.told = lambda text: print(json.dumps({"hang": text}), flush=True)

    def findings() -> Findings:
        with open(path, "rb") as file:
            progress = _Progress(judge, hang_after)
            log = _GrowingLog(file, commands, progress)
            judged(log, judge, progress.say)
            return judge.findings(operations=log.operations())

    sys.stdout.write(f"{_answer(findings)}\n")


def answer() -> None:
    """Judge the log that comes on stdin, and answer questions about the log on stdout."""
    given = FileIO(0)
    judge = _judge(json.loads(given.readline()))

    def asked(told: Any) -> None:
        found = judge.findings(operations=told["operations"]).as_json()
        print(f'{{"number": {told["number"]}, "findings": {found}}}', flush=True)

    def findings() -> Findings:
        judge.asked = asked
        return judged(given, judge).findings(operations=sys.maxsize)

    try:
        print(_answer(findings), flush=True)
    except BrokenPipeError:  # the program has closed it, and Python would complain at its end
        os._exit(1)


def _judge(told: dict[str, Any]) -> Judge:
    """Return a judge with arguments from JSON, and prepare the process for its work."""
    gc.set_threshold(*_COLLECTED)
    suppressions = [
        Suppression(race, memory, tuple(lines)) for race, memory, lines in told.pop("suppressions")
    ]
    return Judge(**told, suppressions=suppressions)


def _answer(findings: Callable[[], Findings]) -> str:
    """Return findings, or an error message, as a line of JSON."""
    try:
        return findings().as_json()
    except (OSError, LogError) as error:
        return json.dumps({"error": str(error)})
    except Exception:  # a defect, which the parent process has to report
        return json.dumps({"error": f"the judge failed:\n{traceback.format_exc()}"})


class _GrowingLog:
    """A file whose `read` waits for more, as long as more may come."""

    def __init__(self, file: BinaryIO, commands: FileIO, progress: _Progress) -> None:
        self._file = file
        self._commands = commands
        self._progress = progress
        self._command: bytes | None = None

    def read(self, size: int) -> bytes:
        while not (data := self._file.read(size)) and self._may_grow():
            pass
        return data or self._file.read(size)  # what came before the command

    def _may_grow(self) -> bool:
        if self._command is None and select.select([self._commands], (), (), _PAUSE)[0]:
            self._take_command()
        if self._command is None:
            self._progress.look()
        return self._command is None

    def _take_command(self) -> None:
        command = self._commands.readline()
        if command == HANG:
            self._progress.ask()
        else:
            self._command = command

    def operations(self) -> int:
        """Return the largest number of operations of the timeline, once the number has come."""
        while self._command is None:
            self._take_command()
        return int(self._command or 0)


class _Progress:
    """Says from time to time how far the judge is, and reports streams that do not go on."""

    def __init__(self, judge: Judge, hang_after: float | None) -> None:
        self._judge = judge
        self._hang_after = hang_after
        self._said = self._looked = self._moved = time.monotonic()
        self._state = -1  # of the streams
        self._is_told = False

    def say(self) -> None:
        if time.monotonic() - self._said >= _PROGRESS:
            self._said = time.monotonic()
            progress = sum(self._judge.calls().values()), len(self._judge.races())
            print(json.dumps({"progress": progress}), flush=True)
            self.look()

    def look(self) -> None:
        """Report the streams if nothing has moved for long."""
        now = time.monotonic()
        if self._hang_after is None or now - self._looked < _PROGRESS:
            return
        self._looked = now
        state = self._judge.hangs.progress()
        if state != self._state:
            self._state, self._moved, self._is_told = state, now, False
        elif now - self._moved >= self._hang_after and not self._is_told:
            self._is_told = True
            cause = f"nothing has moved for {self._hang_after:g} s"
            self._judge.hangs.report(cause, is_asked=bool(self._judge.hangs.pending()))

    def ask(self) -> None:
        """Report the streams on request."""
        self._judge.hangs.report("SIGUSR1", is_asked=True)
