"""Creation and closing of `Stream` objects, and checks of stream arguments."""

from __future__ import annotations

import contextlib
import operator
from typing import TYPE_CHECKING, Any

import cuda.core
import numpy as np
from cuda.bindings import driver

from userstream import _arguments, _driver, _engine
from userstream._buffers import is_named, type_name
from userstream._engine import held_objects, lanes
from userstream.errors import ClosedError, UnsupportedStreamError

if TYPE_CHECKING:
    from collections.abc import Callable

    from userstream._engine.lane import Lane
    from userstream._engine.lanes import Wanted
    from userstream.typing import StreamLike

_CVCUDA = ("cvcuda", "nvcv")
_NONBLOCKING = int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)


def check_flags(flags: int | None, *, nonblocking: bool) -> None:
    """Raise if driver flags contradict *nonblocking*."""
    expected = _NONBLOCKING if nonblocking else 0
    if flags is not None and _arguments.integer(flags, "flags") != expected:
        raise ValueError(
            f"flags={flags!r} contradicts nonblocking={nonblocking!r}: "
            "CU_STREAM_NON_BLOCKING (1) goes with True, CU_STREAM_DEFAULT (0) with False, "
            "and there are no others"
        )


def check_sms(sms: object, *, nonblocking: bool) -> Wanted:
    """Return the validated value of `sms=`."""
    wanted = _engine.lanes.check_sms(sms)
    if not nonblocking:
        raise ValueError(
            f"sms={sms!r} is for non-blocking streams only: leave out nonblocking=False"
        )
    return wanted


def check_own(lane: Lane | None, stream: object) -> None:
    """Raise if a ``with`` block would close a stream that is shared with other code."""
    if lane is None or not lane.owned or lane.is_shared:
        raise TypeError(
            f"{stream!r} is not closed by a with statement: only streams of Stream.create() are; "
            "to let a framework work on it, use `with stream.activate():`"
        )


def close(lane: Lane | None, stream: object) -> None:
    """Close the lane of a stream: destroy the driver's stream if userstream created it."""
    if lane is None or not lane.is_context_independent:
        raise RuntimeError(f"{stream!r} is shared by the whole process and cannot be closed")
    if lane.handle is None:
        return
    address = int(lane.live())
    # Remove the stream from its registry first, which may raise. In the other order, Ctrl-C between
    # the two steps would leave a closed stream there, and every later get_stream() would return it.
    if lane.on_close is not None:
        lane.on_close(lane)
    if lane.owned:
        from userstream._stream import capture

        with contextlib.suppress(ClosedError):  # another thread closed the stream first
            capture.forget(lane)
    lanes.forget(lane, address)
    held_objects.keep_in_use(lane)  # open blocks can no longer record their end on it
    lane.close()


def refuse_number(given: object) -> None:
    """Raise if a number is passed as a stream: a number may be a handle or a device."""
    if isinstance(given, (int, np.integer)) and not isinstance(given, (bool, np.bool_)):
        raise UnsupportedStreamError(
            f"the number {given} is not a stream: pass Stream.from_handle(handle) for a handle, "
            "Stream.legacy_default() or Stream.per_thread_default() for a default stream, "
            "get_stream(device) for the user stream of a device"
        )


def protocol_of(given: Any) -> Callable[[], tuple[int, int]] | None:
    """Return the ``__cuda_stream__`` of a stream, or a substitute for CV-CUDA's streams."""
    protocol: Callable[[], tuple[int, int]] | None = getattr(given, "__cuda_stream__", None)
    kind = type(given)
    if protocol is None and kind.__name__ == "Stream" and is_named(kind, _CVCUDA, ("Stream",)):
        return lambda: (0, given.handle)
    return protocol


def _null_stream_of(kind: type) -> int:
    """Return the default stream that a library means by handle 0."""
    if is_named(kind, ("numba.", "numba_cuda."), ("Stream",)):
        from userstream._buffers import numba

        return numba.default_stream()
    return _driver.streams.LEGACY


def check_stream(given: object) -> None:
    """Raise for an argument of `Stream.wait` that is neither an event nor a stream."""
    if protocol_of(given) is None:
        refuse_number(given)
        raise UnsupportedStreamError(
            "Stream.wait takes an event or a stream (an object with __cuda_stream__), not "
            f"{type(given).__name__}; for a buffer, acquire() waits for its producer"
        )


def address_of_stream(given: driver.CUstream | StreamLike) -> int:
    """Return the address of a stream argument; 1 and 2 are the default streams."""
    refuse_number(given)
    return address_of(given, numbers="")


def address_of(handle: int | driver.CUstream | StreamLike, numbers: str = "an address, ") -> int:
    """Return the address of a stream or of a handle; 1 and 2 are the default streams."""
    if isinstance(handle, (bool, np.bool_)):
        raise UnsupportedStreamError(
            f"a stream is {numbers}a CUstream or an object with __cuda_stream__, not {handle!r}"
        )
    if isinstance(handle, (int, np.integer, driver.CUstream)):
        address = int(handle)
    elif (protocol := protocol_of(handle)) is not None:
        if isinstance(handle, cuda.core.Stream) and handle.is_closed:
            raise ClosedError(f"this {type_name(handle)} is closed; pass an open stream")
        try:
            version, address = map(operator.index, protocol())
        except (TypeError, ValueError) as error:
            raise UnsupportedStreamError(
                f"__cuda_stream__ of this {type_name(handle)} does not return a version and an "
                f"address: {error}"
            ) from error
        if version != 0:
            raise UnsupportedStreamError(
                f"{handle!r} implements version {version} of __cuda_stream__, not 0"
            )
        if address == 0:  # valid in this protocol
            address = _null_stream_of(type(handle))
    else:
        raise UnsupportedStreamError(
            f"a stream is {numbers}a CUstream or an object with __cuda_stream__, not "
            f"{type(handle).__name__}"
        )
    if not 0 < address < 1 << 64:
        raise ValueError(
            f"{handle!r} is not the handle of a stream; for the default streams pass "
            "Stream.legacy_default() or Stream.per_thread_default()"
        )
    return address
