"""Declarations that work only reads buffers: ``mode="read"`` of `borrow` and `acquire`."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from .memory import DECLARED, EXACT

if TYPE_CHECKING:
    from .functions import Call
    from .memory import Allocation, Memory
    from .races import RecordedOperation

_LEGACY = 1
_MOST = 1024  # of a thread on a stream

_Key = tuple[int, int]  # a thread, and the handle of a stream


class _Declaration:
    """A declaration of a thread: its work on a stream only reads a range, or may write it."""

    __slots__ = ("allocation", "end", "number", "reads", "start")

    def __init__(
        self, number: int, start: int, end: int, allocation: Allocation | None, *, reads: bool
    ) -> None:
        self.number = number  # of the block; 0 if `release` ends the declaration
        self.start = start
        self.end = end  # equal to `start`: up to the end of the allocation
        self.reads = reads
        self.allocation = allocation  # later allocations at the address are not declared

    def covers(self, address: int, memory: Memory) -> bool:
        """Return whether the declaration is about an address."""
        if self.allocation is None:  # the memory was unknown when it was declared
            found = memory.find(self.start)
            if found is not None and found.operation is None:  # and was not allocated since
                self.allocation = found
        if address < self.start or (address >= self.end > self.start):
            return False
        return self.allocation is not None and memory.find(address) is self.allocation


class Declarations:
    """The open declarations. The newest one of a thread for an address on a stream counts."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.open: dict[_Key, list[_Declaration]] = {}  # the oldest first
        self._blocks: dict[int, _Key] = {}  # by their numbers

    def begin(self, call: Call) -> None:
        """Apply the begin of a block, or an `acquire`."""
        number, reads, handle = call.words
        key = (call.thread, handle or _LEGACY)
        found = _ranges(call)
        if not found:
            return
        if number:
            self._blocks[number] = key
        else:
            self._release({start for start, _ in found}, [key])
        self.open.setdefault(key, []).extend(
            _Declaration(number, start, end, self._memory.find(start), reads=bool(reads))
            for start, end in found
        )
        del self.open[key][:-_MOST]  # `acquire` may have no `release`

    def end(self, call: Call) -> None:
        """Apply the end of a block, or a `release` of buffers that any thread has acquired."""
        number, handle = call.words
        if not number:
            keys = [key for key in self.open if key[1] == (handle or _LEGACY)]
            self._release({start for start, _ in _ranges(call)}, keys)
            return
        key = self._blocks.pop(number, None)
        if key is not None:
            self._keep(key, [each for each in self.open.get(key, ()) if each.number != number])

    def _release(self, starts: set[int], keys: list[_Key]) -> None:
        for key in keys:
            kept = [
                each
                for each in self.open.get(key, ())
                # Without `starts` the released buffers are unknown, and may be any.
                if each.number or (starts and each.start not in starts)
            ]
            self._keep(key, kept)

    def _keep(self, key: _Key, kept: list[_Declaration]) -> None:
        if kept:
            self.open[key] = kept
        else:
            self.open.pop(key, None)

    def forget(self) -> None:
        """Forget all declarations: lost records may include the end of a block."""
        self.open.clear()
        self._blocks.clear()

    def judge(
        self, operation: RecordedOperation, address: int, write: bool, known: str
    ) -> tuple[bool, str]:
        """Return whether an operation writes to an address, and how certain the answer is."""
        if self.open and known != EXACT and self._is_only_read(operation, address):
            return False, DECLARED
        return write, known

    def _is_only_read(self, operation: RecordedOperation, address: int) -> bool:
        handle = 0 if operation.lane is None else operation.lane.handle
        for each in reversed(self.open.get((operation.thread, handle or _LEGACY), ())):
            if each.covers(address, self._memory):
                return each.reads
        return False


def _ranges(call: Call) -> list[tuple[int, int]]:
    return list(struct.iter_unpack("<2Q", call.fetched[0]))
