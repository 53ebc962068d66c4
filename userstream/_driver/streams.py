"""Streams: queries that break no capture, events, host functions and attributes."""

from __future__ import annotations

import ctypes
import functools
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from cuda.bindings import driver

from userstream._driver import account, core
from userstream._driver.library import device_attribute, driver_function, version
from userstream._driver.status import SUCCESS, call, failed, raised
from userstream.errors import CaptureError, DriverError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Two handles that name no stream but "the default stream of the current context".
LEGACY = 1
PER_THREAD = 2

CAPTURE_IMPLICIT = driver.CUresult.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
NOT_CAPTURING = driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
_FREE = (SUCCESS, NOT_CAPTURING)
_INVALID_HANDLE = int(driver.CUresult.CUDA_ERROR_INVALID_HANDLE)
_RELAXED = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED


# Call `relaxed(function, *args)`: the driver calls of the function leave the captures of other
# threads alone. See `native/calls.c`.
relaxed = core.relaxed


def relax_capture_of_this_thread() -> None:
    """Relax the capture mode of the calling thread, one of userstream's, permanently."""
    call(driver.cuThreadExchangeStreamCaptureMode, _RELAXED)


def capture_status(handle: driver.CUstream, stream: object) -> driver.CUstreamCaptureStatus:
    """Return the capture status of a stream. Invalidates no capture.

    Raises
    ------
    CaptureError
        It is a legacy default stream, and using it would break a capture.
    """
    try:
        answer = driver.cuStreamIsCapturing(handle)
    except (RuntimeError, ValueError) as error:
        raise raised("cuStreamIsCapturing", error) from error
    if answer == _FREE:  # nearly always
        return NOT_CAPTURING
    status, capture = answer
    if status == SUCCESS:
        return capture
    if status == CAPTURE_IMPLICIT:
        raise CaptureError(
            f"{stream!r} cannot be used now: a blocking stream of its context is being captured, "
            "and the legacy default stream would invalidate that capture",
            stream=repr(stream),
        )
    raise failed("cuStreamIsCapturing", status, stream)


_NEVER_RUNS = (
    " into a graph, and work that is captured never runs: wait for the stream on which the graph "
    "is launched"
)


def refuse_capturing(handle: driver.CUstream, stream: object, why: str = _NEVER_RUNS) -> None:
    """Raise `CaptureError` if this stream is part of a capture, or its use would break one.

    `why` continues the message after "is being captured".
    """
    if capture_status(handle, stream) != NOT_CAPTURING:
        raise CaptureError(f"{stream!r} is being captured{why}", stream=repr(stream))


def stream_is_idle(handle: Any, stream: object, result: int | None = None) -> bool:
    """Return whether all the work queued on a stream is done, without harm to any capture.

    `result` is the result of `core.query`, if it was called already.

    Raises
    ------
    CaptureError
        The stream is being captured, and the query would invalidate that capture.
    """
    if result is None:
        result = core.query(handle)
    while result == core.CAPTURED:
        refuse_capturing(handle, stream)  # returns only if the capture has ended meanwhile
        result = core.query(handle)
    if not result:
        return True
    if result & 0xFFFFFFFF == core.NOT_READY:
        return False
    raise core.result_failure(result, stream)


def cuda_core_failure(function: str, error: Exception, stream: object = None) -> Exception:
    """Return the exception for an error that cuda.core raised for a driver call of its own."""
    # CUDAError is not public before cuda.core 1.3, and the code is only in the text.
    if type(error).__name__ != "CUDAError" and type(error) is not RuntimeError:
        return error
    unknown = re.search(r"UNEXPECTED ERROR CODE: (\d+)", str(error))
    if unknown:
        return failed(function, int(unknown[1]), stream)
    name = re.match(r"CUDA_ERROR_\w+", str(error))
    if name:
        return failed(function, getattr(driver.CUresult, name[0]), stream)
    # Where cuda.core cannot create an object it drops the code; an error of the GPU persists.
    return _gpu_error(stream) or DriverError(f"{function} failed: {error}", function=function)


def _gpu_error(stream: object) -> DriverError | None:
    """Return the GPU error that a stream reports, if there is one; breaks no capture."""
    handle = getattr(stream, "handle", None)
    if handle is None:
        return None
    try:
        account.on(account.HOUSEKEEPING, stream_is_idle, handle, stream)
    except CaptureError:  # a captured stream cannot be queried
        return None
    except DriverError as error:
        return error
    return None


@contextmanager
def cuda_core_errors(function: str, stream: object = None) -> Iterator[None]:
    """Convert the errors that cuda.core raises in a block (see `cuda_core_failure`)."""
    try:
        yield
    except Exception as error:
        failure = cuda_core_failure(function, error, stream)
        if failure is error:
            raise
        raise failure from error


def stream_context(handle: driver.CUstream) -> driver.CUcontext:
    """Return the context that a stream belongs to."""
    try:
        values = call(driver.cuStreamGetCtx, handle)
    except DriverError as error:
        if error.code == _INVALID_HANDLE:
            error.add_note(
                f"no stream has the handle {int(handle):#x}; keep a stream as long as a buffer "
                "names it"
            )
        raise
    # cuda-bindings 13 returns a green context beside it.
    return values[0] if isinstance(values, list) else values


def stream_id(handle: driver.CUstream, stream: object) -> int:
    """Return the driver's identifier of a stream, which the driver never reuses."""
    return int(call(driver.cuStreamGetId, handle, stream=stream))


def stream_flags(handle: driver.CUstream, stream: object) -> int:
    """Return the flags that a stream was created with."""
    return int(call(driver.cuStreamGetFlags, handle, stream=stream))


# -- events and host functions

EXTERNAL = int(driver.CUevent_wait_flags.CU_EVENT_WAIT_EXTERNAL)


def wait_for_event(handle: driver.CUstream, event: int, flags: int, stream: object) -> None:
    """Make later work on a stream wait for an event; no host wait."""
    call(driver.cuStreamWaitEvent, handle, driver.CUevent(event), flags, stream=stream)


def record_context(context: driver.CUcontext, event: int | driver.CUevent) -> None:
    """Record an event behind all the work of a context; invalidates any capture there."""
    call(driver.cuCtxRecordEvent, context, driver.CUevent(int(event)))


def let_context_wait(context: driver.CUcontext, event: int | driver.CUevent) -> None:
    """Make all later work of a context wait for an event; invalidates any capture there."""
    call(driver.cuCtxWaitEvent, context, driver.CUevent(int(event)))


@functools.cache
def has_context_events() -> bool:
    """Return whether the driver supports events of a whole context (CUDA 12.5 or newer)."""
    return version() >= 12050


_LAUNCH = "cuLaunchHostFunc"


@functools.cache
def _launch_host_function() -> Callable[..., int]:
    # By its address: cuda-bindings 12.9 would wrap the function in one that takes the GIL, on a
    # thread of the driver.
    pointer = ctypes.c_void_p
    return driver_function(_LAUNCH, 10000, pointer, pointer, pointer)


def call_native(
    handle: driver.CUstream, function: int | None, argument: int, stream: object
) -> None:
    """Queue a call of ``function(argument)``, a native function given by its address."""
    status = _launch_host_function()(int(handle), function, argument)
    if status:
        raise failed(_LAUNCH, status, stream)


# -- attributes

Attribute: TypeAlias = Literal[
    "access_policy_window", "mem_sync_domain", "mem_sync_domain_map", "priority", "sync_policy"
]

_ID = driver.CUstreamAttrID
_IDS: dict[Attribute, driver.CUstreamAttrID] = {
    "access_policy_window": _ID.CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW,
    "mem_sync_domain": _ID.CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN,
    "mem_sync_domain_map": _ID.CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP,
    "priority": _ID.CU_LAUNCH_ATTRIBUTE_PRIORITY,
    "sync_policy": _ID.CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY,
}
ATTRIBUTES = tuple(_IDS)

_POLICY = driver.CUsynchronizationPolicy
SYNC_POLICIES = {
    "auto": _POLICY.CU_SYNC_POLICY_AUTO,
    "spin": _POLICY.CU_SYNC_POLICY_SPIN,
    "yield": _POLICY.CU_SYNC_POLICY_YIELD,
    "blocking": _POLICY.CU_SYNC_POLICY_BLOCKING_SYNC,
}
_DOMAIN = driver.CUlaunchMemSyncDomain
DOMAINS = {
    "default": _DOMAIN.CU_LAUNCH_MEM_SYNC_DOMAIN_DEFAULT,
    "remote": _DOMAIN.CU_LAUNCH_MEM_SYNC_DOMAIN_REMOTE,
}
_PROPERTY = driver.CUaccessProperty
PROPERTIES = {
    "normal": _PROPERTY.CU_ACCESS_PROPERTY_NORMAL,
    "streaming": _PROPERTY.CU_ACCESS_PROPERTY_STREAMING,
    "persisting": _PROPERTY.CU_ACCESS_PROPERTY_PERSISTING,
}


# An access-policy window: address, bytes, hit ratio, and the policies of hits and of misses.
Window: TypeAlias = tuple[int, int, float, str, str]


def largest_window(device: int) -> int:
    """Return the largest number of bytes of an access-policy window; 0 if there is none."""
    which = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_ACCESS_POLICY_WINDOW_SIZE
    return device_attribute(device, which)


def domain_count(device: int) -> int:
    """Return the number of memory-synchronization domains of a device."""
    which = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MEM_SYNC_DOMAIN_COUNT
    return device_attribute(device, which)


def get_attribute(handle: driver.CUstream, attribute: Attribute, stream: object) -> Any:
    """Return an attribute of a stream; `None` for a value that has no name."""
    value = call(driver.cuStreamGetAttribute, handle, _IDS[attribute], stream=stream)
    if attribute == "access_policy_window":
        return _window(value.accessPolicyWindow)
    if attribute == "mem_sync_domain_map":
        return int(value.memSyncDomainMap.default_), int(value.memSyncDomainMap.remote)
    # The others are a C int. Read as one: the bindings fail at a number that has no name, and a
    # new stream's synchronization policy is -1.
    number = int.from_bytes(bytes(value.pad[:4]), "little", signed=True)
    if attribute == "priority":
        return number
    return _name_of(number, DOMAINS if attribute == "mem_sync_domain" else SYNC_POLICIES)


def set_attribute(
    handle: driver.CUstream, attribute: Attribute, wanted: Any, stream: object
) -> None:
    """Set an attribute of a stream to a value as `get_attribute` returns it."""
    value = driver.CUstreamAttrValue()
    if attribute == "access_policy_window":
        _fill(value.accessPolicyWindow, wanted)
    elif attribute == "mem_sync_domain_map":
        value.memSyncDomainMap.default_, value.memSyncDomainMap.remote = wanted
    elif attribute == "mem_sync_domain":
        value.memSyncDomain = DOMAINS[wanted]
    elif attribute == "sync_policy":
        value.syncPolicy = SYNC_POLICIES[wanted]
    else:
        value.priority = wanted
    call(driver.cuStreamSetAttribute, handle, _IDS[attribute], value, stream=stream)


def copy_attributes(destination: driver.CUstream, source: driver.CUstream, stream: object) -> None:
    """Copy the attributes of another stream of the same context."""
    call(driver.cuStreamCopyAttributes, destination, source, stream=stream)


def _window(window: driver.CUaccessPolicyWindow) -> Window:
    return (
        int(window.base_ptr),
        int(window.num_bytes),
        float(window.hitRatio),
        _name_of(int(window.hitProp), PROPERTIES) or "normal",
        _name_of(int(window.missProp), PROPERTIES) or "normal",
    )


def _fill(window: driver.CUaccessPolicyWindow, wanted: Window) -> None:
    window.base_ptr, window.num_bytes, window.hitRatio, hit, miss = wanted
    window.hitProp, window.missProp = PROPERTIES[hit], PROPERTIES[miss]


def _name_of(number: int, names: dict[str, Any]) -> str | None:
    return next((name for name, known in names.items() if int(known) == number), None)
