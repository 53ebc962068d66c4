"""The lanes of the process: created, found by their handles, or wrapped; and parts of devices.

`cuda.core.Stream` has no public constructor that fits. Its private ``_init`` is called here and,
for the streams that users hold, in `userstream._stream.factory`.
"""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Literal, TypeAlias

from cuda.bindings import driver
from cuda.core import Context, Device, StreamOptions

from userstream import _arguments, _driver, _process
from userstream._buffers import NO_STREAM
from userstream._driver import core
from userstream._engine.lane import CoreStream, Lane, Part

if TYPE_CHECKING:
    from collections.abc import Iterable

    from userstream._buffers.framework import Framework

_core_contexts: dict[int | Part, Context] = {}

# Lanes of streams that userstream created, by handle, so that a handle gives the same lane again.
# Weak: strong references would keep dropped streams from being destroyed.
_ours: weakref.WeakValueDictionary[int, Lane] = weakref.WeakValueDictionary()

# Lanes of frameworks' streams, by device and handle, for the next edge. All that is known of such a
# stream is that it is in the primary context: the driver reuses the handle of a destroyed stream,
# so a cached fact may be about another stream. `named` checks the context on every call as well.
of_frameworks: dict[int, dict[int, Lane]] = {}
_MOST_KNOWN = 128

# The default streams of the primary contexts, by handle and device.
_defaults: dict[tuple[int, int], Lane] = {}


def ours() -> list[Lane]:
    """Return the lanes of open streams that userstream created."""
    # values() breaks if another thread creates a stream meanwhile.
    return [lane for each in _ours.valuerefs() if (lane := each()) is not None]


def create(
    device: int,
    *,
    name: str | None = None,
    nonblocking: bool,
    priority: int,
    part: Part | None = None,
) -> Lane:
    """Create a stream in the primary context of a device; the current context does not change.

    `part` limits the stream to a part of the device.
    """
    context = _driver.contexts.primary_context(device)
    # cuda.core creates the stream in the current context, not in that of `device_id`.
    clamped = clamp_priority(device, priority)
    options = StreamOptions(nonblocking=nonblocking, priority=clamped)
    inside = context if part is None else part.context()
    core = _driver.contexts.within(inside, _create_here, device, options, part)
    lane = Lane(core.handle, device, context, core=core, name=name, owned=True)
    lane.flags, lane.priority = int(nonblocking), clamped  # CU_STREAM_NON_BLOCKING is 1
    lane.part = part
    _ours[int(lane.live())] = lane
    lane.stream_id = _driver.streams.stream_id(lane.live(), lane)
    return lane


def _create_here(device: int, options: StreamOptions, part: Part | None) -> CoreStream:
    with _driver.streams.cuda_core_errors("cuStreamCreateWithPriority"):
        context = _core_context(device, part)
        return CoreStream._init(options=options, device_id=device, ctx=context)


def _core_context(device: int, part: Part | None) -> Context:
    """Return the `cuda.core.Context` of the current context, cached by device or part."""
    which = device if part is None else part
    try:
        return _core_contexts[which]
    except KeyError:
        pass
    if part is None:
        core_device = Device(device)
        core_device.set_current()
        context = core_device.context
    else:
        # Device.set_current() would leave the green context for the primary context.
        context = CoreStream._legacy_default().context
    context = _core_contexts.setdefault(which, context)
    # Some versions of cuda-bindings crash at exit when the last reference goes.
    _process.keep_forever(context)
    return context


def at_handle(address: int, owner: object = None, *, shared: bool = True) -> Lane:
    """Return the lane of any stream but a default stream, and keep its owner alive.

    With `shared`, the lane of a stream that userstream created is returned, which keeps no owner
    alive.
    """
    ours = _ours.get(address)
    if ours is not None:
        # For a stream limited to a part, the driver would return the green context.
        return ours if shared else _wrapped(address, owner, ours.device, ours.context)
    for primary, ordinal in _driver.contexts.devices_of_primaries.copy().items():
        if core.is_in(address, primary):  # quicker than the query, and nearly always enough
            return _wrapped(address, owner, ordinal, driver.CUcontext(primary))
    context = _driver.streams.stream_context(driver.CUstream(address))
    device = _driver.contexts.devices_of_primaries.get(int(context))
    if device is None:
        device = _driver.contexts.within(context, _driver.contexts.current_device)
        _driver.contexts.primary_context_if_active(device)  # registers the context if primary
    return _wrapped(address, owner, device, context)


def named(handle: int, device: int) -> Lane:
    """Return the lane of the stream that a buffer on a device names.

    The stream may belong to another device.
    """
    known = of_frameworks.get(device)  # Inlined `of_framework`: this path runs on every borrow.
    lane = (known and known.get(handle)) or of_framework(handle, device)
    if not lane.is_context_independent or core.is_in(
        lane.raw_handle or lane.live(), lane.raw_context
    ):
        return lane
    return at_handle(handle)


def of_framework(handle: int, device: int) -> Lane:
    """Return the lane of the stream that a framework names by a handle on a device."""
    try:
        return of_frameworks[device][handle]
    except KeyError:
        pass
    if handle == _driver.streams.PER_THREAD:  # another stream in each thread: not cached
        return default(handle, device)
    if handle == _driver.streams.LEGACY:
        lane = default(handle, device)
    else:
        context = _driver.contexts.primary_context(device)
        lane = _ours.get(handle) or _wrapped(handle, None, device, context)
    known = of_frameworks.setdefault(device, {})
    if len(known) >= _MOST_KNOWN:
        known.clear()
    # setdefault: two threads must not get two lanes of one stream, which edges would order.
    return known.setdefault(handle, lane)


def current_of(framework: Framework, device: int) -> tuple[Lane | None, object]:
    """Return the lane of a framework's current stream on a device, and what keeps it alive.

    `None` if the framework has no current stream on the device.
    """
    handle, owner = framework.current_stream(device)
    return (None if handle == NO_STREAM else of_framework(handle, device)), owner


def default(handle: int, device: int | None = None) -> Lane:
    """Return the lane of a default stream on a device, or in the context that is current."""
    if device is None:
        context = _driver.contexts.default_context()
        device = _driver.contexts.devices_of_primaries.get(int(context))
        if device is None:
            device = _driver.contexts.within(context, _driver.contexts.current_device)
            primary = _driver.contexts.primary_context_if_active(device)
            if primary is None or int(primary) != int(context):
                # A foreign context may be destroyed at any time: do not cache the lane.
                return _wrapped(handle, None, device, context)
    try:
        return _defaults[handle, device]
    except KeyError:
        lane = _wrapped(handle, None, device, _driver.contexts.primary_context(device))
        return _defaults.setdefault((handle, device), lane)  # as above


def default_in(handle: int, device: int, context: driver.CUcontext) -> Lane:
    """Return the lane of a default stream in a context of a device."""
    known = _defaults.get((handle, device))
    if known is not None and known.raw_context == int(context):
        return known
    primary = int(context) in _driver.contexts.devices_of_primaries
    return default(handle, device) if primary else _wrapped(handle, None, device, context)


def _wrapped(address: int, owner: object, device: int, context: driver.CUcontext) -> Lane:
    """Return a new lane of a stream in a known context; no driver call."""
    return Lane(driver.CUstream(address), device, context, owner=owner)


def forget(lane: Lane, address: int) -> None:
    """Remove a lane that is being closed from the caches: the driver reuses handles."""
    for known in list(of_frameworks.values()):  # an array of another device may name the stream
        known.pop(address, None)  # the cached lane shares ownership in cuda.core
    if _ours.get(address) is lane:  # otherwise the handle belongs to a new stream
        _ours.pop(address, None)


def clamp_priority(device: int, priority: int) -> int:
    """Return the nearest priority that the device supports."""
    least, greatest = _driver.contexts.priority_range(_driver.contexts.primary_context(device))
    nearest = max(greatest, min(priority, least))
    logging = sys.modules.get("logging")  # without an import there is no handler
    if nearest != priority and logging is not None:
        logging.getLogger("userstream").debug(
            "priority %d is clamped to %d: device %d has priorities from %d to %d",
            priority,
            nearest,
            device,
            greatest,
            least,
        )
    return nearest


def refuse_captures(legacy: Lane, why: str, others: Iterable[Lane] = ()) -> None:
    """Raise `CaptureError` for a known capture in the context of a legacy default stream.

    Known are captures that the legacy default stream would join, and captures of streams that
    userstream created or that the caller knows. `why` is as for `Lane.usable`.
    """
    candidates = [legacy, *others]
    # Streams of other code may be destroyed, and a query of a destroyed stream crashes.
    for each in _ours.valuerefs():  # `ours`, inlined: this path runs on every edge with a device
        lane = each()
        if lane is not None and lane.raw_context == legacy.raw_context:
            candidates.append(lane)
    if core.are_all_free(candidates):
        return
    for lane in candidates:
        if lane.handle is not None:  # not closed meanwhile
            lane.usable(why)


# -- parts of a device -----------------------------------------------------------------------------

# A process splits a device once: into a part of the size that is asked for first, and the rest. So
# the parts of any two streams are the same part, or have nothing in common.

REST: Literal["rest"] = "rest"

Wanted: TypeAlias = int | Literal["rest"]


_splits: dict[int, tuple[Part, Part]] = {}  # by device: the part, and the rest


def check_sms(sms: object) -> Wanted:
    """Check the argument `sms=` before the first driver call, and return it."""
    if isinstance(sms, str):
        if sms != REST:
            raise ValueError(f"sms must be a number of multiprocessors or 'rest', not {sms!r}")
        return REST
    wanted = _arguments.integer(sms, "sms")
    if wanted < 1:
        raise ValueError(
            f"sms must be at least 1, not {wanted}; leave it out for all multiprocessors of the "
            "device"
        )
    return wanted


def part_of(device: int, wanted: Wanted) -> Part:
    """Return a part of a device; the first call splits the device."""
    split = _splits.get(device)
    if split is None:
        _driver.library.check_device(device)
        _driver.contexts.check_green_contexts()
        if wanted == REST:
            raise ValueError(
                f"device {device} has not been split, so there is no rest yet: create a stream "
                "with a number as sms= first"
            )
        split = _splits.setdefault(device, _split(device, wanted))
    part, rest = split
    if wanted == REST:
        if not rest.sms:
            raise ValueError(f"the part of {part.sms} SMs leaves nothing of device {device}")
        return rest
    # Nearly every call asks for the same number. The driver may round another number up to it.
    if wanted != part.sms and _split(device, wanted)[0].sms != part.sms:
        raise ValueError(
            f"device {device} is split into {part.sms} and {rest.sms} SMs, once for the process, "
            f"so there is no part of {wanted}: pass sms={part.sms}, or sms='rest'"
        )
    return part


def _split(device: int, wanted: int) -> tuple[Part, Part]:
    """Compute the two parts of a device. Repeatable: nothing changes on the device."""
    whole = _driver.contexts.all_multiprocessors(device)
    # The driver takes an unsigned int; cuda-bindings raise OverflowError for a larger number.
    available = _driver.contexts.multiprocessor_count(whole)
    found = _driver.contexts.split_multiprocessors(whole, wanted) if wanted <= available else None
    if found is None:
        raise ValueError(
            f"device {device} has {available} SMs, from which no part of {wanted} can be split: "
            "pass a smaller sms=, or none for the whole device"
        )
    part, rest = found
    return Part(device, part), Part(device, rest)


_process.after_fork(of_frameworks.clear)
