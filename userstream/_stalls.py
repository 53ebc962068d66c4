"""`stall_allowed`: a block that may wait for the GPU. It costs little where nothing is watched."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from userstream import _hooks

if TYPE_CHECKING:
    from collections.abc import Generator


@contextmanager
def stall_allowed(reason: str) -> Generator[None, None, None]:
    """Allow the calling thread to wait for the GPU in the block.

    Its stalls do not count: neither in a block of `no_stalls` around it, nor in the report of an
    `observe`, which says how many were allowed, by their reason.

    Parameters
    ----------
    reason : str
        Why the block waits, for the report.

    Returns
    -------
    context manager
        It is a decorator of functions as well.

    Raises
    ------
    TypeError
        The reason is no text.
    ValueError
        The reason is empty.

    Examples
    --------
    >>> import userstream as us
    >>> with us.no_stalls(), us.stall_allowed("logging every 100 steps"):
    ...     us.wait_for_device(0)
    """
    if not isinstance(reason, str):
        raise TypeError(f"the reason of stall_allowed() must be a text, not {reason!r}")
    if not reason.strip():
        raise ValueError("the reason of stall_allowed() must not be empty: the report names it")
    for listener in _hooks.stalls_allowed:
        listener(reason)
    try:
        yield
    finally:
        for listener in _hooks.stalls_allowed:
            listener(None)
