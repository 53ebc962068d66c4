"""Ordering user streams with the producers of buffers, in both directions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from userstream import _driver, _holding, _targets
from userstream._buffers import type_name
from userstream._ordering import (
    Borrow,
    Ordering,
    given_stream,
    ordering_of,
    usual_streams_of,
)
from userstream._registry._waits import Waits
from userstream._stream._foreign import stream_at
from userstream.errors import CaptureError, UnsupportedBufferError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from userstream._stream import Stream
    from userstream.typing import Buffer, Producer, StreamLike

_AUTO = "auto"


class Orders(Waits):
    """The orderings of a `UserStream`."""

    __slots__ = ()

    def acquire(
        self,
        *buffers: Buffer,
        stream: StreamLike | int | None = None,
        producer: Producer = "auto",
    ) -> Stream:
        if stream is None and producer is _AUTO:
            usual = usual_streams_of(buffers, self._unnamed)
            if usual is not None:
                consumer, source, _ = usual
                if source is not None:
                    consumer._wait_for(source, may_join=False)
                return consumer
        ordering = self._ordering(buffers, stream, producer)
        ordering.acquire()
        return ordering.consumer

    def release(
        self,
        *buffers: Buffer,
        stream: StreamLike | int | None = None,
        producer: Producer = "auto",
    ) -> None:
        self._ordering(buffers, stream, producer).release(buffers)

    def borrow(
        self,
        *buffers: Buffer,
        stream: StreamLike | int | None = None,
        producer: Producer = "auto",
        activate: bool | str | Iterable[str] = False,
        keep: bool = True,
    ) -> Borrow:
        return Borrow(self._ordering, (buffers, stream, producer), activate, keep)

    def hold(self, *objects: object, stream: StreamLike | int) -> None:
        self._check_open()
        where = given_stream(stream, "stream")._settled()
        event, capture = where._mark()
        if capture != _driver.NOT_CAPTURING:
            where._pool.give_back(event)
            raise CaptureError(
                f"{where!r} is being captured into a graph, and what is captured never completes: "
                "keep the objects as long as the graph",
                stream=repr(where),
            )
        _holding.hold(where, event, objects)

    def hand_over(self, *results: Buffer, stream: StreamLike | int | None = None) -> None:
        self._check_open()
        given = None if stream is None else given_stream(stream, "stream")
        for buffer, rule in _targets.buffers_in(results, named="results"):
            framework = rule.framework
            if framework is None:
                raise UnsupportedBufferError(
                    f"{type_name(buffer)} belongs to no framework with a current stream, which it "
                    "could be handed over to; let a stream of yours wait for the user stream"
                )
            device = rule.device_id(buffer)
            source = self._user_stream(device) if given is None else given
            handle, _owner = framework.current_stream(device)
            current = stream_at(handle, device)
            if current._is_same(source):
                continue
            current._wait_for(source, may_join=False)
            if framework.record_use is not None:
                framework.record_use(buffer)

    def _ordering(
        self, buffers: Sequence[Any], stream: StreamLike | int | None, producer: Producer
    ) -> Ordering:
        if stream is None and producer is _AUTO:
            usual = usual_streams_of(buffers, self._unnamed)
            if usual is not None:
                consumer, source, owner = usual
                return Ordering(consumer, () if source is None else (source,), owner)
        self._check_open()
        return ordering_of(buffers, stream, producer, self._user_stream)

    def _user_stream(self, device: int) -> Stream:
        return self._unnamed.get(device) or self._find_or_create(device, None, None)
