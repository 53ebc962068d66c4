"""Streams of other code as cuda.core has them."""

from __future__ import annotations

from userstream._engine.core import CoreStream


class _Foreign:
    """What `cuda.core.Stream._init` accepts as a stream that other code created."""

    __slots__ = ("handle", "owner")

    def __init__(self, handle: int, owner: object) -> None:
        self.handle = handle
        self.owner = owner

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.handle)


def foreign(handle: int, owner: object) -> CoreStream:
    """Wrap a stream that other code created, and keep its owner alive; calls no driver."""
    return CoreStream._init(_Foreign(handle, owner))
