"""Waiting for everything on a device."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from userstream import _driver
from userstream._engine import lanes
from userstream.errors import DriverError, NotSupportedError, UserStreamError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cuda.bindings import driver

    from userstream._engine.lane import Lane
    from userstream._engine.waiting import Pending


_BREAKS = (
    ", which a wait for the whole device would invalidate: wait() for streams, or for the device "
    "after the capture"
)


class DeviceWork:
    """Everything queued on a device, as a target of a wait."""

    def __init__(self, device: int, context: driver.CUcontext) -> None:
        self.device = device
        self._context = context

    def refuse_captures(self) -> None:
        """Raise `CaptureError` if a capture can be seen, which the wait would invalidate."""
        refuse_captures(self.device, self._context, _BREAKS)

    def is_idle(self) -> bool:
        return False  # there is no such query; an event of an idle context is done at once

    def completion(self) -> Pending:
        try:
            return _Recorded(self._context, self)
        except NotSupportedError:
            return _Synchronizing(self._context, self)

    def __repr__(self) -> str:
        return f"<device {self.device}>"


def refuse_captures(device: int, context: driver.CUcontext, why: str) -> None:
    """Raise `CaptureError` if a capture in a context of a device can be seen.

    Those are captures that the legacy default stream takes part in, or a stream that userstream
    made. `why` is as for `Lane.usable`.
    """
    lanes.default_in(_driver.streams.LEGACY, device, context).usable(why)
    for lane in lanes.ours():
        # Not those of others, which may be destroyed by now: to ask one would be a crash.
        handle = lane.handle
        if (
            handle is not None
            and lane.is_in(context)
            and not _driver.fused.are_free(handle, handle)
        ):
            lane.usable(why)


def work_on(devices: Sequence[int], lane: Lane | None, *, and_current: bool) -> list[DeviceWork]:
    """Return the work of the devices that are in use; refuse the captures that can be seen.

    It is that of their primary contexts, and of the stream's own or the current one if that is
    another.
    """
    own = lane if lane is not None and lane.is_context_independent else None
    contexts = {device: _driver.contexts.primary_context_if_active(device) for device in devices}
    work = [
        DeviceWork(device, context) for device, context in contexts.items() if context is not None
    ]
    if own is not None:
        work += _work_of_other(own.context)
    elif lane is not None or and_current:
        work += _work_of_other(_driver.contexts.current_context())
    if own is not None:
        own.usable(_BREAKS)
    for each in work:
        each.refuse_captures()
    return work


def _work_of_other(context: driver.CUcontext | None) -> list[DeviceWork]:
    """Return the work of a context, if there is one and it is not the primary one of a device."""
    if context is None or _driver.contexts.device_of_primary(int(context)) is not None:
        return []
    device = _driver.contexts.within(context, _driver.contexts.current_device)
    known = _driver.contexts.primary_context_if_active(device)
    if known is not None and int(known) == int(context):
        return []
    return [DeviceWork(device, context)]


class _Recorded:
    """An event recorded after all the work of a context; polled, then destroyed."""

    def __init__(self, context: driver.CUcontext, target: DeviceWork) -> None:
        self.target = target
        self.ordered = False
        event = _driver.events.create_event(context)
        self._event: driver.CUevent | None = event
        try:
            _driver.events.record_context(context, event)
        except BaseException:  # Ctrl-C as well: no destructor frees an event of the driver
            self.abandon()
            raise

    def is_done(self) -> bool:
        if not _driver.events.event_is_done(self._event, self.target):
            return False
        self.abandon()
        return True

    def abandon(self) -> None:
        """Destroy the event; the driver keeps what it still needs."""
        event, self._event = self._event, None
        if event is not None:
            # After an error of the GPU it cannot be destroyed, and is of no use.
            with contextlib.suppress(UserStreamError):
                _driver.events.destroy_event(event)


class _Synchronizing:
    """A thread inside ``cuCtxSynchronize``, for drivers before CUDA 12.5; polled like an event."""

    def __init__(self, context: driver.CUcontext, target: DeviceWork) -> None:
        self.target = target
        self.ordered = False
        self._context = context
        self._error: DriverError | None = None
        self._thread = threading.Thread(
            target=self._run, name="userstream-synchronize", daemon=True
        )
        self._thread.start()

    def _run(self) -> None:
        try:
            _driver.contexts.synchronize_context(self._context)
        except DriverError as error:
            self._error = error

    def is_done(self) -> bool:
        if self._thread.is_alive():
            return False
        if self._error is not None:
            raise self._error
        return True

    def abandon(self) -> None:
        """Abandon the thread, which ends when the device has finished."""
