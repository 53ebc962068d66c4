"""`Framework`: one that has a current stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from userstream.typing import StreamLike

NO_STREAM = 0  # what a framework answers that has no current stream on a device


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
        # Whether it is imported and can use a GPU.
        self.is_usable = is_usable
        # The handle of the current stream of a device, and what keeps that stream alive.
        self.current_stream = current_stream
        # Makes a stream the current one of a device; returns what undoes it, in the same thread.
        # Both are called with the device current.
        self.activate = activate
        # Informs the framework's allocator that its current stream uses a buffer of its own.
        self.record_use = record_use
        # Whether it captures graphs on its current stream, and asking for that changes nothing.
        self.captures = captures
        # Whether it relies on the legacy default stream to wait for its own streams, as it does
        # for blocking streams only.
        self.needs_blocking = needs_blocking
