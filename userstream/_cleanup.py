"""What goes wrong while something is being undone."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def report(failures: Sequence[Exception], error: BaseException | None) -> None:
    """Raise the first of the failures, unless an error of the user's is on its way.

    What is not raised becomes a note of what is.
    """
    if not failures:
        return
    raised = failures[0] if error is None else error
    for failure in failures:
        if failure is not raised:
            raised.add_note(f"and at the end of the block: {type(failure).__name__}: {failure}")
    if error is None:
        raise raised
