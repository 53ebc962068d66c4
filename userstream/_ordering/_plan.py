"""The edges between the streams that produce some buffers and the one that uses them."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any

from userstream import _cleanup, _driver, _holding, _waiting
from userstream._buffers import type_name
from userstream._device_wait import DeviceWork
from userstream._engine import host_wait
from userstream._engine.lane import usual_edge
from userstream._stream.stream import lane_of
from userstream.errors import (
    CaptureError,
    DeviceMismatchError,
    NotSupportedError,
    UnknownProducerError,
    UserStreamError,
    WaitTimeout,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cuda.core import Event

    from userstream._buffers import View
    from userstream._engine.lane import Lane
    from userstream._stream.stream import Stream
    from userstream._waiting import Deadline

# To find a race: every acquire and release waits on the host as well.
SYNC = os.environ.get("USERSTREAM_SYNC", "") not in ("", "0")


class Ordering:
    """The streams that produce some buffers, and the one that uses them."""

    # What few buffers need has its default here.
    exporting: Sequence[View] = ()  # those that order the consumer themselves
    buffers: Sequence[Any] = ()
    may_join = False  # whether the producers may join a capture of the consumer
    thread: int | None = None  # the one whose per-thread default stream takes part
    followers: Sequence[Lane] = ()  # what goes on after a copy, beside the producers
    devices: Sequence[int] = ()  # where all that comes later does, as nobody knows who produces

    def __init__(self, consumer: Stream, producers: Sequence[Lane], owners: object) -> None:
        self.consumer = consumer
        self.lane = consumer._resolve()
        self.producers = producers
        self.owners = owners  # of producers that their frameworks might destroy

    def find_way_back(self) -> None:
        """Find out who goes on after the consumer of buffers that order it by DLPack alone.

        For copies, which promise that. Asked beforehand, as what is wrong is to be refused then.
        """
        views = [view for view in self.exporting if not view.is_immutable]
        named = [view for view in views if view.way_back.ordering == "exact"]
        self.followers = [lane_of(view.way_back.handle, view.device) for view in named]
        self.devices = list({view.device for view in views if view not in named})

    def acquire(self, deadline: Deadline | None = None) -> list[object]:
        """Let the consumer wait for the producers; return what keeps the memory of some."""
        lane = self.lane
        for producer in self.producers:
            lane.wait_for(producer, may_join=not lane.is_shared)
        kept = [self._export(view) for view in self.exporting] if self.exporting else []
        if SYNC:
            self._wait_on_host(deadline)
        return kept

    def _export(self, view: View) -> object:
        consumer, buffer, device = self.lane, view.buffer, view.device
        if not consumer.anywhere and consumer.device != device:
            raise DeviceMismatchError(
                f"to {type_name(buffer)} the handle of {consumer!r} means a stream of device "
                f"{device}; pass another stream",
                devices=(consumer.device, device),
            )
        if consumer.capture_status() != _driver.NOT_CAPTURING:
            raise CaptureError(
                f"{consumer!r} is being captured into a graph, which cannot depend on the work "
                f"that produces this {type_name(buffer)}; acquire it before the capture begins",
                stream=repr(consumer),
            )
        try:
            # Where its handle means it: that of a default stream means the current context's.
            return consumer.within(view.export, int(self.consumer.handle))
        except UserStreamError:
            raise
        except Exception as error:
            raise UnknownProducerError(
                f"this {type_name(buffer)} could not order {consumer!r} after its producer "
                f"({type(error).__name__}: {error}); pass producer=, the stream that writes it, or "
                "None if nothing is pending",
                device=device,
            ) from error

    def release(
        self, objects: object, deadline: Deadline | None = None, *, after_error: bool = False
    ) -> None:
        """Let the producers go on after the consumer; hold the objects up to there, unless `None`.

        One producer that cannot wait does not stop the others. Where one can be ordered by a host
        wait alone, that has the deadline; after an error it is not waited for.
        """
        if objects is None and not self.producers and not SYNC:
            return
        began = time.monotonic()
        lane, producers = self.lane, self.producers
        failures: list[Exception] = []
        wait_on_host = SYNC and not after_error
        event = None
        others = self.followers or self.devices
        if len(producers) == 1 and not others:
            try:
                event = usual_edge(lane, producers[0])
            except Exception as failure:
                failures.append(failure)
                producers = ()
        capture = _driver.NOT_CAPTURING
        if event is None:
            event, capture = lane.mark()
            for producer in (*producers, *self.followers):
                try:
                    producer.follow(event, lane, capture, may_join=self.may_join)
                except Exception as failure:
                    failures.append(failure)
            wait_on_host = not self._let_devices_follow(event, failures) or wait_on_host
        # What is captured never completes: the graph needs the buffers as long as it lives.
        if objects is None or capture != _driver.NOT_CAPTURING:
            lane.pool.give_back(event)
            _holding.let_go(objects)
        else:
            _holding.hold(lane, event, began, objects)
        if wait_on_host:
            try:
                self._wait_on_host(_waiting.Deadline(0) if after_error else deadline)
            except Exception as failure:
                failures.append(failure)
        if failures:
            _cleanup.report(failures, None)

    def _let_devices_follow(self, event: Event, failures: list[Exception]) -> bool:
        """Let all later work of the devices wait for an event; tell whether that could be done."""
        could = True
        for device in self.devices:
            try:
                could = _let_follow(device, event) and could
            except Exception as failure:
                failures.append(failure)
        return could

    def check_thread(self) -> None:
        """Raise unless this is the thread whose per-thread default stream takes part, if any."""
        if self.thread is not None and self.thread != threading.get_ident():
            raise RuntimeError(
                "a borrow with the per-thread default stream must end in the thread where it "
                "began: in another thread that is another stream"
            )

    def _wait_on_host(self, deadline: Deadline | None) -> None:
        if self.lane.capture_status() != _driver.NOT_CAPTURING:
            return
        try:
            host_wait.sync(self.lane, None if deadline is None else deadline.left(), "auto")
        except WaitTimeout:
            if deadline is None:
                raise
            raise _waiting.late((self.lane,), deadline.seconds) from None


def _let_follow(device: int, event: Event) -> bool:
    """Let all later work of a device wait for an event; tell whether that could be done.

    It would invalidate a capture there, and drivers before CUDA 12.5 cannot do it.
    """
    context = _driver.primary_context(device)
    try:
        DeviceWork(device, context).refuse_captures()
        _driver.let_context_wait(context, event.handle)
    except (CaptureError, NotSupportedError):
        return False
    return True
