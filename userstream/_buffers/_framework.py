"""`Framework`: access to the current streams of a framework."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from userstream.typing import StreamLike

NO_STREAM = 0  # returned for a device without a current stream


class Framework:
    """The current streams of a framework, one per thread and device."""

    __slots__ = (
        "activate",
        "captures",
        "current_stream",
        "is_usable",
        "name",
        "needs_blocking",
        "record_use",
    )

    def __init__(
        self,
        name: str,
        is_usable: Callable[[], bool],
        current_stream: Callable[[int], tuple[int, object]],
        activate: Callable[[StreamLike, int], Callable[[], object]],
        *,
        record_use: Callable[[Any], None] | None = None,
        captures: bool = False,
        needs_blocking: bool = False,
    ) -> None:
        self.name = name
        # Returns whether the framework is imported and can use a GPU.
        self.is_usable = is_usable
        # Returns the handle of a device's current stream, and an object that keeps it alive.
        self.current_stream = current_stream
        # Makes a stream current on a device; returns a function that undoes this in the same
        # thread. Both are called with the device current.
        self.activate = activate
        # Informs the framework's allocator that the current stream uses one of its buffers.
        self.record_use = record_use
        # True if the framework captures graphs on its current stream, and the query is free of
        # side effects.
        self.captures = captures
        # True if the framework relies on the legacy default stream to wait for its streams, which
        # works for blocking streams only.
        self.needs_blocking = needs_blocking
