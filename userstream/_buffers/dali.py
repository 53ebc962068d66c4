"""Outputs of NVIDIA DALI: tensors, lists of tensors, and those of its dynamic mode.

DALI uses the memory of a pipeline's outputs again in spite of references to them: wait for your
work on them before its next run.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from typing import TYPE_CHECKING, Any

from userstream import _driver
from userstream._buffers import cai
from userstream._buffers._info import BufferInfo
from userstream._buffers._rule import (
    NOTHING_PENDING,
    UNKNOWN,
    Framework,
    Rule,
    host_error,
    is_named,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from userstream.typing import StreamLike

_DYNAMIC = "nvidia.dali.experimental.dynamic"


def rule_for(kind: type) -> Rule | None:
    """Return the rule if `kind` is a type of DALI's that holds data."""
    for names, rule in _KINDS:
        if is_named(kind, ("nvidia.dali.",), names):
            return rule
    return None


def _device_id(output: Any) -> int:  # TensorGPU, TensorListGPU
    return output.device_id()  # type: ignore[no-any-return]


def _dynamic_device_id(output: Any) -> int:  # Tensor, Batch; evaluates nothing
    device = output.device
    if device.device_type != "gpu":
        raise host_error(output)
    return int(device.device_id)


def _host_device_id(output: object) -> int:
    raise host_error(output)


def _describe_tensor(tensor: Any) -> BufferInfo:
    info = cai.describe_interface(tensor, "dali TensorGPU", device=tensor.device_id())
    return _ordered(info, tensor.stream)


def _describe_list(batch: Any) -> BufferInfo:
    parts = tuple(_describe_tensor(batch[i]) for i in range(len(batch)))
    return _composite(batch.device_id(), "dali TensorListGPU", parts, batch.stream)


def _describe_dynamic(tensor: Any) -> BufferInfo:
    device = _dynamic_device_id(tensor)
    storage = tensor.evaluate()._storage
    info = cai.describe_interface(tensor, "dali dynamic Tensor", device=device)
    return _ordered(info, getattr(storage, "stream", None))


def _describe_batch(batch: Any) -> BufferInfo:
    device = _dynamic_device_id(batch)
    parts = tuple(_describe_dynamic(tensor) for tensor in batch.tensors)
    streams = {part.producer for part in parts}
    stream = streams.pop() if len(streams) == 1 else None
    return _composite(device, "dali dynamic Batch", parts, stream)


def _ordered(info: BufferInfo, stream: int | None) -> BufferInfo:
    producer, ordering = _producer(stream)
    return dataclasses.replace(info, producer=producer, ordering=ordering)


def _composite(
    device: int, source: str, parts: tuple[BufferInfo, ...], stream: int | None
) -> BufferInfo:
    producer, ordering = _producer(stream)
    return BufferInfo(
        source=source,
        device_id=device,
        nbytes=sum(part.nbytes or 0 for part in parts),
        memory="device",
        producer=producer,
        ordering=ordering,
        parts=parts,
    )


def _producer(stream: int | None) -> tuple[int | None, Any]:
    return (None, "unknown") if stream is None else (_handle(stream), "exact")


def _handle(stream: int | None) -> int:
    return UNKNOWN if stream is None else stream or _driver.LEGACY


def _output_producer(output: Any) -> int:
    return _handle(output.stream)


def _tensor_producer(tensor: Any) -> int:
    return _handle(getattr(tensor.evaluate()._storage, "stream", None))


def _items(batch: Any) -> list[Any]:
    return [batch[i] for i in range(len(batch))]


def _tensors(batch: Any) -> list[Any]:
    return list(batch.tensors)


def _is_usable() -> bool:
    return _DYNAMIC in sys.modules


def _current_stream(device: int) -> tuple[int, object]:
    context = sys.modules[_DYNAMIC].EvalContext.current()
    if context.device_id != device:
        return NOTHING_PENDING, None
    stream = context.cuda_stream
    return stream.handle or _driver.LEGACY, stream


def _activate(stream: StreamLike, device: int) -> Callable[[], object]:
    context = sys.modules[_DYNAMIC].EvalContext(device_id=device, cuda_stream=stream)
    context.__enter__()
    return functools.partial(context.__exit__, None, None, None)


FRAMEWORK = Framework("dali", _is_usable, _current_stream, _activate)
_HOST = Rule(_host_device_id, _host_device_id)  # type: ignore[arg-type]
_KINDS = (
    (
        ("TensorGPU",),
        Rule(_device_id, _describe_tensor, _output_producer, read_only=cai.is_read_only),
    ),
    (("TensorListGPU",), Rule(_device_id, _describe_list, _output_producer, parts=_items)),
    (("TensorCPU",), _HOST),
    (("TensorListCPU",), _HOST._replace(parts=_items)),
    (
        ("Batch",),
        Rule(_dynamic_device_id, _describe_batch, framework=FRAMEWORK, parts=_tensors),
    ),
    (
        ("Tensor",),
        Rule(
            _dynamic_device_id,
            _describe_dynamic,
            _tensor_producer,
            framework=FRAMEWORK,
            read_only=cai.is_read_only,
        ),
    ),
)
