"""Types for annotating code that calls userstream.

The types are for type checkers; none is needed at run time, and none imports a framework.

Examples
--------
>>> import userstream as us
>>> from userstream.typing import Buffer, Buffers, DeviceLike, Producer, StreamLike, Target
>>> from userstream.typing import AccessMode, CaptureMode, WaitPolicy
>>> def finish(target: Target, policy: WaitPolicy = "auto") -> None:
...     us.wait(target, timeout=10, policy=policy)
>>> def begin(stream: us.Stream, mode: CaptureMode = "global") -> None:
...     stream.begin_capture(mode)
>>> def clear(buffer: Buffer, producer: Producer = "auto") -> None:
...     with us.borrow(buffer, producer=producer) as stream:
...         buffer.fill(0, stream=stream)
>>> def use(buffer: Buffer, mode: AccessMode) -> us.Borrow:
...     return us.borrow(buffer, mode=mode)
>>> def snapshot(*buffers: Buffers) -> list[object]:
...     return [us.asnumpy(each) for each in buffers]
>>> def follow(theirs: StreamLike, device: DeviceLike = 0) -> None:
...     us.get_stream(device).wait(theirs)
"""

from __future__ import annotations

from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    Protocol,
    SupportsIndex,
    TypeAlias,
    runtime_checkable,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "AccessMode",
    "Buffer",
    "Buffers",
    "CUDAArrayInterface",
    "CaptureMode",
    "DLPackBuffer",
    "DeviceLike",
    "Producer",
    "StreamLike",
    "Target",
    "WaitPolicy",
]


@runtime_checkable
class StreamLike(Protocol):
    """A stream of any library: an object that implements the ``__cuda_stream__`` protocol.

    Examples
    --------
    >>> import userstream as us
    >>> from userstream.typing import StreamLike
    >>> isinstance(us.get_stream(0), StreamLike)
    True
    """

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return the protocol version, 0, and the stream handle."""
        ...


@runtime_checkable
class DLPackBuffer(Protocol):
    """An array of any library that implements DLPack.

    Examples
    --------
    >>> import numpy as np
    >>> from userstream.typing import DLPackBuffer
    >>> isinstance(np.zeros(4), DLPackBuffer)
    True
    """

    def __dlpack__(self, *, stream: Any = None) -> Any:  # a capsule
        """Export the array, safe to use on the consumer's stream."""
        ...

    def __dlpack_device__(self) -> tuple[Any, int]:  # an Enum in some libraries
        """Return the DLPack device type and the device ordinal."""
        ...


@runtime_checkable
class CUDAArrayInterface(Protocol):
    """An array of any library that implements the CUDA Array Interface.

    Examples
    --------
    >>> import numpy as np
    >>> from userstream.typing import CUDAArrayInterface
    >>> isinstance(np.zeros(4), CUDAArrayInterface)
    False
    """

    @property
    def __cuda_array_interface__(self) -> Mapping[str, Any]:
        """The interface: pointer, shape, type and, since version 3, the stream."""
        ...


class _Pointer(Protocol):
    """A ``CUdeviceptr`` of cuda.bindings, which has no type hints."""

    def getPtr(self) -> int:  # noqa: N802
        """Return the address of the object itself."""
        ...


class _TensorList(Protocol):
    """A list of tensors of DALI (``TensorListGPU``), which implements no array protocol."""

    def device_id(self) -> int:
        """Return the ordinal of the device."""
        ...


class _Batch(Protocol):
    """A batch of DALI's dynamic mode (``Batch``)."""

    @property
    def tensors(self) -> Any:
        """The tensors of the batch."""
        ...


class _CUDADevice(Protocol):
    """`cuda.core.Device`, or the device object of a framework."""

    def __hash__(self) -> int: ...


_Array: TypeAlias = DLPackBuffer | CUDAArrayInterface
_Several: TypeAlias = _TensorList | _Batch

Buffer: TypeAlias = _Array | _Several | _Pointer
"""A GPU buffer of any framework: an object that implements DLPack or the CUDA Array Interface, a
list of tensors of DALI, or a ``CUdeviceptr``."""

Buffers: TypeAlias = "Buffer | Sequence[Any] | Mapping[Any, Any]"
"""A buffer, or a (nested) sequence or mapping of buffers."""

Producer: TypeAlias = "StreamLike | Literal['auto', 'device'] | None"
"""The producer of a buffer: a stream, ``"device"`` for everything on the device of the buffer,
``"auto"`` for the stream that is known of the buffer, or `None` if no work is pending."""

DeviceLike: TypeAlias = SupportsIndex | str | _CUDADevice
"""A device: an ordinal, ``"cuda:1"``, or the device object of cuda.core or of a framework."""

AccessMode: TypeAlias = Literal["read", "write"]
"""The access of work to buffers: only reading, or writing as well; see `userstream.borrow`."""

WaitPolicy: TypeAlias = Literal["auto", "spin"]
"""The policy of a host wait: sleeping until the work is done, or polling; see `userstream.wait`."""

CaptureMode: TypeAlias = Literal["global", "thread_local", "relaxed"]
"""The calls that a capture prohibits; see `userstream.Stream.begin_capture`."""

Target: TypeAlias = "Buffers | DeviceLike | StreamLike | None"
"""A buffer, a device or a stream, which selects a stream; a (nested) sequence or mapping of buffers
(for waits, of streams as well); or `None` for the current device of the calling thread."""
