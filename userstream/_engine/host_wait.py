"""Host waits for lanes and for everything on a device.

A wait can time out, and Ctrl-C stops it, because the waiting thread never blocks inside the driver:
it sleeps until a native thread that does rings its bell (see `native/bells.c`). A wait covers the
work that was queued when it was called.
"""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from userstream import _driver, _hooks, _process
from userstream._driver import core
from userstream._driver.core import Bell
from userstream._engine import events, held_objects, lanes
from userstream.errors import (
    ClosedError,
    DriverError,
    NotSupportedError,
    WaitErrors,
    WaitTimeout,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Protocol

    from cuda.bindings import driver

    from userstream._engine.events import Pending
    from userstream._engine.lane import Lane

    class Waitable(Protocol):
        """A target of host waits: a lane, or everything on a device."""

        @property
        def device(self) -> int: ...
        def is_idle(self) -> bool: ...
        def completion(self) -> Pending: ...


_POLLS = 20  # some 20 us: to sleep and to be woken takes longer

# Where no bell rings, a wait is late by at most this share of its length, or by the longest pause.
_PAUSE_SHARE = 0.05
_LONGEST_PAUSE = 5e-3

# The identifier of the thread that runs host functions; 0 is no thread's.
host_functions_thread = 0


def check_arguments(timeout: float | None, policy: str) -> None:
    """Check a timeout and a policy before the first driver call."""
    if policy not in ("auto", "spin"):
        raise ValueError(f'policy must be "auto" or "spin", not {policy!r}')
    if timeout is None:
        return
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"timeout must be seconds, an int or a float, or None, not {timeout!r}")
    try:
        seconds = float(timeout)
    except OverflowError:
        raise ValueError(
            f"timeout is an int of {int(timeout).bit_length()} bits, which no float can hold; pass "
            "seconds, or None to wait indefinitely"
        ) from None
    if not seconds >= 0:  # also NaN
        raise ValueError(f"timeout must be at least 0 seconds, not {timeout!r}")


class Deadline:
    """A point in time that ends several waits, computed from one timeout."""

    __slots__ = ("_until", "seconds")

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self._until = None if seconds is None else time.monotonic() + seconds

    def remaining(self) -> float | None:
        """Return the remaining seconds; `None` without a timeout."""
        return None if self._until is None else max(0.0, self._until - time.monotonic())


def forbid_waits_here() -> None:
    """Declare the calling thread the one that runs host functions, in which waits raise."""
    global host_functions_thread  # noqa: PLW0603 -- there is one
    host_functions_thread = threading.get_ident()


def refuse_in_host_function(what: str) -> None:
    """Raise `RuntimeError` on the thread that runs host functions."""
    if threading.get_ident() == host_functions_thread:
        raise RuntimeError(
            f"{what} was called in a host function or callback of a stream, which may not wait for "
            "the GPU: the stream may be waiting for the function; do it on another thread"
        )


def wait_on_host(
    targets: Sequence[Waitable],
    timeout: float | None,
    policy: str,
    grouped: bool,
    closed_is_done: bool = False,
) -> None:
    """Block until the GPU has completed the work that is queued on each target now.

    Parameters
    ----------
    targets : sequence of Waitable
        The failure of one target does not end the waits for the others.
    timeout : float or None
        Seconds for all targets together; None waits indefinitely, 0 polls once.
    policy : {"auto", "spin"}
        Whether to sleep between the polls.
    grouped : bool
        Whether failures are raised as `WaitErrors`, or the one failure as itself.
    closed_is_done : bool
        Whether to skip a stream that another thread has closed, instead of raising.

    Raises
    ------
    RuntimeError
        The calling thread runs host functions.
    """
    refuse_in_host_function("a wait")
    since = time.perf_counter()
    pending, failed = start(targets, closed_is_done=closed_is_done)
    if pending:
        pending = poll(pending, failed, since, timeout, policy)
    if pending or failed:
        raise outcome(pending, failed, timeout, grouped=grouped)


def wait_until(there: Pending, timeout: float | None) -> None:
    """Block until the GPU has passed a point; otherwise like `wait_on_host`."""
    refuse_in_host_function("a wait")
    failed: list[DriverError] = []
    pending = poll([there], failed, time.perf_counter(), timeout, "auto")
    if pending or failed:
        raise outcome(pending, failed, timeout, grouped=False)


def poll(
    pending: list[Pending],
    failed: list[DriverError],
    since: float,
    timeout: float | None,
    policy: str,
) -> list[Pending]:
    """Wait until all points are passed or time is up; return the late points."""
    if _hooks.host_waits:
        return _hooks.waiting(_poll, pending, failed, since, timeout, policy)
    return _poll(pending, failed, since, timeout, policy)


def _poll(
    pending: list[Pending],
    failed: list[DriverError],
    since: float,
    timeout: float | None,
    policy: str,
) -> list[Pending]:
    bell, polls = None, 0
    ringing: set[int] = set()  # the identifiers of points for which the bell rings
    while True:
        if _process.halted:  # forked, or Python exits: a daemon thread must not poll on
            _process.check_fork()
        pending = still_pending(pending, failed)
        elapsed = time.perf_counter() - since
        if not pending or (timeout is not None and elapsed >= timeout):
            return pending
        # A count, not a clock, ends the polls: a schedule of `testing` has to repeat what happens.
        polls += 1
        if policy == "spin" or polls < _POLLS:
            continue
        if bell is None:
            bell = Bell()
        # Asked again after each pause: one event of a context rings at a time.
        ringing = {id(each) for each in pending if id(each) in ringing or each.notify(bell)}
        rings = len(ringing) == len(pending)
        pause = events.LONGEST_SLEEP if rings else min(elapsed * _PAUSE_SHARE, _LONGEST_PAUSE)
        if timeout is not None:
            pause = min(pause, timeout - elapsed)
        if rings:
            bell.wait(pause)
        else:  # so that no schedule of `testing` takes a pause for a turn
            _driver.account.on(_driver.account.HOUSEKEEPING, bell.wait, pause)


def start(
    targets: Sequence[Waitable], closed_is_done: bool = False
) -> tuple[list[Pending], list[DriverError]]:
    """Record the point that each target has reached; return pending points and errors."""
    pending: list[Pending] = []
    failed: list[DriverError] = []
    for target in targets:
        try:
            if not target.is_idle():
                pending.append(target.completion())
        except DriverError as error:
            failed.append(error)
        except ClosedError:
            if not closed_is_done:
                raise
    return pending, failed


def still_pending(points: list[Pending], failed: list[DriverError]) -> list[Pending]:
    """Return the points that are not passed; append the errors of those that have failed."""
    pending = []
    for point in points:
        try:
            if not point.is_done():
                pending.append(point)
        except DriverError as error:
            failed.append(error)
    return pending


def outcome(
    pending: Sequence[Pending],
    failed: Sequence[Exception],
    timeout: float | None,
    *,
    grouped: bool,
) -> Exception:
    """Return the exception for a wait with late points or failures."""
    problems: list[Exception] = [*failed]
    if pending:
        problems.append(late([each.target for each in pending], timeout))
    if failed and grouped:
        return WaitErrors(f"{len(problems)} of the waits failed, first {problems[0]}", problems)
    return problems[0]


_GO_ON = "nothing was cancelled, wait again to continue"


def late(targets: Sequence[Any], timeout: float | None, then: str = _GO_ON) -> WaitTimeout:
    """Return the `WaitTimeout` for targets; `then` ends the message."""
    for listener in _hooks.wait_timed_out:
        listener()
    names = ", ".join(map(repr, targets))
    devices = sorted({target.device for target in targets})
    return WaitTimeout(
        f"not done within {timeout} s: {names}{_driver.status.uuids(devices)}; {then}",
        seconds=timeout,
        devices=devices,
        streams=[repr(target) for target in targets],
    )


# -- host waits as users call them -----------------------------------------------------------------


def sync(lane: Lane, timeout: float | None, policy: str, is_reported: bool = False) -> None:
    """Block until the work queued on a lane now has completed."""
    if _hooks.host_waits and not is_reported:
        _hooks.waiting(sync, lane, timeout, policy, True)
        return
    if timeout is not None or policy != "auto":
        check_arguments(timeout, policy)
    # Inlined: only programs with host functions look up the identifier of the thread.
    if host_functions_thread and threading.get_ident() == host_functions_thread:
        refuse_in_host_function("a wait")
    if _process.halted:
        _process.check_fork()
    result = core.query(lane)  # inlined: 0 says that the lane is idle
    # Pass the result on: the driver may tell of a failure only once.
    if result and not lane.is_idle(result):
        wait_on_host((lane,), timeout=timeout, policy=policy, grouped=False)
    if held_objects.queues or held_objects.orphans:
        held_objects.sweep()


def sync_all(
    targets: Sequence[Waitable],
    timeout: float | None,
    policy: str = "auto",
    *,
    grouped: bool | None = None,
    closed_is_done: bool = False,
) -> None:
    """Wait for all targets at once; by default failures are grouped if there are several."""
    grouped = len(targets) > 1 if grouped is None else grouped
    wait = partial(_hooks.waiting, wait_on_host) if _hooks.host_waits else wait_on_host
    wait(targets, timeout, policy, grouped, closed_is_done)
    held_objects.sweep()


# -- everything on a device ------------------------------------------------------------------------

_BREAKS = (
    ", which a wait for the whole device would invalidate: wait() for streams, or for the device "
    "after the capture"
)


class DeviceWork:
    """All work queued on a device, as a target of a wait."""

    def __init__(self, device: int, context: driver.CUcontext) -> None:
        self.device = device
        self._context = context

    def refuse_captures(self) -> None:
        """Raise `CaptureError` for a known capture that the wait would invalidate."""
        legacy = lanes.default_in(_driver.streams.LEGACY, self.device, self._context)
        lanes.refuse_captures(legacy, _BREAKS)

    def is_idle(self) -> bool:
        return False  # CUDA has no such query; an event of an idle context completes at once

    def completion(self) -> Pending:
        pool = events.pool_of(self._context)
        point = core.Point(pool, pool.take(), self, time.monotonic())
        try:
            _driver.streams.record_context(self._context, point.event)
        except NotSupportedError:
            return _Synchronizing(self._context, self)
        return point

    def __repr__(self) -> str:
        return f"<device {self.device}>"


def work_on(devices: Sequence[int], lane: Lane | None, *, and_current: bool) -> list[DeviceWork]:
    """Return the work of devices as targets of a wait; raise `CaptureError` for known captures.

    The work is that of the active primary contexts, and of the stream's context or the current one
    if that is not primary.
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
    """Return the work of a context as a list, which is empty for a primary context or `None`."""
    if context is None or int(context) in _driver.contexts.devices_of_primaries:
        return []
    device = _driver.contexts.within(context, _driver.contexts.current_device)
    known = _driver.contexts.primary_context_if_active(device)
    if known is not None and int(known) == int(context):
        return []
    return [DeviceWork(device, context)]


class _Synchronizing:
    """A thread in ``cuCtxSynchronize``, polled like an event; for drivers before CUDA 12.5."""

    in_order = False

    def __init__(self, context: driver.CUcontext, target: DeviceWork) -> None:
        self.target = target
        self._context = context
        self._error: DriverError | None = None
        self._bell: Bell | None = None
        self._is_over = False
        self._thread = threading.Thread(
            target=self._run, name="userstream-synchronize", daemon=True
        )
        _process.start_thread(self._thread)

    def _run(self) -> None:
        try:
            _driver.contexts.synchronize_context(self._context)
        except DriverError as error:
            self._error = error
        self._is_over = True
        if self._bell is not None:
            self._bell.ring()

    def is_done(self) -> bool:
        if not self._is_over:
            return False
        if self._error is not None:
            raise self._error
        return True

    def notify(self, bell: Bell) -> bool:
        self._bell = bell
        return not self._is_over  # otherwise the thread may have missed the bell
