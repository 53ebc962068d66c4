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

_HEAD = struct.Struct("<IHBBhBxiQQQQQ")
_LENGTH = struct.Struct("<Q")
# Accounts: whose wait or query a call is. A test compares the numbers with `_driver.account`.
PROGRAM = 0  # the program has waited, or has asked
FUTURE = 1  # a future was told: the program may have looked at it, which cannot be seen
HOUSEKEEPING = 2  # the program does not hear the answer

_LEAVING = 1  # the site of a call that comes back


class Call:
    """One driver call of the program, at its begin or its end."""

    __slots__ = (
        "account",
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

    def __init__(  # noqa: PLR0917 -- made for each record: keywords would take longer
        self,
        what: int,
        leaving: bool,
        result: int,
        account: int,
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
        self.account = account  # on which the thread made the call
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
    at, until = 0, len(chunk)
    while at < until:
        size, what, site, count, result, account, stack, thread, began, ended, context, number = (
            _HEAD.unpack_from(chunk, at)
        )
        end = at + size
        at += _HEAD.size
        words = _words(count).unpack_from(chunk, at)
        at += 8 * count
        fetched = []
        while at < end:
            (length,) = _LENGTH.unpack_from(chunk, at)
            at += 8
            fetched.append(chunk[at : at + length])
            at += length + 7 & ~7
        leaving = site == _LEAVING
        yield Call(
            what,
            leaving,
            result,
            account,
            stack,
            thread,
            began,
            ended,
            context,
            number,
            words,
            fetched,
        )


@functools.cache
def _words(count: int) -> struct.Struct:
    """Return how so many words are read: compiled once, for there are millions."""
    return struct.Struct(f"<{count}Q")
