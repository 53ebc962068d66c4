"""Tells the recorder what is no driver call, in the order of the calls of each thread.

What the program declares only to read, its waits for the GPU, and which of them are allowed.

It listens to `_hooks` while the process is observed.
"""

from __future__ import annotations

import itertools
import math
import struct
from typing import TYPE_CHECKING, Any

from userstream import _hooks, _targets
from userstream._copies.layout import spread
from userstream._observe.judge import log
from userstream._ordering.borrow import READ

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from userstream._buffers.view import View
    from userstream._observe.logger import Logger
    from userstream._ordering import Borrow
    from userstream._stream.stream import Stream

_MOST = 2000  # ranges in one record


class _Block:
    """The begin of a block that was noted. Its end is noted when this goes, should none come."""

    __slots__ = ("_logger", "_number")

    def __init__(self, logger: Logger, number: int) -> None:
        self._logger = logger
        self._number = number

    def end(self) -> None:
        if self._number:
            self._logger.note(log.DECLARED_NO_MORE, (self._number, 0))
            self._number = 0  # only now: if a signal handler raises, it is noted as this goes

    __del__ = end


class Declaring:
    """Listener of `_hooks`, from `begin` to `end`."""

    def __init__(self, logger: Logger) -> None:
        self._logger = logger
        self._numbers = itertools.count(1)
        # Only with something that is only read does it matter what else may be written.
        self._any_read = False
        self._any_acquired = False
        self._listeners: list[tuple[list[Any], Any]] = [
            (_hooks.borrow_entered, self._entered),
            (_hooks.borrow_left, self._left),
            (_hooks.buffers_acquired, self._acquired),
            (_hooks.buffers_released, self._released),
            (_hooks.user_stream_created, self._created),
            (_hooks.host_waits, self._host_waits),
            (_hooks.stalls_allowed, self._stalls_allowed),
            (_hooks.wait_timed_out, self._timed_out),
        ]

    def begin(self) -> None:
        for hook, listener in self._listeners:
            hook.append(listener)

    def end(self) -> None:
        # Idempotent: after an exception of a signal handler the observation ends again.
        for hook, listener in self._listeners:
            while listener in hook:
                hook.remove(listener)

    def _entered(self, borrow: Borrow, stream: Stream) -> None:
        reads = borrow.mode == READ
        if not (reads or self._any_read):
            return
        self._any_read = True
        number = next(self._numbers)
        borrow.noted = _Block(self._logger, number)
        self._declare(number, reads, stream, borrow._arguments[0])

    def _left(self, borrow: Borrow) -> None:
        block = getattr(borrow, "noted", None)
        if block is not None:
            block.end()

    def _acquired(self, stream: Stream, buffers: Iterable[Any], reads: bool) -> None:
        if reads or self._any_read:
            self._any_read = self._any_acquired = True
            self._declare(0, reads, stream, buffers)

    def _released(self, stream: Stream, buffers: Iterable[Any]) -> None:
        if self._any_acquired:
            words = (0, int(stream._resolve().handle or 0))
            for part in _ranges(buffers):
                self._logger.note(log.DECLARED_NO_MORE, words, part)

    def _declare(self, number: int, reads: bool, stream: Stream, buffers: Iterable[Any]) -> None:
        words = (number, int(reads), int(stream.handle))
        for part in _ranges(buffers):
            self._logger.note(log.DECLARED, words, part)

    def _created(self, stream: Stream) -> None:
        self._logger.note_json(log.NAMES, {"streams": {int(stream.handle): name_of(stream)}})

    def _host_waits(self, begins: bool) -> None:
        self._logger.note(log.HOST_WAITS, (int(begins),))

    def _stalls_allowed(self, reason: str | None) -> None:
        told = "" if reason is None else reason
        self._logger.note(log.STALLS_ALLOWED, (int(reason is not None),), told.encode())

    def _timed_out(self) -> None:
        self._logger.note(log.TIMED_OUT)


def name_of(stream: Stream) -> str:
    """Return how reports name a user stream."""
    return f"user stream {stream.name!r}" if stream.name else "the user stream"


def _ranges(buffers: Iterable[Any]) -> list[bytes]:
    """Return where the bytes of buffers begin and end: a part for each record."""
    found: list[tuple[int, int]] = []
    try:
        for view in _targets.views_in(buffers):
            found += _ranges_of(view)
    except Exception:  # of a framework, which does not tell: then nothing is known of it
        return [b""]
    packed = [struct.pack("<2Q", *each) for each in found]
    return [b"".join(packed[at : at + _MOST]) for at in range(0, len(packed), _MOST)] or [b""]


def _ranges_of(view: View) -> Iterator[tuple[int, int]]:
    if view.parts is not None:
        for part in view.parts:
            yield from _ranges_of(part)
        return
    layout = view.layout
    if not layout.address or layout.is_empty:
        return
    start, end = layout.address, layout.address + (layout.nbytes or 0)
    if layout.shape is not None and layout.strides is not None and layout.nbytes:
        itemsize = layout.nbytes // math.prod(layout.shape)
        span = spread(layout.shape, layout.strides, itemsize)
        start -= span.offset
        end = start + span.nbytes
    yield start, end
