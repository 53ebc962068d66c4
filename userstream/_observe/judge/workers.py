"""Judges in processes of their own, one for each log."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .findings import Findings, from_json
from .log import LogError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_PACKAGE = Path(__file__).parent
# The package alone, without userstream and site-packages: it starts within 30 ms.
_IMPORT = (
    f"import sys; sys.path.append({str(_PACKAGE.parent)!r}); from {_PACKAGE.name}.worker import"
)
_START = f"{_IMPORT} main; main()"
ANSWER = f"{_IMPORT} answer; answer()"
MOST = max(4, os.cpu_count() or 1)  # at a time
_PAUSE = 0.005  # seconds between two looks at a judge that was told to finish


class Worker:
    """A process that judges a log while it grows."""

    def __init__(self, log: str, options: Mapping[str, Any]) -> None:
        self.log = log
        self.calls = self.races = 0  # until now
        self.answer: Findings | LogError | None = None
        self._said = bytearray()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _START, log],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in the terminal is not for it
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._tell(json.dumps(options))

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    def finish(self, operations: int) -> None:
        """Say that nothing is added to the log any more, and how many operations are shown."""
        self._tell(str(operations))

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, as `look` will find
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()

    def look(self) -> bool:
        """Take what the process has said; return whether its answer is there."""
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
    """Judge logs that nothing is added to, several at a time; return an answer for each."""
    answers: dict[str, Findings | LogError] = {}
    waiting = list(dict.fromkeys(logs))[::-1]
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
            time.sleep(_PAUSE)
    return [answers[log] for log in logs]
