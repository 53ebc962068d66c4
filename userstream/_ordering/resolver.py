"""The resolver: finds the streams that produce buffers, and the stream that uses the buffers.

`resolve` is for `borrow`, `acquire` and `release`; `resolve_views` and `resolve_copy` are for
copies. `resolve` begins with a fast path that makes no views of the buffers.
"""

from __future__ import annotations

import functools
import operator
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any, Final

from userstream import _buffers, _driver, _targets
from userstream._buffers import NO_STREAM, type_name
from userstream._driver import core
from userstream._engine import lanes
from userstream._ordering import settings
from userstream._ordering.ordering import Ordering, Rest
from userstream._stream import factory
from userstream._stream.stream import Stream, lane_of
from userstream.errors import (
    DeviceMismatchError,
    HostBufferError,
    UnknownProducerError,
    UnsupportedStreamError,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from userstream._buffers.view import View
    from userstream._engine.lane import Lane
    from userstream._table import Table, Unknown
    from userstream.typing import Producer, StreamLike

_AUTO: Final = "auto"
_memory_owner = operator.attrgetter("memory_owner")


def resolve(
    buffers: Sequence[Any],
    table: Table,
    stream: StreamLike | None,
    name: str | None,
    producer: Producer,
) -> Ordering:
    """Return the ordering between the producers of buffers and the stream that uses the buffers."""
    # Fast path for arrays of one kind on one device whose producer is one stream. `source` remains
    # None where the general path has to decide, or has to raise.
    source: Lane | None = None
    kind = named = None
    owner: object = None
    may_join = False
    if stream is None and buffers and not settings.SYNC and not settings.BY_DEVICE:
        first = buffers[0]
        kind = _buffers.view_classes.get(type(first)) or _buffers.kind_of(first)
    if kind is None:
        pass
    elif producer is not _AUTO:
        if kind.is_single:
            device, owner = kind.locate(first), producer
            source = _given_producer(producer, device)
            may_join = source is not None and source.on_close is None
    elif kind.names_producer and (found := kind.producer_of(first)) is not None:
        device, handle, owner = found
        if kind.producer_framework is not None:
            # A stream is unknown on first use. The per-thread default stream is never cached.
            known = lanes.of_frameworks.get(device)
            source = None if known is None else known.get(handle)
        elif handle != _driver.streams.PER_THREAD:
            source, named = lanes.named(handle, device), found
    elif (
        kind.is_anonymous
        and name is None
        and len(buffers) == 1
        and table.unknown == "device"
        and _driver.streams.has_context_events()
    ):
        view = kind(first)
        device = view.device
        consumer = table.unnamed.get(device)
        if consumer is not None and consumer._lane is not None:
            view.check_context()
            _log((view,))
            rest, held = Rest((), (device,), (device,)), (view.memory_owner,)
            return Ordering(consumer, consumer._lane, (), (), held, False, None, rest)
    if source is not None and (len(buffers) == 1 or _are_alike(buffers, kind, device, named)):
        streams = table.unnamed if name is None else table.streams_named(name)
        ordering = core.new_ordering(Ordering, streams, device, source, owner, buffers, may_join)
        if ordering is not None:
            if name is not None:
                ordering.buffer_use = table.uses.begin(buffers, ordering.lane)
            return ordering
    return _resolve_any(buffers, table, stream, name, producer)


def _resolve_any(
    buffers: Sequence[Any],
    table: Table,
    stream: StreamLike | None,
    name: str | None,
    producer: Producer,
) -> Ordering:
    """Return the ordering of `resolve` on the general path."""
    table.check_open()
    views = _targets.views_in(buffers, named="buffers")
    if name is not None:
        table.check_name(name, stream)
    try:
        ordering = resolve_views(views, table, stream, name, producer)
    except HostBufferError as error:
        raise _targets.placed(error, buffers, "buffers") from None
    if stream is not None or name is not None:
        used = [view.buffer for view in views]
        ordering.buffer_use = table.uses.begin(used, ordering.lane)
    return ordering


def _are_alike(
    buffers: Sequence[Any],
    kind: type[View] | None,
    device: int,
    named: tuple[int, int, object] | None,
) -> bool:
    """Return whether all buffers have the kind, the device and the named stream of the first."""
    for other in buffers[1:]:
        if kind is None or _buffers.kind_of(other) is not kind:
            return False
        if kind.locate(other) != device if named is None else kind.producer_of(other) != named:
            return False
    return True


def _given_producer(producer: Producer, device: int) -> Lane | None:
    """Return the lane of a producer that was passed; `None` if the general path has to decide."""
    if producer is None or isinstance(producer, str):
        return None
    lane = producer._lane if type(producer) is Stream else None
    if lane is None:
        lane = given_lane(producer, "producer", device)
    return lane if lane.handle is not None and lane.is_context_independent else None


def resolve_copy(  # noqa: PLR0912 -- one function: this path runs on every copy
    views: Sequence[View],
    table: Table,
    stream: StreamLike | None,
    name: str | None,
    producer: Producer,
) -> Ordering | None:
    """Return the ordering of a copy of one or two arrays, if edges between streams are all of it.

    `None` if a buffer names no stream, or the streams are unusual: `resolve_views` then decides, or
    refuses. Without `stream`, the first view has the device of the consumer.
    """
    if settings.SYNC or settings.BY_DEVICE:
        return None
    first = views[0]
    if (
        producer is _AUTO
        and stream is None
        and len(views) == 1
        and first.producer_framework is not None
        and first.names_producer
        and (current := first.producer_of(first.buffer)) is not None
    ):
        # As in `resolve`.
        device, handle, owner = current
        known = lanes.of_frameworks.get(device)
        if known is not None and (source := known.get(handle)) is not None:
            streams = table.unnamed if name is None else table.streams_named(name)
            held = (first.memory_owner,)
            return core.new_ordering(Ordering, streams, device, source, owner, held, False)
    device = first.device
    producers: tuple[Lane, ...] = ()
    owners: list[object] = []
    may_join = False
    if producer is _AUTO:
        last: tuple[str, int] | None = None
        for view in views:
            named = None
            if view.producer_framework is not None and view.names_producer:
                named = view.producer_of(
                    view.buffer
                )  # faster than `producer`, which creates an object
            if named is None:
                ordering, handle, owner = view.producer
            else:
                ordering, (_, handle, owner) = "current", named
            if handle in (NO_STREAM, _driver.streams.PER_THREAD):
                return None
            if (ordering, handle) == last and view.device == device:
                continue
            last = ordering, handle
            if ordering == "exact":
                source = lanes.named(handle, view.device)
            else:
                source = lanes.of_frameworks.get(view.device, {}).get(handle) or lanes.of_framework(
                    handle, view.device
                )
            owners.append(owner)
            producers = (*producers, source)
    elif producer is not None:
        given = _given_producer(producer, device)
        if given is None:
            return None
        producers, may_join = (given,), given.on_close is None
        owners.append(producer)
    if stream is None:
        consumer = (table.unnamed if name is None else table.streams_named(name)).get(device)
    elif type(stream) is Stream:
        consumer = stream
    else:
        consumer = _consumer(stream, [device], table, name)
    lane = None if consumer is None else consumer._lane
    if consumer is None or lane is None or not (lane.is_context_independent and lane.raw_handle):
        return None
    if len(producers) > 1:
        producers, owners = _distinct(lane, zip(producers, owners, strict=True))
    elif producers and producers[0].raw_handle == lane.raw_handle:
        producers = ()
    held = tuple(map(_memory_owner, views))
    return Ordering(consumer, lane, producers, owners, held, may_join)


def resolve_views(
    views: Iterable[View],
    table: Table,
    stream: StreamLike | None,
    name: str | None,
    producer: Producer,
    *,
    reads: Collection[View] | None = None,
) -> Ordering:
    """Return the ordering between the producers of views and the stream that uses the views.

    `reads` lists the views that a copy only reads. A copy holds the buffers of these views, so
    nothing has to wait for the copy if such a buffer is never written again.
    """
    units: list[View] = []
    for view in views:
        units += view.units
    devices = _devices(units)
    if not devices:
        raise ValueError("no buffer was passed: pass those that the work reads or writes")
    rest: Rest | None = None
    may_join = False
    found: list[tuple[Lane, object]] = []
    word: str | None = producer if isinstance(producer, str) else None
    if word == "auto":
        found, unnamed = _producers(units)
        if unnamed:
            # With USERSTREAM_ORDER=device every buffer is ordered with its device: none is refused.
            rest = _unnamed_producers(
                unnamed, "device" if settings.BY_DEVICE else table.unknown, reads
            )
    elif word == "device":
        for unit in units:
            unit.check_context()
        rest = Rest(before=devices, after=devices)
    elif producer is not None:
        found = [(given_lane(producer, "producer", device), producer) for device in devices]
        may_join = all(lane.on_close is None for lane, _ in found)
    if settings.SYNC and rest is None:
        rest = Rest()
    if settings.BY_DEVICE:
        rest = Rest(() if rest is None else rest.exporting, devices, devices)
    consumer = _consumer(stream, devices, table, name)  # last, because it may create a stream
    lane = consumer._lane or consumer._resolve()
    producers, owners = _distinct(lane, found) if found else ((), [])
    for each in (lane, *producers):
        # The per-thread default stream of one thread is another stream in the next thread.
        if not each.is_context_independent and int(each.live()) == _driver.streams.PER_THREAD:
            rest = rest or Rest()
            rest.thread = threading.get_ident()
        elif each.handle is None:
            each.live()  # raises ClosedError
    # Hold the units, not the list that was passed: the caller may change the list.
    held = [unit.memory_owner for unit in units]
    return Ordering(consumer, lane, producers, owners, held, may_join, None, rest)


def _distinct(
    consumer: Lane, found: Iterable[tuple[Lane, object]]
) -> tuple[tuple[Lane, ...], list[object]]:
    """Return the producers other than the consumer, each once, and their owners."""
    producers: list[Lane] = []
    owners = []
    for lane, owner in found:
        if not any(lane.is_same(other) for other in (consumer, *producers)):
            producers.append(lane)
            owners.append(owner)
    return tuple(producers), owners


def _unnamed_producers(
    units: Iterable[View], unknown: Unknown, reads: Collection[View] | None
) -> Rest:
    """Return the order of buffers that name no stream, or raise `UnknownProducerError`."""
    exporting: list[View] = []
    unknown_units: list[View] = []
    for unit in units:
        (exporting if unit.producer.ordering == "dlpack" else unknown_units).append(unit)
    if unknown == "device" and _driver.streams.has_context_events():
        for unit in unknown_units:
            unit.check_context()
        _log(unknown_units)
        written = unknown_units
        if exporting:
            read = {id(unit) for view in reads or () for unit in view.units}
            written = unknown_units + [
                unit for unit in exporting if not (unit.is_immutable and id(unit) in read)
            ]
        return Rest(exporting, _devices(unknown_units), _devices(written))
    written = [unit for unit in exporting if not unit.is_immutable]
    # A copy needs no release edge: the host can wait for the copy instead.
    _refuse(unknown_units if reads is not None else unknown_units + written)
    return Rest(exporting, (), _devices(written), may_order_devices=False)


def _devices(units: Iterable[View]) -> list[int]:
    """Return the devices of buffers, each once."""
    found: list[int] = []
    for unit in units:
        if unit.device not in found:
            found.append(unit.device)
    return found


def _refuse(units: Iterable[View]) -> None:
    """Raise `UnknownProducerError` for the first buffer, if there is one."""
    for unit in units:
        raise UnknownProducerError(
            f"the producer of this {type_name(unit.buffer)} is unknown{_doubt(unit)}: pass "
            "producer=, the stream that writes all the buffers of this call, or None if nothing is "
            "pending",
            device=unit.device,
        )


def _doubt(unit: View) -> str:
    """Return the end of a message about a buffer that names a default stream."""
    from userstream._buffers.view import DOUBTED  # loaded with the first buffer

    if unit.producer is not DOUBTED:
        return ""
    return " (its interface names a default stream, as many types do whichever stream writes)"


def _log(units: Iterable[View]) -> None:
    """Log once per type that buffers are ordered with their device, and how to avoid that."""
    logging = sys.modules.get("logging")  # without an import there is no handler
    if logging is None or not (logger := _logger_of(logging)).isEnabledFor(logging.DEBUG):
        return
    for unit in units:
        kind = type(unit.buffer)
        if kind not in _logged:
            _logged.add(kind)
            logger.debug(
                "a %s is ordered with everything on device %d, because its producer is unknown%s; "
                "producer=, the stream that writes it, orders it with that one only (logged once "
                "per type)",
                type_name(unit.buffer),
                unit.device,
                _doubt(unit),
            )


@functools.cache  # `getLogger` takes as long as a driver call
def _logger_of(logging: Any) -> Any:
    return logging.getLogger("userstream")


_logged: weakref.WeakSet[type] = weakref.WeakSet()


def _producers(units: Iterable[View]) -> tuple[list[tuple[Lane, object]], list[View]]:
    """Return the streams on which work for buffers is pending, and the buffers that name none.

    Beside each stream is an object that keeps the stream alive.
    """
    # By handle and device: buffers often share a stream, and a new lane takes long. A stream that a
    # buffer names may be of another device.
    named: dict[tuple[int, int, bool], object] = {}
    unnamed: list[View] = []
    for unit in units:
        ordering, handle, owner = unit.producer
        if handle:
            named.setdefault((handle, unit.device, ordering == "exact"), owner)
        elif ordering in ("device", "dlpack"):
            unnamed.append(unit)
    found: list[tuple[Lane, object]] = []
    for (handle, device, is_exact), owner in named.items():
        lane_of_handle = lanes.named if is_exact else lanes.of_framework
        found.append((lane_of_handle(handle, device), owner))
    return found, unnamed


def _consumer(
    stream: StreamLike | None, devices: list[int], table: Table, name: str | None
) -> Stream:
    """Return the stream that uses the buffers: the one that was passed, or the user stream."""
    if type(stream) is Stream and stream._lane is not None:
        return stream
    if stream is not None:
        return _given_stream(stream)._settled(devices[0])
    if len(devices) > 1:
        raise DeviceMismatchError(
            f"the buffers live on devices {devices}, each of which has its own user stream; pass "
            "stream=, the one that uses them all",
            devices=devices,
        )
    return table.user_stream(devices[0], name)


def given_lane(stream: Any, argument: str, device: int | None = None) -> Lane:
    """Return the lane of a stream that was passed; `device` selects a default stream's lane."""
    try:
        return lane_of(stream, device)
    except UnsupportedStreamError as error:
        words = ' (or "auto", "device", or None)' if argument == "producer" else ""
        raise UnsupportedStreamError(
            f"{argument}=: {error}{words}{_advice(stream, argument)}"
        ) from None


def _given_stream(stream: StreamLike) -> Stream:
    try:
        if factory.protocol_of(stream) is None:
            factory.address_of_stream(stream)  # raises for a number, which from_handle accepts
        return Stream.from_handle(stream)
    except UnsupportedStreamError as error:
        raise UnsupportedStreamError(f"stream=: {error}{_advice(stream, 'stream')}") from None


def _advice(stream: object, argument: str) -> str:
    """Return what to pass instead of the name of a stream."""
    if not isinstance(stream, str) or not stream:
        return ""
    if argument == "stream":
        return (
            f"; for the user stream of that name pass name={stream!r}, or "
            f"get_stream(device, name={stream!r})"
        )
    return f"; the user stream of that name is get_stream(device, name={stream!r})"
