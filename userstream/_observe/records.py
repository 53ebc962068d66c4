"""What the logger writes down, read back: one `Call` for each."""

from __future__ import annotations

import functools
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from userstream._observe.functions import Function

# Functions that no driver has: the logger reports what it meets for the first time.
SEEN_MEMORY = 0xFFFE
SEEN_STREAM = 0xFFFD
SOURCE_CHANGED = 0xFFFC
SEEN_KERNEL = 0xFFFB
LEARNED = 0xFFFA
# And what else is noted in the order of the calls.
DECLARED = 0xFFF9
DECLARED_NO_MORE = 0xFFF8

_HEAD = "<IHBBiiQQQQQ"
_COUNT = 7  # where it says how many words follow
_LENGTH = struct.Struct("<Q")


class Call:
    """One driver call of the program, at its begin or its end."""

    __slots__ = (
        "began",
        "context",
        "ended",
        "entry",
        "fetched",
        "function",
        "leaving",
        "name",
        "number",
        "result",
        "stack",
        "thread",
        "what",
        "words",
    )

    # Of what was called, which the engine knows.
    name: str
    function: Function

    def __init__(self, parts: tuple[int, ...], fetched: list[bytes]) -> None:
        (
            _,
            self.what,  # the maker's number of the function
            site,
            _,
            self.result,
            self.stack,
            self.thread,
            self.began,  # nanoseconds
            self.ended,
            self.context,
            self.number,
            *self.words,
        ) = parts
        self.leaving = site == 1
        self.fetched = fetched
        self.entry = -1  # in the timeline


def read(chunk: bytes) -> Iterator[Call]:
    """Read what the logger gave."""
    at, until = 0, len(chunk)
    while at < until:
        layout = _layout(chunk[at + _COUNT])
        parts = layout.unpack_from(chunk, at)
        end = at + parts[0]
        at += layout.size
        fetched = []
        while at < end:
            (length,) = _LENGTH.unpack_from(chunk, at)
            at += 8
            fetched.append(chunk[at : at + length])
            at += length + 7 & ~7
        yield Call(parts, fetched)


@functools.cache
def _layout(words: int) -> struct.Struct:
    """Return how a record with so many words begins: compiled once, for there are millions."""
    return struct.Struct(f"{_HEAD}{words}Q")
