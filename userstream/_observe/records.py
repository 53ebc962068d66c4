"""What the logger writes down, read back: one `Call` for each."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from userstream._observe.functions import Function

# Functions that no driver has: the logger tells of what it meets for the first time.
SEEN_MEMORY = 0xFFFE
SEEN_STREAM = 0xFFFD
SOURCE_CHANGED = 0xFFFC
SEEN_KERNEL = 0xFFFB
LEARNED = 0xFFFA
# And what else is noted in the order of the calls.
DECLARED = 0xFFF9
DECLARED_NO_MORE = 0xFFF8

_HEAD = struct.Struct("<IHBBiiQQQQQ")
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

    def __init__(  # noqa: PLR0917 -- made for each call: keywords would take longer
        self,
        what: int,
        leaving: bool,
        result: int,
        stack: int,
        thread: int,
        began: int,
        ended: int,
        context: int,
        number: int,
        words: tuple[int, ...],
        fetched: list[bytes],
    ) -> None:
        self.what = what  # the maker's number of the function
        self.leaving = leaving
        self.result = result
        self.stack = stack
        self.thread = thread
        self.began = began  # nanoseconds
        self.ended = ended
        self.context = context
        self.number = number
        self.words = words
        self.fetched = fetched
        self.entry = -1  # in the timeline


def read(chunk: bytes) -> Iterator[Call]:
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
        yield Call(
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
