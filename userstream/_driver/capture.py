"""Graph captures: their begin and end, and the capture state of a stream."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from cuda.bindings import driver

from userstream._driver import core
from userstream._driver.status import CAPTURE_ERRORS, SUCCESS, ask, call, failed
from userstream._driver.streams import CAPTURE_IMPLICIT
from userstream.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cuda.core.graph import GraphDefinition

    from userstream.typing import CaptureMode

_MODES = {
    "global": driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL,
    "thread_local": driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
    "relaxed": driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED,
}
_STATES: dict[driver.CUstreamCaptureStatus, Literal["active", "invalidated"]] = {
    driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE: "active",
    driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_INVALIDATED: "invalidated",
}

# Failures at the end of a capture, with their causes and remedies.
_ENDS = {
    driver.CUresult.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED: (
        "a call that no capture allows (usually a query or a wait) has invalidated it; capture "
        "again without it"
    ),
    driver.CUresult.CUDA_ERROR_STREAM_CAPTURE_UNMATCHED: CAPTURE_ERRORS[903],
    driver.CUresult.CUDA_ERROR_STREAM_CAPTURE_UNJOINED: CAPTURE_ERRORS[904],
}


@dataclass(frozen=True, slots=True)
class CaptureInfo:
    """Information about the capture that a stream is part of.

    Attributes
    ----------
    state : {"active", "invalidated"}
        An invalidated capture gives no graph, but still has to be ended.
    id : int or None
        Identifier shared by all streams of a capture, and never reused. None once invalidated.
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


def check_capture_mode(mode: CaptureMode) -> driver.CUstreamCaptureMode:
    """Return the driver's name of a capture mode."""
    try:
        return _MODES[mode]
    except (KeyError, TypeError):
        raise ValueError(
            f'a capture mode is "global", "thread_local" or "relaxed", not {mode!r}'
        ) from None


def is_capturing(handle: driver.CUstream, stream: object) -> bool:
    """Return whether a stream is part of a capture, valid or not. Invalidates no capture."""
    status, state = ask(driver.cuStreamIsCapturing, handle)
    if status == CAPTURE_IMPLICIT:  # of the legacy stream: others are captured, it cannot be
        return False
    if status != SUCCESS:
        raise failed("cuStreamIsCapturing", status, stream)
    return state in _STATES


def begin_capture(
    handle: driver.CUstream,
    graph: GraphDefinition,
    mode: driver.CUstreamCaptureMode,
    stream: object,
) -> None:
    """Begin a capture: the stream's work is recorded in a graph instead of performed."""
    # Into a graph of cuda.core's, as it can wrap none that the driver makes.
    begin = driver.cuStreamBeginCaptureToGraph
    call(begin, handle, graph.handle, None, None, 0, mode, stream=stream)


def end_capture(handle: driver.CUstream, stream: object) -> None:
    """End a capture that `begin_capture` began."""
    status, _graph = ask(driver.cuStreamEndCapture, handle)
    if status in _ENDS:
        raise CaptureError(
            f"the capture of {stream!r} produced no graph: {_ENDS[status]} ({status.name})",
            stream=repr(stream),
        )
    if status != SUCCESS:
        raise failed("cuStreamEndCapture", status, stream)


def capture_info(handle: driver.CUstream, stream: object) -> CaptureInfo | None:
    """Return information about the capture of a stream, or `None`; invalidates no capture."""
    status, *facts = ask(driver.cuStreamGetCaptureInfo, handle)
    if status == CAPTURE_IMPLICIT:
        return None
    if status != SUCCESS:
        raise failed("cuStreamGetCaptureInfo", status, stream)
    # cuda-bindings 13 returns the data of the edges too.
    capture, number, graph, dependencies, *_ = facts
    state = _STATES.get(capture)
    if state is None:
        return None
    if state == "invalidated":  # the driver reports nothing else
        return CaptureInfo(state, None, None, ())
    # Copied: the nodes lie in an array of the driver, which the next call overwrites.
    copied = tuple([driver.CUgraphNode(int(node)) for node in dependencies or ()])
    return CaptureInfo(state, int(number), graph, copied)


@contextmanager
def in_capture_mode(mode: driver.CUstreamCaptureMode) -> Iterator[None]:
    """Set the calling thread's capture mode for a block."""
    changed: list[int] = []  # the mode to restore, from the change on
    error = None
    try:
        core.enter_mode(int(mode), changed)
        yield
    except BaseException as caught:
        error = caught
        raise
    finally:
        core.leave_mode(changed, error)
