"""How a stream is ordered after others, and waited for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cuda.core import Event, EventOptions

from userstream import _driver, _events, _holding, _process, _waiting
from userstream._buffers import type_name
from userstream._stream._edges import EdgeStream
from userstream.errors import DeviceMismatchError

if TYPE_CHECKING:
    from userstream.typing import StreamLike, WaitPolicy


class OrderedStream(EdgeStream):
    """Order and host waits of a `Stream`."""

    __slots__ = ()

    @property
    def is_done(self) -> bool:
        """Whether all the work queued on it is done. Does not block.

        A stream that others keep feeding may never be done; `sync` waits for what is there now.
        Raises `CaptureError` while the stream is being captured, and `DriverError` if the GPU
        failed. Driver call: ``cuStreamQuery``, without harm to anybody's capture.

        Examples
        --------
        >>> import userstream as us
        >>> stream = us.get_stream(0)
        >>> stream.sync()
        >>> stream.is_done
        True
        """
        return self._is_idle()

    def sync(self, *, timeout: float | None = None, policy: WaitPolicy = "auto") -> None:
        """Wait on the host for the work that is queued on this stream now.

        Parameters
        ----------
        timeout : float, optional
            Seconds, at least 0; 0 asks once, `None` waits for ever.
        policy : {"auto", "spin"}, default "auto"
            ``"auto"`` polls for 250 µs and then sleeps between polls, for 5 % of the time waited
            so far and 5 ms at most. ``"spin"`` never sleeps.

        Raises
        ------
        WaitTimeout
            The work was not done in time. Nothing was cancelled.
        CaptureError
            The stream is being captured; the capture goes on.
        ClosedError
            The stream is closed.
        DriverError
            The GPU failed.
        RuntimeError
            Called in a host function or callback, which may not wait.
        TypeError, ValueError
            ``timeout`` or ``policy`` is none.

        Notes
        -----
        Blocks, but never inside the driver: Ctrl-C stops it. Work that other threads queue
        afterwards is not waited for. Driver calls: ``cuStreamQuery``, and if the stream is busy
        ``cuEventRecord`` and ``cuEventQuery``, in the relaxed capture mode.

        Examples
        --------
        >>> import userstream as us
        >>> us.get_stream(0).sync(timeout=10)
        """
        if timeout is not None or policy != "auto":
            _waiting.check_arguments(timeout, policy)
        _waiting.refuse_in_host_function("a wait")
        if not self._is_idle():
            _waiting.wait_for((self,), timeout=timeout, policy=policy, grouped=False)
        _holding.sweep()

    def wait(self, event_or_stream: Event | StreamLike) -> None:
        """Make later work on this stream wait for an event or a stream; no host wait.

        Parameters
        ----------
        event_or_stream : Event, or stream
            An event, or a stream (anything with ``__cuda_stream__``), of any device. Of a stream,
            the work queued now is waited for.

        Raises
        ------
        TypeError
            It is neither.
        ValueError
            The event is closed.
        ClosedError
            One of the streams is closed.
        CaptureError
            One of the streams is being captured, and the other one is not or into another graph.
            A stream of your own may join the capture of the other one; a user stream never does.
            Or this stream is being captured and the event was not recorded in that capture, which
            is invalid then.
        DriverError
            The driver refused.

        Notes
        -----
        As `cuda.core.Stream.wait`, also when another device is current. Driver calls:
        ``cuStreamIsCapturing``, ``cuEventRecord`` on a pooled event, and ``cuStreamWaitEvent``.
        Does not block; thread-safe. An event that was recorded in a capture pulls the stream into
        it, as CUDA has it.

        Examples
        --------
        >>> from userstream import Stream
        >>> first, second = Stream.create(), Stream.create()
        >>> second.wait(first)
        """
        self._live()
        if isinstance(event_or_stream, Event):
            _check_open(event_or_stream)
            with _driver.core_errors("cuStreamWaitEvent", self):
                super().wait(event_or_stream)
        elif hasattr(event_or_stream, "__cuda_stream__"):
            from userstream._stream import Stream  # which is built upon this

            self._wait_for(Stream.from_handle(event_or_stream), may_join=not self._is_shared())
        else:
            raise TypeError(
                "Stream.wait takes an event or a stream (an object with __cuda_stream__), not "
                f"{type(event_or_stream).__name__}; for a buffer, acquire() waits for its producer"
            )

    def record(self, event: Event | None = None, options: EventOptions | None = None) -> Event:
        """Record an event behind the work queued on this stream.

        Parameters
        ----------
        event : Event, optional
            Recorded again; a new one by default. One of cuda.core, of the context of this stream.
        options : EventOptions, optional
            Of the new event.

        Returns
        -------
        Event
            The event.

        Raises
        ------
        TypeError
            ``event`` is none of cuda.core.
        ValueError
            The event is closed.
        DeviceMismatchError
            The event is of another device.
        CaptureError
            The legacy default stream would break a capture.
        ClosedError, ForkedError, DriverError
            The stream is closed, CUDA may not be used, or the driver refused.

        Notes
        -----
        As `cuda.core.Stream.record`, also when another device is current. Driver calls:
        ``cuEventCreate``, ``cuEventRecord``. Does not block.

        Examples
        --------
        >>> from userstream import Stream
        >>> event = Stream.create().record()
        >>> event.sync()
        """
        self._live()
        # Up to cuda.core 1.2 an event is made in the current context; it must be the stream's.
        return _driver.within(self._context, self._record, event, options)

    def _record(self, event: Event | None, options: EventOptions | None) -> Event:
        if event is not None:
            self._check_recordable(event)
        with _driver.core_errors("cuEventRecord", self):
            recorded = super().record(event, options)
        _process.leak_at_end(recorded)
        return recorded

    def _check_recordable(self, event: Event) -> None:
        if not isinstance(event, Event):
            raise TypeError(
                f"record takes an event of cuda.core, not {type_name(event)}; without one it makes "
                "one, and options= are of that"
            )
        _check_open(event)
        own, device = self._device(), event.device  # None of an event of another process
        if device is not None and device.device_id != own:
            raise DeviceMismatchError(
                f"{event!r} is of device {device.device_id} and {self!r} of device {own}; a stream "
                "records events of its own device, and record() makes one",
                devices=(own, device.device_id),
                stream=repr(self),
            )

    def _is_idle(self) -> bool:
        handle = self._live()
        _driver.refuse_capturing(handle, self)
        return _driver.stream_is_idle(handle, self)

    def _completion(self) -> _events.Completion:
        self._live()
        return _events.Completion(self._pool, self, ordered=True)


def _check_open(event: Event) -> None:
    if event.is_closed:
        raise ValueError(f"{event!r} is no open event")
