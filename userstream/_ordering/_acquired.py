"""Buffers that are acquired for a copy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from userstream import _cleanup, _holding

if TYPE_CHECKING:
    from types import TracebackType

    from userstream._ordering._plan import Ordering


class Acquired:
    """Acquires the buffers of an ordering for the block and, if need be, releases them.

    A copy that was waited for needs no release: what the producers do next comes after it. One
    that failed may go on.
    """

    __slots__ = ("_held", "_ordering", "_release")

    def __init__(self, ordering: Ordering, *, release: bool = False) -> None:
        self._ordering = ordering
        self._release = release

    def __enter__(self) -> Ordering:
        self._held = self._ordering.buffers, self._ordering.acquire()
        return self._ordering

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            if self._release:
                _holding.in_use[id(self._held)] = self._held  # as long as nothing else holds it
                self._ordering.release(self._held)
            return
        try:
            self._ordering.release(self._held)
        except Exception as failure:
            _cleanup.report([failure], error)
