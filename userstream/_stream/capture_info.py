"""`CaptureInfo`: what is known of a capture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from cuda.bindings import driver


@dataclass(frozen=True, slots=True)
class CaptureInfo:
    """Information about the capture that a stream is part of.

    Attributes
    ----------
    state : {"active", "invalidated"}
        An invalidated capture gives no graph, but still has to be ended.
    id : int or None
        The same for all streams of a capture, and never reused. None once invalidated.
    graph : CUgraph or None
        The graph being built, which must not be destroyed or launched. None once invalidated.
    dependencies : tuple of CUgraphNode
        The nodes on which the stream's next node will depend.

    Examples
    --------
    >>> from userstream import Stream
    >>> stream = Stream.create(0)
    >>> with stream.capture():
    ...     stream.capture_info.dependencies  # nothing was queued yet
    ()
    """

    __module__ = "userstream"

    state: Literal["active", "invalidated"]
    id: int | None
    graph: driver.CUgraph | None
    dependencies: tuple[driver.CUgraphNode, ...]
