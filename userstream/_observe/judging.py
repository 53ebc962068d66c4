"""Places where a log is judged: in this process, in another one, or later."""

from __future__ import annotations

import fcntl
import json
import signal
import socket
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from userstream._observe.judge import Judge, log
from userstream._observe.judge.findings import Findings, from_json
from userstream._observe.judge.workers import ANSWER, started

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from userstream._observe.judge.trials import Pair

    Answer = Callable[[int, Findings], object]  # to the question with a number

_LEAST_NUMBER = 500  # of a descriptor
_FINDINGS = b'{"Findings"'  # begins the answer at the end
_PIECE = 1 << 18  # bytes that are received at once


class Judging(Protocol):
    """Interface to a judge, wherever it is. Only the thread of the session calls it meanwhile."""

    is_here: bool  # it gets the log by `receive`

    @property
    def is_gone(self) -> bool:
        """True if the judge has ended too early, and answers no more questions."""

    def open(self) -> int:
        """Return the socket of a judge in another process; -1 for none."""

    def began(self, answer: Answer) -> None:
        """Continue after the start of the recorder, which now has a duplicate of the socket."""

    def receive(self, data: bytes) -> None:
        """Take a piece of the log, or of the answers of a judge in another process."""

    def close(self) -> None:
        """Take the last answer of a judge in another process. The log has ended."""

    def forked(self) -> None:
        """Leave the judge to the parent process."""

    def answers(self) -> bool:
        """Return whether the judge answers questions that come in the log."""

    def findings(self, operations: int) -> Findings:
        """Return the findings of the whole log, once it has ended."""

    def orders(self) -> list[Pair | int]:
        """Return the trials for the recorder; see `Judge.orders`."""


class InThread:
    """Judges in the thread of the session."""

    is_here = True
    is_gone = False

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.judge = Judge(**options)
        self._rest = b""
        self._has_begun = False

    def open(self) -> int:
        return -1

    def began(self, answer: Answer) -> None:
        self.judge.asked = lambda told: answer(told["number"], self.findings(told["operations"]))

    def receive(self, data: bytes) -> None:
        self._rest += data
        if not self._has_begun:
            if len(self._rest) <= len(log.MAGIC):
                return
            self._rest = self._rest[len(log.MAGIC) + 1 :]
            self._has_begun = True
        self._rest = self._rest[self.judge.take(self._rest) :]

    def close(self) -> None:
        pass

    def forked(self) -> None:
        pass

    def answers(self) -> bool:
        return True

    def findings(self, operations: int) -> Findings:
        return self.judge.findings(operations=operations)

    def orders(self) -> list[Pair | int]:
        return self.judge.orders()


class InProcess:
    """Judges in a process of its own, to which the recorder sends the log without the GIL.

    If the process ends too early, what it has answered stays, with a sentence that says so.
    """

    is_here = False

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = json.dumps(options)
        self._said = bytearray()  # the begin of a line
        self._found: Findings | None = None  # the last answer
        self._last: bytearray | None = None  # the one at the end, in JSON until somebody asks
        self._is_whole = False  # it is that one
        self._error: str | None = None
        self._answer: Answer | None = None
        self._socket: socket.socket | None = None

    @property
    def is_gone(self) -> bool:
        return self._error is not None or self._process.poll() not in (None, 0)

    def open(self) -> int:
        mine, its = socket.socketpair()
        with mine, its:
            # A number that a program does not close with those of its own files.
            number = fcntl.fcntl(mine.fileno(), fcntl.F_DUPFD_CLOEXEC, _LEAST_NUMBER)
            self._socket = kept = socket.socket(fileno=number)
            self._process = started(ANSWER, stdin=its.fileno(), stdout=its.fileno())
        with suppress(OSError):  # it has ended, as `close` will find
            kept.sendall(f"{self._options}\n".encode())
        return number

    def began(self, answer: Answer) -> None:
        self._answer = answer

    def receive(self, data: bytes) -> None:
        self._said += data
        if b"\n" in data:
            *lines, self._said = self._said.split(b"\n")
            for line in lines:
                self._take(line)

    def _take(self, line: bytearray) -> None:
        if line.startswith(_FINDINGS):
            self._last = line
            return
        told = from_json(line)
        if "error" in told:
            self._error = told["error"]
        else:
            self._found = told["findings"]
            if self._answer is not None:
                self._answer(told["number"], told["findings"])

    def close(self) -> None:
        if self._answer is None:  # the recorder has not begun
            self._process.kill()
        assert self._socket is not None
        with suppress(OSError), self._socket as connection:  # the program may have closed it
            connection.shutdown(socket.SHUT_WR)
            while data := connection.recv(_PIECE):
                self.receive(data)
        self._process.wait()
        self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise RuntimeError(self._error)

    def forked(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def answers(self) -> bool:
        return True

    def findings(self, operations: int) -> Findings:  # noqa: ARG002 -- it has said what it has
        self._check()
        last = self._last
        if last is not None:  # several threads may come here
            self._found, self._is_whole = from_json(last), True
            self._last = None
        found = self._found or Judge().findings()
        if self._is_whole:
            return found
        status = self._process.wait()
        how = f"status {status}" if status >= 0 else signal.Signals(-status).name
        calls = sum(found.calls.values())
        said = f"what came after {calls:,} calls: the process of the judge has ended ({how})"
        return replace(found, not_seen=(*found.not_seen, said))

    def orders(self) -> list[Pair | int]:
        return []


class Later:
    """Leaves the log to a later ``userstream judge``."""

    is_here = False
    is_gone = False

    def open(self) -> int:
        return -1

    def began(self, answer: Answer) -> None:
        pass

    def receive(self, data: bytes) -> None:
        pass

    def close(self) -> None:
        pass

    def forked(self) -> None:
        pass

    def answers(self) -> bool:
        return False

    def findings(self, operations: int) -> Findings:  # noqa: ARG002 -- that of all judges
        raise RuntimeError(
            'this observation is only recorded, as judge="later" asks for: judge its log with '
            "`python -m userstream judge`"
        )

    def orders(self) -> list[Pair | int]:
        return []
