"""The stacks of a log, as lines of source."""

from __future__ import annotations

import re
from contextlib import suppress
from traceback import FrameSummary
from typing import TYPE_CHECKING

from .log import LIBRARY, OWN, PROGRAM, Code, frames_of, text_of

if TYPE_CHECKING:
    from .functions import Call


Place = tuple[int | None, int | None, int | None, int | None]  # line, last line, columns
_NOWHERE: Place = (None, None, None, None)


class Frame(FrameSummary):
    """A line of source, and whose it is: the program's, a library's or userstream's."""

    __slots__ = ("whose",)

    def __init__(  # noqa: PLR0917 -- logs and JSON have these in a row
        self,
        filename: str,
        line: int | None,
        name: str,
        whose: int,
        end_line: int | None = None,
        column: int | None = None,
        end_column: int | None = None,
    ) -> None:
        super().__init__(
            filename,
            line,
            name,
            lookup_line=False,
            end_lineno=end_line,
            colno=column,
            end_colno=end_column,
        )
        self.whose = whose


Stack = tuple[FrameSummary, ...]
_INSTALLED = re.compile(r"/(?:site|dist)-packages/(\w+)")
# Folders of the standard library, and of packages, wherever Python is installed.
_LIBRARIES = re.compile(
    r"<frozen|.*/(?:site|dist)-packages/|.*/lib(?:64)?/python3\.\d+/|.*/python3\d+\.zip/"
)


class Stacks:
    """The definitions of stacks and code objects. Each stack is worked out once."""

    def __init__(self) -> None:
        self.package = ""  # the folder of userstream in the observed process
        self._codes: dict[int, Code] = {}
        self._tables: dict[int, list[tuple[int, Place]]] = {}
        self._frames: dict[int, list[tuple[int, int]]] = {}
        self._stacks: dict[int, Stack] = {-1: ()}

    def define_code(self, call: Call) -> None:
        """Add a code object."""
        number, first_line = call.words
        file, name, lines = call.fetched
        self._codes[number] = Code(text_of(file), text_of(name), first_line & 0x7FFFFFFF, lines)

    def define_stack(self, call: Call) -> None:
        """Add a stack: codes, and the offsets in them, the innermost frame first."""
        self._frames[call.words[0]] = frames_of(call.fetched[0])

    def whose(self, filename: str) -> int:
        """Return whose code a file has: the program's, a library's or userstream's."""
        if self.package and filename.startswith(self.package):
            return OWN
        return LIBRARY if _LIBRARIES.match(filename) else PROGRAM

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
        found = _NOWHERE
        for end, candidate in table:
            found = candidate
            if place < end:
                break
        line, *columns = found
        return Frame(code.file, line, code.name, self.whose(code.file), *columns)


def line_of(stack: Stack) -> FrameSummary | None:
    """Return the frame to show: the program's innermost, else the innermost there is."""
    for frame in reversed(stack):
        if owner_of(frame) == PROGRAM:
            return frame
    for frame in reversed(stack):
        if owner_of(frame) != OWN:
            return frame
    return stack[-1] if stack else None


def short(line: FrameSummary) -> str:
    """Return the name of the file, without its folder, and the number of the line."""
    return f"{line.filename.rpartition('/')[2]}:{line.lineno}"


def library_of(stack: Stack) -> str:
    """Return the installed package, or userstream, that made a call for the program."""
    for frame in reversed(stack):
        whose = owner_of(frame)
        if whose == OWN:
            return "userstream"
        found = _INSTALLED.search(frame.filename)
        if whose == LIBRARY and found:
            return found[1]
        if whose == PROGRAM:
            break
    return ""


def owner_of(frame: FrameSummary) -> int:
    """Return whose the code of a frame is: `PROGRAM`, `LIBRARY` or `OWN`."""
    return frame.whose if isinstance(frame, Frame) else PROGRAM


def line_table(data: bytes, first_line: int) -> list[tuple[int, Place]]:
    """Read a table of locations (PEP 626 and 657): ends of entries, in bytes of code, and places.

    A table that ends within an entry gives the entries before it.
    """
    table: list[tuple[int, Place]] = []
    with suppress(IndexError):
        _read_entries(data, first_line, table)
    return table


def _read_entries(data: bytes, line: int, table: list[tuple[int, Place]]) -> None:
    at, end = 0, 0
    while at < len(data):
        kind = data[at] >> 3 & 15
        end += 2 * ((data[at] & 7) + 1)
        at += 1
        if kind == 15:  # no location
            table.append((end, _NOWHERE))
            continue
        lines, column, end_column = 0, None, None
        if kind in (13, 14):
            number, at = _number(data, at)
            line += -(number >> 1) if number & 1 else number >> 1
            if kind == 14:
                lines, at = _number(data, at)
                begin, at = _number(data, at)
                until, at = _number(data, at)
                # One more than the column; 0 if it is not known.
                column, end_column = begin - 1 if begin else None, until - 1 if until else None
        elif kind >= 10:
            line += kind - 10
            column, end_column = data[at], data[at + 1]
            at += 2
        else:
            column = kind << 3 | data[at] >> 4
            end_column = column + (data[at] & 15)
            at += 1
        table.append((end, (line, line + lines, column, end_column)))


def _number(data: bytes, at: int) -> tuple[int, int]:
    value, shift = 0, 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 63) << shift
        shift += 6
        if not byte & 64:
            return value, at
