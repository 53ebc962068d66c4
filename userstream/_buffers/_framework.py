"""`Framework`: one that has a current stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from userstream.typing import StreamLike

NO_STREAM = 0  # what a framework answers that has no current stream on a device


class Framework(NamedTuple):
    """The current streams of a framework, one per thread and device."""

    name: str
    # Whether it is imported and can use a GPU.
    is_usable: Callable[[], bool]
    # The handle of the current stream of a device, and what keeps that stream alive.
    current_stream: Callable[[int], tuple[int, object]]
    # Makes a stream the current one of a device; returns what undoes it, in the same thread. Both
    # are called with the device current.
    activate: Callable[[StreamLike, int], Callable[[], object]]
    # Tells the framework's allocator that its current stream uses a buffer of its own.
    record_use: Callable[[Any], None] | None = None
    # Whether it captures graphs on its current stream, and to ask for that changes nothing.
    captures: bool = False
    # Whether it relies on the legacy default stream to wait for its own, as blocking ones make it.
    needs_blocking: bool = False
