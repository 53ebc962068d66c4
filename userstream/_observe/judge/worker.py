"""The judge of one log in a process of its own, which `workers` starts.

The process gets the path of a log, and on its stdin a line of JSON, the arguments of `Judge`. It
judges what the log has and what it gets, up to the record that ends a log, or until another line of
its stdin says that the log gets nothing more: the number of operations that are shown. It answers
with lines of JSON: `progress`, the numbers of calls and races until now, and at last the findings,
or an `error`.

The judge of an observation gets the log behind the arguments on its stdin, and answers questions in
the log as well: the `number` of the question, and the `findings` until there.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
import traceback
from io import FileIO
from typing import TYPE_CHECKING

from . import Judge, judged
from .found import Suppression
from .log import LogError

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, BinaryIO

    from .findings import Findings

_PAUSE = 0.02  # seconds between two looks at a log that has not grown
_PROGRESS = 0.2  # seconds between two lines of progress


def main() -> None:
    """Judge the log that the command line names, and answer on stdout."""
    commands = FileIO(0)  # without a buffer: `select` does not see what is in one
    path, judge = sys.argv[1], _judge(commands)

    def findings() -> Findings:
        with open(path, "rb") as file:
            log = _GrowingLog(file, commands)
            judged(log, judge, _Progress(judge).say)
            return judge.findings(operations=log.operations())

    sys.stdout.write(f"{_answer(findings)}\n")


def answer() -> None:
    """Judge the log that comes on stdin, and answer its questions on stdout."""
    given = FileIO(0)
    judge = _judge(given)

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


def _judge(given: FileIO) -> Judge:
    """Return the judge whose arguments are the first line."""
    told = json.loads(given.readline())
    suppressions = [
        Suppression(race, memory, tuple(lines)) for race, memory, lines in told.pop("suppressions")
    ]
    return Judge(**told, suppressions=suppressions)


def _answer(findings: Callable[[], Findings]) -> str:
    """Return findings, or what is wrong, as a line of JSON."""
    try:
        return findings().as_json()
    except (OSError, LogError) as error:
        return json.dumps({"error": str(error)})
    except Exception:  # a defect, which the parent process has to report
        return json.dumps({"error": f"the judge failed:\n{traceback.format_exc()}"})


class _GrowingLog:
    """A file whose `read` waits for more, as long as more may come."""

    def __init__(self, file: BinaryIO, commands: FileIO) -> None:
        self._file = file
        self._commands = commands
        self._command: bytes | None = None

    def read(self, size: int) -> bytes:
        while not (data := self._file.read(size)) and self._may_grow():
            pass
        return data or self._file.read(size)  # what came before the command

    def _may_grow(self) -> bool:
        if self._command is None and select.select([self._commands], (), (), _PAUSE)[0]:
            self._command = self._commands.readline()
        return self._command is None

    def operations(self) -> int:
        """Return how many operations the timeline may have, once that is said."""
        if self._command is None:
            self._command = self._commands.readline()
        return int(self._command or 0)


class _Progress:
    """Says from time to time how far the judge is."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self._said = time.monotonic()

    def say(self) -> None:
        if time.monotonic() - self._said >= _PROGRESS:
            self._said = time.monotonic()
            progress = sum(self._judge.calls().values()), len(self._judge.races())
            print(json.dumps({"progress": progress}), flush=True)
