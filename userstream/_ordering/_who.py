"""Which streams produce some buffers, and which one uses them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from userstream import _buffers, _driver, _targets
from userstream._buffers import NOTHING_PENDING, UNKNOWN, type_name
from userstream._ordering._plan import SYNC, Ordering
from userstream._stream import Stream
from userstream._stream._default import on_device
from userstream._stream._foreign import stream_at
from userstream.errors import DeviceMismatchError, UnknownProducerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from userstream._buffers import Rule
    from userstream.typing import Producer, StreamLike


def usual_streams_of(
    buffers: Sequence[Any], user_streams: Mapping[int, Stream]
) -> tuple[Stream, Stream | None, object] | None:
    """Find out quickly who uses the buffers, who else produces them, and what keeps that alive.

    That is for buffers of one framework that has a current stream, on one device, of types that
    were seen before. For others it returns `None`: `ordering_of` takes care of them.
    """
    if not buffers or SYNC:
        return None
    rule = _buffers.learned.get(type(buffers[0]))
    if rule is None or rule.framework is None or rule.producer or rule.parts:
        return None
    device = rule.device_id(buffers[0])
    if len(buffers) > 1:
        for buffer in buffers:
            if _buffers.learned.get(type(buffer)) is not rule or rule.device_id(buffer) != device:
                return None
    consumer = user_streams.get(device)
    handle, owner = rule.framework.current_stream(device)
    if consumer is None or handle == _driver.PER_THREAD:
        return None
    producer = stream_at(handle, device)
    return consumer, None if producer == consumer else producer, owner


def ordering_of(
    buffers: Sequence[Any],
    stream: StreamLike | int | None,
    producer: Producer,
    user_stream: Callable[[int], Stream],
) -> Ordering:
    """Find out who produces the buffers, and who uses them."""
    leaves = [
        (part, rule, rule.device_id(part))
        for buffer, whole in _targets.buffers_in(buffers, named="buffers")
        for part, rule in _parts(buffer, whole)
    ]
    devices = list(dict.fromkeys(device for _, _, device in leaves))
    if not devices:
        raise ValueError("no buffer was passed: pass those that the work reads or writes")
    exports = []
    may_join = False
    if isinstance(producer, str) and producer == "auto":
        found = list(_producers(leaves))
        exports = [(buffer, device, rule.export) for buffer, rule, device in leaves if rule.export]
    elif producer is None:  # nothing is pending
        found = []
    else:
        given = given_stream(producer, "producer")
        found = [(on_device(given, device), producer) for device in devices]
        may_join = not given._is_shared()
    # Last, because it may make a stream.
    ordering = _ordering(_consumer(stream, devices, user_stream), found)
    # These are held, and not the list that they came in: it may be filled with others.
    ordering.buffers = [buffer for buffer, _, _ in leaves]
    ordering.exports = exports
    ordering.may_join = may_join
    return ordering


def _parts(buffer: Any, rule: Rule) -> Iterator[tuple[Any, Rule]]:
    if rule.parts is None or rule.producer is not None:
        yield buffer, rule
    else:
        for part in rule.parts(buffer):
            yield part, _buffers.require_rule(part)


def _ordering(consumer: Stream, found: Iterable[tuple[Stream, object]]) -> Ordering:
    producers: list[Stream] = []
    owners = []
    for stream, owner in found:
        if not any(map(stream._is_same, (consumer, *producers))):
            producers.append(stream)
            owners.append(owner)
    ordering = Ordering(consumer, producers, owners)
    # What is the per-thread stream of one thread is another one in the next.
    if any(int(each._live()) == _driver.PER_THREAD for each in (consumer, *producers)):
        ordering.thread = threading.get_ident()
    return ordering


def _producers(leaves: Iterable[tuple[Any, Rule, int]]) -> Iterator[tuple[Stream, object]]:
    """Yield the streams on which work for the buffers is pending, and what keeps each alive."""
    # By handle and device, as buffers often share a stream, and to wrap one takes long. Some name
    # theirs themselves, and that may be of another device.
    found: dict[tuple[int, int, bool], object] = {}
    for buffer, rule, device in leaves:
        if rule.export is not None:  # it orders our stream itself
            continue
        owner: object = None
        if rule.producer is not None:
            handle = rule.producer(buffer)
        elif rule.framework is not None:
            handle, owner = rule.framework.current_stream(device)
        else:
            handle = UNKNOWN
        if handle == UNKNOWN:
            raise UnknownProducerError(
                f"nothing tells which stream works on this {type_name(buffer)}: pass producer=, "
                "the stream that writes all the buffers of this call, or None if nothing is "
                "pending",
                device=device,
            )
        if handle != NOTHING_PENDING:
            found.setdefault((handle, device, rule.producer is not None), owner)
    for (handle, device, named), owner in found.items():
        if named:
            yield on_device(Stream.from_handle(handle), device), None
        else:
            yield stream_at(handle, device), owner


def _consumer(
    stream: StreamLike | int | None, devices: list[int], user_stream: Callable[[int], Stream]
) -> Stream:
    if stream is not None:
        return on_device(given_stream(stream, "stream"), devices[0])
    if len(devices) > 1:
        raise DeviceMismatchError(
            f"the buffers live on devices {devices}, each of which has its own user stream; pass "
            "stream=, the one that uses them all",
            devices=devices,
        )
    return user_stream(devices[0])


def given_stream(stream: StreamLike | int, argument: str) -> Stream:
    """Return the stream that was passed as an argument."""
    try:
        return Stream.from_handle(stream)
    except TypeError as error:
        words = ' (or "auto", or None)' if argument == "producer" else ""
        raise TypeError(f"{argument}=: {error}{words}") from None
