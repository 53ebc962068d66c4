"""Holding a stream, on the simulated and on a real driver."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import mmap
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any, Self

from cuda.bindings import driver

from userstream.testing import _simulated

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

_WORD = 4


class _Words:
    """Words of host memory that streams wait for.

    The memory is this module's own, registered with the driver and never given back: freeing pinned
    memory waits for the device. A context takes the registration with it when it is reset.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[tuple[int, int]] = []

    def take(self) -> tuple[int, int]:
        """Take a word that nobody else uses: its address and that of its page."""
        with self._lock:
            if not self._free:
                memory = mmap.mmap(-1, mmap.PAGESIZE)
                # It outlives the interpreter: until then a held stream looks at it.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))
                page = ctypes.addressof(ctypes.c_char.from_buffer(memory))
                words = range(page, page + mmap.PAGESIZE, _WORD)
                self._free.extend((word, page) for word in reversed(words))
            return self._free.pop()

    def device_address(self, word: int, page: int) -> int:
        """Give the address for the device. Needs a current context."""
        with self._lock:  # of two threads, one registers
            result, address = driver.cuMemHostGetDevicePointer(word, 0)
            if result == driver.CUresult.CUDA_ERROR_INVALID_VALUE:
                flags = driver.CU_MEMHOSTREGISTER_PORTABLE | driver.CU_MEMHOSTREGISTER_DEVICEMAP
                answer = driver.cuMemHostRegister(page, mmap.PAGESIZE, flags)
                _checked(answer, "cuMemHostRegister")
                result, address = driver.cuMemHostGetDevicePointer(word, 0)
            return int(_checked((result, address), "cuMemHostGetDevicePointer"))

    def give_back(self, word: int, page: int) -> None:
        """Let others use the word, at once, though streams may still have to look at it."""
        with self._lock:
            self._free.append((word, page))


_words = _Words()
_held: weakref.WeakSet[latch] = weakref.WeakSet()


class latch:  # noqa: N801 - used like a function
    """Hold a stream: what is queued on it inside the block waits until ``release``.

    The same on the simulated and on a real driver: the stream waits (``cuStreamWaitValue32``) for a
    word of pinned memory that ``release`` writes. No host function and no kernel is involved, so
    other streams go on. While a stream is held, free no memory (that waits for the device, and
    holds up what other threads launch and record until then), load no modules (lazy loading waits
    too), and do not wait for the stream or its device before the release.

    Entering does not block (the first time in a process it pins memory), nothing of the
    caller's context changes, and it needs no current context, except for the default streams
    (handles 0, 1 and 2), which belong to the current one. Any thread may call ``release``,
    any number of times. A latch is used once.

    Parameters
    ----------
    stream : object with ``__cuda_stream__``, CUstream or int
        Which stream; an int is its handle, and not the ordinal of a device.

    Raises
    ------
    RuntimeError
        On entering, when the stream is capturing or the driver refuses; when a latch is entered
        twice, or released before it was entered.
    TypeError
        For something that is no stream.

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
        self._stream = stream  # kept alive while it is held
        self._handle = _simulated.handle_of(stream)
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._word: tuple[int, int] | None = None
        self._value = 0
        self._entered = False
        self._released = False

    def __repr__(self) -> str:
        entered = "holds it" if self._entered else "not entered"
        state = "released" if self._released else entered
        return f"<userstream.testing.latch of stream {self._handle:#x}: {state}>"

    @property
    def is_released(self) -> bool:
        """Whether the stream may go on.

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
                raise RuntimeError("a latch is used once: make another one")
            self._entered = True
        stream = driver.CUstream(self._handle)
        _refuse_capturing(stream)
        with _context_of(stream), _relaxed_capture_mode():
            word = _words.take()
            try:
                # Each use of a word waits for a value one higher than the use before. Streams that
                # have not yet looked at an earlier value are satisfied by a later one.
                self._value = (ctypes.c_uint32.from_address(word[0]).value + 1) & 0xFFFFFFFF
                address = _words.device_address(*word)
                at_least = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
                answer = driver.cuStreamWaitValue32(stream, address, self._value, at_least)
                _checked(answer, "cuStreamWaitValue32")
            except BaseException:
                _words.give_back(*word)
                raise
            self._word = word
        _held.add(self)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def release(self) -> None:
        """Let the stream go on. Does not block and makes no driver call.

        In a forked child it does nothing: the stream is the parent's, and goes on when the parent
        says so.

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
        with self._lock:
            if not self._entered:
                raise RuntimeError("this latch holds nothing: enter it with a with statement")
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
    """Let all streams go: a real driver may wait for them when the process ends."""
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
        raise RuntimeError("latch: the stream is capturing, and would not be held but recorded")


@contextlib.contextmanager
def _context_of(stream: driver.CUstream) -> Iterator[None]:
    """Make the stream's context current."""
    # The bindings of CUDA 13 answer (result, context, green context).
    context = _checked(driver.cuStreamGetCtx(stream)[:2], "cuStreamGetCtx")
    _checked(driver.cuCtxPushCurrent(context), "cuCtxPushCurrent")
    try:
        yield
    finally:
        driver.cuCtxPopCurrent()


@contextlib.contextmanager
def _relaxed_capture_mode() -> Iterator[None]:
    """Keep the captures of other threads, which pinning memory would invalidate."""
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    mode = _checked(driver.cuThreadExchangeStreamCaptureMode(relaxed), "the capture mode")
    try:
        yield
    finally:
        driver.cuThreadExchangeStreamCaptureMode(mode)
