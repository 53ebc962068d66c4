"""What the calling thread has current, and a call changes for a moment: set back whatever comes.

A Ctrl-C may come after any call. So the first attempt stands where it is needed: a builtin in a
``finally``, before which none can come. What is here is for when that fails.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from userstream import errors
from userstream._driver.status import SUCCESS, failed, raised

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

_TRIES = 10


def restore_again(
    function: Callable[..., Any], before: object, answer: Any, level: int = 1
) -> None:
    """Set something back where the first attempt has failed, with this `answer`.

    `level` is how many frames up the caller is where that was.

    Raises
    ------
    DriverError
        It stays changed. It becomes a note of the exception that is on its way in the caller.
    """
    name = function.__name__
    # A signal handler may raise what the bindings do as well. That is the user's, and not lost.
    theirs = answer if isinstance(answer, Exception) and raised(name, answer) is answer else None
    for _ in range(_TRIES):
        try:
            answer = function(before)
        except (RuntimeError, ValueError) as error:
            answer = error
        if type(answer) is tuple and answer[0] == SUCCESS:
            break
    else:
        failure = raised(name, answer) if isinstance(answer, Exception) else failed(name, answer[0])
        failure.add_note(f"so {before!r} could not be made current again in this thread")
        errors._report_failures([failure], _on_its_way(sys._getframe(level)))
    if theirs is not None:
        raise theirs


def _on_its_way(frame: FrameType) -> BaseException | None:
    """Return the exception that leaves a frame; not one that its callers are handling."""
    error = sys.exception()
    traceback = None if error is None else error.__traceback__
    while traceback is not None and traceback.tb_frame is not frame:
        traceback = traceback.tb_next
    return None if traceback is None else error
