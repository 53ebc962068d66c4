"""Ordering user streams with the producers of buffers, in both directions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from userstream import _holding, _targets
from userstream._ordering import (
    Borrow,
    Ordering,
    given_lane,
    hand_over,
    ordering_of,
    usual_streams_of,
)
from userstream._registry._waits import Waits

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from userstream._stream.stream import Stream
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
        """Let later work on a stream wait for the work that produces buffers; no host wait.

        Parameters
        ----------
        *buffers : GPU buffer, or sequence or mapping of them
            Of any framework: see :doc:`/reference/buffers`.
        stream : stream, optional
            The one that uses the buffers, of any library; by default the user stream of their
            device, which is made if there is none yet.
        producer : stream, None or "auto", default "auto"
            The one that writes all the buffers; `None` if nothing is pending. ``"auto"`` asks
            each buffer, or its framework for the current stream of the buffer's device.

        Returns
        -------
        Stream
            The one that uses the buffers.

        Raises
        ------
        UnknownProducerError
            Nothing tells who writes a buffer (see :doc:`/reference/buffers`): pass ``producer=``.
        DeviceMismatchError
            The buffers live on several devices, and no ``stream`` is given.
        UnsupportedBufferError, HostBufferError
            Something that was passed is no GPU buffer.
        CaptureError
            One stream is being captured into a graph and the other is not, or into another one; or
            the legacy default stream would break a capture. The captures go on.
        ClosedError
            A stream that was passed, or this registry, is closed.
        ValueError, TypeError
            No buffer was passed; ``stream`` or ``producer`` is none.
        DriverNotFoundError, ForkedError, DriverError
            The driver is not there, may not be used, or refused.

        Notes
        -----
        It is no lock: the producer may go on writing until `release` tells it to wait. It keeps
        nothing alive; `borrow` does. There is one edge per distinct producer stream, and none where
        the producer and the consumer are the same stream. Does not block; thread-safe; the current
        device stays as it is. A user stream never joins the capture of a producer; a stream of
        your own that you pass does. With ``USERSTREAM_SYNC=1`` it waits on the host as well. Driver
        calls: ``cuStreamIsCapturing``, ``cuEventRecord`` on a pooled event, ``cuStreamWaitEvent``;
        for JAX and other producers that order a consumer themselves, ``__dlpack__(stream=)``.

        Examples
        --------
        >>> import userstream as us
        >>> from cuda.core import Device
        >>> Device(0).set_current()
        >>> producer = Device(0).create_stream()
        >>> buffer = Device(0).allocate(1024, stream=producer)
        >>> us.acquire(buffer, producer=producer) is us.get_stream(buffer)
        True
        """
        if stream is None and producer is _AUTO:
            usual = usual_streams_of(buffers, self._unnamed)
            if usual is not None:
                consumer, source, _ = usual
                if source is not None:
                    consumer._resolve().wait_for(source, may_join=False)
                return consumer
        ordering = self._any_ordering(buffers, stream, producer)
        ordering.acquire()
        return ordering.consumer

    def release(
        self,
        *buffers: Buffer,
        stream: StreamLike | int | None = None,
        producer: Producer = "auto",
    ) -> None:
        """Let the producers of buffers go on only after the work queued on a stream; no host wait.

        Parameters
        ----------
        *buffers : GPU buffer, or sequence or mapping of them
            They are held until the stream has passed this point.
        stream : stream, optional
            The one that used the buffers; by default the user stream of their device.
        producer : stream, None or "auto", default "auto"
            As for `acquire`. ``"auto"`` means the current streams of the frameworks now.

        Raises
        ------
        UnknownProducerError, DeviceMismatchError, UnsupportedBufferError, HostBufferError
            As `acquire`.
        CaptureError, ClosedError, ValueError, TypeError
            As `acquire`.
        DriverNotFoundError, ForkedError, DriverError
            As `acquire`.

        Notes
        -----
        What `borrow` does at its end. JAX and other producers that order a consumer through
        ``__dlpack__`` only cannot be told to wait: their buffers are held and nothing else, unless
        ``producer`` is given. Where the stream is being captured nothing is held: keep the buffers
        as long as the graph. Does not block; thread-safe. Driver calls: those of `acquire`. After
        the CUDA Array Interface, which asks for this edge of its consumers.

        Examples
        --------
        >>> import userstream as us
        >>> from cuda.core import Device
        >>> Device(0).set_current()
        >>> producer = Device(0).create_stream()
        >>> buffer = Device(0).allocate(1024, stream=producer)
        >>> stream = us.acquire(buffer, producer=producer)
        >>> us.release(buffer, producer=producer)
        """
        ordering = self._ordering(buffers, stream, producer)
        ordering.release(ordering.buffers)

    def borrow(
        self,
        *buffers: Buffer,
        stream: StreamLike | int | None = None,
        producer: Producer = "auto",
        activate: bool | str | Iterable[str] = False,
        keep: bool = True,
    ) -> Borrow:
        """Use buffers on a stream for the length of a block, in order with their producers.

        Parameters
        ----------
        *buffers : GPU buffer, or sequence or mapping of them
            Of any framework: see :doc:`/reference/buffers`.
        stream : stream, optional
            The one that uses the buffers, of any library; by default the user stream of their
            device, which is made if there is none yet.
        producer : stream, None or "auto", default "auto"
            As for `acquire`; asked at the begin of the block and kept to its end.
        activate : bool, str or iterable of str, default False
            Makes the stream the current one of these frameworks inside (see `Stream.activate`);
            `True` stands for those of the buffers.
        keep : bool, default True
            Hold the buffers not only to the end of the block, but until the stream has passed it.
            With `False` it is yours to see that their memory is not freed before.

        Returns
        -------
        context manager
            Its value is the stream. At the begin the stream waits for the producers, as `acquire`;
            at the end, also after an exception, the producers wait for the stream, as `release`.

        Raises
        ------
        UnknownProducerError, DeviceMismatchError, UnsupportedBufferError, HostBufferError
            As `acquire`.
        CaptureError, ClosedError, ValueError, TypeError
            As `acquire`.
        DriverNotFoundError, ForkedError, DriverError
            As `acquire`.
        RuntimeError
            The block ends in another thread than it began in, and the per-thread default stream
            takes part, or a framework's current stream was set.

        Notes
        -----
        An error at the end of the block never replaces one of your own: it becomes a note of it.
        Memory is not used again underneath: an edge alone would not see to that for memory that
        was allocated on another stream than the producer's (of PyTorch and CuPy). References are
        let go of by later calls, by waits, or by a thread of the library within about 5 ms. DALI
        uses the memory of a pipeline's outputs again all the same: `wait` before its next run. An
        array of JAX cannot be donated as long as it is held. May be nested, and used in many
        threads. Does not block. Driver calls: those of `acquire`, twice.

        Examples
        --------
        >>> import userstream as us
        >>> from cuda.core import Device
        >>> Device(0).set_current()
        >>> producer = Device(0).create_stream()
        >>> buffer = Device(0).allocate(1024, stream=producer)
        >>> with us.borrow(buffer, producer=producer) as stream:
        ...     buffer.fill(0, stream=stream)
        """
        return Borrow(self._ordering, (buffers, stream, producer), activate, keep)

    def hold(self, *objects: object, stream: StreamLike | int) -> None:
        """Keep objects alive until a stream has done the work that is queued on it now.

        Parameters
        ----------
        *objects : object
            Anything; usually buffers that the work uses.
        stream : stream
            Of any library.

        Raises
        ------
        CaptureError
            The stream is being captured into a graph: keep the objects as long as the graph.
        ClosedError, ForkedError, DriverError, TypeError, ValueError
            As `acquire`.

        Notes
        -----
        References are let go of by later calls, by waits, or by a thread of the library within
        about 5 ms; never by a thread of the driver. At interpreter exit what is still held stays.
        Does not block; thread-safe. Driver calls: ``cuEventRecord``, and ``cuEventQuery`` later.

        Examples
        --------
        >>> import userstream as us
        >>> stream = us.get_stream(0)
        >>> scratch = bytearray(1024)
        >>> us.hold(scratch, stream=stream)
        """
        self._check_open()
        _holding.keep(given_lane(stream, "stream"), objects)

    def hand_over(self, *results: Buffer, stream: StreamLike | int | None = None) -> None:
        """Hand results that were made on a stream over to the current streams of their frameworks.

        Parameters
        ----------
        *results : GPU buffer, or sequence or mapping of them
            Of PyTorch, CuPy or DALI's dynamic mode, made while the stream was `active
            <Stream.activate>`.
        stream : stream, optional
            The one on which they were made; by default the user stream of their device.

        Raises
        ------
        UnsupportedBufferError
            A result belongs to no framework that has a current stream.
        CaptureError, ClosedError, ForkedError, DriverError, TypeError, ValueError
            As `acquire`.

        Notes
        -----
        Needed for results that are used before the block ends in which they were made, or in
        another thread: their framework's current stream then waits for the stream, and PyTorch's
        allocator is told of that use (``Tensor.record_stream``). Call it where the results are to
        be used. After the block its end has done all that. Does not block; thread-safe. Driver
        calls: those of `acquire`.

        Examples
        --------
        >>> import userstream as us
        >>> us.hand_over([])  # nothing to hand over
        """
        self._check_open()
        hand_over(results, stream, self._user_stream)

    def _ordering(
        self, buffers: Sequence[Any], stream: StreamLike | int | None, producer: Producer
    ) -> Ordering:
        if stream is None and producer is _AUTO:
            usual = usual_streams_of(buffers, self._unnamed)
            if usual is not None:
                consumer, source, owner = usual
                ordering = Ordering(consumer, () if source is None else (source,), owner)
                ordering.buffers = buffers
                return ordering
        return self._any_ordering(buffers, stream, producer)

    def _any_ordering(
        self, buffers: Sequence[Any], stream: StreamLike | int | None, producer: Producer
    ) -> Ordering:
        self._check_open()
        views = _targets.views_in(buffers, named="buffers")
        return ordering_of(views, stream, producer, self._user_stream)

    def _user_stream(self, device: int) -> Stream:
        return self._unnamed.get(device) or self._find_or_create(device, None, None)
