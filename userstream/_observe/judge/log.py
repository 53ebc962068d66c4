"""The log of an observation: its records, how a judge reads them, and the stacks in them.

A log is a magic number and records, in the order of their numbers. All numbers are little-endian.
A definition comes before the first record that refers to it, and a log that was cut off ends with
its last whole record. The page *log format* of the documentation describes each type; the recorder
has the same types and numbers in `native/parts.h`, and a test compares them.
"""

from __future__ import annotations

import json
import re
import struct
from contextlib import suppress
from traceback import FrameSummary
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .functions import Call

MAGIC = b"uslog\r\n"
MAJOR = 2  # the byte after the magic; minor versions add types of records

# Records that are no calls: definitions and facts of the recorder.
HEADER = 0xFF00
FUNCTION = 0xFF01
THREAD = 0xFF02
THREAD_ENDS = 0xFF03
CODE = 0xFF04
STACK = 0xFF05
CONTEXT = 0xFF06
SEEN_STREAM = 0xFF07
SEEN_MEMORY = 0xFF08
SEEN_KERNEL = 0xFF09
LEARNED = 0xFF0A
SOURCE_CHANGED = 0xFF0B
NOT_COMPARED = 0xFF0C  # sources of copies that the host may overwrite unseen: how many
LOST = 0xFF0D  # records are missing here: how many until here
HELD = 0xFF0E  # a stream is held, for another operation to run first
MARKED = 0xFF0F  # that operation was queued
# Notes of Python, in the order of the calls.
DECLARED = 0xFF10
DECLARED_NO_MORE = 0xFF11
NAMES = 0xFF12
BLOCK = 0xFF13
BLOCKS = 0xFF14
UNSEEN = 0xFF15
QUESTION = 0xFF16
END = 0xFF17
HOST_WAITS = 0xFF18
NO_STALLS = 0xFF19
STALLS_ALLOWED = 0xFF1A
RELEASED = 0xFF1B  # the stream goes on
TIMED_OUT = 0xFF1C  # notes of Python as well
BLOCK_FREED = 0xFF1D
NOT_HELD = 0xFF1E  # the driver refused to hold a stream

HEAD = struct.Struct("<IHBBQIiQQQiH2x")
_LENGTH = struct.Struct("<Q")
_PAIR = struct.Struct("<II")
PIECE = 1 << 18  # bytes that are read at once

# Whose code a frame runs.
PROGRAM, LIBRARY, OWN = range(3)


class LogError(Exception):
    """A file is not a log, or a log of a version that this judge cannot read."""


class Code(NamedTuple):
    """A code object, as stacks refer to it."""

    file: str
    name: str
    first_line: int
    lines: bytes  # the table of locations


class Source(Protocol):
    """A source of the bytes of a log."""

    def read(self, size: int, /) -> bytes:
        """Return at most `size` bytes as soon as some have come; no bytes at the end of the log."""


class Taker(Protocol):
    """A taker of records: a judge."""

    end: str | None  # why the recording ended, once it has

    def take(self, data: bytes) -> int:
        """Apply the whole records at the begin of some bytes; return how many bytes they have."""


def read_log(source: Source, judge: Taker) -> Iterator[None]:
    """Pass a log to a judge, a piece at a time.

    Raises
    ------
    LogError
        This is no log, or of a version that is not known.
    """
    head = b""
    while len(head) <= len(MAGIC) and (data := source.read(len(MAGIC) + 1 - len(head))):
        head += data
    check_magic(head)
    rest = b""
    while judge.end is None and (data := source.read(PIECE)):
        rest += data
        rest = rest[judge.take(rest) :]
        yield


def check_magic(head: bytes) -> None:
    """Raise `LogError` unless these are the first eight bytes of a log that can be read."""
    if len(head) <= len(MAGIC) or head[:-1] != MAGIC:
        raise LogError("this is no log of `python -m userstream observe --log`")
    if head[-1] != MAJOR:
        raise LogError(
            f"this log has version {head[-1] or 1} of the format, and this judge reads version "
            f"{MAJOR}: judge it with the userstream that recorded it, or a later one"
        )


def parts_of(data: bytes, at: int, end: int) -> list[bytes]:
    """Return the parts of a record, which lie behind its words: each has its length before it."""
    parts = []
    while at < end:
        (length,) = _LENGTH.unpack_from(data, at)
        at += 8
        parts.append(data[at : at + length])
        at += length + 7 & ~7
    return parts


def text_of(part: bytes) -> str:
    """Return a text: UTF-8, in which names of files may have parts of other encodings."""
    try:
        return part.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return part.decode("utf-8", "surrogateescape")


def header_of(part: bytes) -> dict[str, Any]:
    """Return the facts of a header: texts by name, and the arguments of the command."""
    texts = [text_of(each) for each in part.split(b"\0")]
    pairs = list(zip(texts[::2], texts[1::2], strict=False))
    return {**dict(pairs), "command": [value for name, value in pairs if name == "command"]}


def frames_of(part: bytes) -> list[tuple[int, int]]:
    """Return the codes of a stack and the offsets in them, the innermost frame first."""
    return list(_PAIR.iter_unpack(part))


def json_of(parts: list[bytes]) -> Any:
    """Return the data of a note that Python wrote."""
    return json.loads(parts[0])


# -- Stacks, as lines of source --------------------------------------------------------------------

Place = tuple[int | None, int | None, int | None, int | None]  # line, last line, columns
_NOWHERE: Place = (None, None, None, None)


class Frame(FrameSummary):
    """A line of source of the program, of a library or of userstream."""

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
        """Return the owner of the code in a file: the program, a library or userstream."""
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
    """Return the owner of the code of a frame: `PROGRAM`, `LIBRARY` or `OWN`."""
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
