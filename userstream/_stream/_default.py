"""The two default streams, whose handles mean a stream of whichever context is current."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import cuda.core

from userstream import _driver, _events
from userstream._stream import Stream, _base

if TYPE_CHECKING:
    from cuda.bindings import driver
    from cuda.core import Event, EventOptions

    from userstream._stream._order import OrderedStream
    from userstream.typing import StreamLike


class DefaultStream(Stream):
    """A default stream: its handle means the stream of whichever context is current."""

    __slots__ = ()

    _streams: ClassVar[dict[int, DefaultStream]] = {}

    @classmethod
    def _shared(cls, handle: int) -> DefaultStream:
        try:
            return cls._streams[handle]
        except KeyError:
            make = cls._legacy_default if handle == _driver.LEGACY else cls._per_thread_default
            stream: DefaultStream = make()
            _base.complete(stream, -1, None, owned=False)
            return cls._streams.setdefault(handle, stream)

    def _device(self) -> int:
        _driver.ensure()
        return _driver.current_device()

    @property
    def flags(self) -> int:
        with _driver.entered(_driver.default_context()):
            return int(super().flags)

    @property
    def priority(self) -> int:
        with _driver.entered(_driver.default_context()):
            return super().priority

    @property
    def stream_id(self) -> int:
        with _driver.entered(_driver.default_context()):
            handle = self._live()
            _driver.refuse_capturing(handle, self)
            return _driver.stream_id(handle, self)

    def wait(self, event_or_stream: Event | StreamLike) -> None:
        with _driver.entered(_driver.default_context()):
            super().wait(event_or_stream)

    def record(self, event: Event | None = None, options: EventOptions | None = None) -> Event:
        self._live()
        context = _driver.default_context()
        with _driver.entered(context), _driver.core_errors("cuEventRecord", self):
            return cuda.core.Stream.record(self, event, options)

    def close(self) -> None:
        raise RuntimeError(f"{self!r} is shared by the whole process and cannot be closed")

    def __repr__(self) -> str:
        legacy = self._handle is not None and int(self._handle) == _driver.LEGACY
        return f"<userstream.Stream {'legacy' if legacy else 'per-thread'} default>"

    def _is_idle(self) -> bool:
        with _driver.entered(_driver.default_context()):
            return super()._is_idle()

    def _completion(self) -> _events.Completion:
        with _driver.entered(_driver.default_context()) as context:
            return _events.record_stream(self._live(), context, self, ordered=False)

    def _precede(self, handle: driver.CUstream, stream: OrderedStream) -> None:
        with _driver.entered(_driver.default_context()) as context:
            _events.edge(self._live(), context, handle, (self, stream))
