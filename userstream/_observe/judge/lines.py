"""Lines of a report: the same words as plain text and on a terminal."""

from __future__ import annotations

import linecache
import os
import re
import textwrap
import unicodedata
from bisect import bisect_left, bisect_right
from itertools import accumulate
from typing import IO, TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from traceback import FrameSummary

_COLORS = {
    "error": "1;31",
    "warning": "1;33",
    "title": "1",
    "first": "1;34",
    "second": "1;31",
    "fix": "1;32",
    "faint": "2",
}
_NARROWEST = 40  # columns: a narrower terminal gets lines that do not fit
_WIDEST = 160  # columns of a line of source if the width is not known
_BEFORE = 8  # columns of source that stay visible before the underlined part of a line that is cut
# Characters that control a terminal, end a line or change the direction of text, and surrogates,
# which are in no encoding. A tab does no harm.
CONTROLS = re.compile(
    r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


class Style(NamedTuple):
    """Style of printed lines: the width of the terminal, if any, and the use of color."""

    width: int | None = None
    color: bool = False


PLAIN = Style()


class Text(NamedTuple):
    """A line of words, whose first `marked` characters have the color of a role."""

    text: str
    role: str = ""
    marked: int | None = None  # all of them
    wraps: bool = True


class Source(NamedTuple):
    """A line of source without its indent, of which the part from `start` to `end` is marked."""

    number: int
    text: str
    start: int
    end: int
    role: str
    indent: int = 0


Line = Text | Source


def style_of(file: IO[Any] | int, environment: Mapping[str, str] = os.environ) -> Style:
    """Return the style for a file: colors and a width on a terminal alone.

    `NO_COLOR` and `FORCE_COLOR` decide on colors, whatever their values, unless they are empty.
    """
    try:
        descriptor = file if isinstance(file, int) else file.fileno()
    except (OSError, ValueError):  # closed, or not a file of the system
        return PLAIN
    is_terminal = os.isatty(descriptor)
    color = is_terminal and environment.get("TERM") != "dumb"
    if environment.get("NO_COLOR"):
        color = False
    elif environment.get("FORCE_COLOR"):
        color = True
    if not is_terminal:
        return Style(None, color)
    columns = environment.get("COLUMNS", "")
    width = int(columns) if columns.isdecimal() else os.get_terminal_size(descriptor).columns
    return Style(max(width, _NARROWEST) if width else None, color)


def excerpt(frame: FrameSummary, role: str) -> list[Line]:
    """Return the source of a frame, if its file can be read, with the call underlined."""
    number = frame.lineno
    if number is None or not _may_be_read(frame.filename):
        return []
    whole = linecache.getline(frame.filename, number).rstrip()
    text = whole.lstrip()
    if not text:
        return []
    indent = len(whole) - len(text)
    start, end = (_characters(whole, column) for column in (frame.colno, frame.end_colno))
    if start is None or end is None:
        return [Source(number, text, 0, 0, role, indent)]
    if (frame.end_lineno or number) > number:  # the call goes on in the next line
        end = len(whole)
    return [Source(number, text, max(start - indent, 0), max(end - indent, 0), role, indent)]


def _may_be_read(file: str) -> bool:
    """Return whether a file is a regular one or none: reading a pipe would block."""
    return "\0" not in file and (os.path.isfile(file) or not os.path.exists(file))


def _characters(text: str, column: int | None) -> int | None:
    """Return a column, which Python counts in bytes of UTF-8, in characters."""
    return None if column is None else len(text.encode()[:column].decode(errors="replace"))


def printable(text: str) -> str:
    r"""Return a text with escapes, such as ``\x1b``, in place of control characters."""
    return CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def render(lines: Iterable[Line], style: Style = PLAIN) -> str:
    """Return lines as text."""
    written: list[str] = []
    for line in lines:
        written += _source(line, style) if isinstance(line, Source) else _text(line, style)
    return "\n".join(written)


def _text(line: Text, style: Style) -> list[str]:
    text = printable(line.text)
    parts = [text]
    if style.width is not None and line.wraps and len(text) > style.width:
        indent = " " * (len(text) - len(text.lstrip()) + 4)
        parts = textwrap.wrap(
            text,
            style.width,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
    if not line.role:
        return parts
    if line.marked is None:
        return [_colored(part, line.role, style) for part in parts]
    first, *rest = parts
    marked = _colored(first[: line.marked], line.role, style)
    return [marked + first[line.marked :], *rest]


def _source(line: Source, style: Style) -> list[str]:
    number = f"{line.number:>6}"
    # Each character is escaped by itself: the marked part moves by what comes before.
    whole, before, until = (
        printable(part).expandtabs(1)
        for part in (line.text, line.text[: line.start], line.text[: line.end])
    )
    room = (style.width or _WIDEST) - len(number) - 3
    text, start, end = _cut(whole, len(before), len(until), room)
    said = [f"{_colored(number + ' |', 'faint', style)} {text}"]
    if end > start:
        columns = _columns(text[:start])
        mark = _colored("^" * max(_columns(text[start:end]), 1), line.role, style)
        said.append(f"{_colored(' ' * len(number) + ' |', 'faint', style)} {' ' * columns}{mark}")
    return said


def _cut(text: str, start: int, end: int, room: int) -> tuple[str, int, int]:
    """Return the piece of a text that fits, and where its marked part is in it."""
    columns = [0, *accumulate(map(_width, text))]  # before each character
    if columns[-1] <= room:
        return text, start, end
    begin = bisect_left(columns, min(columns[start] - _BEFORE, columns[-1] - room))
    stop = bisect_right(columns, columns[begin] + room) - 1
    cut = text[begin:stop]
    cut = f"…{cut[1:]}" if begin else cut
    cut = f"{cut[:-1]}…" if stop < len(text) else cut
    return cut, max(start - begin, 0), min(end - begin, len(cut))


def _columns(text: str) -> int:
    """Return how many columns of a terminal a text takes."""
    return sum(map(_width, text))


def _width(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):  # drawn on the one before, or not
        return 0
    return 2 if unicodedata.east_asian_width(character) in "FW" else 1


def _colored(text: str, role: str, style: Style) -> str:
    return f"\x1b[{_COLORS[role]}m{text}\x1b[0m" if style.color and text else text
