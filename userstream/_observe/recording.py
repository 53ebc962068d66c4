"""The records and definitions of one observation, as the blocks of a log."""

from __future__ import annotations

import os
import platform
import sys
import sysconfig
import threading
import time
from typing import TYPE_CHECKING, Any

from userstream._driver import contexts, library
from userstream._observe.judge import log
from userstream._observe.judge.log import LIBRARY, OWN, PROGRAM, Block, Code
from userstream._observe.judge.stacks import Stacks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from userstream._observe.judge.functions import Function
    from userstream._observe.judge.stacks import Stack
    from userstream._observe.logger import Logger

_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARIES = tuple(
    {os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib", "purelib")}
)
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_THREADS_EVERY = 1.0  # seconds between two lists of the threads that are alive


def whose(filename: str) -> int:
    """Return whose code a file has: the program's, a library's or userstream's."""
    if filename.startswith(_OWN):
        return OWN
    if filename.startswith(("<frozen", *_LIBRARIES)) or any(
        part in filename for part in _INSTALLED
    ):
        return LIBRARY
    return PROGRAM


class Recording:
    """Reads the recorder, and puts the definitions before the records that refer to them."""

    def __init__(self, logger: Logger, functions: Mapping[int, tuple[str, Function]]) -> None:
        self.unseen: Callable[[], list[str]] = list  # what others could not record
        self._lost = 0  # records that did not fit
        self._logger = logger
        self._functions = dict(functions)
        self._codes: set[int] = set()
        self._facts: dict[str, dict[int, Any]] = {}
        self._unseen: list[str] = []
        self._threads_at = 0.0
        self._began = time.monotonic()

    def header(self) -> Block:
        """Return the first block of the log."""
        return log.block(
            log.HEADER,
            {
                "format": (log.MAJOR, log.MINOR),
                "userstream": sys.modules["userstream"].__version__,
                "python": platform.python_version(),
                "platform": platform.platform(),
                "pid": os.getpid(),
                "rank": os.environ.get("RANK"),
                "command": sys.orig_argv,
                "directory": _directory(),
                "driver": library.version_text(),
                "time_ns": time.time_ns(),
                "monotonic_ns": time.monotonic_ns(),
                "functions": log.functions_block(self._functions),
            },
        )

    def read(self) -> tuple[list[Block], int]:
        """Return what was recorded since the last call, and how many chunks are left.

        There are no blocks if nothing was recorded.
        """
        records, lost, left = self._logger.read()
        if not records:
            return [], left
        blocks = [*self._definitions(), Block(log.RECORDS, records)]
        self._lost = lost
        unseen = self._not_recorded()
        if unseen != self._unseen:
            self._unseen = unseen
            blocks.append(log.block(log.UNSEEN, unseen))
        return blocks, left

    def end(self, reason: str) -> list[Block]:
        """Return the last blocks of the log."""
        return [
            log.block(log.UNSEEN, self._not_recorded()),
            log.block(log.END, {"seconds": time.monotonic() - self._began, "reason": reason}),
        ]

    def _definitions(self) -> Iterator[Block]:
        stacks = list(self._logger.new_stacks())
        codes = {code for _, frames in stacks for code, _ in frames} - self._codes
        if codes:
            self._codes |= codes
            yield log.codes_block(_code(self._logger, number) for number in sorted(codes))
        if stacks:
            yield log.stacks_block(stacks)
        facts = self._new_facts()
        if any(facts.values()):
            yield log.block(log.FACTS, facts)
        now = time.monotonic()
        if now - self._threads_at > _THREADS_EVERY:
            self._threads_at = now
            yield log.block(log.THREADS, sorted(map(int, os.listdir("/proc/self/task"))))

    def _new_facts(self) -> dict[str, dict[int, Any]]:
        """Return the facts that differ from what was returned before."""
        facts: dict[str, dict[int, Any]] = {
            "streams": _names_of_streams(),
            "devices": contexts.devices_of_primaries.copy(),
            "primaries": contexts.primaries_of_green.copy(),
            "threads": {
                thread.native_id: thread.name
                for thread in threading.enumerate()
                if thread.native_id is not None
            },
        }
        known, self._facts = self._facts, facts
        return {
            what: {
                key: value for key, value in found.items() if known.get(what, {}).get(key) != value
            }
            for what, found in facts.items()
        }

    def _not_recorded(self) -> list[str]:
        found = self.unseen()
        if self._lost:
            found.insert(0, f"calls that came faster than they could be analyzed ({self._lost})")
        without_stack = self._logger.without_stack()
        if without_stack:
            found.append(f"lines of calls with more different stacks than fit ({without_stack})")
        if not self._logger.has_stacks:
            found.append("lines: the frames of this interpreter cannot be read")
        return found


def stack_of(logger: Logger, number: int) -> Stack:
    """Return the frames of a stack of the recorder, without the log."""
    stacks, frames = Stacks(), logger.stack(number)
    for code, _ in frames:
        stacks.define_code(_code(logger, code))
    stacks.define_stack(number, frames)
    return stacks[number]


def _code(logger: Logger, number: int) -> Code:
    file, name, lines, first_line = logger.code(number)
    return Code(number, file, name, first_line, lines, whose(file))


def _directory() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return None


def _names_of_streams() -> dict[int, str]:
    """Return the names of the user streams, by their handles."""
    # No import: this is another thread, and the main one may be in the middle of an import.
    registry = sys.modules.get("userstream._registry")
    if registry is None:
        return {}
    return {
        int(stream.handle): f"user stream {name!r}" if name else "the user stream"
        for (_, name), stream in registry.UserStream.get().streams().items()
        if not stream.is_closed
    }
