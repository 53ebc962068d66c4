"""The two default streams, whose handles mean a stream of whichever context is current."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, ClassVar, TypeVar

from userstream import _driver, _events
from userstream._stream import Stream, _base

if TYPE_CHECKING:
    from collections.abc import Callable

    from cuda.bindings import driver
    from cuda.core import Event, EventOptions

    from userstream._stream._order import OrderedStream
    from userstream.typing import StreamLike

T = TypeVar("T")


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

    def _where(self) -> driver.CUcontext:
        return _driver.default_context()

    @property
    def flags(self) -> int:
        return _here(_driver.stream_flags, self._askable(), self)

    @property
    def priority(self) -> int:
        return 0  # the driver makes them so

    @property
    def stream_id(self) -> int:
        return _here(_driver.stream_id, self._askable(), self)

    def wait(self, event_or_stream: Event | StreamLike) -> None:
        _here(self._refuse_implicit)
        _here(super().wait, event_or_stream)

    def record(self, event: Event | None = None, options: EventOptions | None = None) -> Event:
        _here(self._refuse_implicit)
        return _here(self._record, event, options)

    def close(self) -> None:
        raise RuntimeError(f"{self!r} is shared by the whole process and cannot be closed")

    def __repr__(self) -> str:
        legacy = self._handle is not None and int(self._handle) == _driver.LEGACY
        return f"<userstream.Stream {'legacy' if legacy else 'per-thread'} default>"

    def _askable(self) -> driver.CUstream:
        """Return the handle, if asking the driver about it breaks no capture."""
        handle = self._live()
        _here(_driver.refuse_capturing, handle, self)
        return handle

    def _refuse_implicit(self) -> None:
        _driver.refuse_implicit(self._live(), self)

    def _is_idle(self) -> bool:
        return _here(super()._is_idle)

    def _completion(self) -> _events.Completion:
        context = _driver.default_context()
        record = functools.partial(_events.record_stream, ordered=False)
        return _driver.within(context, record, self._live(), context, self)

    def _precede(self, handle: driver.CUstream, stream: OrderedStream) -> None:
        context = _driver.default_context()
        _driver.within(context, _events.edge, self._live(), context, handle, (self, stream))


def _here(function: Callable[..., T], *args: object) -> T:
    """Call a function where the handle means the stream of the current context, or device 0's."""
    return _driver.within(_driver.default_context(), function, *args)
