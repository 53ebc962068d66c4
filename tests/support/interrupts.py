"""Exceptions of signal handlers, wherever one can come."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from types import CodeType, FrameType

import cuda.bindings

import userstream
from helpers import untraced

HERE = userstream.__path__[0]
# A function of cuda.bindings makes an enum of what the driver has answered, in Python, and
# frames of contextlib stand between a block and its end.
BINDINGS = os.path.dirname(cuda.bindings.__file__)
PLACES = (HERE, BINDINGS, contextlib.__file__)


class Cut(BaseException):
    """An exception of a signal handler."""


def place(code: CodeType) -> str:
    """Return how a function is called among the places."""
    return f"{code.co_filename.removeprefix(HERE + os.sep)} {code.co_name}"


def cut_short(
    function: Callable[[], object],
    at: int,
    places: list[str] | None = None,
    *,
    anywhere: bool = False,
) -> bool:
    """Call a function, and raise in userstream where the signal of that number can come.

    Python looks for signals where a function of Python begins, and where one of C has returned.
    Tells whether the function took that long. `places` is told of every such place. `anywhere`
    means in all other modules as well.
    """
    left = at

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal left
        where = frame.f_code
        if where.co_name == "<genexpr>":  # that may be its end, whose errors nobody sees
            return
        here = where is not cut_short.__code__ if anywhere else where.co_filename.startswith(PLACES)
        if event in ("call", "c_return") and here:
            if places is not None:
                called = "" if event == "call" else f": {getattr(argument, '__name__', argument)}"
                places.append(f"{place(where)}{called}")
            left -= 1
            if left < 0:
                sys.setprofile(None)
                raise Cut

    with untraced():
        try:
            sys.setprofile(profile)
            function()
        except Cut:
            return True
        finally:
            sys.setprofile(None)
    return False
