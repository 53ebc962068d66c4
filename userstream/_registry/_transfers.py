"""Looking at buffers and changing them, in order with their producers."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, overload

from userstream import _numbers, _transfer, _waiting
from userstream._ordering import in_order, ordering_of
from userstream._registry import _host_operands, _operands
from userstream._registry._orders import Orders
from userstream.errors import UnsupportedBufferError

if TYPE_CHECKING:
    import numpy as np

    from userstream._buffers import View
    from userstream._stream.stream import Stream
    from userstream._waiting import Deadline
    from userstream.typing import Buffer, Producer, StreamLike


class Transfers(Orders):
    """The copies of a `UserStream`."""

    __slots__ = ()

    @overload
    def asnumpy(
        self,
        buffer: Buffer,
        *,
        out: np.ndarray,
        stream: StreamLike | int | None = None,
        producer: Producer = "auto",
        timeout: float | None = None,
    ) -> np.ndarray: ...
    @overload
    def asnumpy(
        self,
        buffer: Buffer,
        *,
        out: None = None,
        stream: StreamLike | int | None = None,
        producer: Producer = "auto",
        timeout: float | None = None,
    ) -> Any: ...

    def asnumpy(
        self,
        buffer: Buffer,
        *,
        out: np.ndarray | None = None,
        stream: StreamLike | int | None = None,
        producer: Producer = "auto",
        timeout: float | None = None,
    ) -> Any:
        """Copy a buffer to the host, in order with its producer, and wait for that copy alone.

        Parameters
        ----------
        buffer : GPU buffer, or sequence or mapping of them
            Of any framework: see :doc:`/reference/buffers`. Any strides; NumPy's types, and
            bfloat16 and float8 where ``ml_dtypes`` is installed. Host buffers are taken as well.
        out : numpy.ndarray, optional
            Where to; of the same shape and type. Page-locked memory is the quickest.
        stream : stream, optional
            The one to copy on; by default the user stream of the buffer's device.
        producer : stream, None or "auto", default "auto"
            As for `acquire`.
        timeout : float, optional
            Seconds, at least 0; `None` waits for ever.

        Returns
        -------
        numpy.ndarray, or list or dict of them
            ``out``, or a new array that has the order in memory that the buffer has. Of a list
            of tensors of DALI, a sequence or a mapping: a list, or a dict. Of a sharded array of
            JAX: the whole array. Of a host buffer ``numpy.asarray(buffer)``, which copies nothing
            where it need not, or ``numpy.from_dlpack``. Read-only where elements share memory.

        Raises
        ------
        WaitTimeout
            The copy was not done in time. ``out`` is undefined: copy again once the producer is
            done. Until the GPU has come past it, the buffer and the memory to fill are kept.
        UnsupportedBufferError
            The object is no buffer, has no shape (a bare address), has elements that NumPy lacks,
            or is masked; or its shape and strides reach out of its allocation; or it lies in memory
            so that it takes more than 65,536 copies; or its ``__dlpack__`` gives another copy at
            each call.
        HostBufferError
            It is on the host, and NumPy cannot read it.
        UnknownProducerError, DeviceMismatchError, CaptureError, ClosedError
            As `acquire`; and a copy in a graph is refused, as is a ``stream`` of another device for
            a conjugate or negated tensor of PyTorch.
        ValueError, TypeError
            ``out`` has another shape or type, is read-only or masked; as `acquire`.
        DriverNotFoundError, ForkedError, DriverError
            The driver is not there, may not be used, or refused.

        Notes
        -----
        Blocks, but never inside the driver, so Ctrl-C stops it; thread-safe. Work on other streams
        is not held up. On an error ``out`` is undefined, and after a timeout or Ctrl-C the GPU may
        still write a page-locked ``out``. Driver calls: those of `acquire`; ``cuMemcpyAsync``,
        ``cuMemcpy3DAsync``; for new memory ``cuMemAllocFromPoolAsync``, without pools
        ``cuMemHostAlloc``.

        A result is on page-locked memory, which is used again when the last array on it is gone. So
        work that still reads it, such as a copy from it that does not block, needs it kept: keep
        the array, or give it to `hold` with the stream of that work. At most an eighth of the
        machine's memory and 4 GiB are page-locked (set ``USERSTREAM_PINNED_LIMIT``, in bytes, or
        call `UserStream.set_pinned_limit`); past that results are ordinary arrays, copied through
        page-locked chunks.

        Examples
        --------
        >>> import userstream as us
        >>> from cuda.core import Device
        >>> Device(0).set_current()
        >>> theirs = Device(0).create_stream()
        >>> buffer = Device(0).allocate(4, stream=theirs)
        >>> buffer.fill(7, stream=theirs)
        >>> us.asnumpy(buffer, producer=theirs).tolist()
        [7, 7, 7, 7]
        """
        _waiting.check_arguments(timeout, "auto")
        self._check_open()
        copy = functools.partial(
            self._to_host,
            stream=stream,
            producer=producer,
            deadline=_waiting.Deadline(timeout),  # one for all that is copied
        )
        return _operands.copied(buffer, copy, out)

    def copyto(
        self,
        dst: Buffer,
        src: Buffer,
        *,
        stream: StreamLike | int | None = None,
        producer: Producer = "auto",
        timeout: float | None = None,
    ) -> Stream:
        """Copy one buffer to another, in order with the producers of both.

        Parameters
        ----------
        dst : GPU buffer or host array
            Where to.
        src : GPU buffer or host array
            Where from: of the same type as ``dst``, and of a shape that broadcasts to its shape.
            One of the two is a GPU buffer; if both are, they may be of different frameworks and
            on different devices. NumPy's scalars are arrays without axes.
        stream : stream, optional
            The one to copy on; by default the user stream of the device of ``dst``, or of ``src``
            if ``dst`` is on the host.
        producer : stream, None or "auto", default "auto"
            As for `acquire`, of both.
        timeout : float, optional
            Seconds, at least 0; `None` waits for ever. Nothing is waited for between devices.

        Returns
        -------
        Stream
            The one on which the copy was queued.

        Raises
        ------
        WaitTimeout
            The copy was not done in time, and what ``dst`` holds is undefined: copy again.
        UnsupportedBufferError, HostBufferError
            As `asnumpy`.
        UnknownProducerError, DeviceMismatchError, CaptureError, ClosedError
            As `asnumpy`.
        ValueError, TypeError
            The shapes do not fit, or the types differ; ``dst`` is read-only (as arrays of JAX
            are), a conjugate or negated view of PyTorch, or a host object that NumPy can only
            copy; the two overlap or interleave; both are on the host, where `numpy.copyto` copies.
        DriverNotFoundError, ForkedError, DriverError
            The driver is not there, may not be used, or refused.

        Notes
        -----
        A host array may be reused when it returns: one that is copied from is copied aside first
        up to 16 MiB, and waited for above; one that is copied to is waited for. The GPU buffers
        are held until the copy is done, and their producers go on after it. A buffer that orders a
        consumer by DLPack alone names no producer: there all later work of the device goes on after
        the copy, unless its CUDA Array Interface names a stream; where that would invalidate a
        capture that can be seen, and before CUDA 12.5, the copy is waited for instead. Peer access
        between devices is left as it is. Thread-safe. Driver calls: those of `acquire` and
        `release`; ``cuCtxWaitEvent``;
        ``cuMemcpyAsync``, ``cuMemcpy3DAsync``, ``cuMemcpyPeerAsync``, ``cuMemcpy3DPeerAsync``; for
        new page-locked memory ``cuMemAllocFromPoolAsync``, without pools ``cuMemHostAlloc``.
        After `numpy.copyto`.

        Examples
        --------
        >>> import numpy as np
        >>> import userstream as us
        >>> from cuda.core import Device
        >>> Device(0).set_current()
        >>> theirs = Device(0).create_stream()
        >>> buffer = Device(0).allocate(4, stream=theirs)
        >>> stream = us.copyto(buffer, np.arange(4, dtype=np.uint8), producer=theirs)
        >>> us.asnumpy(buffer, producer=theirs).tolist()
        [0, 1, 2, 3]
        """
        _waiting.check_arguments(timeout, "auto")
        self._check_open()
        deadline = _waiting.Deadline(timeout)
        to, source = _operands.target_of(dst), _operands.source_of(src)
        target = to or source
        if target is None:
            raise TypeError("both are on the host: use numpy.copyto")
        views = [operand.view for operand in (to, source) if operand is not None]
        if stream is None:
            stream = self._user_stream(target.array.device)

        ordering = ordering_of(views, stream, producer, self._user_stream)
        consumer = ordering.consumer

        def copy() -> None:
            if source is None:
                assert to is not None
                _transfer.from_host(_host_operands.as_array(src), to.array, consumer, deadline)
                return
            _keep, packed = _operands.packed(source, ordering, if_scattered=to is None)
            if to is None:
                _transfer.into_host(_host_operands.writable(dst), packed, consumer, deadline)
            else:
                _transfer.between(to.array, packed, consumer, deadline)

        in_order(ordering, copy, deadline, release=True)
        return consumer

    @staticmethod
    def set_pinned_limit(nbytes: int) -> None:
        """Bound the page-locked memory on which `asnumpy` hands out results, for the process.

        Parameters
        ----------
        nbytes : int
            Bytes, those under arrays that are still in use included; 0 hands out none.

        Raises
        ------
        ValueError
            It is negative.
        TypeError
            It is no integer.

        Notes
        -----
        Memory that is free already is given back, by a thread of the library. Does not block;
        thread-safe. Launches of other threads are not held up, except where the driver has no pools
        of host memory: see :doc:`/explanation/limits`. Driver call: ``cuMemFreeAsync``; without
        pools ``cuMemFreeHost``.

        Examples
        --------
        >>> from userstream import UserStream
        >>> UserStream.set_pinned_limit(1 << 30)
        """
        _transfer.set_limit(_numbers.integer(nbytes, "nbytes"))

    def _to_host(
        self,
        view: View,
        out: np.ndarray | None = None,
        *,
        stream: StreamLike | int | None,
        producer: Producer,
        deadline: Deadline,
    ) -> np.ndarray:
        """Copy one array, wherever it is."""
        try:
            on_host = _operands.is_on_host(view)
        except UnsupportedBufferError:
            empty = _operands.empty_array(view)
            if empty is None:
                raise
            return _host_operands.copied(empty, out)
        if on_host:
            return _host_operands.copied(view.buffer, out)
        source = _operands.Operand(view, _transfer.device_array(view))  # refuses what has no shape
        ordering = ordering_of((view,), stream, producer, self._user_stream)

        def copy() -> np.ndarray:
            _keep, packed = _operands.packed(source, ordering)
            return _transfer.to_host(packed, ordering.consumer, out, deadline)

        return in_order(ordering, copy, deadline, release=False)
