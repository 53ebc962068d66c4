"""Lists of listeners for events of the package, such as a new edge or an entered borrow.

A tool appends a function to a list and removes it later; nothing of the package is replaced. Where
an event happens, the package checks whether the list is empty, and calls the functions otherwise.
`stall_allowed`, a public function, only calls listeners.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

T = TypeVar("T")

#: Called with the destination and the source after the destination was made to wait for the
#: source: lanes, a cuda.core event, or a text. The compiled core calls the functions as well.
edge_added: list[Callable[[Any, Any], object]] = []

#: Called with the `Borrow` and its stream after the borrow was entered.
borrow_entered: list[Callable[[Any, Any], object]] = []

#: Called with the `Borrow` before the edges at the end of its block are added.
borrow_left: list[Callable[[Any], object]] = []

#: Called with the stream, the buffers, and whether they are only read, after `acquire`.
buffers_acquired: list[Callable[[Any, Any, bool], object]] = []

#: Called with the stream and the buffers before `release` adds its edges.
buffers_released: list[Callable[[Any, Any], object]] = []

#: Called with the `Stream` after a user stream was created.
user_stream_created: list[Callable[[Any], object]] = []

#: Called with `True` before the host waits for the GPU, and with `False` afterwards. What is waited
#: for may be over already. Waits may be within each other.
host_waits: list[Callable[[bool], object]] = []

#: Called before a wait of the host raises `WaitTimeout`.
wait_timed_out: list[Callable[[], object]] = []

#: Called at the begin and the end of a block of `stall_allowed`: with its reason, and with `None`.
stalls_allowed: list[Callable[[str | None], object]] = []


def waiting(function: Callable[..., T], *args: object) -> T:
    """Call a function that waits on the host, and the listeners of `host_waits` around it."""
    for listener in host_waits:
        listener(True)
    try:
        return function(*args)
    finally:
        for listener in host_waits:
            listener(False)


def report_edge(destination: object, source: object) -> None:
    """Call the listeners of `edge_added`."""
    for listener in edge_added:
        listener(destination, source)


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
        *reason* is not a string.
    ValueError
        *reason* is empty.

    Examples
    --------
    >>> import userstream as us
    >>> with us.no_stalls(), us.stall_allowed("logging every 100 steps"):
    ...     us.wait_for_device(0)
    """
    if not isinstance(reason, str):
        raise TypeError(f"the reason of stall_allowed() must be a str, not {reason!r}")
    if not reason.strip():
        raise ValueError("the reason of stall_allowed() must not be empty: the report names it")
    for listener in stalls_allowed:
        listener(reason)
    try:
        yield
    finally:
        for listener in stalls_allowed:
            listener(None)
