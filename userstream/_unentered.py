"""What warns of a context manager that was made and never entered, which does nothing."""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import CodeType


class Unentered:
    """Part of a context manager until that is entered; warns if it goes before.

    The context manager has no destructor of its own: what a signal handler raises in a destructor
    is lost, and nearly every context manager is entered. Entering puts this back into `spare`, so
    that its destructor does not run then either.
    """

    __slots__ = ("code", "position", "words")

    words: str  # what it is, as users wrote it
    code: CodeType | None  # that made it; None: there is nothing to warn of
    position: int  # in that code, which is the line at a fraction of the cost

    def __del__(self) -> None:
        code = getattr(self, "code", None)
        if code is None:
            return
        # On the line that made it: where it is collected is a matter of chance.
        line = code.co_firstlineno
        for begin, end, number in code.co_lines():
            if begin <= self.position < end and number is not None:
                line = number
        warnings.warn_explicit(
            f"{self.words} was never entered, so it did nothing: use it in a with statement",
            ResourceWarning,
            code.co_filename,
            line,
        )


spare: list[Unentered] = []


def made(words: str, depth: int) -> Unentered:
    """Return what warns of a context manager; it is made so many calls above."""
    try:
        unentered = spare.pop()
    except IndexError:
        unentered = Unentered()
    frame = sys._getframe(depth + 1)
    unentered.words, unentered.position = words, frame.f_lasti
    unentered.code = frame.f_code  # last, as it arms this
    return unentered


def entered(unentered: Unentered) -> None:
    """Note that there is nothing to warn of."""
    unentered.code = None
    spare.append(unentered)
