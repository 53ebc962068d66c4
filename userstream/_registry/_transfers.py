"""Looking at buffers and changing them, in order with their producers."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from userstream import _buffers, _cleanup, _targets, _transfer, _waiting
from userstream._buffers import type_name
from userstream._registry._orders import Orders
from userstream.errors import HostBufferError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from userstream._buffers import BufferInfo, Rule
    from userstream._ordering import Ordering
    from userstream._stream import Stream
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
            where it need not. Read-only where elements share memory.

        Raises
        ------
        WaitTimeout
            The copy was not done in time; it goes on.
        UnsupportedBufferError
            The object is no buffer, has no shape (a bare address), or elements that NumPy lacks.
        UnknownProducerError, DeviceMismatchError, CaptureError, ClosedError
            As `acquire`; and a copy in a graph is refused.
        ValueError, TypeError
            ``out`` has another shape or type, or is read-only; as `acquire`.
        DriverNotFoundError, ForkedError, DriverError
            The driver is not there, may not be used, or refused.

        Notes
        -----
        Blocks, but never inside the driver, so Ctrl-C stops it; thread-safe. Work on other streams
        is not held up. Results are handed out on page-locked memory, which is used again when the
        last array on it is gone: at most an eighth of the machine's memory and 4 GiB (set
        ``USERSTREAM_PINNED_LIMIT``, in bytes, or call `UserStream.set_pinned_limit`); past that
        they are ordinary arrays, copied through page-locked chunks. On an error ``out`` is
        undefined, and after a timeout or Ctrl-C the GPU may still write a page-locked ``out``.
        Driver calls: those of `acquire`; ``cuMemcpyAsync``, ``cuMemcpy3DAsync``.

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
        left = _waiting.Deadline(timeout).left

        def copy(part: Any, out: np.ndarray | None = None) -> Any:
            return self.asnumpy(part, out=out, stream=stream, producer=producer, timeout=left())

        rule = _buffers.rule_of(buffer)
        if rule is None and _targets.is_collection(buffer):
            _refuse_out(out, buffer)
            if isinstance(buffer, Mapping):
                return {key: copy(part) for key, part in buffer.items()}
            return [copy(part) for part in iter(buffer)]  # type: ignore[arg-type] # a sequence
        rule = rule or _buffers.require_rule(buffer)
        if rule.parts is not None and rule.places is None:
            _refuse_out(out, buffer)
            return [copy(part) for part in rule.parts(buffer)]
        places = () if rule.places is None else rule.places(buffer)
        if len(places) > 1:
            return _joined(buffer, places, copy, out)
        if places:  # the whole on one device, or on each of several
            buffer = places[0][0]
        info = _described(buffer, rule)
        if info is None:
            return _from_host(buffer, out)
        _transfer.device_array(info)  # what has no shape is refused first
        with self._ordered((buffer,), stream, producer) as ordering:
            _keep, info = _packed(buffer, rule, info, ordering)
            return _transfer.to_host(info, ordering.consumer, out, timeout)

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
            on different devices.
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
            The copy was not done in time; it goes on, and what ``dst`` holds is undefined.
        UnsupportedBufferError, UnknownProducerError, DeviceMismatchError, CaptureError, ClosedError
            As `asnumpy`.
        ValueError, TypeError
            The shapes do not fit, or the types differ; ``dst`` is read-only (as arrays of JAX
            are); the two overlap; both are on the host, where `numpy.copyto` copies.
        DriverNotFoundError, ForkedError, DriverError
            The driver is not there, may not be used, or refused.

        Notes
        -----
        A host array may be reused when it returns: one that is copied from is copied aside first
        up to 16 MiB, and waited for above; one that is copied to is waited for. The GPU buffers
        are held until the copy is done, and their producers go on after it. Peer access between
        devices is left as it is. Thread-safe. Driver calls: those of `acquire` and `release`;
        ``cuMemcpyAsync``, ``cuMemcpy3DAsync``, ``cuMemcpyPeerAsync``, ``cuMemcpy3DPeerAsync``.
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
        to, source = (_described(each, _buffers.require_rule(each)) for each in (dst, src))
        if to is None and source is None:
            raise TypeError("both are on the host: use numpy.copyto")
        buffers = [buffer for buffer, info in ((dst, to), (src, source)) if info is not None]
        if to is not None:
            _transfer.refuse_read_only(dst, to)
        target = to or source
        if stream is None and target is not None and target.device_id is not None:
            stream = self._user_stream(target.device_id)
        with self._ordered(buffers, stream, producer, always=True) as ordering:
            consumer = ordering.consumer
            if source is not None:
                rule = _buffers.require_rule(src)
                src, source = _packed(src, rule, source, ordering, if_scattered=to is None)
            if to is None:
                assert source is not None
                _transfer.into_host(_writable(dst), source, consumer, timeout)
            elif source is None:
                _transfer.from_host(np.asarray(src), to, consumer, timeout)
            else:
                _transfer.between(to, source, consumer, timeout)
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

        Notes
        -----
        Memory that is free already is given back, by a thread of the library, because the driver
        waits for the devices in that. Does not block; thread-safe. Driver call:
        ``cuMemFreeHost``.

        Examples
        --------
        >>> from userstream import UserStream
        >>> UserStream.set_pinned_limit(1 << 30)
        """
        _transfer.set_limit(operator.index(nbytes))

    @contextmanager
    def _ordered(
        self,
        buffers: Sequence[Any],
        stream: StreamLike | int | None,
        producer: Producer,
        *,
        always: bool = False,
    ) -> Iterator[Ordering]:
        """Acquire buffers for a block; release them after an error in it, or `always`.

        A copy that was waited for needs no release: what the producers do next comes after it.
        """
        ordering = self._ordering(buffers, stream, producer)
        held = ordering.buffers, ordering.acquire()
        try:
            yield ordering
        except BaseException as error:
            try:
                ordering.release(held)
            except Exception as failure:
                _cleanup.report([failure], error)
            raise
        if always:
            ordering.release(held)


def _packed(
    buffer: Any, rule: Rule, info: BufferInfo, ordering: Ordering, *, if_scattered: bool = True
) -> tuple[Any, BufferInfo]:
    """Let the framework of a buffer make it contiguous on our stream, if need be or if quicker."""
    if rule.pack is None or rule.framework is None:
        return buffer, info
    if not (rule.must_pack is not None and rule.must_pack(buffer)) and not (
        if_scattered and _transfer.is_scattered(info)
    ):
        return buffer, info
    with ordering.consumer.activate(rule.framework.name):
        packed = rule.pack(buffer)
    # Its memory belongs to our stream's arena: what is freed there is used in order.
    return packed, rule.describe(packed)


def _joined(
    buffer: Any,
    places: Sequence[tuple[Any, Any]],
    copy: Callable[..., np.ndarray],
    out: np.ndarray | None,
) -> np.ndarray:
    """Copy the parts of a buffer into one array."""
    if out is not None and out.shape != tuple(buffer.shape):
        raise ValueError(f"out has shape {out.shape}, and the buffer {tuple(buffer.shape)}")
    for part, index in places:
        if out is None:
            first = copy(part)
            out = np.empty(buffer.shape, first.dtype)
            out[index] = first
        else:
            copy(part, out[index])
    assert out is not None
    return out


def _described(buffer: Any, rule: Rule) -> BufferInfo | None:
    """Describe a GPU buffer; `None` if it is on the host."""
    try:
        rule.device_id(buffer)
    except HostBufferError:
        return None
    return rule.describe(buffer)


def _from_host(buffer: Any, out: np.ndarray | None) -> np.ndarray:
    array = np.asarray(buffer)
    if out is None:
        return array
    if out.shape != array.shape or out.dtype != array.dtype:
        raise ValueError(
            f"out has shape {out.shape} and dtype {out.dtype}, and the buffer {array.shape} and "
            f"{array.dtype}"
        )
    np.copyto(out, array)
    return out


def _writable(buffer: Any) -> np.ndarray:
    array = np.asarray(buffer)
    if not array.flags.writeable:
        raise ValueError(f"the target is read-only: {type_name(buffer)}")
    return array


def _refuse_out(out: np.ndarray | None, buffer: object) -> None:
    if out is not None:
        raise TypeError(f"out= takes one array, and {type_name(buffer)} is made of several")
