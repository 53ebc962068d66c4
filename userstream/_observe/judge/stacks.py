"""The stacks of a log, as lines of source."""

from __future__ import annotations

from contextlib import suppress
from traceback import FrameSummary
from typing import TYPE_CHECKING

from .log import OWN, PROGRAM

if TYPE_CHECKING:
    from .log import Code


class Frame(FrameSummary):
    """A line of source, and whose it is: the program's, a library's or userstream's."""

    __slots__ = ("whose",)

    def __init__(self, filename: str, line: int | None, name: str, whose: int) -> None:
        super().__init__(filename, line, name, lookup_line=False)
        self.whose = whose


Stack = tuple[FrameSummary, ...]


class Stacks:
    """The definitions of stacks and code objects. Each stack is worked out once."""

    def __init__(self) -> None:
        self._codes: dict[int, Code] = {}
        self._tables: dict[int, list[tuple[int, int | None]]] = {}
        self._frames: dict[int, list[tuple[int, int]]] = {}
        self._stacks: dict[int, Stack] = {-1: ()}

    def define_code(self, code: Code) -> None:
        """Add a code object."""
        self._codes[code.number] = code

    def define_stack(self, number: int, frames: list[tuple[int, int]]) -> None:
        """Add a stack: codes, and the offsets in them, the innermost frame first."""
        self._frames[number] = frames

    def __getitem__(self, number: int) -> Stack:
        """Return the frames, the innermost last as in a traceback."""
        found = self._stacks.get(number)
        if found is None:
            if number not in self._frames:
                return ()
            frames = [self._frame(code, place) for code, place in self._frames[number]]
            found = self._stacks[number] = tuple(reversed(frames))
        return found

    def _frame(self, number: int, place: int) -> Frame:
        code = self._codes[number]
        table = self._tables.get(number)
        if table is None:
            table = self._tables[number] = line_table(code.lines, code.first_line)
        line = None
        for end, candidate in table:
            line = candidate
            if place < end:
                break
        return Frame(code.file, line, code.name, code.whose)


def line_of(stack: Stack) -> FrameSummary | None:
    """Return the frame to show: the program's innermost, else the innermost there is."""
    for frame in reversed(stack):
        if _whose(frame) == PROGRAM:
            return frame
    for frame in reversed(stack):
        if _whose(frame) != OWN:
            return frame
    return stack[-1] if stack else None


def _whose(frame: FrameSummary) -> int:
    return frame.whose if isinstance(frame, Frame) else PROGRAM


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
