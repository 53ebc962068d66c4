"""`cuda.core.Stream`, as type checkers can know it: what `Stream` extends and a `Lane` works with.

cuda.core chooses its modules for the installed CUDA major when it is imported. No type checker can
follow that: the base class would be unknown, and with it all of `Stream`. So the
parts that userstream uses are declared here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cuda.core

if TYPE_CHECKING:
    from typing import Self

    from cuda.bindings import driver
    from cuda.core import Context, Device, Event, EventOptions, StreamOptions

    from userstream.typing import StreamLike

    class CoreStream:
        """A queue of GPU work."""

        @classmethod
        def _init(
            cls,
            obj: StreamLike | None = None,
            options: StreamOptions | None = None,
            device_id: int | None = None,
            ctx: Context | None = None,
        ) -> Self: ...
        @classmethod
        def _legacy_default(cls) -> Self: ...
        @classmethod
        def _per_thread_default(cls) -> Self: ...
        @property
        def handle(self) -> driver.CUstream:
            """The ``CUstream``."""

        def __cuda_stream__(self) -> tuple[int, int]: ...
        @property
        def device(self) -> Device:
            """The device of the stream."""

        @property
        def context(self) -> Context:
            """The context of the stream."""

        @property
        def resources(self) -> Any:  # cuda.core.DeviceResources
            """The resources of the device that the stream may use."""

        @property
        def priority(self) -> int:
            """Its priority; lower numbers run first."""

        @property
        def is_nonblocking(self) -> bool:
            """Whether it runs concurrently with the legacy default stream."""

        @property
        def is_closed(self) -> bool:
            """Whether it was closed."""

        def close(self) -> None:
            """Close the stream."""

        def sync(self) -> None:
            """Block until the work queued on it has completed."""

        def wait(self, event_or_stream: Event | StreamLike) -> None:
            """Make later work on it wait for an event or a stream."""

        def record(self, event: Event | None = None, options: EventOptions | None = None) -> Event:
            """Record an event after the work queued on it."""

        def create_graph_builder(self) -> Any:  # cuda.core.graph.GraphBuilder
            """Make a builder that captures this stream into a graph."""

else:
    CoreStream = cuda.core.Stream
