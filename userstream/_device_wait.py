"""Waiting for everything on a device."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from userstream import _driver, _events
from userstream._stream import Stream
from userstream.errors import DriverError, NotSupportedError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cuda.bindings import driver

    from userstream._waiting import Pending


def refuse_captures(context: driver.CUcontext, streams: Iterable[Stream]) -> None:
    """Raise `CaptureError` if a capture of the context can be seen, which waiting would break."""
    with _driver.entered(context):
        for stream in (Stream.legacy_default(), *streams):
            _driver.refuse_capturing(stream._live(), stream)


class DeviceWork:
    """Everything that is queued on a device, as something to wait for."""

    def __init__(self, device: int, context: driver.CUcontext) -> None:
        self._ordinal = device
        self._context = context

    def _device(self) -> int:
        return self._ordinal

    def _is_idle(self) -> bool:
        return False  # nobody can be asked; an event of an idle context is done at once

    def _completion(self) -> Pending:
        try:
            return _events.record_context(self._context, self)
        except NotSupportedError:
            return _Synchronizing(self._context, self)

    def __repr__(self) -> str:
        return f"<device {self._ordinal}>"


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
            _driver.synchronize_context(self._context)
        except DriverError as error:
            self._error = error

    def is_done(self) -> bool:
        if self._thread.is_alive():
            return False
        if self._error is not None:
            raise self._error
        return True

    def abandon(self) -> None:
        """Leave the thread behind; it ends when the device has finished."""
