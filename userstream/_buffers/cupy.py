"""CuPy arrays."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from userstream import _driver
from userstream._buffers._info import BufferInfo, Layout, info_of
from userstream._buffers._rule import Framework, Rule, locate

if TYPE_CHECKING:
    from collections.abc import Callable

    from userstream.typing import StreamLike


def rule_for(kind: type) -> Rule | None:
    """Return the rule if `kind` is an array type of CuPy."""
    array = getattr(sys.modules.get("cupy"), "ndarray", None)
    return _RULE if isinstance(array, type) and issubclass(kind, array) else None


def _device_id(array: Any) -> int:  # cupy.ndarray
    return array.device.id  # type: ignore[no-any-return]


def _is_usable() -> bool:
    return hasattr(sys.modules.get("cupy"), "cuda")


def _current_stream(device: int) -> tuple[int, object]:
    stream = sys.modules["cupy"].cuda.get_current_stream(device)
    # In its per-thread mode CuPy says 2 itself. The object destroys the stream when it goes.
    return stream.ptr or _driver.LEGACY, stream


def _activate(stream: StreamLike, device: int) -> Callable[[], object]:
    cuda = sys.modules["cupy"].cuda
    previous = cuda.get_current_stream(device)
    handle = stream.__cuda_stream__()[1]
    if handle == _driver.LEGACY:
        ours = cuda.Stream.null
    elif handle == _driver.PER_THREAD:
        ours = cuda.Stream.ptds
    else:  # ExternalStream warns, and the streams of from_external do not know their device
        ours = cuda.stream._BaseStream(handle, device)
    ours.__enter__()  # not `use`, so that a with block inside returns to it

    def undo() -> None:
        ours.__exit__(None, None, None)
        if cuda.get_current_stream(device) is not previous:  # made current by `use`
            previous.use()

    return undo


def _describe(array: Any) -> BufferInfo:
    layout = _layout(array)
    address, device = layout.address, layout.device_id
    return info_of(
        layout,
        device_id=device,
        # A slice without elements may begin where its allocation ends.
        memory=locate(address, array)[1] if array.nbytes else "device",
        nbytes=array.nbytes,
        producer=_current_stream(device)[0],
    )


def _layout(array: Any) -> Layout:
    return Layout(
        source="cupy.ndarray",
        device_id=_device_id(array),
        address=array.data.ptr,
        shape=array.shape,
        strides=array.strides,
        dtype=array.dtype,
    )


def _pack(array: Any) -> Any:
    return sys.modules["cupy"].ascontiguousarray(array)


FRAMEWORK = Framework("cupy", _is_usable, _current_stream, _activate)
_RULE = Rule(_device_id, _describe, framework=FRAMEWORK, pack=_pack, layout=_layout)
