"""The stacks that the logger took, as lines of source."""

from __future__ import annotations

import os
import sysconfig
from contextlib import suppress
from traceback import FrameSummary
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from userstream._observe.logger import Logger

_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARIES = tuple(
    {os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib", "purelib")}
)
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")

Stack = tuple[FrameSummary, ...]


def is_own(filename: str) -> bool:
    """Tell whether a file is userstream's."""
    return filename.startswith(_OWN)


def _is_program(filename: str) -> bool:
    """Tell whether a file is the program's, and not of a library that it uses."""
    if filename.startswith(("<frozen", _OWN)):
        return False
    return not filename.startswith(_LIBRARIES) and not any(part in filename for part in _INSTALLED)


class Stacks:
    """Works out each stack once."""

    def __init__(self, logger: Logger) -> None:
        self._logger = logger
        self._codes: dict[int, tuple[str, str, list[tuple[int, int | None]]]] = {}
        self._stacks: dict[int, Stack] = {-1: ()}

    def __getitem__(self, index: int) -> Stack:
        """Return the frames, the innermost last as in a traceback."""
        found = self._stacks.get(index)
        if found is None:
            frames = [self._frame(code, place) for code, place in self._logger.stack(index)]
            found = self._stacks[index] = tuple(reversed(frames))
        return found

    def _frame(self, code: int, place: int) -> FrameSummary:
        known = self._codes.get(code)
        if known is None:
            filename, name, lines, first_line = self._logger.code(code)
            known = self._codes[code] = (filename, name, line_table(lines, first_line))
        filename, name, table = known
        line = None
        for end, candidate in table:
            line = candidate
            if place < end:
                break
        return FrameSummary(filename, line, name, lookup_line=False)


def line_of(stack: Stack) -> FrameSummary | None:
    """Return the frame to show: the program's innermost, else the innermost there is."""
    for frame in reversed(stack):
        if _is_program(frame.filename):
            return frame
    for frame in reversed(stack):
        if not is_own(frame.filename):
            return frame
    return stack[-1] if stack else None


def line_table(data: bytes, first_line: int) -> list[tuple[int, int | None]]:
    """Read a table of locations (PEP 626): where an entry ends, in bytes of code, and its line.

    A table that ends within an entry gives the entries before it.
    """
    table: list[tuple[int, int | None]] = []
    with suppress(IndexError):
        _read_entries(data, first_line, table)
    return table


def _read_entries(data: bytes, line: int, table: list[tuple[int, int | None]]) -> None:
    at, end = 0, 0
    while at < len(data):
        kind = data[at] >> 3 & 15
        end += 2 * ((data[at] & 7) + 1)
        at += 1
        if kind == 15:  # no location
            table.append((end, None))
            continue
        if kind in (13, 14):
            number, at = _number(data, at)
            line += -(number >> 1) if number & 1 else number >> 1
            for _ in range(3 if kind == 14 else 0):
                _, at = _number(data, at)
        elif kind >= 10:
            line += kind - 10
            at += 2
        else:
            at += 1
        table.append((end, line))


def _number(data: bytes, at: int) -> tuple[int, int]:
    value, shift = 0, 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 63) << shift
        shift += 6
        if not byte & 64:
            return value, at
