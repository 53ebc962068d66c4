"""Copies between the edges from the producers of what is copied and those back to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from userstream import errors
from userstream._copies.copy_lane import NOT_CAPTURED
from userstream._driver import core
from userstream._engine import held_objects
from userstream.errors import CaptureError, UnknownProducerError

if TYPE_CHECKING:
    from collections.abc import Callable

    from userstream._engine.host_wait import Deadline
    from userstream._ordering import Ordering

T = TypeVar("T")


def in_order(
    ordering: Ordering,
    copy: Callable[[], T],
    *,
    release: bool,
    deadline: Deadline | None = None,
    memory: object = None,
    may_wait: bool = True,
) -> T:
    """Call what copies, with the buffers of an ordering acquired for it and, if need be, released.

    A copy that was waited for needs no release: what the producers do next comes after it. One
    that failed may go on, so then the buffers are held and released in any case, and with them the
    memory that it fills.

    Where a producer can continue after the copy only once the host has waited for that, `may_wait`
    decides between that and an error.

    No context manager: a Ctrl-C at the first line of its ``__exit__`` would leave the copy running
    with nothing ordered after it. The outer `try` is for one in the handling of an error.
    """
    if ordering.rest is not None:
        ordering.rest.may_wait = may_wait
    if not may_wait:
        _refuse_waits(ordering)
    try:
        kept = ordering.acquire(deadline, to_be_released=release)
    except CaptureError:
        # Of the edge, whose advice would lead to the error that a copy is captured.
        ordering.lane.usable(NOT_CAPTURED)
        raise
    acquired = Acquired(ordering, deadline, kept, memory)
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


class Acquired:
    """Buffers that are held from before the copy is queued, and other objects with them."""

    __slots__ = ("_deadline", "_ended", "_ordering", "_use")

    def __init__(self, ordering: Ordering, deadline: Deadline | None, *objects: object) -> None:
        self._ended = False
        self._deadline = deadline
        self._ordering = ordering
        self._use = core.use(ordering.lane, None, (ordering.buffers, *objects))

    def end(self, *, release: bool) -> None:
        if release:
            self._ordering.release(self._use.ticket, self._deadline)
        else:
            self._use.ticket.end()
        self._ended = True

    def end_after(self, error: BaseException) -> None:
        """Release unless that has been done, in whole."""
        if self._ended:
            return
        try:
            self._ordering.release(self._use.ticket, after_error=True)
        except Exception as failure:
            held_objects.hold_later(self._use)
            errors._report_failures([failure], error)
        self._ended = True


def _refuse_waits(ordering: Ordering) -> None:
    """Refuse buffers whose producers could not be ordered after the copy by an edge."""
    rest = ordering.rest
    if rest is not None and rest.after and not rest.may_order_devices:
        raise UnknownProducerError(
            "the producer of a buffer is unknown, so it could continue only when the copy is done: "
            "pass producer=, the stream that writes it, or None if nothing is pending, or wait for "
            "the copy",
            device=rest.after[0],
        )
