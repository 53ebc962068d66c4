"""Warnings about context managers that were created and never entered, and so did nothing."""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import CodeType


class Unentered:
    """Part of a context manager, whose destructor warns unless the manager was entered.

    The context manager has no destructor of its own: an exception of a signal handler in a
    destructor would be lost, and nearly every context manager is entered. Entering returns this
    object to `spare`, so that its destructor does not run either.
    """

    __slots__ = ("code", "position", "words")

    words: str  # the call, as users wrote it
    code: CodeType | None  # the code that created the manager; None: nothing to warn of
    position: int  # the instruction in `code`: cheaper than the line

    def __del__(self) -> None:
        code = getattr(self, "code", None)
        if code is None:
            return
        # Warn on the line of the creation: the place of the collection is arbitrary.
        line = code.co_firstlineno
        for begin, end, number in code.co_lines():
            if begin <= self.position < end and number is not None:
                line = number
        warnings.warn_explicit(
            f"{self.words} was never entered, so it did nothing: use it in a with statement",
            RuntimeWarning,
            code.co_filename,
            line,
        )


spare: list[Unentered] = []


def armed(words: str, depth: int) -> Unentered:
    """Return an armed warning for a context manager created `depth` calls above."""
    try:
        unentered = spare.pop()
    except IndexError:
        unentered = Unentered()
    frame = sys._getframe(depth + 1)
    unentered.words, unentered.position = words, frame.f_lasti
    unentered.code = frame.f_code  # last: from now on the destructor warns
    return unentered


def disarm(unentered: Unentered) -> None:
    """Disarm the warning and keep the object for reuse."""
    unentered.code = None
    spare.append(unentered)
