"""The logs of a run, which are judged while they grow."""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from .descendants import Process, is_alive
from .findings import Findings
from .log import LogError
from .workers import MOST, Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

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
        self.answers: dict[str, Findings | LogError] = {}
        self.processes: dict[Process, str] = {}  # the recorded ones, with the names of their logs
        self.refused: dict[Process, str] = {}  # those that could not record, and why

    def look(self) -> None:
        """Begin to judge new logs, and take what judges say."""
        self.find()
        while self._waiting and len(self._running) < MOST:
            name = self._waiting.pop(0)
            self._running[name] = Worker(os.path.join(self._directory, name), self._options)
        for name, worker in [*self._running.items()]:
            if not is_alive(_process_of(name)):
                self._finish(name)
            if worker.look():
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
        """Judge what is left, until an interrupt."""
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

    @property
    def judges(self) -> set[int]:
        """The processes of the judges."""
        return {worker.pid for worker in self._running.values()}

    def progress(self) -> tuple[int, int]:
        """Return how many calls were judged until now, and how many races were found."""
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
