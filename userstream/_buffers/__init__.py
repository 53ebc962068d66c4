"""Recognition and description of buffers, with one module per framework or protocol.

A framework is never imported here: if an object of a framework exists, the framework is already in
`sys.modules`.
"""

from __future__ import annotations

import functools
import importlib
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cuda.core import Device

from userstream import _driver
from userstream._buffers import framework
from userstream._buffers.framework import NO_STREAM, is_named, type_name
from userstream.errors import UnsupportedBufferError

if TYPE_CHECKING:
    from collections.abc import Container, Iterable
    from types import ModuleType

    from userstream._buffers.framework import Framework
    from userstream._buffers.view import BufferInfo, View

__all__ = [
    "NO_STREAM",
    "capturing_frameworks",
    "describe",
    "device_id_of",
    "device_of",
    "frameworks",
    "is_named",
    "kind_of",
    "locate",
    "type_name",
    "view_classes",
    "view_of",
    "view_or_none",
]

# The module of each protocol, by the attribute that objects with the protocol have.
_PROTOCOLS = {"__dlpack_device__": "dlpack", "__cuda_array_interface__": "cai"}

# Cache of the view class by the exact type of the object.
view_classes: dict[type, type[View]] = {}
_unsupported_types: set[type] = set()  # types that no module recognizes
_MOST_TYPES = 1024  # bounded, because a program may create types without limit


def kind_of(obj: object) -> type[View] | None:
    """Return the view class of a buffer; `None` if the object is not a known buffer."""
    kind = type(obj)
    view = view_classes.get(kind)
    if view is not None:
        return view
    if kind not in _unsupported_types:
        view = _learn(kind)
        if view is not None:
            return view
    # Not cached: the protocols may be attributes of the object; others of its type may lack them.
    for attribute, file in _PROTOCOLS.items():
        if hasattr(obj, attribute) and not isinstance(obj, type):
            return _file(file).view_for(obj)  # type: ignore[no-any-return]
    return None


def _learn(kind: type) -> type[View] | None:
    if len(view_classes) + len(_unsupported_types) >= _MOST_TYPES:
        view_classes.clear()
        _unsupported_types.clear()
    # The first match counts: frameworks come before the protocols that they also implement.
    packages = {str(base.__module__).partition(".")[0] for base in kind.__mro__}
    for file in (*_files_of(packages), "cuda_core", *_PROTOCOLS.values()):
        view: type[View] | None = _file(file).view_for(kind)
        if view is not None:
            view_classes[kind] = view
            return view
    _unsupported_types.add(kind)
    return None


def frameworks(*, imported: bool = True) -> list[Framework]:
    """Return the frameworks that have current streams: the imported ones, or all."""
    found: list[Framework] = []
    for file in _files_of(sys.modules if imported else None):
        module = _file(file)
        if hasattr(module, "FRAMEWORK"):
            found.append(module.FRAMEWORK)
    return found


def capturing_frameworks() -> list[Framework]:
    """Return the imported frameworks that capture graphs on their current streams."""
    return [_file(file).FRAMEWORK for package, file in _CAPTURING if package in sys.modules]


def device_id_of(obj: Any) -> int | None:
    """Return the ordinal of a framework's device object; `None` for any other object."""
    for known in framework.KNOWN:
        if known.file and known.device:
            module, name = known.device
            kind = getattr(sys.modules.get(module), name, None)
            if isinstance(kind, type) and isinstance(obj, kind):
                return _file(known.file).device_id_of(obj)  # type: ignore[no-any-return]
    return None


# Of the frameworks that have a module: package and module.
_FILES = tuple(
    (package, each.file) for each in framework.KNOWN if each.file for package in each.packages
)
_CAPTURING = tuple(
    (each.packages[0], each.file) for each in framework.KNOWN if each.file and each.captures
)


def _files_of(packages: Container[str] | None) -> Iterable[str]:
    """Return the modules of the frameworks that define one of the packages, or of all."""
    files = [file for package, file in _FILES if packages is None or package in packages]
    return dict.fromkeys(files)


# Cached only after the import: if a signal handler raises during the import, the next call imports
# again.
@functools.cache
def _file(name: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{name}")


def view_or_none(obj: Any) -> View | None:
    """Return a new view of a buffer; `None` if the object is not a known buffer."""
    kind = kind_of(obj)
    return None if kind is None else kind(obj)


def view_of(obj: Any) -> View:
    """Return a new view of a buffer, or raise `UnsupportedBufferError`."""
    return _kind_or_raise(obj)(obj)


def locate(obj: Any) -> int:
    """Return the ordinal of the device of a buffer, without creating a view."""
    return _kind_or_raise(obj).locate(obj)


def _kind_or_raise(obj: object) -> type[View]:
    kind = kind_of(obj)
    if kind is None:
        raise UnsupportedBufferError(
            f"{type_name(obj)} is not a GPU buffer that userstream knows: it has neither "
            f"{' nor '.join(_PROTOCOLS)}, and no rule of its own{_advice(obj)}"
        )
    return kind


def _advice(obj: object) -> str:
    if isinstance(obj, int):
        return _driver.library.AS_POINTER
    if hasattr(obj, "__cuda_stream__"):
        return "; a stream of userstream or cuda.core has its device as .device"
    if isinstance(obj, (list, tuple, dict)):
        return "; pass what it holds, one by one"
    return ""


def device_of(buffer: Any) -> Device:  # any framework's buffer
    """Return the device of a buffer.

    Parameters
    ----------
    buffer : GPU buffer
        Of any framework: see :doc:`/reference/buffers`.

    Returns
    -------
    cuda.core.Device
        The device of the memory; for managed memory, the one that the driver reports.

    Raises
    ------
    UnsupportedBufferError
        The object is not recognized, is empty and does not know its device, or is in the memory of
        a context other than the primary one of its device.
    HostBufferError
        The buffer is in host memory, including pinned memory.
    DeviceMismatchError
        The buffer is sharded over several devices.
    UserStreamError
        Other causes: see :doc:`/reference/common-errors`.

    Notes
    -----
    Thread-safe; does not block, establishes no order, and imports no framework. Driver call, if
    the object does not know its device: ``cuPointerGetAttributes``.

    Examples
    --------
    >>> import userstream as us
    >>> from cuda.core import Device
    >>> Device(0).set_current()
    >>> buffer = Device(0).allocate(1024, stream=us.get_stream())
    >>> us.device_of(buffer).device_id
    0
    """
    _driver.library.ensure()
    return Device(locate(buffer))


def describe(buffer: Any) -> BufferInfo:  # any framework's buffer
    """Describe a buffer: where it lives, its layout, and the stream of its producer.

    Parameters
    ----------
    buffer : GPU buffer
        Of any framework: see :doc:`/reference/buffers`. Pinned host memory is described as well.

    Returns
    -------
    BufferInfo
        Device, address, shape, strides and dtype, kind of memory, and the stream of its producer.

    Raises
    ------
    UserStreamError
        As for `device_of`, except that pinned memory and shards on several devices are accepted.
        Other causes: see :doc:`/reference/common-errors`.

    Notes
    -----
    Thread-safe; establishes no order and imports no framework. A lazy tensor of DALI's dynamic
    mode is evaluated. Driver calls: ``cuPointerGetAttributes``, and ``cuDeviceGetUuid`` once per
    device.

    Examples
    --------
    >>> import userstream as us
    >>> from cuda.core import Device
    >>> Device(0).set_current()
    >>> info = us.describe(Device(0).allocate(1024, stream=us.get_stream()))
    >>> info.nbytes, info.memory, info.source
    (1024, 'device', 'cuda.core.Buffer')
    """
    _driver.library.ensure()
    return _with_uuid(view_of(buffer).info())


def _with_uuid(info: BufferInfo) -> BufferInfo:
    device = info.device_id
    return replace(
        info,
        device_uuid=None if device is None else _driver.library.device_uuid(device),
        parts=tuple(map(_with_uuid, info.parts)),
    )
