"""Which streams produce some buffers, and which one uses them."""

from __future__ import annotations

import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any

from userstream import _buffers, _driver
from userstream._buffers import type_name
from userstream._ordering import settings
from userstream._ordering._plan import Ordering
from userstream._stream import factory
from userstream._stream.stream import Stream, lane_of
from userstream.errors import DeviceMismatchError, UnknownProducerError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from userstream._buffers import View
    from userstream._engine.lane import Lane
    from userstream._ordering.settings import Unknown
    from userstream.typing import Producer, StreamLike


def usual_streams_of(
    buffers: Sequence[Any], user_streams: Mapping[int, Stream]
) -> tuple[Stream, Lane | None, object] | None:
    """Find out quickly who uses the buffers, who else produces them, and what keeps that alive.

    That is for buffers of one framework that has a current stream, on one device, of types that
    were seen before. For others it returns `None`: `ordering_of` takes care of them.
    """
    if not buffers or settings.SYNC or settings.BY_DEVICE:
        return None
    kind = _buffers.learned.get(type(buffers[0]))
    if kind is None or not kind.is_usual or kind.framework is None:
        return None
    device = kind.locate(buffers[0])
    if len(buffers) > 1:
        for buffer in buffers:
            if _buffers.learned.get(type(buffer)) is not kind or kind.locate(buffer) != device:
                return None
    consumer = user_streams.get(device)
    handle, owner = kind.framework.current_stream(device)
    if consumer is None or handle == _driver.PER_THREAD:
        return None
    producer = factory.of_framework(handle, device)
    return consumer, None if producer is consumer._lane else producer, owner


def ordering_of(
    views: Iterable[View],
    stream: StreamLike | int | None,
    producer: Producer,
    user_stream: Callable[[int], Stream],
    *,
    unknown: Unknown,
    copy_of: Collection[View] | None = None,
) -> Ordering:
    """Find out who produces the buffers, and who uses them.

    `copy_of` are those that a copy reads, if it is for a copy: they are held meanwhile, so nobody
    has to wait with the next write of what nobody ever writes.
    """
    units = [unit for view in views for unit in view.units]
    devices = list(dict.fromkeys(unit.device for unit in units))
    if not devices:
        raise ValueError("no buffer was passed: pass those that the work reads or writes")
    exporting: list[View] = []
    before: Iterable[int] = ()
    after: Iterable[int] = ()
    may_join = False
    may_order_devices = settings.BY_DEVICE or (unknown == "device" and _driver.has_context_events())
    found: Iterable[tuple[Lane, object]] = ()
    word: str | None = producer if isinstance(producer, str) else None
    if word == "auto":
        found = list(_producers(units))
        exporting = [unit for unit in units if unit.order.ordering == "dlpack"]
        untold = [unit for unit in units if unit.order.ordering == "device"]
        if may_order_devices:
            _log(untold)
            before = dict.fromkeys(unit.device for unit in untold)
            after = dict.fromkeys(unit.device for unit in untold + _written(exporting, copy_of))
        else:
            writable = [unit for unit in exporting if not unit.is_immutable]
            _refuse(untold if copy_of is not None else untold + writable)
            after = dict.fromkeys(unit.device for unit in writable)
    elif word == "device":
        before = after = devices
        may_order_devices = True
    elif producer is not None:
        found = [(given_lane(producer, "producer", device), producer) for device in devices]
        may_join = not any(lane.is_shared for lane, _ in found)
    if settings.BY_DEVICE:
        before = after = devices
    # Last, because it may make a stream.
    ordering = _ordering(_consumer(stream, devices, user_stream), found)
    # These are held, and not the list that they came in: it may be filled with others.
    ordering.buffers = [unit.buffer for unit in units]
    ordering.exporting = exporting
    ordering.before, ordering.after = tuple(before), tuple(after)
    ordering.may_order_devices = may_order_devices
    ordering.may_join = may_join
    return ordering


def _written(units: Iterable[View], copy_of: Collection[View] | None) -> list[View]:
    """Return what may be written by somebody: all but what is only read and never changes."""
    read = [unit for view in copy_of or () for unit in view.units]
    return [unit for unit in units if not (unit.is_immutable and unit in read)]


def _refuse(units: Iterable[View]) -> None:
    """Raise `UnknownProducerError` for what would be ordered with everything on its device."""
    for unit in units:
        raise UnknownProducerError(
            f"nothing tells which stream works on this {type_name(unit.buffer)}: pass "
            "producer=, the stream that writes all the buffers of this call, or None if "
            "nothing is pending",
            device=unit.device,
        )


def _log(units: Iterable[View]) -> None:
    """Say once for a type what it is ordered with, and how to be narrower."""
    for unit in units:
        kind = type(unit.buffer)
        logging = sys.modules.get("logging")  # who has not imported it listens to nothing
        if logging is None or kind in _logged:
            continue
        logger = logging.getLogger("userstream")
        if logger.isEnabledFor(logging.DEBUG):
            _logged.add(kind)
            logger.debug(
                "a %s is ordered with everything on device %d, because nothing tells which stream "
                "works on it; producer=, the stream that writes it, orders it with that one alone "
                "(said once for a type)",
                type_name(unit.buffer),
                unit.device,
            )


_logged: weakref.WeakSet[type] = weakref.WeakSet()


def _ordering(consumer: Stream, found: Iterable[tuple[Lane, object]]) -> Ordering:
    user = consumer._resolve()
    producers: list[Lane] = []
    owners = []
    for lane, owner in found:
        if not any(map(lane.is_same, (user, *producers))):
            producers.append(lane)
            owners.append(owner)
    ordering = Ordering(consumer, producers, owners)
    # What is the per-thread stream of one thread is another one in the next.
    if any(int(each.live()) == _driver.PER_THREAD for each in (user, *producers)):
        ordering.thread = threading.get_ident()
    return ordering


def _producers(units: Iterable[View]) -> Iterator[tuple[Lane, object]]:
    """Yield the streams on which work for the buffers is pending, and what keeps each alive."""
    # By handle and device, as buffers often share a stream, and to wrap one takes long. Some name
    # theirs themselves, and that may be of another device.
    found: dict[tuple[int, int, bool], object] = {}
    for unit in units:
        ordering, handle, owner = unit.order
        if handle:
            found.setdefault((handle, unit.device, ordering == "exact"), owner)
    for (handle, device, named), owner in found.items():
        if named:
            yield lane_of(handle, device), None
        else:
            yield factory.of_framework(handle, device), owner


def _consumer(
    stream: StreamLike | int | None, devices: list[int], user_stream: Callable[[int], Stream]
) -> Stream:
    if stream is not None:
        return _given_stream(stream)._settled(devices[0])
    if len(devices) > 1:
        raise DeviceMismatchError(
            f"the buffers live on devices {devices}, each of which has its own user stream; pass "
            "stream=, the one that uses them all",
            devices=devices,
        )
    return user_stream(devices[0])


def given_lane(stream: Any, argument: str, device: int | None = None) -> Lane:
    """Return the lane of a stream that was passed: of a default stream that on a device."""
    try:
        return lane_of(stream, device)
    except TypeError as error:
        words = ' (or "auto", "device", or None)' if argument == "producer" else ""
        raise TypeError(f"{argument}=: {error}{words}") from None


def _given_stream(stream: StreamLike | int) -> Stream:
    try:
        return Stream.from_handle(stream)
    except TypeError as error:
        raise TypeError(f"stream=: {error}") from None
