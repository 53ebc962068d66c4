"""The edges between the streams that produce some buffers and the one that uses them.

Where a producer is unknown, an edge is between the consumer and everything on a device. An event of
``cuCtxRecordEvent`` covers what is queued on every stream of a context, whichever library created
the stream. ``cuCtxWaitEvent`` makes everything that is queued in a context afterwards wait for an
event, even on streams that are created later, and nothing that was queued before. Neither waits on
the host. Both invalidate any capture in the context, whatever its mode.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from userstream import _driver, _hooks, errors
from userstream._buffers import capturing_frameworks, type_name
from userstream._driver import core
from userstream._engine import held_objects, host_wait, lanes
from userstream._ordering import settings
from userstream.errors import (
    CaptureError,
    DeviceMismatchError,
    NotSupportedError,
    UnknownProducerError,
    UserStreamError,
    WaitTimeout,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from userstream._buffers.view import View
    from userstream._engine.host_wait import Deadline
    from userstream._engine.lane import Lane
    from userstream._stream.stream import Stream
    from userstream._table import BufferUse


class Rest:
    """The parts of an `Ordering` that few calls need."""

    __slots__ = ("after", "before", "exporting", "may_order_devices", "may_wait", "thread")

    def __init__(
        self,
        exporting: Sequence[View] = (),
        before: Sequence[int] = (),
        after: Sequence[int] = (),
        may_order_devices: bool = True,
    ) -> None:
        self.exporting = exporting  # buffers that order the consumer themselves
        self.before = before  # devices all of whose work comes before that of the consumer
        self.after = after  # devices all of whose later work comes after that of the consumer
        self.may_order_devices = may_order_devices  # else the host waits for the consumer
        self.thread: int | None = None  # whose per-thread default stream takes part
        self.may_wait = False  # on the host, where no edge can order work after the consumer


class Ordering(core.OrderingState):
    """The streams that produce some buffers, and the stream that uses the buffers.

    `OrderingState` in `native/edges.c` describes the attributes. `rest` is a `Rest`, or `None` if
    edges between the lanes are the whole order: `core.acquire` and `core.release` then add them.
    """

    __slots__ = ()

    consumer: Stream
    lane: Lane
    producers: tuple[Lane, ...]
    buffer_use: BufferUse | None
    rest: Rest | None

    def acquire(
        self,
        deadline: Deadline | None = None,
        *,
        to_be_released: bool = True,
        result: int | None = None,
    ) -> Sequence[object]:
        """Make the consumer wait for the producers; return objects that keep exported memory.

        An error that the release would raise is raised before the first edge. `result` is the
        result of `core.acquire`, if the caller has called that function already.
        """
        lane, producers, rest = self.lane, self.producers, self.rest
        if result is None:
            result = core.acquire(self)
        if not result:
            return ()
        if rest is not None and (rest.before or rest.after):
            after = rest.after if to_be_released and not rest.may_wait else ()
            refuse_captures({*rest.before, *after}, lane)
            for device in rest.before:
                _add_edge_from_device(device, lane)
        if rest is None and len(producers) == 1:
            lane.add_checked_edge(producers[0], result, may_join=lane.on_close is None)
        else:
            for producer in producers:
                lane.add_edge(producer, may_join=lane.on_close is None)
        kept = [self._export(view) for view in rest.exporting] if rest and rest.exporting else ()
        if settings.SYNC:
            self._wait_on_host(deadline)
        return kept

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
            # In the stream's context: the handle of a default stream depends on the context.
            kept = consumer.within(view.export, int(self.consumer.handle))
        except UserStreamError:
            raise
        except Exception as error:
            if self.rest is not None and self.rest.may_order_devices:
                refuse_captures((device,), consumer)
                _add_edge_from_device(device, consumer)
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

        A failure of one producer does not stop the others. A producer that no edge can order is
        ordered by a host wait until the deadline; there is no host wait after an error. `result` is
        the result of `core.release` or `core.queue_copy`, if the caller has called one already.
        """
        lane, producers, rest = self.lane, self.producers, self.rest
        failures: list[Exception] = []
        try:
            if result is None:
                result = core.release(self, objects)
            if result == core.DUE:
                held_objects.sweep_if_due(lane)
                return
            if not result:
                return
        except Exception as failure:
            failures.append(failure)
            result, producers = core.CAPTURED, ()
        if result != core.CAPTURED:
            failures.append(core.edge_failure(result, lane, *producers or (lane,)))
            producers = ()
        wait_on_host = settings.SYNC and not after_error
        if objects is not None or producers or (rest is not None and rest.after):
            wait_on_host |= self._release_each(producers, objects, failures)
        if wait_on_host:
            try:
                self._wait_on_host(host_wait.Deadline(0) if after_error else deadline)
            except Exception as failure:
                failures.append(failure)
        if failures:
            try:
                errors._report_failures(failures, None)
            finally:
                # The frames of the traceback refer to this list. With the failure in it, a
                # reference cycle would keep the buffers until the next garbage collection.
                failures.clear()

    def _release_each(
        self, producers: Sequence[Lane], objects: object, failures: list[Exception]
    ) -> bool:
        """Release each producer; return whether the host has to wait as well."""
        lane = self.lane
        began = time.monotonic()
        event, capture = core.mark(lane), _driver.streams.NOT_CAPTURING
        if event is None:
            event, capture = lane.mark()
        for producer in producers:
            try:
                producer.wait_for_event(event, lane, capture, may_join=self.may_join)
            except Exception as failure:
                failures.append(failure)
        wait_on_host = self._let_devices_wait(event, failures)
        # Captured work never completes: the user keeps the buffers as long as the graph.
        if objects is None:
            lane.pool.give_back(event)
        elif capture != _driver.streams.NOT_CAPTURING:
            lane.pool.give_back(event)
            held_objects.end_ticket(objects)
        else:
            point = core.Point(lane.pool, event, lane, began)
            held_objects.hold(lane, point, objects)
        return wait_on_host

    def _let_devices_wait(self, event: int, failures: list[Exception]) -> bool:
        """Make the devices wait for an event; return whether the host has to wait instead."""
        rest = self.rest
        if rest is None:
            return False
        if not rest.may_order_devices:
            return bool(rest.after)
        instead = False
        for device in rest.after:
            tried = False
            try:
                refuse_captures((device,), self.lane)
                tried = True
                _add_edge_to_device(device, event)
            except (CaptureError, NotSupportedError) as failure:
                instead = rest.may_wait
                # Report a capture that could not be seen: the edge has invalidated it.
                if not instead or (tried and isinstance(failure, CaptureError)):
                    failures.append(failure)
            except Exception as failure:
                failures.append(failure)
        return instead

    def check_thread(self) -> None:
        """Raise in a thread with another per-thread default stream than the one that takes part."""
        rest = self.rest
        if rest is not None and rest.thread not in (None, threading.get_ident()):
            raise RuntimeError(
                "a borrow with the per-thread default stream must end in the thread where it "
                "began: in another thread that is another stream"
            )

    def _wait_on_host(self, deadline: Deadline | None) -> None:
        if self.lane.capture_status() != _driver.streams.NOT_CAPTURING:
            return
        try:
            host_wait.sync(self.lane, None if deadline is None else deadline.remaining(), "auto")
        except WaitTimeout:
            if deadline is None:
                raise
            raise host_wait.late((self.lane,), deadline.seconds) from None


# -- edges with everything on a device -------------------------------------------------------------

# The advice in a refusal, by whether USERSTREAM_ORDER asks for these edges for every producer.
_INSTEAD = {
    False: "pass producer=, the stream that writes the buffer, or use the buffer before or after "
    "the capture",
    True: "unset USERSTREAM_ORDER, or use the buffer before or after the capture",
}
_BREAKS = {
    by_device: f", which ordering with everything on the device would invalidate: {instead}"
    for by_device, instead in _INSTEAD.items()
}


def refuse_captures(devices: Collection[int], consumer: Lane) -> None:
    """Raise `CaptureError` if a capture can be seen, before an edge would invalidate it."""
    for device in devices:
        others = [consumer]
        for framework in capturing_frameworks():
            # A framework captures on its current stream. The legacy stream does not tell of the
            # capture of a non-blocking stream.
            if framework.is_usable():
                current, _owner = lanes.current_of(framework, device)
                if current is not None and current.is_context_independent:
                    others.append(current)
        legacy = lanes.default(_driver.streams.LEGACY, device)
        try:
            lanes.refuse_captures(legacy, _BREAKS[settings.BY_DEVICE], others)
        except CaptureError:
            if consumer.capture_status() == _driver.streams.NOT_CAPTURING:
                raise
            raise CaptureError(
                f"{consumer!r} is being captured into a graph, which cannot depend on all other "
                f"work on the device: {_INSTEAD[settings.BY_DEVICE]}",
                stream=repr(consumer),
            ) from None


def _add_edge_from_device(device: int, consumer: Lane) -> None:
    """Make later work on a stream wait for everything that is queued on a device now."""
    everything = lanes.default(_driver.streams.LEGACY, device)  # its context and pool of events
    event = everything.pool.take()
    try:
        _driver.streams.record_context(everything.context, event)
        core.wait_for(consumer, event)
    except CaptureError as error:
        _explain(error)
        raise
    finally:
        everything.pool.give_back(event)  # a wait that is pending keeps the record that it saw
    if _hooks.edge_added:
        _hooks.report_edge(consumer, f"everything on device {device}")


def _add_edge_to_device(device: int, event: int) -> None:
    """Make everything that is queued on a device from now on wait for an event."""
    context = lanes.default(_driver.streams.LEGACY, device).context
    try:
        _driver.streams.let_context_wait(context, event)
    except CaptureError as error:
        _explain(error)
        raise
    if _hooks.edge_added:
        _hooks.report_edge(f"everything on device {device}", "the stream that used the buffers")


def _explain(error: CaptureError) -> None:
    """Add to an error what invalidated a capture that could not be seen, and how to avoid it."""
    instead = (
        "unset USERSTREAM_ORDER"
        if settings.BY_DEVICE
        else "pass producer=, or set UserStream.unknown (USERSTREAM_UNKNOWN) to 'raise'"
    )
    error.add_note(
        "this was to order a buffer with everything on its device, which invalidates a capture "
        f"there: {instead}"
    )
