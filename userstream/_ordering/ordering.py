"""The edges between the streams that produce some buffers and the one that uses them."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from userstream import _buffers, _driver, _hooks, errors
from userstream._buffers import NO_STREAM, type_name
from userstream._driver import core
from userstream._engine import held_objects, host_wait, lanes
from userstream._ordering import device_edges, settings
from userstream._stream.stream import Stream
from userstream.errors import (
    CaptureError,
    DeviceMismatchError,
    NotSupportedError,
    UnknownProducerError,
    UserStreamError,
    WaitTimeout,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from userstream._buffers.view import View
    from userstream._engine.host_wait import Deadline
    from userstream._engine.lane import Lane
    from userstream._ordering.uses import Pending
    from userstream.typing import Producer

_AUTO: Final = "auto"
_PER_THREAD = _driver.streams.PER_THREAD  # which is another one in the next thread


class Ordering:
    """The streams that produce some buffers, and the one that uses them."""

    # What few buffers need has its default here.
    exporting: Sequence[View] = ()  # those that order the consumer themselves
    buffers: Sequence[Any] = ()
    may_join = False  # whether the producers may join a capture of the consumer
    thread: int | None = None  # the one whose per-thread default stream takes part
    before: Sequence[int] = ()  # devices of which all work comes before that of the consumer
    after: Sequence[int] = ()  # and those of which all later work comes after it
    may_order_devices = True  # or the consumer is waited for, where it comes to that
    pending: Pending | None = None  # the note of a use that is not on the usual user stream
    may_wait = False  # on the host for what no edge can order after the consumer: copies

    def __init__(
        self, consumer: Stream, lane: Lane, producers: Sequence[Lane], owners: object
    ) -> None:
        self.consumer = consumer
        self.lane = lane  # of the consumer
        self.producers = producers
        self.owners = owners  # of producers that their frameworks might destroy

    def acquire(
        self, deadline: Deadline | None = None, *, to_be_released: bool = True
    ) -> Sequence[object]:
        """Make the consumer wait for the producers; return what keeps the memory of some.

        What a release would be refused for is refused before the first edge.
        """
        lane = self.lane
        if self.before or self.after:
            self._come_after_devices(to_be_released and not self.may_wait)
        for producer in self.producers:
            lane.add_edge(producer, may_join=lane.on_close is None)  # is_shared, without a call
        kept = [self._export(view) for view in self.exporting] if self.exporting else ()
        if settings.SYNC:
            self._wait_on_host(deadline)
        return kept

    def _come_after_devices(self, to_be_released: bool) -> None:
        devices = {*self.before, *self.after} if to_be_released else self.before
        if devices:
            device_edges.refuse_captures(devices, self.lane)
        for device in self.before:
            device_edges.from_device(device, self.lane)

    def _export(self, view: View) -> object:
        consumer, buffer, device = self.lane, view.buffer, view.device
        if not consumer.is_context_independent and consumer.device != device:
            raise DeviceMismatchError(
                f"to {type_name(buffer)} the handle of {consumer!r} means a stream of device "
                f"{device}; pass another stream",
                devices=(consumer.device, device),
            )
        if consumer.capture_status() != _driver.streams.NOT_CAPTURING:
            raise CaptureError(
                f"{consumer!r} is being captured into a graph, which cannot depend on the work "
                f"that produces this {type_name(buffer)}; acquire it before the capture begins",
                stream=repr(consumer),
            )
        try:
            # Where its handle means it: that of a default stream means the current context's.
            kept = consumer.within(view.export, int(self.consumer.handle))
        except UserStreamError:
            raise
        except Exception as error:
            if self.may_order_devices:
                device_edges.refuse_captures((device,), consumer)
                device_edges.from_device(device, consumer)
                return None
            raise UnknownProducerError(
                f"this {type_name(buffer)} could not order {consumer!r} after its producer "
                f"({type(error).__name__}: {error}); pass producer=, the stream that writes it, or "
                "None if nothing is pending",
                device=device,
            ) from error
        if _hooks.edge_added:
            _hooks.report_edge(consumer, f"what __dlpack__ of a {type_name(buffer)} names")
        return kept

    def release(
        self,
        objects: object,
        deadline: Deadline | None = None,
        *,
        after_error: bool = False,
        result: int | None = None,
    ) -> None:
        """Make the producers wait for the consumer; hold the objects up to there, unless `None`.

        One producer that cannot wait does not stop the others. Where one can be ordered by a host
        wait alone, that has the deadline; after an error it is not waited for. `result` is what
        `core.finish` has answered, if it was called already.
        """
        lane, producers = self.lane, self.producers
        if objects is None and not (producers or self.after or settings.SYNC):
            return
        failures: list[Exception] = []
        wait_on_host = settings.SYNC and not after_error
        if len(producers) > 1 or self.after:
            result = core.CAPTURED
        elif result is None:
            try:
                result = self._release_usual(producers[0] if producers else None, objects)
            except Exception as failure:  # without the compiled core; or it was held already
                failures.append(failure)
                result, producers = core.CAPTURED, ()
        if result:
            if result != core.CAPTURED:
                failures.append(_driver.core.edge_failure(result, lane, *producers[:1] or (lane,)))
                producers = ()
            wait_on_host |= self._release_each(producers, objects, failures)
        if wait_on_host:
            try:
                self._wait_on_host(host_wait.Deadline(0) if after_error else deadline)
            except Exception as failure:
                failures.append(failure)
        if failures:
            errors._report_failures(failures, None)

    def _release_usual(self, source: Lane | None, objects: object) -> int:
        """Release in one step if no capture is involved; return what `core.finish` does."""
        if objects is None:
            return 0 if source is None else core.order(self.lane, source)
        result = core.finish(self.lane, source, objects)
        if result != core.DUE:
            return result
        held_objects.sweep_if_due(self.lane)
        return 0

    def _release_each(
        self, producers: Sequence[Lane], objects: object, failures: list[Exception]
    ) -> bool:
        """Release one producer after the other; tell whether the host has to wait as well."""
        lane = self.lane
        began = time.monotonic()
        event, capture = lane.mark()
        for producer in producers:
            try:
                producer.wait_for_event(event, lane, capture, may_join=self.may_join)
            except Exception as failure:
                failures.append(failure)
        wait_on_host = self._let_devices_wait(event, failures)
        # What is captured never completes: the graph needs the buffers as long as it lives.
        if objects is None:
            lane.pool.give_back(event)
        elif capture != _driver.streams.NOT_CAPTURING:
            lane.pool.give_back(event)
            held_objects.end_ticket(objects)
        else:
            held_objects.hold(lane, event, began, objects)
        return wait_on_host

    def _let_devices_wait(self, event: int, failures: list[Exception]) -> bool:
        """Make the devices wait for an event; tell whether the host has to wait for it instead."""
        if not self.may_order_devices:
            return bool(self.after)
        instead = False
        for device in self.after:
            tried = False
            try:
                device_edges.refuse_captures((device,), self.lane)
                tried = True
                device_edges.to_device(device, event)
            except (CaptureError, NotSupportedError) as failure:
                instead = self.may_wait
                # A capture that could not be seen is broken by now, which must be reported.
                if not instead or (tried and isinstance(failure, CaptureError)):
                    failures.append(failure)
            except Exception as failure:
                failures.append(failure)
        return instead

    def check_thread(self) -> None:
        """Raise unless this is the thread whose per-thread default stream takes part, if any."""
        if self.thread is not None and self.thread != threading.get_ident():
            raise RuntimeError(
                "a borrow with the per-thread default stream must end in the thread where it "
                "began: in another thread that is another stream"
            )

    def _wait_on_host(self, deadline: Deadline | None) -> None:
        if self.lane.capture_status() != _driver.streams.NOT_CAPTURING:
            return
        try:
            host_wait.sync(self.lane, None if deadline is None else deadline.left(), "auto")
        except WaitTimeout:
            if deadline is None:
                raise
            raise host_wait.late((self.lane,), deadline.seconds) from None


# Who uses some buffers, its lane, that of who else produces them, and what keeps that alive.
Lanes: TypeAlias = "tuple[Stream, Lane, Lane | None, object]"


def usual_lanes_of_view(view: View, consumer: Stream) -> Lanes | None:
    """As `usual_lanes`, for the user stream and one buffer that is copied.

    It names its producer's stream, or its framework has a current one.
    """
    lane = consumer._lane
    if settings.SYNC or settings.BY_DEVICE or lane is None or not lane.is_context_independent:
        return None
    device, framework = view.device, view.usual
    if framework is not None:
        kind = "current"
        handle, owner = framework.current_stream(device)
    else:
        kind, handle, owner = view.order
    if handle in (NO_STREAM, _PER_THREAD):  # 0 is not a stream
        return None
    if kind == "current":
        source = lanes.of_framework(handle, device)
    elif kind == "exact":
        source = lanes.named(handle, device)
    else:
        return None
    return consumer, lane, None if source is lane else source, owner


def ordering_of_lanes(found: Lanes, buffers: Sequence[Any], producer: Producer = _AUTO) -> Ordering:
    """Return the ordering of what `usual_lanes` found for some buffers."""
    consumer, lane, source, owner = found
    ordering = Ordering(consumer, lane, () if source is None else (source,), owner)
    ordering.buffers = buffers
    if producer is not _AUTO:
        ordering.may_join = source is not None and source.on_close is None
    return ordering


def usual_lanes(
    buffers: Sequence[Any], producer: Producer, user_streams: Mapping[int, Stream]
) -> Lanes | None:
    """Find out quickly who uses some buffers, and who else produces them.

    That is for buffers of one type that was seen before, on one device and each in one piece, and
    either of a framework that has a current stream, or all naming one stream, or written on a
    `Stream` that is given. For others it returns `None`: `ordering_of` takes care of them. It is
    all that nearly every borrow needs, so each call of a function counts here.
    """
    kind = _buffers.learned.get(type(buffers[0])) if buffers else None
    if kind is None or settings.SYNC or settings.BY_DEVICE:
        return None
    if producer is not _AUTO:
        return _given_lanes(kind, buffers, producer, user_streams)
    framework = kind.usual
    if framework is None:
        return _named_lanes(kind, buffers, user_streams) if kind.is_named else None
    device = kind.locate(buffers[0])
    if len(buffers) > 1 and not _are_alike(buffers, kind, device):
        return None
    handle, owner = framework.current_stream(device)
    try:
        consumer, source = user_streams[device], lanes.of_frameworks[device][handle]
    except KeyError:  # the first time, a stream that has to be created, or the per-thread one
        return None
    lane = consumer._lane
    if lane is None:
        return None
    return consumer, lane, None if source is lane else source, owner


def _given_lanes(
    kind: type[View], buffers: Sequence[Any], producer: Producer, user_streams: Mapping[int, Stream]
) -> Lanes | None:
    """As `usual_lanes`, for buffers that are written on a stream that is given."""
    source = producer._lane if type(producer) is Stream else None
    if source is None or not source.is_context_independent or not kind.is_single:
        return None
    device = kind.locate(buffers[0])
    if len(buffers) > 1 and not _are_alike(buffers, kind, device):
        return None
    consumer = user_streams.get(device)
    if consumer is None or consumer._lane is None:
        return None
    return consumer, consumer._lane, None if source is consumer._lane else source, producer


def _are_alike(buffers: Sequence[Any], kind: type[View], device: int) -> bool:
    """Tell whether buffers are of one kind and on one device."""
    return all(
        _buffers.learned.get(type(buffer)) is kind and kind.locate(buffer) == device
        for buffer in buffers[1:]
    )


def _named_lanes(
    kind: type[View], buffers: Sequence[Any], user_streams: Mapping[int, Stream]
) -> Lanes | None:
    """As `usual_lanes`, for buffers that name their stream."""
    told = kind.named(buffers[0])
    if told is None:
        return None
    for buffer in buffers[1:]:
        if _buffers.learned.get(type(buffer)) is not kind or kind.named(buffer) != told:
            return None
    device, handle = told
    consumer = user_streams.get(device)
    if consumer is None or consumer._lane is None or handle == _PER_THREAD:
        return None
    lane, source = consumer._lane, lanes.named(handle, device)
    return consumer, lane, None if source is lane else source, None
