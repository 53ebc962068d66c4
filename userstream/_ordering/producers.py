"""Which streams produce some buffers, and which one uses them."""

from __future__ import annotations

import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from userstream import _driver
from userstream._buffers import type_name
from userstream._engine import lanes
from userstream._ordering import settings
from userstream._ordering.ordering import Ordering
from userstream._stream import factory
from userstream._stream.stream import Stream, lane_of
from userstream.errors import DeviceMismatchError, UnknownProducerError, UnsupportedStreamError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from userstream._buffers.view import View
    from userstream._engine.lane import Lane
    from userstream._ordering.settings import Unknown
    from userstream.typing import Producer, StreamLike


def ordering_of(
    views: Iterable[View],
    stream: StreamLike | None,
    producer: Producer,
    user_stream: Callable[[int], Stream],
    *,
    unknown: Unknown,
    copy_of: Collection[View] | None = None,
) -> Ordering:
    """Determine which streams produce the buffers, and which one uses them.

    `copy_of` is for copies: the buffers that are read. They are held meanwhile, so nothing has to
    wait if they are never written again.
    """
    units: list[View] = []
    for view in views:
        units += view.units
    devices = list(dict.fromkeys([unit.device for unit in units]))
    if not devices:
        raise ValueError("no buffer was passed: pass those that the work reads or writes")
    unsure = _Unsure()
    may_join = False
    found: list[tuple[Lane, object]] = []
    word: str | None = producer if isinstance(producer, str) else None
    if word == "auto":
        found = _producers(units)
        asked = [unit for unit in units if unit.order.ordering in ("device", "dlpack")]
        if asked:
            # Who wants that of every order does not need to be told who writes.
            unsure = _unsure(asked, "device" if settings.BY_DEVICE else unknown, copy_of)
    elif word == "device":
        for unit in units:
            unit.check_context()
        unsure = _Unsure(before=devices, after=devices)
    elif producer is not None:
        found = [(given_lane(producer, "producer", device), producer) for device in devices]
        may_join = all(lane.on_close is None for lane, _ in found)
    if settings.BY_DEVICE:
        unsure = unsure._replace(before=devices, after=devices, may_order_devices=True)
    # Last, because it may make a stream.
    ordering = _ordering(_consumer(stream, devices, user_stream), found)
    # These are held, and not the list that they came in: it may be filled with others.
    ordering.buffers = [unit.held for unit in units]
    ordering.may_join = may_join
    ordering.exporting, ordering.before, ordering.after, ordering.may_order_devices = unsure
    return ordering


class _Unsure(NamedTuple):
    """How buffers that name no stream are ordered: fields of an `Ordering`."""

    exporting: Sequence[View] = ()
    before: Sequence[int] = ()
    after: Sequence[int] = ()
    may_order_devices: bool = True


def _unsure(units: list[View], unknown: Unknown, copy_of: Collection[View] | None) -> _Unsure:
    exporting = [unit for unit in units if unit.order.ordering == "dlpack"]
    untold = [unit for unit in units if unit.order.ordering == "device"]
    if unknown == "device" and _driver.streams.has_context_events():
        for unit in untold:
            unit.check_context()
        _log(untold)
        read = [unit for view in copy_of or () for unit in view.units]
        written = [unit for unit in exporting if not (unit.is_immutable and unit in read)]
        return _Unsure(exporting, _devices(untold), _devices(untold + written))
    written = [unit for unit in exporting if not unit.is_immutable]
    # A copy is waited for instead, where only the way back is missing.
    _refuse(untold if copy_of is not None else untold + written)
    return _Unsure(exporting, (), _devices(written), may_order_devices=False)


def _devices(units: Iterable[View]) -> list[int]:
    return list(dict.fromkeys([unit.device for unit in units]))


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
    """Return why a buffer that names its producer is not believed, for a message."""
    from userstream._buffers.view import DOUBTED  # loaded with the first buffer

    if unit.order is not DOUBTED:
        return ""
    return " (its interface names a default stream, as many types do whichever stream writes)"


def _log(units: Iterable[View]) -> None:
    """Record once per type what its buffers are ordered with, and how to narrow that."""
    for unit in units:
        kind = type(unit.buffer)
        logging = sys.modules.get("logging")  # who has not imported it listens to nothing
        if logging is None or kind in _logged:
            continue
        logger = logging.getLogger("userstream")
        if logger.isEnabledFor(logging.DEBUG):
            _logged.add(kind)
            logger.debug(
                "a %s is ordered with everything on device %d, because its producer is unknown%s; "
                "producer=, the stream that writes it, orders it with that one only (logged once "
                "per type)",
                type_name(unit.buffer),
                unit.device,
                _doubt(unit),
            )


_logged: weakref.WeakSet[type] = weakref.WeakSet()


def _ordering(consumer: Stream, found: Iterable[tuple[Lane, object]]) -> Ordering:
    user = consumer._resolve()
    producers: list[Lane] = []
    owners = []
    for lane, owner in found:
        for other in (user, *producers):
            if lane.is_same(other):
                break
        else:
            producers.append(lane)
            owners.append(owner)
    ordering = Ordering(consumer, user, producers, owners)
    for each in (user, *producers):
        # What is the per-thread stream of one thread is another one in the next.
        if not each.is_context_independent and int(each.live()) == _driver.streams.PER_THREAD:
            ordering.thread = threading.get_ident()
        elif each.handle is None:
            each.live()  # which raises
    return ordering


def _producers(units: Iterable[View]) -> list[tuple[Lane, object]]:
    """Return the streams on which work for the buffers is pending, and what keeps each alive."""
    # By handle and device, as buffers often share a stream, and to wrap one takes long. Some name
    # theirs themselves, and that may be of another device.
    found: dict[tuple[int, int, bool], object] = {}
    for unit in units:
        ordering, handle, owner = unit.order
        if handle:
            found.setdefault((handle, unit.device, ordering == "exact"), owner)
    return [
        ((lanes.named if named else lanes.of_framework)(handle, device), owner)
        for (handle, device, named), owner in found.items()
    ]


def _consumer(
    stream: StreamLike | None, devices: list[int], user_stream: Callable[[int], Stream]
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
    except UnsupportedStreamError as error:
        words = ' (or "auto", "device", or None)' if argument == "producer" else ""
        raise UnsupportedStreamError(
            f"{argument}=: {error}{words}{_advice(stream, argument)}"
        ) from None


def _given_stream(stream: StreamLike) -> Stream:
    try:
        if factory.protocol_of(stream) is None:
            factory.address_of_stream(stream)  # an address is none here, unlike there
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
