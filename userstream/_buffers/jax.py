"""JAX arrays."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

from userstream._buffers._info import BufferInfo, contiguous_strides
from userstream._buffers._rule import Rule, host_error, type_name
from userstream.errors import DeviceMismatchError, UnsupportedBufferError

# Ordinals by jax.Device, of which a process has as many as it has devices.
_ordinals: dict[Any, int] = {}


def rule_for(kind: type) -> Rule | None:
    """Return the rule if `kind` is an array type of JAX."""
    array = getattr(sys.modules.get("jax"), "Array", None)
    if isinstance(array, type) and issubclass(kind, array):
        return _RULE
    tracer = getattr(sys.modules.get("jax.core"), "Tracer", None)
    return _TRACED if isinstance(tracer, type) and issubclass(kind, tracer) else None


def _device_id(array: Any) -> int:  # jax.Array
    ordinal = _ordinals.get(array.device)  # a sharding, if there are several
    return _one_device(array) if ordinal is None else ordinal


def _one_device(array: Any) -> int:
    ordinals = sorted({_ordinal(device, array) for device in _devices(array)})
    if len(ordinals) > 1:
        raise DeviceMismatchError(
            f"this {type_name(array)} is sharded over devices {ordinals}; pass one of its "
            "addressable_shards[i].data, or a device",
            devices=ordinals,
        )
    return ordinals[0]


def _devices(array: Any) -> list[Any]:
    return [shard.device for shard in array.addressable_shards]


def _refuse_traced(tracer: object) -> NoReturn:
    raise UnsupportedBufferError(
        f"this {type_name(tracer)} is traced, so it has no memory yet; pass concrete arrays, "
        "outside jax.jit"
    )


def _ordinal(device: Any, array: Any) -> int:
    if device.platform not in ("gpu", "cuda"):
        raise host_error(array, f"the memory of {device}")
    return _ordinals.setdefault(device, int(device.local_hardware_id))


def _describe(array: Any) -> BufferInfo:
    devices = _devices(array)
    if len(devices) > 1:
        parts = tuple(_describe(shard.data) for shard in array.addressable_shards)
        ordinals = {part.device_id for part in parts}
        return BufferInfo(
            source="jax.Array",
            device_id=ordinals.pop() if len(ordinals) == 1 else None,
            nbytes=array.nbytes,
            shape=array.shape,
            dtype=array.dtype,
            memory="device",
            ordering="dlpack",
            parts=parts,
        )
    return BufferInfo(
        source="jax.Array",
        device_id=_ordinal(devices[0], array),
        address=array.unsafe_buffer_pointer(),
        nbytes=array.nbytes,
        shape=array.shape,
        strides=_strides(array),
        dtype=array.dtype,
        memory="device",
        ordering="dlpack",
    )


def _strides(array: Any) -> tuple[int, ...]:
    """Return the strides in bytes; the compiler may have chosen another order than C's."""
    itemsize = array.dtype.itemsize
    layout = getattr(getattr(array, "format", None), "layout", None)
    if layout is None:  # of a JAX, or a plugin, that knows no other order
        return contiguous_strides(array.shape, itemsize)
    if layout.tiling:
        raise UnsupportedBufferError(
            f"the elements of this {type_name(array)} lie in tiles {layout.tiling}, which are no "
            "strides; copy it to the default layout"
        )
    order = layout.major_to_minor
    dense = contiguous_strides([array.shape[axis] for axis in order], itemsize)
    return tuple(stride for _, stride in sorted(zip(order, dense, strict=True)))


def _is_read_only(_array: Any) -> bool:
    return True


def _parts(array: Any) -> list[Any]:
    return [shard.data for shard in array.addressable_shards]


def _places(array: Any) -> list[tuple[Any, Any]]:
    if not array.is_fully_addressable:
        raise UnsupportedBufferError(
            f"this {type_name(array)} has shards on devices of other processes; pass its "
            "addressable_shards[i].data"
        )
    return [
        (shard.data, shard.index) for shard in array.addressable_shards if shard.replica_id == 0
    ]


def _export(array: Any, handle: int) -> Any:
    """Order a stream after JAX's work; the capsule keeps the memory, also from donation."""
    return array.__dlpack__(stream=handle)


_RULE = Rule(
    _device_id,
    _describe,
    parts=_parts,
    places=_places,
    export=_export,
    read_only=_is_read_only,
)
_TRACED = Rule(_refuse_traced, _refuse_traced)
