"""Waiting for the events of any framework."""

from __future__ import annotations

from typing import Any

from cuda.bindings import driver
from cuda.core import Event

from userstream import _driver, _numbers
from userstream._buffers import is_named, type_name
from userstream._stream._attributes import ConfiguredStream


class EventWaitingStream(ConfiguredStream):
    """`Stream.wait_event`."""

    __slots__ = ()

    def wait_event(self, event: Any, flags: int = 0) -> None:  # any framework's event
        """Make later work on this stream wait for an event; no host wait.

        Parameters
        ----------
        event : cuda.core.Event, CUevent, torch.cuda.Event or cupy.cuda.Event
            Of any device. One that was never recorded is not waited for.
        flags : int or CUevent_wait_flags, default 0
            1 (``CU_EVENT_WAIT_EXTERNAL``), under capture only: the launched graph waits for the
            event, instead of the capture joining the one that the event was recorded in.

        Raises
        ------
        TypeError
            ``event`` is no event, or ``flags`` no number.
        ValueError
            ``flags`` is neither 0 nor 1, or 1 while the stream is not being captured; or the
            event is closed.
        CaptureError
            The legacy default stream would break a capture; or the wait did: without the flag, an
            event that was recorded outside a capture cannot be waited for in it.
        ClosedError, ForkedError, DriverError
            The stream is closed, CUDA may not be used, or the driver refused.

        Notes
        -----
        Waiting for an event that was recorded in a capture pulls this stream into the capture, as
        CUDA has it: on a shared user stream, with the work of everybody. The driver cannot be
        asked beforehand. Thread-safe; does not block. Driver call: ``cuStreamWaitEvent``. After
        baracuda's ``wait_event``.

        Examples
        --------
        >>> from userstream import Stream
        >>> first, second = Stream.create(), Stream.create()
        >>> second.wait_event(first.record())
        """
        wanted = _numbers.integer(flags, "flags")
        if wanted not in (0, _driver.EXTERNAL):
            raise ValueError(
                f"flags of wait_event are 0 or CU_EVENT_WAIT_EXTERNAL (1), not {flags!r}"
            )
        self._here(self._wait_event, event, wanted)

    def _wait_event(self, event: Any, flags: int) -> None:
        handle = self._workable()
        address = _address_of(event)
        if flags and not _driver.is_capturing(handle, self):
            raise ValueError(
                f"CU_EVENT_WAIT_EXTERNAL is for waits that are captured, and {self!r} is not being "
                "captured: pass flags=0"
            )
        if address:
            _driver.wait_for_event(handle, address, flags, self)


def _address_of(event: Any) -> int:
    """Return the address of an event; 0 for one of torch that was never recorded."""
    kind = type(event)
    if isinstance(event, Event):
        address = int(event.handle)
    elif isinstance(event, driver.CUevent):
        address = int(event)
    elif hasattr(event, "cuda_event") and not isinstance(event, type):
        return int(event.cuda_event)
    elif is_named(kind, ("cupy",), ("Event",)):
        address = int(event.ptr)
    else:
        raise TypeError(
            "wait_event takes an event of cuda.core, torch or CuPy, or a CUevent, not "
            f"{type_name(event)}"
        )
    if address == 0:
        raise ValueError(f"{event!r} is no open event")
    return address
