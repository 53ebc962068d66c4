"""How a library takes and returns buffers: `snapshot` copies an array of any framework."""

import numpy
from cuda.core import DeviceMemoryResource

import userstream as us
from userstream.typing import Buffer, Producer, StreamLike

_streams = us.UserStream()  # of this library alone; making it needs no GPU


class Array:
    """What `snapshot` returns. It names its stream, so consumers can be ordered after it."""

    def __init__(self, memory, info, stream):
        self._owned = memory, stream
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": info.shape,
            "typestr": info.dtype.str,
            "strides": None,
            "data": (int(memory.handle), False),
            "stream": int(stream.handle),
        }


def snapshot(
    x: Buffer,
    out: Buffer | None = None,
    stream: StreamLike | None = None,
    producer: Producer = "auto",
):
    """Copy `x` to new memory, or to `out`. The host does not wait.

    Parameters
    ----------
    x : GPU buffer of any framework, contiguous
        It is read after the work that is pending on it, and held until the copy is done.
    out : GPU buffer of any framework, contiguous, optional
        Destination; must have as many bytes as `x`. Its framework continues after the copy.
    stream : stream of any library, optional
        The stream on which to copy, by default one of this library. It may be under capture.
    producer : stream, "auto", "device" or None, default "auto"
        Who writes `x` and `out`, as for `userstream.borrow`.

    Returns
    -------
    Array, or `out` if it was passed
        Complete once the stream has passed this point. An `Array` names its stream.
    """
    source = _contiguous("x", x)
    buffers = (x,)
    if out is not None:
        buffers = (x, out)
        target = _contiguous("out", out)
        if target.nbytes != source.nbytes:
            raise ValueError(f"out has {target.nbytes} bytes, but x has {source.nbytes}")
    with _streams.borrow(*buffers, stream=stream, producer=producer) as queue:
        if out is not None:
            queue.memcpy_dtod(target.address, source.address, source.nbytes)
            return out
        memory = DeviceMemoryResource(queue.device).allocate(source.nbytes, stream=queue)
        queue.memcpy_dtod(int(memory.handle), source.address, source.nbytes)
        return Array(memory, source, queue)


def _contiguous(name, buffer):
    info = us.describe(buffer)
    if info.shape is None or not isinstance(info.dtype, numpy.dtype):
        raise TypeError(f"{name} has no shape, or no NumPy dtype: it is a {info.source}")
    step = info.dtype.itemsize
    for length, stride in zip(reversed(info.shape), reversed(info.strides), strict=True):
        if length > 1 and stride != step:
            raise ValueError(f"{name} is not contiguous: its strides are {info.strides}")
        step *= length
    return info
