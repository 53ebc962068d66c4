"""JAX arrays."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NoReturn

from userstream._buffers.framework import type_name
from userstream._buffers.view import (
    Layout,
    ProducerStream,
    View,
    cached,
    contiguous_strides,
    host_error,
)
from userstream.errors import DeviceMismatchError, InvalidDeviceError, UnsupportedBufferError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from userstream._driver.pointers import Memory

# Ordinals by jax.Device; bounded by the number of devices.
_ordinals: dict[Any, int] = {}


def view_for(kind: type) -> type[View] | None:
    """Return the view class if `kind` is an array type of JAX."""
    array = getattr(sys.modules.get("jax"), "Array", None)
    if isinstance(array, type) and issubclass(kind, array):
        return ArrayView
    tracer = getattr(sys.modules.get("jax.core"), "Tracer", None)
    return TracerView if isinstance(tracer, type) and issubclass(kind, tracer) else None


def device_id_of(device: Any) -> int:
    """Return the ordinal of a device object."""
    if device.platform not in ("gpu", "cuda"):
        raise InvalidDeviceError(f"{device!r} is not a CUDA device; pass one of jax.devices('gpu')")
    return int(device.local_hardware_id)


class ArrayView(View):
    """View of a ``jax.Array``, which may be sharded over several devices."""

    source = "jax.Array"
    is_immutable = True

    @staticmethod
    def locate(array: Any) -> int:
        """Return the ordinal of the device."""
        ordinal = _ordinals.get(array.device)  # a sharding, if the array is on several devices
        return _one_device(array) if ordinal is None else ordinal

    @cached
    def shards(self) -> Sequence[Any]:
        """The array's shards in this process; empty for an array known to be on one device."""
        return () if self.buffer.device in _ordinals else self.buffer.addressable_shards

    @cached
    def parts(self) -> Sequence[View] | None:
        """The views of the shards; `None` for an array of one shard."""
        if len(self.shards) < 2:
            return None
        return [ArrayView(shard.data) for shard in self.shards]

    @property
    def units(self) -> Sequence[View]:
        """The views of the shards, each on one device."""
        return self.parts or (self,)

    @cached
    def pieces(self) -> Sequence[tuple[View, Any]] | None:
        """The shards with their indices, one shard per group of replicas."""
        if not self.shards:
            return None
        if not self.buffer.is_fully_addressable:
            raise UnsupportedBufferError(
                f"this {type_name(self.buffer)} has shards on devices of other processes; pass its "
                "addressable_shards[i].data"
            )
        return [
            (ArrayView(shard.data), shard.index) for shard in self.shards if shard.replica_id == 0
        ]

    @cached
    def device_and_memory(self) -> tuple[int | None, Memory]:
        """The device, `None` for an array on several devices, and the kind of memory."""
        if self.parts is None:
            return self.device, "device"
        ordinals = {part.device for part in self.parts}
        return ordinals.pop() if len(ordinals) == 1 else None, "device"

    @cached
    def layout(self) -> Layout:
        """The layout; without an address for an array of several shards."""
        array = self.buffer
        if self.parts is not None:
            return Layout(None, array.shape, None, array.dtype, array.nbytes)
        address = array.unsafe_buffer_pointer()
        return Layout(address, array.shape, _strides(array), array.dtype, array.nbytes)

    @cached
    def producer(self) -> ProducerStream:
        """No named stream: JAX orders the consumer's stream in `export`."""
        return ProducerStream("dlpack")

    def export(self, handle: int) -> object:
        """Order a stream after JAX's work; the capsule also protects the memory from donation."""
        return self.buffer.__dlpack__(stream=handle)

    @cached
    def is_read_only(self) -> bool:
        """Always true: JAX arrays are immutable."""
        return True


def _one_device(array: Any) -> int:
    ordinals = sorted({_ordinal(shard.device, array) for shard in array.addressable_shards})
    if len(ordinals) > 1:
        raise DeviceMismatchError(
            f"this {type_name(array)} is sharded over devices {ordinals}; pass one of its "
            "addressable_shards[i].data, or a device",
            devices=ordinals,
        )
    return ordinals[0]


def _ordinal(device: Any, array: Any) -> int:
    if device.platform not in ("gpu", "cuda"):
        raise host_error(array, f"the memory of {device}")
    return _ordinals.setdefault(device, int(device.local_hardware_id))


def _strides(array: Any) -> tuple[int, ...]:
    """Return the strides in bytes; the compiler may choose an order other than C order."""
    itemsize = array.dtype.itemsize
    layout = getattr(getattr(array, "format", None), "layout", None)
    if layout is None:  # a JAX version or plugin with C order only
        return contiguous_strides(array.shape, itemsize)
    if layout.tiling:
        raise UnsupportedBufferError(
            f"the elements of this {type_name(array)} lie in tiles {layout.tiling}, which strides "
            "cannot describe; copy it to the default layout"
        )
    order = layout.major_to_minor
    dense = contiguous_strides(tuple(array.shape[axis] for axis in order), itemsize)
    return tuple(stride for _, stride in sorted(zip(order, dense, strict=True)))


class TracerView(View):
    """View of a JAX tracer, which is refused because it has no memory."""

    source = "jax.core.Tracer"

    @staticmethod
    def locate(tracer: Any) -> NoReturn:
        """Raise `UnsupportedBufferError`."""
        raise UnsupportedBufferError(
            f"this {type_name(tracer)} is traced, so it has no memory yet; pass concrete arrays, "
            "outside jax.jit"
        )

    @cached
    def layout(self) -> Layout:
        """Raise `UnsupportedBufferError`."""
        self.locate(self.buffer)
