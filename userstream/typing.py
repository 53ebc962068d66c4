"""Types for annotations: what userstream's functions take.

Nothing here is needed at run time, and no framework is imported for it.
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

    from cuda.bindings import driver

__all__ = [
    "Buffer",
    "CUDAArrayInterface",
    "DLPackBuffer",
    "DeviceLike",
    "Producer",
    "StreamLike",
    "Target",
]


@runtime_checkable
class StreamLike(Protocol):
    """A stream of any library: an object with the ``__cuda_stream__`` protocol of cuda.core."""

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return the version of the protocol, 0, and the address of the stream."""
        ...


@runtime_checkable
class DLPackBuffer(Protocol):
    """An array of any library that speaks DLPack."""

    def __dlpack__(self, *, stream: Any = None) -> Any:  # a capsule
        """Export the array, ordered for a stream of the consumer."""
        ...

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return the DLPack device type and the ordinal."""
        ...


@runtime_checkable
class CUDAArrayInterface(Protocol):
    """An array of any library that speaks the CUDA Array Interface."""

    @property
    def __cuda_array_interface__(self) -> Mapping[str, Any]:
        """The interface: pointer, shape, type, and from version 3 on the stream."""
        ...


class _CUDADevice(Protocol):
    """`cuda.core.Device`, `torch.device`, `cupy.cuda.Device` or `jax.Device`."""

    def __hash__(self) -> int: ...


Buffer: TypeAlias = "DLPackBuffer | CUDAArrayInterface | driver.CUdeviceptr | Any"
"""A GPU buffer of any framework. DALI's lists and RMM's buffers have no protocol in common with
the others, so to a type checker it is any object."""

Producer: TypeAlias = "StreamLike | int | Literal['auto'] | None"
"""Who writes a buffer: a stream or its handle, `None` if nothing is pending, or ``"auto"``."""

DeviceLike: TypeAlias = SupportsIndex | _CUDADevice
"""A device: an ordinal, or the device object of cuda.core or of a framework."""

Target: TypeAlias = "Buffer | DeviceLike | StreamLike | Sequence[Any] | Mapping[Any, Any] | None"
"""What says where to work: a buffer, a device, a stream, a (nested) sequence or mapping of
buffers, or `None` for the calling thread's current device."""
