"""The processes below this one, and which of them used CUDA without being recorded."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Container

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
        """Look for processes that use CUDA and are not `recorded`, where that is due, or `now`."""
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
