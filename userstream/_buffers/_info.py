"""`BufferInfo`: the description of a buffer."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    import numpy as np

    from userstream._driver.pointers import Memory

Ordering: TypeAlias = Literal["exact", "current", "dlpack", "none", "device"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferInfo:
    """The description of a buffer, as returned by `describe`. Unknown facts are `None`.

    Attributes
    ----------
    device_id : int or None
        Ordinal of the device that owns the memory; `None` for parts on several devices.
    device_uuid : str or None
        UUID of that device, as shown by ``nvidia-smi -L``; the same in every process.
    address : int or None
        Address of the first element; 0 for most empty arrays.
    nbytes : int or None
        Size of the elements in bytes, without the gaps between them.
    shape : tuple of int, or None
        Shape in elements.
    strides : tuple of int, or None
        Strides in bytes, as in NumPy.
    dtype : numpy.dtype, str or None
        The name, such as "bfloat16", if NumPy has no such type.
    memory : {"device", "managed", "pinned"} or None
        Kind of memory, as reported by the driver.
    producer : int or None
        Handle of the stream on which work for the buffer may be pending, as in
        ``__cuda_stream__``: 1 and 2 are the legacy and the per-thread default stream.
    ordering : {"exact", "current", "dlpack", "none", "device"}
        How the producer is known. *exact*: the object names its stream. *current*: the current
        stream of its framework stands in, which is not necessarily the one that wrote the buffer.
        *dlpack*: the object names no stream, but its type is known to order a consumer's stream
        itself, in ``__dlpack__(stream=)``. *none*: nothing is pending. *device*: the producer is
        not known, so the buffer is ordered with everything on the device.
    source : str
        The kind of buffer, such as ``"torch.Tensor"`` or ``"__cuda_array_interface__"``.
    parts : tuple of BufferInfo
        The parts of a buffer that consists of several, such as a sharded array.

    Examples
    --------
    >>> import userstream as us
    >>> from cuda.core import Device
    >>> Device(0).set_current()
    >>> info = us.describe(Device(0).allocate(1024, stream=us.get_stream(0)))
    >>> info.device_id, info.nbytes, info.memory
    (0, 1024, 'device')
    """

    __module__ = "userstream"

    device_id: int | None
    source: str
    ordering: Ordering
    address: int | None = None
    nbytes: int | None = None
    shape: tuple[int, ...] | None = None
    strides: tuple[int, ...] | None = None
    dtype: np.dtype | str | None = None
    memory: Memory | None = None
    producer: int | None = None
    parts: tuple[BufferInfo, ...] = ()
    device_uuid: str | None = None

    def __repr__(self) -> str:
        said = ((each.name, getattr(self, each.name)) for each in fields(self))
        return f"BufferInfo({', '.join(f'{name}={_shown(name, it)}' for name, it in said)})"


def _shown(name: str, it: object) -> str:
    # Hexadecimal, like the repr of streams and the reports of races.
    return hex(it) if isinstance(it, int) and name in ("address", "producer") else repr(it)
