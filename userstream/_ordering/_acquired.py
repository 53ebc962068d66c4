"""A copy between the producers of what it uses."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from userstream import _cleanup, _holding

if TYPE_CHECKING:
    from collections.abc import Callable

    from userstream._ordering._plan import Ordering
    from userstream._waiting import Deadline

T = TypeVar("T")


def in_order(ordering: Ordering, copy: Callable[[], T], deadline: Deadline, *, release: bool) -> T:
    """Call what copies, with the buffers of an ordering acquired for it and, if need be, released.

    A copy that was waited for needs no release: what the producers do next comes after it. One
    that failed may go on, so then the buffers are held and released in any case.

    No context manager: a Ctrl-C at the first line of its ``__exit__`` would leave the copy running
    with nobody ordered after it. The outer `try` is for one in the handling of an error.
    """
    ordering.may_wait = True
    acquired = _Acquired(ordering, deadline, release=release)
    try:
        try:
            result = copy()
            acquired.end(release=release)
        except BaseException as error:
            acquired.end_after(error)
            raise
    except BaseException as error:
        acquired.end_after(error)
        raise
    return result


class _Acquired:
    """Buffers that are held from before the copy is queued."""

    __slots__ = ("_deadline", "_ended", "_ordering", "_use")

    def __init__(self, ordering: Ordering, deadline: Deadline, *, release: bool) -> None:
        self._ended = False
        self._deadline = deadline
        self._ordering = ordering
        kept = ordering.acquire(deadline, to_be_released=release)
        self._use = _holding.Use(ordering.lane, ordering.buffers, kept)

    def end(self, *, release: bool) -> None:
        if release:
            self._ordering.release(self._use.ticket, self._deadline)
        else:
            self._use.end()
        self._ended = True

    def end_after(self, error: BaseException) -> None:
        """Release unless that has been done, in whole."""
        if self._ended:
            return
        try:
            self._ordering.release(self._use.ticket, after_error=True)
        except Exception as failure:
            self._use.hold_later()
            _cleanup.report([failure], error)
        self._ended = True
