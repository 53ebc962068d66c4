"""Lines of a report: the same words as plain text and on a terminal."""

from __future__ import annotations

import linecache
import os
import textwrap
import unicodedata
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
_BEFORE = 8  # columns of source that stay visible before the underlined part of a line that is cut


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
    if number is None:
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


def _characters(text: str, column: int | None) -> int | None:
    """Return a column, which Python counts in bytes of UTF-8, in characters."""
    return None if column is None else len(text.encode()[:column].decode(errors="replace"))


def render(lines: Iterable[Line], style: Style = PLAIN) -> str:
    """Return lines as text."""
    written: list[str] = []
    for line in lines:
        written += _source(line, style) if isinstance(line, Source) else _text(line, style)
    return "\n".join(written)


def _text(line: Text, style: Style) -> list[str]:
    parts = [line.text]
    if style.width is not None and line.wraps and len(line.text) > style.width:
        indent = " " * (len(line.text) - len(line.text.lstrip()) + 4)
        parts = textwrap.wrap(
            line.text,
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
    text, start, end = line.text, line.start, line.end
    room = None if style.width is None else style.width - len(number) - 3
    if room is not None and len(text) > room:
        begin = max(0, min(start - _BEFORE, len(text) - room))
        cut = text[begin : begin + room]
        cut = f"…{cut[1:]}" if begin else cut
        text = f"{cut[:-1]}…" if begin + room < len(text) else cut
        start, end = max(start - begin, 0), min(end - begin, room)
    said = [f"{_colored(number + ' |', 'faint', style)} {text.expandtabs(1)}"]
    if end > start:
        before, marked = _columns(text[:start]), max(_columns(text[start:end]), 1)
        mark = _colored("^" * marked, line.role, style)
        said.append(f"{_colored(' ' * len(number) + ' |', 'faint', style)} {' ' * before}{mark}")
    return said


def _columns(text: str) -> int:
    """Return how many columns of a terminal a text takes."""
    return sum(
        0 if unicodedata.combining(each) else 2 if unicodedata.east_asian_width(each) in "FW" else 1
        for each in text
    )


def _colored(text: str, role: str, style: Style) -> str:
    return f"\x1b[{_COLORS[role]}m{text}\x1b[0m" if style.color and text else text
