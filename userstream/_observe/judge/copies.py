"""Copies and fills: the bytes that they read and write."""

from __future__ import annotations

import struct
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from .memory import DEVICE, PINNED, UNKNOWN, Access
from .races import RaceMemory, RecordedOperation, Side

if TYPE_CHECKING:
    from .clocks import Lane
    from .functions import Call
    from .memory import Allocation
    from .world import World

# Bytes of a source up to which the recorder compares all of it: `WHOLE` in `sources.c`.
_WHOLE = 1 << 16
_REMEMBERED = 4096  # copies whose end the host does not know

_Writes = frozenset[tuple[int, int]]  # stream and number of each operation


class _Source(NamedTuple):
    """Pinned memory that a copy reads."""

    access: Access
    known_writes: _Writes  # over before the copy was queued, as the host knew
    pending_write: bool  # one may have changed the memory after the copy was queued
    unseen_write: bool  # the same, of work that was queued before the observation


class Pinned:
    """Remembers copies from and to pinned memory until the host knows that they are over."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._sources: OrderedDict[int, list[_Source]] = OrderedDict()  # by number of the record
        self._results: OrderedDict[int, Access] = OrderedDict()

    def remember(self, number: int, access: Access) -> None:
        """Remember pinned memory that a copy reads or writes."""
        if access.write:
            self._results[number] = access
            if len(self._results) > _REMEMBERED:
                self._results.popitem(last=False)
            return
        if access.end - access.start > _WHOLE:
            self.world.not_seen(
                "writes of the host between the samples of the source of a copy above 64 KiB"
            )
        found = self.world.memory.find(access.start)
        allocated_here = found is not None and found.operation is not None
        writes = self._writes(access)
        known = [each for each in writes if self.world.host_knew(each)]
        source = _Source(
            access,
            known_writes=frozenset((each.lane.id, each.time) for each in known),
            pending_write=len(known) < len(writes),
            unseen_write=not allocated_here and self.world.clocks.may_follow_unseen(access.lane),
        )
        self._sources.setdefault(number, []).append(source)
        if len(self._sources) > _REMEMBERED:
            self._sources.popitem(last=False)

    def _writes(self, access: Access) -> list[Access]:
        """Return the writes of the GPU to the memory of an access."""
        found = self.world.memory.find(access.start) or self.world.memory.elsewhere
        return [
            each
            for each in found.overlapping(access.start, access.end)
            # Allocating and freeing change no byte.
            if each.write and not each.operation.kind
        ]

    def source_changed(self, call: Call) -> None:
        """Report that the host wrote to the source of a copy, unless the GPU explains the change.

        The words are the number of the copy's record and, of a batch, the address of the source.
        """
        number, *address = call.words
        for source in self._sources.pop(number, ()):
            access = source.access
            if address and not access.start <= address[0] < access.end:
                self._sources.setdefault(number, []).append(source)
            elif not self.world.host_knew(access) and not self._explained(source):
                self._report(source, call)

    def _explained(self, source: _Source) -> bool:
        """Return whether a write of the GPU may have changed the source after it was hashed."""
        return source.pending_write or any(
            (each.lane.id, each.time) not in source.known_writes
            for each in self._writes(source.access)
        )

    def _report(self, source: _Source, call: Call) -> None:
        access = source.access
        found = self.world.memory.find(access.start) or self.world.memory.elsewhere
        host = RecordedOperation("a write of the host", call.stack, call.thread, None)
        told = self.world.clocks.possibly_known.get(access.lane.id, 0) >= access.time
        self.world.finds.race(
            "host overwrote the source of a copy",
            RaceMemory(access.start, access.end, found.kind, self.world.allocated_at(found)),
            Side(access.operation, "read"),
            Side(host, "write"),
            possible=told or source.unseen_write,
        )

    def not_compared(self, call: Call) -> None:
        """Count sources that the recorder has no place for."""
        for _ in range(call.words[0]):
            self.world.not_seen("writes of the host to the source of a copy, of too many at once")

    def forget(self) -> None:
        """Forget all copies: records are missing, and the host may know of their ends."""
        self._sources.clear()
        self._results.clear()

    def finish(self) -> None:
        """Report results of copies whose end the host never learned."""
        for access in self._results.values():
            if not self.world.host_knew(access):
                host = Side(
                    RecordedOperation("a read of the host", -1, access.operation.thread, None),
                    "read",
                )
                self.world.finds.race(
                    "host read before the copy",
                    RaceMemory(access.start, access.end, PINNED),
                    Side(access.operation, "write"),
                    host,
                    possible=True,
                )
        self._results.clear()


_WORD = struct.Struct("<Q")
_MOST_ROWS = 64  # of a copy with a pitch, taken one by one

Range = tuple[int, int]


class Copies:
    """Applies calls that copy or fill memory."""

    def __init__(self, world: World, pinned: Pinned) -> None:
        self.world = world
        self._pinned = pinned

    def copy(self, call: Call) -> None:
        to, source = call.function.operands
        size = call.words[call.function.size or 0]
        begin = (call.words[to], call.words[source])  # type: ignore[index]
        lane = self.world.lane(call)
        self._do_copy(call, lane, [(begin[0], begin[0] + size)], [(begin[1], begin[1] + size)])

    def copy_now(self, call: Call) -> None:
        lane = self.world.lane(call)
        to, source = call.function.operands
        size = call.words[call.function.size or 0]
        ends = [(call.words[word], call.words[word] + size) for word in (to, source)]  # type: ignore[index]
        self._do_copy(call, lane, ends[:1], ends[1:])
        self._after_copy_now(call, lane, ends[:1], ends[1:])

    def copy_batch(self, call: Call) -> None:
        lane = self.world.lane(call)
        count = len(call.fetched[2]) // 8
        if count != call.words[3]:
            self.world.not_seen("operands of a batch of more than 2048 copies")
        to, source, sizes = (
            struct.unpack(f"<{count}Q", each[: 8 * count]) for each in call.fetched
        )
        operation, time = self.world.begin(call, lane)
        for begins, write in ((source, False), (to, True)):
            ranges = []
            for begin, size in zip(begins, sizes, strict=True):
                found = self.world.memory.find(begin)
                if found is not None:
                    ranges.append((begin, begin + size))
                    self._remember_pinned(
                        call, lane, found, Access(begin, begin + size, lane, time, operation, write)
                    )
            self.world.touch(lane, time, operation, ranges, write=write)

    def copy_2d(self, call: Call) -> None:
        words = struct.unpack("<16Q", call.fetched[0])
        width, height = words[14], words[15]
        sides = []
        for x, y, kind, host, device, _, pitch in (words[:7], words[7:14]):
            begin = (host if kind & 0xFFFFFFFF == 1 else device) + y * (pitch or width) + x
            sides.append((kind & 0xFFFFFFFF, _rows(begin, width, height, pitch or width)))
        self._shaped(call, sides)

    def copy_3d(self, call: Call) -> None:
        words = struct.unpack("<25Q", call.fetched[0])
        width, height, depth = words[22:]
        sides = []
        for at in (0, 11):
            x, y, z, _, kind, host, device, _, _, pitch, rows = words[at : at + 11]
            pitch = pitch or x + width
            layer = pitch * (rows or y + height)
            begin = (host if kind & 0xFFFFFFFF == 1 else device) + z * layer + y * pitch + x
            ranges: list[Range] = []
            for each in range(min(depth, _MOST_ROWS + 1)):
                ranges += _rows(begin + each * layer, width, height, pitch)
            if depth > _MOST_ROWS or len(ranges) > _MOST_ROWS:
                ranges = [(begin, begin + (depth - 1) * layer + (height - 1) * pitch + width)]
            sides.append((kind & 0xFFFFFFFF, ranges))
        self._shaped(call, sides)

    def fill(self, call: Call) -> None:
        words, roles = call.words, call.function.roles
        begin, width = words[0], words[call.function.size or 0] * roles["width"]
        ranges = [(begin, begin + width)]
        loose = False
        if "pitch" in roles:
            height, pitch = words[roles["height"]], words[roles["pitch"]]
            ranges = _rows(begin, width, height, pitch)
            loose = height > len(ranges) and pitch != width
        lane = self.world.lane(call)
        operation, time = self.world.begin(call, lane)
        self.world.touch(lane, time, operation, ranges, write=True, loose=loose)
        if call.function.stream is None and self._kind_at(begin) != DEVICE:
            self.world.clocks.host_knows(lane.clock)

    def _do_copy(
        self,
        call: Call,
        lane: Lane,
        to: list[Range],
        source: list[Range],
        *,
        loose: bool = False,
    ) -> tuple[bool, bool]:
        """Record the accesses of a copy; return which sides are pageable host memory."""
        operation, time = self.world.begin(call, lane)
        if not to or not source or to[0][0] == to[0][1]:
            return False, False
        name, find = call.name, self.world.memory.find
        at_source, at_to = find(source[0][0]), find(to[0][0])  # None: pageable memory of the host
        from_host = at_source is None and "DtoH" not in name and "DtoD" not in name
        to_host = at_to is None and "HtoD" not in name and "DtoD" not in name
        if not from_host:
            self.world.touch(lane, time, operation, source, write=False, loose=loose)
        if not to_host:
            self.world.touch(lane, time, operation, to, write=True, loose=loose)
        # From the device to pageable memory it returns "only once the copy has completed", and
        # between two places of the host it is "fully synchronous with respect to the host".
        returns_when_done = to_host or (_is_of_host(at_to) and _is_of_host(at_source))
        if lane.capture is None and returns_when_done:
            self.world.clocks.host_knows(lane.clock)
        if not (from_host or to_host):
            for found, ranges, write in ((at_source, source, False), (at_to, to, True)):
                if found is not None:
                    start, end = ranges[0]
                    access = Access(start, min(end, found.end), lane, time, operation, write)
                    self._remember_pinned(call, lane, found, access)
        return from_host, to_host

    def _remember_pinned(self, call: Call, lane: Lane, found: Allocation, access: Access) -> None:
        """Remember page-locked memory that a copy uses, as the host may use it too early."""
        if found.kind != PINNED:
            return
        if lane.capture is None:
            self._pinned.remember(call.number, access)
        elif not access.write:
            self.world.not_seen("writes of the host to the source of a copy in a graph")

    def _after_copy_now(self, call: Call, lane: Lane, to: list[Range], source: list[Range]) -> None:
        if call.function.orders_host:
            sides = [self.world.memory.find(side[0][0]) for side in (to, source) if side]
            # "no host-side synchronization is performed" from device to device
            if not all(side is not None and side.kind == DEVICE for side in sides):
                self.world.clocks.host_knows(lane.clock)

    def _shaped(self, call: Call, sides: list[tuple[int, list[Range]]]) -> None:
        lane = self.world.lane(call)
        if any(kind == 3 for kind, _ in sides):
            self.world.not_seen("CUDA arrays")
            sides = [(kind, [] if kind == 3 else ranges) for kind, ranges in sides]
        (_, source), (_, to) = sides
        rows = max(len(source), len(to))
        whole = rows == 1 and _extent(call.fetched[0]) > 1
        loose = whole and not _is_packed(call.fetched[0])
        if source and call.function.stream is not None and self._kind_at(source[0][0]) == PINNED:
            self.world.not_seen("writes of the host to the source of a 2-D or 3-D copy")
        self._do_copy(call, lane, to, source, loose=loose)
        if call.function.stream is None:
            self._after_copy_now(call, lane, to, source)

    def _kind_at(self, address: int) -> int:
        found = self.world.memory.find(address)
        return UNKNOWN if found is None else found.kind


def _is_of_host(found: Allocation | None) -> bool:
    return found is None or found.kind == PINNED


def _rows(begin: int, width: int, height: int, pitch: int) -> list[Range]:
    if not width or not height:
        return []
    if pitch == width or height == 1 or height > _MOST_ROWS:
        return [(begin, begin + (height - 1) * pitch + width)]
    return [(begin + row * pitch, begin + row * pitch + width) for row in range(height)]


def _extent(structure: bytes) -> int:
    """Return the number of rows that a CUDA_MEMCPY2D or CUDA_MEMCPY3D copies."""
    if len(structure) == 128:
        return _WORD.unpack_from(structure, 120)[0]  # type: ignore[no-any-return]
    return _WORD.unpack_from(structure, 184)[0] * _WORD.unpack_from(structure, 192)[0]  # type: ignore[no-any-return]


def _is_packed(structure: bytes) -> bool:
    """Return whether the rows of both sides are contiguous."""
    if len(structure) == 128:
        width, pitches = 112, (48, 104)
    else:
        width, pitches = 176, (72, 160)
    (wide,) = _WORD.unpack_from(structure, width)
    return all(_WORD.unpack_from(structure, pitch)[0] in (0, wide) for pitch in pitches)
