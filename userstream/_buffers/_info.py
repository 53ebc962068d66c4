"""`BufferInfo`: what is known of a buffer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    import numpy as np

    from userstream._driver import Memory

Ordering: TypeAlias = Literal["exact", "current", "dlpack", "none", "device"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferInfo:
    """What `describe` found out about a buffer. A fact that nobody tells is `None`.

    Attributes
    ----------
    device_id : int or None
        Ordinal of the device whose memory it is; `None` for parts on several devices.
    device_uuid : str or None
        UUID of that device, as ``nvidia-smi -L`` names it: the same in every process.
    address : int or None
        Address of the first element; 0 for most empty arrays.
    nbytes : int or None
        Size of the elements in bytes, without gaps between them.
    shape : tuple of int, or None
        In elements.
    strides : tuple of int, or None
        In bytes, as NumPy counts them.
    dtype : numpy.dtype, str or None
        The name where NumPy has no such type ("bfloat16").
    memory : {"device", "managed", "pinned"} or None
        By the driver.
    producer : int or None
        Handle of the stream on which work for it may be pending, as ``__cuda_stream__`` gives it:
        1 and 2 are the legacy and the per-thread default stream of the device.
    ordering : {"exact", "current", "dlpack", "none", "device"}
        How far the producer is known. *exact*: the object names its stream. *current*: the
        current stream of its framework stands in, which need not be the one that wrote it.
        *dlpack*: no stream is named, but objects of this type are known to order a consumer's
        stream themselves, through ``__dlpack__(stream=)``. *none*: nothing is pending. *device*:
        nothing tells, so it is ordered with everything on the device.
    source : str
        The rule that answered, such as ``"torch.Tensor"`` or ``"__cuda_array_interface__"``.
    parts : tuple of BufferInfo
        Of a buffer that is made of several, such as a sharded array: each of them.

    Examples
    --------
    >>> import userstream as us
    >>> from cuda.core import Device
    >>> Device(0).set_current()
    >>> info = us.describe(Device(0).allocate(1024, stream=us.get_stream(0)))
    >>> info.device_id, info.nbytes, info.memory
    (0, 1024, 'device')
    """

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
