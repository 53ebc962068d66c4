"""The two default streams, whose handles mean a stream of whichever context is current."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, ClassVar, TypeVar

from userstream import _driver, _events
from userstream._stream import Stream, _making
from userstream._stream._base import NOT_NOW

if TYPE_CHECKING:
    from cuda.bindings import driver
    from cuda.core import Context, DeviceResources, Event, EventOptions

    from userstream._stream._edges import EdgeStream
    from userstream.typing import StreamLike

T = TypeVar("T")


class DefaultStream(Stream):
    """A default stream: of one device, or of whichever context is current."""

    __slots__ = ()

    _context: driver.CUcontext | None  # None: the current one

    _streams: ClassVar[dict[tuple[int, int | None], DefaultStream]] = {}

    @classmethod
    def at(cls, handle: int, device: int | None = None) -> DefaultStream:
        """Return a default stream of a device; of whichever is current for `None`."""
        try:
            return cls._streams[handle, device]
        except KeyError:
            context = None if device is None else _driver.primary_context(device)
            stream = cls._make(handle, -1 if device is None else device, context)
            return cls._streams.setdefault((handle, device), stream)

    @classmethod
    def _make(cls, handle: int, device: int, context: driver.CUcontext | None) -> DefaultStream:
        make = cls._legacy_default if handle == _driver.LEGACY else cls._per_thread_default
        stream = make()
        _making.complete(stream, device, context, owned=False)
        return stream

    def on(self, device: int) -> DefaultStream:
        """Return the stream that this one is while a device is current."""
        return self.at(int(self._live()), device)

    @property
    def context(self) -> Context:
        return self._here(getattr, super(), "context")

    @property
    def resources(self) -> DeviceResources:
        return self._here(getattr, super(), "resources")

    @property
    def flags(self) -> int:
        return self._here(_driver.stream_flags, self._askable(), self)

    @property
    def priority(self) -> int:
        return 0  # the driver makes them so

    @property
    def stream_id(self) -> int:
        return self._here(_driver.stream_id, self._askable(), self)

    def wait(self, event_or_stream: Event | StreamLike) -> None:
        self._here(_driver.capture_status, self._live(), self)
        self._here(super().wait, event_or_stream)

    def record(self, event: Event | None = None, options: EventOptions | None = None) -> Event:
        self._here(_driver.capture_status, self._live(), self)
        return self._here(self._record, event, options)

    def close(self) -> None:
        raise RuntimeError(f"{self!r} is shared by the whole process and cannot be closed")

    def __repr__(self) -> str:
        legacy = self._handle is not None and int(self._handle) == _driver.LEGACY
        device = "" if self._context is None else f" device={self._device_id}"
        return f"<userstream.Stream{device} {'legacy' if legacy else 'per-thread'} default>"

    def _device(self) -> int:
        _driver.ensure()
        return _driver.current_device() if self._context is None else self._device_id

    def _is_in(self, context: driver.CUcontext) -> bool:  # noqa: ARG002
        return False

    def _where(self) -> driver.CUcontext:
        """Return the context that it stands for: the current one, or device 0's without one."""
        return self._context or _driver.default_context()

    def _settled(self) -> DefaultStream:
        """Return the stream of one context that it stands for now."""
        if self._context is not None:
            return self
        context = _driver.default_context()
        device = _driver.within(context, _driver.current_device)
        primary = _driver.primary_context_if_active(device)
        if primary is not None and int(primary) == int(context):
            return self.on(device)
        return self._make(int(self._live()), device, context)

    def _askable(self) -> driver.CUstream:
        """Return the handle, if asking the driver about it breaks no capture."""
        handle = self._live()
        self._here(_driver.refuse_capturing, handle, self, NOT_NOW)
        return handle

    def _is_idle(self) -> bool:
        return self._here(super()._is_idle)

    def _completion(self) -> _events.Completion:
        self._live()
        stream = self._settled()
        # Not ordered: the per-thread ones of two threads are two streams.
        completion = functools.partial(_events.Completion, stream._pool, stream, ordered=False)
        return stream._here(completion)

    def _capture_status(self) -> driver.CUstreamCaptureStatus:
        return self._here(super()._capture_status)

    def _mark(self) -> tuple[Event, driver.CUstreamCaptureStatus]:
        return self._here(super()._mark)

    def _follow(
        self,
        event: Event,
        source: EdgeStream,
        capture: driver.CUstreamCaptureStatus,
        *,
        may_join: bool,
    ) -> None:
        follow = super()._follow
        self._here(functools.partial(follow, event, source, capture, may_join=may_join))

    def _is_same(self, other: EdgeStream) -> bool:
        return (
            self == other
            and isinstance(other, DefaultStream)
            and int(self._where()) == int(other._where())
        )


def on_device(stream: Stream, device: int) -> Stream:
    """Return the stream, of a default stream the one of a device."""
    return stream.on(device) if isinstance(stream, DefaultStream) else stream
