"""`asnumpy` and `copyto`: copies in order with the producers of what is copied."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from userstream import _transfer
from userstream._ordering import in_order, ordering_of
from userstream._transfer import host_operands, operands
from userstream._waiting import Deadline
from userstream.errors import UnsupportedBufferError

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from userstream._buffers import View
    from userstream._stream.stream import Stream
    from userstream.typing import Buffer, Producer, StreamLike


def asnumpy(
    buffer: Buffer,
    out: np.ndarray | None,
    *,
    stream: StreamLike | int | None,
    producer: Producer,
    user_stream: Callable[[int], Stream],
    timeout: float | None,
) -> Any:
    """Copy a buffer, or what a collection holds, to the host."""
    copy = functools.partial(
        _to_host,
        stream=stream,
        producer=producer,
        user_stream=user_stream,
        deadline=Deadline(timeout),  # one for all that is copied
    )
    return operands.copied(buffer, copy, out)


def _to_host(
    view: View,
    out: np.ndarray | None = None,
    *,
    stream: StreamLike | int | None,
    producer: Producer,
    user_stream: Callable[[int], Stream],
    deadline: Deadline,
) -> np.ndarray:
    """Copy one array, wherever it is."""
    try:
        on_host = operands.is_on_host(view)
    except UnsupportedBufferError:
        empty = operands.empty_array(view)
        if empty is None:
            raise
        return host_operands.copied(empty, out)
    if on_host:
        return host_operands.copied(view.buffer, out)
    source = operands.Operand(view, _transfer.device_array(view))  # refuses what has no shape
    ordering = ordering_of((view,), stream, producer, user_stream)

    def copy() -> np.ndarray:
        _keep, packed = operands.packed(source, ordering)
        return _transfer.to_host(packed, ordering.consumer, out, deadline)

    return in_order(ordering, copy, deadline, release=False)


def copyto(
    dst: Buffer,
    src: Buffer,
    *,
    stream: StreamLike | int | None,
    producer: Producer,
    user_stream: Callable[[int], Stream],
    timeout: float | None,
) -> Stream:
    """Copy one array to another; return the stream that it was queued on."""
    deadline = Deadline(timeout)
    to, source = operands.target_of(dst), operands.source_of(src)
    target = to or source
    if target is None:
        raise TypeError("both are on the host: use numpy.copyto")
    views = [operand.view for operand in (to, source) if operand is not None]
    if stream is None:
        stream = user_stream(target.array.device)

    ordering = ordering_of(views, stream, producer, user_stream)
    consumer = ordering.consumer

    def copy() -> None:
        if source is None:
            assert to is not None
            _transfer.from_host(host_operands.as_array(src), to.array, consumer, deadline)
            return
        _keep, packed = operands.packed(source, ordering, if_scattered=to is None)
        if to is None:
            _transfer.into_host(host_operands.writable(dst), packed, consumer, deadline)
        else:
            _transfer.between(to.array, packed, consumer, deadline)

    in_order(ordering, copy, deadline, release=True)
    return consumer
