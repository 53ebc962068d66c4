"""Sequences of driver calls in Python: the reference for `_native.c`, and what stands in for it.

A handle is one of cuda.bindings, or its number. A result is 0, or the index in `FUNCTIONS` of the
function that failed << 32 | its ``CUresult``, or `CAPTURED`. What cuda.bindings raises itself (for
a function that the driver lacks, or a result that it does not know) is raised here.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from cuda.bindings import driver

from userstream._driver.status import NOT_READY, SUCCESS, ask, call, raised
from userstream._driver.streams import NOT_CAPTURING, relaxed
from userstream.errors import UserStreamError

if TYPE_CHECKING:
    from collections.abc import Callable

FUNCTIONS = (
    "cuThreadExchangeStreamCaptureMode",
    "cuStreamIsCapturing",
    "cuStreamQuery",
    "cuEventQuery",
    "cuEventRecord",
    "cuStreamWaitEvent",
    "cuCtxGetCurrent",
    "cuMemcpyAsync",
    "cuPointerGetAttributes",
    "cuStreamGetCtx",
)
CAPTURED = -1

_WANTED = (
    driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
    driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_MANAGED,
    driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
    driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_CONTEXT,
    driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
    driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_RANGE_SIZE,
)
_COUNT = len(_WANTED)
_ATTRIBUTES = (ctypes.c_int * _COUNT)(*map(int, _WANTED))

_FREE = (SUCCESS, NOT_CAPTURING)
_QUERY_STREAM = FUNCTIONS.index("cuStreamQuery") << 32
_QUERY_EVENT = FUNCTIONS.index("cuEventQuery") << 32
_RECORD_EVENT = FUNCTIONS.index("cuEventRecord") << 32
_WAIT_EVENT = FUNCTIONS.index("cuStreamWaitEvent") << 32
_GET_ATTRIBUTES = FUNCTIONS.index("cuPointerGetAttributes") << 32
_COPY = FUNCTIONS.index("cuMemcpyAsync") << 32


def are_free(first: Any, second: Any) -> bool:
    """Tell whether neither of two streams is being captured; `False` also if one cannot tell."""
    try:
        return bool(
            driver.cuStreamIsCapturing(first) == _FREE
            and driver.cuStreamIsCapturing(second) == _FREE
        )
    except (RuntimeError, ValueError):
        return False


def is_in(stream: Any, context: Any) -> bool:
    """Tell whether a stream belongs to a context; `False` also if one cannot tell."""
    try:
        return bool(driver.cuStreamGetCtx(stream)[:2] == (SUCCESS, context))
    except (RuntimeError, ValueError):
        return False


def query(stream: Any) -> int:
    """Query a stream unless it is being captured, and leave the captures of other threads alone."""
    # Not by `are_free`: each call of a function counts in a wait that is over.
    try:
        free = driver.cuStreamIsCapturing(stream) == _FREE
    except (RuntimeError, ValueError):
        free = False
    if not free:
        return CAPTURED
    try:
        # In the global mode this query would invalidate the capture of any thread.
        (status,) = relaxed(driver.cuStreamQuery, stream)
    except UserStreamError:
        raise
    except (RuntimeError, ValueError) as error:
        raise raised("cuStreamQuery", error) from error
    return 0 if status == SUCCESS else _QUERY_STREAM | int(status)


def fetch(  # noqa: PLR0917 -- as `_native.fetch`, to which a name would cost as much as a value
    left: dict[int, Any],
    used: object,
    move: tuple[int, int, int, int, int],
    events: tuple[Any, ...],
    start: int,
    address: int,
    stream: Any,
    context: Any,
    nanoseconds: int,
    producer: Any,
    out: int,
    /,
) -> int:
    """Copy to page-locked memory, and ask up to so many nanoseconds whether that is over.

    `move` is where to, from `start` on; where from, from `address` on; and how many bytes. Then how
    far below `address` the array begins, and over how many bytes it extends, if it is not known yet
    that one allocation has these.

    The copy comes after the work of `producer`, a stream of that context, unless that is 0. If it
    is over, it goes on to the memory at `out`, unless that is 0. `CAPTURED` if nothing was queued,
    as a stream is captured, the context is not current, or no allocation has all of the array.

    Unless it is over, `used` is in `left` by its identity afterwards, whatever signal comes.

    The compiled one copies in as many parts as there are events, and one goes on to `out` while the
    GPU copies the next.
    """
    to, source, size, below, span = move
    to, source, event = start + to, address + source, events[-1]
    try:
        here = int(driver.cuCtxGetCurrent()[1] or 0) == int(context)
    except (RuntimeError, ValueError):
        here = False
    if not here or not are_free(stream, stream):
        return CAPTURED
    result = _check_extent(address - below, span) if span else 0
    if result == CAPTURED:
        return result
    left[id(used)] = used
    result = (
        result
        or (_follow(producer, stream, event) if producer else 0)
        or _result(_COPY, driver.cuMemcpyAsync, to, source, size, stream)
        or _result(_RECORD_EVENT, driver.cuEventRecord, event, stream)
        or relaxed(_wait_for_event, event, nanoseconds)
    )
    if not result:
        if out:
            ctypes.memmove(out, to, size)
        left.pop(id(used), None)  # another thread may have taken it to hold it
    return result


def _check_extent(lowest: int, span: int) -> int:
    """Tell whether memory reaches so far: what an object says of itself may be wrong."""
    status, *_, start, size = pointer(lowest)
    if status:
        return _GET_ATTRIBUTES | status
    return 0 if start <= lowest and lowest + span <= start + size else CAPTURED


def _wait_for_event(event: Any, nanoseconds: int) -> int:
    until = time.monotonic_ns() + nanoseconds
    while True:
        result = _result(_QUERY_EVENT, driver.cuEventQuery, event)
        if result != _QUERY_EVENT | int(NOT_READY) or time.monotonic_ns() > until:
            return result


def _follow(producer: Any, stream: Any, event: Any) -> int:
    """Order a stream after another by an event, unless that has nothing to do."""
    result = query(producer)
    if result != _QUERY_STREAM | int(NOT_READY):
        return result
    return _result(_RECORD_EVENT, driver.cuEventRecord, event, producer) or _result(
        _WAIT_EVENT, driver.cuStreamWaitEvent, stream, event, 0
    )


class _Answers:
    """Where the driver writes; no attribute is larger, and what is beside them stays 0."""

    __slots__ = ("places", "values")

    def __init__(self) -> None:
        memory = (ctypes.c_uint64 * _COUNT)()
        first = ctypes.addressof(memory)
        self.places = (ctypes.c_void_p * _COUNT)(*range(first, first + 8 * _COUNT, 8))
        self.values = memoryview(memory).cast("B").cast("Q")  # five times as quick to read


_spare: deque[_Answers] = deque()  # one for each thread that is asking, for the next


def pointer(address: int) -> tuple[int, ...]:
    """Ask the driver about an address; return its status, and the values of `_WANTED`."""
    try:
        answers = _spare.pop()
    except IndexError:
        answers = _Answers()
    status = _several()(_COUNT, _ATTRIBUTES, answers.places, address)
    values = answers.values.tolist()
    _spare.append(answers)
    return (status, *values)


@functools.cache
def _several() -> Callable[..., int]:
    place = ctypes.c_void_p
    return looked_up("cuPointerGetAttributes", 7000, ctypes.c_uint, place, place, ctypes.c_uint64)


def looked_up(name: str, since: int, *arguments: Any) -> Callable[..., int]:
    """Return a function of the driver, with the signature that it has since a CUDA version."""
    address, _found = call(driver.cuGetProcAddress, name.encode(), since, 0)
    return ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(int(address))


class Lease(Protocol):
    """Memory that is lent: a buffer, which goes back when the last reference to it has gone."""

    @property
    def address(self) -> int:
        """Where it begins."""


# By address, as a weak reference has to live to tell.
_leases: dict[int, weakref.ref[Lease]] = {}


def lend(blocks: dict[int, object], size: int) -> Lease | None:
    """Lend the block that came last to a dictionary by address; `None` if there is none.

    The values say nothing: a method of a dict written in C fills it. Whatever signal comes, a block
    is lent or back there, in whatever thread, also in the middle of a garbage collection.
    """
    while True:
        try:
            address = next(reversed(blocks))
            lease = _memory_at(size)(address)
            # At the end it calls `blocks[address] = <the dead reference>`: no Python in between.
            give_back = functools.partial(blocks.__setitem__, address)
            # `_leases[address] = weakref.ref(lease, give_back)` with `del blocks[address]`, in one
            # call of C: whatever signal comes, the block is there, or comes back with the lease. No
            # name is given to what holds the reference: of a lease that got no block it must go
            # first, else it would call.
            _leases.update(
                map(
                    operator.itemgetter(0, 1),
                    zip(
                        (address,),
                        map(weakref.ref, (lease,), (give_back,)),
                        map(blocks.pop, (address,)),
                        strict=True,
                    ),
                )
            )
        except StopIteration:
            return None
        except (KeyError, RuntimeError):  # another thread was faster
            continue
        return lease


@functools.lru_cache(maxsize=256)
def _memory_at(size: int) -> Callable[[int], Lease]:
    kind: Any = type("Lease", (ctypes.c_char * size,), {"address": property(ctypes.addressof)})
    return kind.from_address  # type: ignore[no-any-return]


def _result(which: int, function: Callable[..., tuple[Any, ...]], *handles: Any) -> int:
    (status,) = ask(function, *handles)
    return 0 if status == SUCCESS else which | int(status)
