"""Resolution of a target: the devices, streams or buffers that an argument names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cuda.bindings import driver

from userstream import _arguments, _buffers, _driver
from userstream._stream import factory
from userstream._stream.stream import Stream
from userstream.errors import HostBufferError, InvalidDeviceError, UnsupportedBufferError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from userstream._buffers.view import View

_DEEPEST = 100


def stream_of(target: Any) -> Stream | None:  # see typing.Target
    """Return the stream of a target that is a stream, otherwise `None`."""
    if isinstance(target, Stream) or (
        (factory.protocol_of(target) is not None or isinstance(target, driver.CUstream))
        and not isinstance(target, type)
    ):
        return Stream.from_handle(target)
    return None


def streams_in(target: Any) -> list[Stream]:
    """Return the distinct streams in `target`; an empty list for a target of buffers."""
    given = stream_of(target)
    if given is not None:
        return [given]
    if not is_collection(target) or _buffers.kind_of(target) is not None:
        return []
    streams = [stream_of(item) for _, item, _ in _leaves(target)]
    found = [stream for stream in streams if stream is not None]
    if found and len(found) < len(streams):
        raise UnsupportedBufferError(
            f"this {type(target).__name__} holds streams and other things; pass streams alone, or "
            "buffers alone"
        )
    return list(dict.fromkeys(found))


def devices_of(target: Any) -> list[int]:
    """Return the distinct ordinals of the devices that `target` names; raise for no device."""
    _driver.library.ensure()
    if target is None:
        return [_driver.contexts.current_device()]
    kind = _buffers.kind_of(target)
    if kind is not None:
        return [kind.locate(target)]
    device = _arguments.device_id_of(target)
    if device is not None:
        return [device]
    if is_collection(target):
        try:
            devices = list(dict.fromkeys(view.device for view in views_in(target)))
        except HostBufferError as error:
            raise placed(error, target) from None
        if not devices:
            raise InvalidDeviceError(
                f"an empty {type(target).__name__} names no device; pass buffers, or nothing at "
                "all for the current device"
            )
        return devices
    advice = ""
    if isinstance(target, str) and target.isidentifier() and target not in ("cpu", "gpu"):
        advice = f"; the user stream of that name is selected by name={target!r}"
    elif _can_be_a_list(target):
        advice = "; make a list of it"
    raise UnsupportedBufferError(
        f"{text_of(target)} names no device: pass a GPU buffer, a (nested) sequence or mapping of "
        f'them, a device, its ordinal or "cuda:1", or a stream{advice}'
    )


def suggest_timeout(targets: Sequence[Any], error: Exception) -> None:
    """Add a note to an error if a number after a target may be meant as a timeout."""
    last = targets[-1] if len(targets) > 1 else None
    if isinstance(last, (int, float)) and not isinstance(last, bool):
        error.add_note(f"if {last} is a timeout, pass it by name: timeout={last}")


def is_collection(target: object) -> bool:
    """Return whether `target` is a sequence or a mapping that may hold buffers."""
    return isinstance(target, (Sequence, Mapping)) and not isinstance(
        target, (str, bytes, bytearray, memoryview, range)
    )


def check_depth(depth: int, collection: object) -> None:
    """Raise for a collection that is nested too deeply, such as one that contains itself."""
    if depth > _DEEPEST:
        raise UnsupportedBufferError(
            f"collections are nested more than {_DEEPEST} deep: does {text_of(collection)} contain "
            "itself?"
        )


def views_in(collection: Any, *, named: str = "target") -> list[View]:
    """Return a view of each buffer in a (nested) sequence or mapping."""
    views: list[View] = []
    for path, item, kind in _leaves(collection):
        if kind is None:
            raise UnsupportedBufferError(
                f"{named}{subscripts(path)} is {text_of(item)}, which is not a GPU buffer"
                + _instead(item, named, inside=named == "target" or len(path) > 1)
            )
        views.append(kind(item))
    return views


def placed(error: HostBufferError, collection: Any, named: str = "target") -> HostBufferError:
    """Return the error for a host buffer with the position of the buffer, if there are several."""
    leaves = list(_leaves(collection))
    for path, item, kind in leaves if len(leaves) > 1 else ():
        try:
            _ = None if kind is None else kind(item).device
        except HostBufferError as found:
            return HostBufferError(f"{named}{subscripts(path)}: {found}")
    return error


def _instead(item: object, named: str, *, inside: bool) -> str:
    """Return the advice of an error message about an object that is not a buffer."""
    if named != "target" and factory.protocol_of(item) is not None:
        return "; pass a stream as stream=" + (" or producer=" if named == "buffers" else "")
    if _can_be_a_list(item):
        return "; make a list of it"
    if named == "objects":
        return "; pass stream= with objects of other kinds"
    if inside:
        return "; sequences and mappings hold buffers only"
    return "; pass an array or tensor of a GPU, or an address as a cuda.bindings.driver.CUdeviceptr"


def _can_be_a_list(item: object) -> bool:
    """Return whether `item` is an iterable that is not a collection, such as a generator."""
    return isinstance(item, Iterable) and not isinstance(
        item, (Sequence, Mapping, bytes, bytearray, memoryview)
    )


def _leaves(
    collection: Any, path: tuple[object, ...] = ()
) -> Iterator[tuple[tuple[object, ...], Any, type[View] | None]]:
    """Yield path, item and view class of each leaf of a (nested) sequence or mapping."""
    check_depth(len(path), collection)
    items = collection.items() if isinstance(collection, Mapping) else enumerate(collection)
    for key, item in items:
        kind = _buffers.kind_of(item)
        if kind is None and is_collection(item):
            yield from _leaves(item, (*path, key))
        else:
            yield (*path, key), item, kind


def buffers_in(target: Any) -> list[Any]:
    """Return a list of the buffers in `target`, which may itself be a buffer."""
    if _buffers.kind_of(target) is not None:
        return [target]
    if not is_collection(target):
        return []
    return [item for _, item, kind in _leaves(target) if kind is not None]


def subscripts(path: tuple[object, ...]) -> str:
    """Return the path to an item of a (nested) collection as subscripts, for messages."""
    return "".join(f"[{text_of(key)}]" for key in path)


def text_of(obj: object) -> str:
    """Return the text that represents an object in messages."""
    # Only for these types: the repr of a tensor copies the tensor to the host.
    if obj is None or type(obj) in (bool, int, float, str, bytes):
        text = repr(obj)
        if len(text) <= 60:
            return text
    name = _buffers.type_name(obj)
    vowel = name[0] in "aeiouAEIOU" and not name.startswith("userstream.")
    return f"an {name}" if vowel else f"a {name}"
