"""How a stream is ordered after others, and waited for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cuda.bindings import driver
from cuda.core import Event, EventOptions

from userstream import _driver, _events, _process, _waiting
from userstream._stream._base import BaseStream, address_of

if TYPE_CHECKING:
    from userstream._waiting import Policy
    from userstream.typing import StreamLike


class OrderedStream(BaseStream):
    """Order and host waits of a `Stream`."""

    __slots__ = ()

    @property
    def is_done(self) -> bool:
        """Whether all the work queued on it is done. Does not block.

        A stream that others keep feeding may never be done; `sync` waits for what is there now.
        Raises `CaptureError` while the stream is being captured, and `DriverError` if the GPU
        failed. Driver call: ``cuStreamQuery``, without harm to anybody's capture.
        """
        return self._is_idle()

    def sync(self, *, timeout: float | None = None, policy: Policy = "auto") -> None:
        """Wait on the host for the work that is queued on this stream now.

        Parameters
        ----------
        timeout : float, optional
            Seconds, at least 0; 0 asks once, `None` waits for ever.
        policy : {"auto", "spin"}, default "auto"
            ``"auto"`` polls for 100 µs and then sleeps between polls, for 5 % of the time waited
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
        _waiting.refuse_in_host_function("sync()")
        if not self._is_idle():
            _waiting.wait_for((self,), timeout=timeout, policy=policy, grouped=False)

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
        ClosedError
            One of the streams is closed.
        DriverError
            The driver refused.

        Notes
        -----
        As `cuda.core.Stream.wait`, also when another device is current. Driver calls:
        ``cuEventRecord`` on a pooled event, and ``cuStreamWaitEvent``. Does not block.

        Examples
        --------
        >>> from userstream import Stream
        >>> first, second = Stream.create(), Stream.create()
        >>> second.wait(first)
        """
        destination = self._live()
        if isinstance(event_or_stream, Event):
            with _driver.core_errors("cuStreamWaitEvent", self):
                super().wait(event_or_stream)
        elif isinstance(event_or_stream, OrderedStream):
            event_or_stream._precede(destination, self)
        elif hasattr(event_or_stream, "__cuda_stream__"):
            _precede(event_or_stream, destination, self)
        else:
            raise TypeError(
                "Stream.wait takes an event or a stream (an object with __cuda_stream__), not "
                f"{type(event_or_stream).__name__}"
            )

    def record(self, event: Event | None = None, options: EventOptions | None = None) -> Event:
        """Record an event behind the work queued on this stream.

        Parameters
        ----------
        event : Event, optional
            Recorded again; a new one by default.
        options : EventOptions, optional
            Of the new event.

        Returns
        -------
        Event
            The event.

        Raises
        ------
        ClosedError
            The stream is closed.

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
        with _driver.core_errors("cuEventRecord", self):
            recorded = super().record(event, options)
        _process.leak_at_end(recorded)
        return recorded

    def _is_idle(self) -> bool:
        handle = self._live()
        _driver.refuse_capturing(handle, self)
        return _driver.stream_is_idle(handle, self)

    def _completion(self) -> _events.Completion:
        return _events.record_stream(self._live(), self._context, self)

    def _precede(self, handle: driver.CUstream, stream: OrderedStream) -> None:
        """Make later work on another stream wait for the work that is queued on this one."""
        _events.edge(self._live(), self._context, handle, (self, stream))


def _precede(source: StreamLike, destination: driver.CUstream, stream: OrderedStream) -> None:
    """Make later work on a stream of ours wait for the work queued on one of somebody else."""
    handle = driver.CUstream(address_of(source))
    if int(handle) in (_driver.LEGACY, _driver.PER_THREAD):
        context = _driver.default_context()
        _driver.within(context, _events.edge, handle, context, destination, (source, stream))
    else:
        _events.edge(handle, _driver.stream_context(handle), destination, (source, stream))
