"""Waits of a stream for events of any library, and recording of events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cuda.bindings import driver
from cuda.core import Event, EventOptions

from userstream import _arguments, _driver, _hooks, _process
from userstream._buffers import is_named, type_name
from userstream.errors import ClosedError, DeviceMismatchError

if TYPE_CHECKING:
    from userstream._engine.lane import Lane


def wait(lane: Lane, event: Event) -> None:
    """Make later work on a stream wait for a cuda.core event."""
    lane.usable()
    _check_open(event)
    wait_for_event = _driver.streams.wait_for_event
    lane.here(wait_for_event, lane.live(), int(event.handle), 0, lane)
    if _hooks.edge_added:
        _hooks.report_edge(lane, event)


def record(lane: Lane, event: Event | None, options: EventOptions | None) -> Event:
    """Record an event after the work queued on a stream.

    The lane's context is current: up to cuda.core 1.2 an event is created in the current context.
    """
    lane.usable()
    if event is not None:
        _check_recordable(lane, event)
    with _driver.streams.cuda_core_errors("cuEventRecord", lane):
        recorded = lane.core.record(event, options)
    # A user may keep the event until Python exits. Its destructor would call the driver and hang.
    _process.leak_at_end(recorded)
    return recorded


def wait_for_any(lane: Lane, event: Any, flags: int) -> None:  # any framework's event
    """Make later work wait for an event of any library; the lane's context is current."""
    wanted = _arguments.integer(flags, "flags")
    if wanted not in (0, _driver.streams.EXTERNAL):
        raise ValueError(
            f"flags of wait_event must be 0 or CU_EVENT_WAIT_EXTERNAL (1), not {flags!r}"
        )
    handle = lane.usable()
    address = _address_of(event)
    if wanted and not _driver.capture.is_capturing(handle, lane):
        raise ValueError(
            f"CU_EVENT_WAIT_EXTERNAL is for waits that are captured, and {lane!r} is not being "
            "captured: pass flags=0"
        )
    if address:
        _driver.streams.wait_for_event(handle, address, wanted, lane)
        if _hooks.edge_added:
            _hooks.report_edge(lane, event)


def _check_recordable(lane: Lane, event: Event) -> None:
    if not isinstance(event, Event):
        raise TypeError(
            f"record takes a cuda.core event, not {type_name(event)}; without one it creates one, "
            "with options="
        )
    _check_open(event)
    own, device = lane.device, event.device  # None for an event of another process
    if device is not None and device.device_id != own:
        raise DeviceMismatchError(
            f"{event!r} belongs to device {device.device_id} and {lane!r} to device {own}; a "
            "stream records events of its own device, and record() creates one",
            devices=(own, device.device_id),
            stream=repr(lane),
        )


def _check_open(event: Event) -> None:
    if event.is_closed:
        raise ClosedError(f"{event!r} is closed; pass an open event")


def _address_of(event: Any) -> int:
    """Return the address of an event; 0 for a PyTorch event that was never recorded."""
    kind = type(event)
    if isinstance(event, Event):
        _check_open(event)
        return int(event.handle)
    if isinstance(event, driver.CUevent):
        address = int(event)
    elif hasattr(event, "cuda_event") and not isinstance(event, type):
        return int(event.cuda_event)
    elif is_named(kind, ("cupy",), ("Event",)):
        address = int(event.ptr)
    else:
        raise TypeError(
            "wait_event takes an event of cuda.core, torch or CuPy, or a CUevent, not "
            f"{type_name(event)}; stream.wait(other) waits for another stream"
        )
    if address == 0:
        raise ValueError(f"{event!r} is a null handle, not an event")
    return address
