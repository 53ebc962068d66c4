"""Holding a stream, on the simulated driver or a real one."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import mmap
import os
import weakref
from typing import TYPE_CHECKING, Any, Self

from cuda.bindings import driver

from userstream import _process
from userstream._driver import account
from userstream.testing import _simulated

if TYPE_CHECKING:
    from collections.abc import Iterator

_WORD = 4


class _Words:
    """Words of host memory that streams wait on.

    The memory belongs to this module, is registered with the driver and never unregistered, because
    unregistering waits for the device. A context that is reset drops the registration.
    """

    def __init__(self) -> None:
        self._lock = _process.Lock()
        self._free: list[tuple[int, int]] = []

    def take(self) -> tuple[int, int]:
        """Take an unused word; return its address and that of its page."""
        with self._lock:
            if not self._free:
                memory = mmap.mmap(-1, mmap.PAGESIZE)
                # Never freed: a held stream reads it until the process ends.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))
                page = ctypes.addressof(ctypes.c_char.from_buffer(memory))
                words = range(page, page + mmap.PAGESIZE, _WORD)
                self._free.extend((word, page) for word in reversed(words))
            return self._free.pop()

    def device_address(self, word: int, page: int) -> int:
        """Return the address of the word on the device. Needs a current context."""
        with self._lock:  # only one of two threads may register the page
            result, address = driver.cuMemHostGetDevicePointer(word, 0)
            if result == driver.CUresult.CUDA_ERROR_INVALID_VALUE:
                flags = driver.CU_MEMHOSTREGISTER_PORTABLE | driver.CU_MEMHOSTREGISTER_DEVICEMAP
                answer = driver.cuMemHostRegister(page, mmap.PAGESIZE, flags)
                _checked(answer, "cuMemHostRegister")
                result, address = driver.cuMemHostGetDevicePointer(word, 0)
            return int(_checked((result, address), "cuMemHostGetDevicePointer"))

    def give_back(self, word: int, page: int) -> None:
        """Make the word available for reuse at once, although streams may not have read it yet."""
        with self._lock:
            self._free.append((word, page))


_words = _Words()
_held: weakref.WeakSet[latch] = weakref.WeakSet()


class latch:  # noqa: N801 - used like a function
    """Hold a stream: work queued on it inside the block does not start before ``release``.

    It works the same way on the simulated driver and on a real one: the stream waits
    (``cuStreamWaitValue32``) on a word of pinned memory, which ``release`` writes. Neither a host
    function nor a kernel is involved, so other streams continue. While a stream is held, do not
    free memory (the call waits for the device and stalls the launches and event records of other
    threads), do not load modules (lazy loading waits as well), and do not wait for the stream or
    its device before releasing it.

    Entering does not block (the first latch of a process pins memory) and does not change the
    caller's current context. No context needs to be current, except for the default streams
    (handles 0, 1 and 2), which belong to the current one. ``release`` may be called from any
    thread and repeatedly. A latch can be entered only once.

    Parameters
    ----------
    stream : object with ``__cuda_stream__``, or CUstream
        The stream to hold.

    Raises
    ------
    RuntimeError
        On entering, if the stream is being captured or the driver refuses; if the latch is entered
        twice, or released before it is entered.
    TypeError
        If *stream* is not a stream.

    Examples
    --------
    >>> from cuda.bindings import driver
    >>> from cuda.core import Device
    >>> from userstream.testing import latch
    >>> device = Device(0)
    >>> device.set_current()
    >>> stream = device.create_stream()
    >>> with latch(stream) as held:
    ...     event = stream.record()
    ...     print(event.is_done)
    ...     held.release()
    ...     event.sync()
    ...     print(event.is_done)
    False
    True
    """

    def __init__(self, stream: object) -> None:
        self._stream = stream  # keeps it alive while it is held
        self._handle = _simulated.handle_of(stream)
        self._process = os.getpid()
        self._lock = _process.Lock()
        self._word: tuple[int, int] | None = None
        self._value = 0
        self._entered = False
        self._released = False

    def __repr__(self) -> str:
        entered = "held" if self._entered else "not entered"
        state = "released" if self._released else entered
        return f"<userstream.testing.latch of stream {self._handle:#x}: {state}>"

    @property
    def is_released(self) -> bool:
        """True if the stream has been released.

        Examples
        --------
        >>> from userstream import Stream
        >>> from userstream.testing import latch
        >>> with latch(Stream.create(0)) as held:
        ...     held.is_released
        False
        >>> held.is_released
        True
        """
        return self._released

    def __enter__(self) -> Self:
        with self._lock:
            if self._entered:
                raise RuntimeError("this latch was already used: create a new one for each block")
            self._entered = True
        stream = driver.CUstream(self._handle)
        _refuse_capturing(stream)
        with _context_of(stream), _relaxed_capture_mode():
            word = _words.take()
            try:
                # Each use of a word waits for the next higher value (GEQ), so a stream that has not
                # read an earlier value yet is satisfied by a later one too.
                self._value = (ctypes.c_uint32.from_address(word[0]).value + 1) & 0xFFFFFFFF
                address = _words.device_address(*word)
                at_least = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
                # Not the program's: `observe` does not take it for an order.
                answer = account.on(
                    account.HOUSEKEEPING,
                    *(driver.cuStreamWaitValue32, stream, address, self._value, at_least),
                )
                _checked(answer, "cuStreamWaitValue32")
            except BaseException:
                _words.give_back(*word)
                raise
            self._word = word
        _held.add(self)
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def release(self) -> None:
        """Let the stream continue. Does not block and makes no driver call.

        In a forked child it does nothing: the stream is the parent's, and continues when the parent
        releases it.

        Examples
        --------
        >>> from userstream import Stream
        >>> from userstream.testing import latch
        >>> stream = Stream.create(0)
        >>> with latch(stream) as held:
        ...     held.release()
        ...     stream.sync(timeout=10)
        """
        # The word is in memory that parent and child share, so that the device sees the one that
        # the parent writes: what a child wrote there, if only by ending, would let the stream go,
        # or hold it for good with an older value. Its lock may be held by a thread that is gone.
        if os.getpid() != self._process:
            return
        _process.fence()  # the stream reads what was written until now
        with self._lock:
            if not self._entered:
                raise RuntimeError("this latch was not entered: use it in a with statement")
            self._released = True
            word, self._word = self._word, None
        if word is None:
            return
        ctypes.c_uint32.from_address(word[0]).value = self._value
        _simulated.progress()
        _words.give_back(*word)
        _held.discard(self)


@atexit.register
def _release_all() -> None:
    """Release every stream: a real driver may wait for them when the process ends."""
    for held in list(_held):
        held.release()


def _checked(answer: tuple[Any, ...], call: str) -> Any:
    result, *values = answer
    if result != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"latch: {call} failed with {result.name}")
    return values[0] if values else None


def _refuse_capturing(stream: driver.CUstream) -> None:
    status = _checked(driver.cuStreamIsCapturing(stream), "cuStreamIsCapturing")
    if status != driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE:
        raise RuntimeError(
            "latch: the stream is being captured, so the hold would become part of the graph"
        )


@contextlib.contextmanager
def _context_of(stream: driver.CUstream) -> Iterator[None]:
    """Make the stream's context current."""
    # The bindings of CUDA 13 return (result, context, green context).
    context = _checked(driver.cuStreamGetCtx(stream)[:2], "cuStreamGetCtx")
    _checked(driver.cuCtxPushCurrent(context), "cuCtxPushCurrent")
    try:
        yield
    finally:
        driver.cuCtxPopCurrent()


@contextlib.contextmanager
def _relaxed_capture_mode() -> Iterator[None]:
    """Protect the captures of other threads, which pinning memory would invalidate."""
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    mode = _checked(driver.cuThreadExchangeStreamCaptureMode(relaxed), "the capture mode")
    try:
        yield
    finally:
        driver.cuThreadExchangeStreamCaptureMode(mode)
