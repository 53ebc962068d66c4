"""Handing results over to the current streams of their frameworks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from userstream import _targets
from userstream._buffers import NO_STREAM, type_name
from userstream._engine import lanes
from userstream._ordering.producers import given_lane
from userstream.errors import DeviceMismatchError, UnsupportedBufferError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from userstream._stream.stream import Stream
    from userstream.typing import StreamLike


def hand_over(
    results: Sequence[Any],
    stream: StreamLike | None,
    user_stream: Callable[[int], Stream],
) -> None:
    """Let the frameworks' streams wait for the one that made the results, and note their use."""
    if stream is not None:
        given_lane(stream, "stream")  # refused before anything is looked at
    ordered: set[tuple[int, int]] = set()
    for view in _targets.views_in(results, named="results"):
        buffer, framework = view.buffer, view.framework
        if framework is None:
            raise UnsupportedBufferError(
                f"{type_name(buffer)} belongs to no framework with a current stream to which it "
                "could be handed over; make a stream of yours wait for the user stream"
            )
        device = view.device
        if stream is None:
            source = user_stream(device)._resolve()
        else:
            source = given_lane(stream, "stream", device)
        handle, _owner = framework.current_stream(device)
        if handle == NO_STREAM:
            raise DeviceMismatchError(
                f"{framework.name} has no current stream on device {device}, where this "
                f"{type_name(buffer)} is, as its current context is on another one",
                device=device,
            )
        current = lanes.of_framework(handle, device)
        if current.is_same(source):
            continue
        if (handle, device) not in ordered:
            # The framework did not ask for a capture: its stream must not join one of ours.
            current.add_edge(source, may_join=False)
            ordered.add((handle, device))
        if framework.record_use is not None:
            framework.record_use(buffer)
