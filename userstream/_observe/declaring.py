"""Tells the logger what the program declares only to read, in the order of its calls.

The functions that begin and end that are replaced while the process is observed: when it is not,
they do not even ask.
"""

from __future__ import annotations

import itertools
import math
import struct
import sys
from typing import TYPE_CHECKING, Any

from userstream import _targets
from userstream._copies.layout import spread
from userstream._observe import functions
from userstream._ordering import Borrow, Ordering, modes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from userstream._buffers.view import View
    from userstream._observe.logger import Logger
    from userstream._stream.stream import Stream


class _Block:
    """The begin of a block that was noted. Its end is noted when this goes, should none come."""

    __slots__ = ("_logger", "_number")

    def __init__(self, logger: Logger, number: int) -> None:
        self._logger = logger
        self._number = number

    def end(self) -> None:
        if self._number:
            self._logger.note(functions.DECLARED_NO_MORE, (self._number, 0))
            self._number = 0  # only now: if a signal handler raises, it is noted as this goes

    __del__ = end


class Declaring:
    """Replaces the functions, from `begin` to `end`."""

    def __init__(self, logger: Logger) -> None:
        self._logger = logger
        self._numbers = itertools.count(1)
        # Only with something that is only read does it matter what else may be written.
        self._any_read = False
        self._any_acquired = False
        self._before: list[tuple[Any, str, Any]] = []

    def begin(self) -> None:
        enter, leave, release = Borrow.__enter__, Borrow.__exit__, Ordering.release
        registry: Any = sys.modules["userstream._registry"]  # of that name there is an object too
        acquire, usual_lanes = Ordering.acquire, registry.usual_lanes

        def __enter__(borrow: Borrow) -> Stream:  # noqa: N807
            stream = enter(borrow)
            self._begun(borrow, stream)
            return stream

        def __exit__(borrow: Borrow, *error: Any) -> None:  # noqa: N807
            block = getattr(borrow, "noted", None)
            if block is not None:
                block.end()
            leave(borrow, *error)

        def released(ordering: Ordering, objects: object, *more: Any, **how: Any) -> None:
            # What a block or a copy lets go of is no sequence.
            if self._any_acquired and isinstance(objects, (list, tuple)):
                words = (0, int(ordering.lane.handle or 0))
                self._logger.note(functions.DECLARED_NO_MORE, words, _ranges(ordering.buffers))
            release(ordering, objects, *more, **how)

        def acquired(ordering: Ordering, *deadline: Any, to_be_released: bool = True) -> Any:
            kept = acquire(ordering, *deadline, to_be_released=to_be_released)
            # By `acquire`: a copy has a deadline. If it only reads, that is noted behind this.
            if self._any_read and not (to_be_released or deadline):
                self._any_acquired = True
                self._declare(0, False, ordering.consumer, ordering.buffers)
            return kept

        def unless_noted(*arguments: Any) -> Any:
            return None if self._any_read else usual_lanes(*arguments)  # None: `Ordering.acquire`

        self._replace(Borrow, "__enter__", __enter__)
        self._replace(Borrow, "__exit__", __exit__)
        self._replace(Ordering, "release", released)
        self._replace(Ordering, "acquire", acquired)
        self._replace(registry, "usual_lanes", unless_noted)
        self._replace(modes, "acquired", self._acquired)

    def end(self) -> None:
        # Forgotten only when it is back: after an exception of a signal handler it is ended again.
        while self._before:
            setattr(*self._before[-1])
            self._before.pop()

    def _replace(self, where: Any, name: str, function: Any) -> None:
        self._before.append((where, name, getattr(where, name)))
        setattr(where, name, function)

    def _begun(self, borrow: Borrow, stream: Stream) -> None:
        reads = borrow.mode == modes.READ
        if not (reads or self._any_read):
            return
        self._any_read = True
        number = next(self._numbers)
        borrow.noted = _Block(self._logger, number)
        self._declare(number, reads, stream, borrow._asked[0])

    def _acquired(self, stream: Stream, buffers: Iterable[Any]) -> None:
        self._any_read = self._any_acquired = True
        self._declare(0, True, stream, buffers)

    def _declare(self, number: int, reads: bool, stream: Stream, buffers: Iterable[Any]) -> None:
        words = (number, int(reads), int(stream.handle))
        self._logger.note(functions.DECLARED, words, _ranges(buffers))


def _ranges(buffers: Iterable[Any]) -> bytes:
    """Return where the bytes of buffers begin and end, as the logger takes it."""
    found: list[tuple[int, int]] = []
    try:
        for view in _targets.views_in(buffers):
            found += _ranges_of(view)
    except Exception:  # of a framework, which does not tell: then nothing is known of it
        return b""
    return b"".join(struct.pack("<2Q", *each) for each in found)


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
