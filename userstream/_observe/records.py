"""What the logger writes down, read back: one `Record` for each call."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

# Functions that no driver has: the logger tells of what it meets for the first time.
SEEN_MEMORY = 0xFFFE
SEEN_STREAM = 0xFFFD
SOURCE_CHANGED = 0xFFFC
SEEN_KERNEL = 0xFFFB
LEARNED = 0xFFFA

_HEAD = struct.Struct("<IHBBiiQQQQQ")
_LENGTH = struct.Struct("<Q")


class Record(NamedTuple):
    """One driver call of the program, at its begin or its end."""

    function: int
    leaving: bool
    result: int
    stack: int
    thread: int
    began: int  # nanoseconds
    ended: int
    context: int
    number: int
    words: tuple[int, ...]
    fetched: list[bytes]


def read(chunk: bytes) -> Iterator[Record]:
    """Read what the logger gave."""
    at = 0
    while at < len(chunk):
        (size, function, site, count, result, stack, thread, began, ended, context, number) = (
            _HEAD.unpack_from(chunk, at)
        )
        words = struct.unpack_from(f"<{count}Q", chunk, at + _HEAD.size)
        end = at + size
        at += _HEAD.size + 8 * count
        fetched = []
        while at < end:
            (length,) = _LENGTH.unpack_from(chunk, at)
            fetched.append(chunk[at + 8 : at + 8 + length])
            at += 8 + (length + 7 & ~7)
        yield Record(
            function,
            site == 1,
            result,
            stack,
            thread,
            began,
            ended,
            context,
            number,
            words,
            fetched,
        )
