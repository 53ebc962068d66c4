"""Copies and fills: the bytes that they read and write."""

from __future__ import annotations

import struct
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from .memory import DEVICE, EXACT, PINNED, UNKNOWN, Access
from .races import TOLD, RaceMemory, RecordedOperation, Side, Suspect
from .world import Work

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .clocks import Lane
    from .functions import Call
    from .memory import Allocation
    from .world import World

# Bytes of a source up to which the recorder compares all of it: `WHOLE` in `sources.c`.
_WHOLE = 1 << 16
_NO_STACK = (1 << 64) - 1
_REMEMBERED = 4096  # copies whose end the host does not know

# Why a race is only possible.
_UNSEEN = "work from before the observation may have written there"
_UNREAD = "whether the host reads the result is not seen"

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

    def remember(self, number: int, access: Access, found: Allocation) -> None:
        """Remember pinned memory, in an allocation, that a copy reads or writes."""
        if access.write:
            self._results[number] = access
            if len(self._results) > _REMEMBERED:
                self._results.popitem(last=False)
            return
        if access.end - access.start > _WHOLE:
            self.world.not_seen(
                "writes of the host between the samples of the source of a copy above 64 KiB"
            )
        allocated_here = found.operation is not None
        writes = _writes(found, access)
        known = [each for each in writes if self.world.host_knew(each)]
        source = _Source(
            access,
            known_writes=frozenset([(each.lane.id, each.time) for each in known]),
            pending_write=len(known) < len(writes),
            unseen_write=not allocated_here and self.world.clocks.may_follow_unseen(access.lane),
        )
        self._sources.setdefault(number, []).append(source)
        if len(self._sources) > _REMEMBERED:
            self._sources.popitem(last=False)

    def source_changed(self, call: Call) -> None:
        """Report that the host wrote to the source of a copy, unless the GPU explains the change.

        The words are the number of the copy's record, the address of the source, and the stack
        of the last call at which it had not changed.
        """
        number, address, *_ = call.words
        for source in self._sources.pop(number, ()):
            access = source.access
            if not access.start <= address < access.end:
                self._sources.setdefault(number, []).append(source)
            elif not self.world.host_knew(access) and not self._explained(source):
                self._report(source, call)

    def _explained(self, source: _Source) -> bool:
        """Return whether a write of the GPU may have changed the source after it was hashed."""
        access = source.access
        found = self.world.memory.find(access.start) or self.world.memory.elsewhere
        return source.pending_write or any(
            (each.lane.id, each.time) not in source.known_writes for each in _writes(found, access)
        )

    def _report(self, source: _Source, call: Call) -> None:
        access = source.access
        found = self.world.memory.find(access.start) or self.world.memory.elsewhere
        host = RecordedOperation("a write of the host", call.stack, call.thread, None)
        intact = call.words[2]  # the last call before which nothing had changed, else the copy
        since = access.operation.stack if intact == _NO_STACK else intact
        reason = ""
        if self.world.clocks.possibly_known.get(access.lane.id, 0) >= access.time:
            reason = TOLD
        elif source.unseen_write:
            reason = _UNSEEN
        self.world.collector.race(
            Suspect(
                "host overwrote the source of a copy",
                RaceMemory(access.start, access.end, found.kind, self.world.allocated_at(found)),
                Side(access.operation, "read"),
                Side(host, "write"),
                reason,
                between=(since, call.stack),
            )
        )

    def not_compared(self, call: Call) -> None:
        """Count sources that the recorder has no place for."""
        for _ in range(call.words[0]):
            self.world.not_seen("writes of the host to the source of a copy, of too many at once")

    def forget(self) -> None:
        """Forget all copies: records are missing, and the host may know that the copies ended."""
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
                self.world.collector.race(
                    Suspect(
                        "host read before the copy",
                        RaceMemory(access.start, access.end, PINNED),
                        Side(access.operation, "write"),
                        host,
                        _UNREAD,
                    )
                )
        self._results.clear()


def _writes(found: Allocation, access: Access) -> list[Access]:
    """Return the writes of the GPU to the memory of an access, in an allocation."""
    return [
        each
        for each in found.overlapping(access.start, access.end)
        # Allocating and freeing change no byte.
        if each.write and not each.operation.kind
    ]


_WORD = struct.Struct("<Q")
_MOST_ROWS = 64  # of a copy with a pitch, taken one by one
_HOST, _ADDRESS, _ARRAY = 1, 2, 3  # CUmemorytype
_BATCH_ARRAY = 2  # CUmemcpy3DOperandType
# CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL: the source is read before the call returns.
_DURING_CALL = struct.pack("<I", 2)
_BATCH_3D = 112  # bytes of a CUDA_MEMCPY3D_BATCH_OP

Range = tuple[int, int]


class _Side(NamedTuple):
    """The source or the destination of a shaped copy."""

    kind: int
    ranges: list[Range]
    is_loose: bool  # only some of these bytes are used


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
        self._copy_now(call, lane, ends[:1], ends[1:])

    def _copy_now(
        self,
        call: Call,
        lane: Lane,
        to: list[Range],
        source: list[Range],
        *,
        loose: tuple[bool, bool] = (False, False),
    ) -> None:
        """Record a copy that the host waits for, as far as the driver's documentation says."""
        before = dict(self.world.clocks.settle(lane))
        from_host, _ = self._do_copy(call, lane, to, source, loose=loose)
        if not call.function.orders_host:
            return
        sides = [self.world.memory.find(side[0][0]) for side in (to, source) if side]
        if from_host:
            # From pageable memory, "a stream sync is performed before the copy is initiated. The
            # function will return once the pageable buffer has been copied to the staging memory",
            # but "the DMA to final destination may not have completed".
            self.world.clocks.host_knows(before)
        elif not all(side is not None and side.kind == DEVICE for side in sides):
            # "no host-side synchronization is performed" from device to device
            self.world.clocks.host_knows(lane.clock)

    def copy_batch(self, call: Call) -> None:
        lane = self.world.lane(call)
        count = len(call.fetched[2]) // 8
        if count != call.words[3]:
            self.world.not_seen("operands of a batch of more than 2048 copies")
        to, source, sizes = (
            struct.unpack(f"<{count}Q", each[: 8 * count]) for each in call.fetched[:3]
        )
        operation, time = self.world.begin(call, lane)
        sides = [(source, False), (to, True)]
        if call.words[6] == 1 and call.fetched[3:] == [_DURING_CALL]:  # one attribute, of all
            del sides[0]
        for begins, write in sides:
            ranges = []
            for begin, size in zip(begins, sizes, strict=True):
                found = self.world.memory.find(begin)
                if found is not None:
                    ranges.append((begin, begin + size))
                    if found.kind == PINNED:
                        access = Access(begin, begin + size, lane, time, operation, write)
                        self._remember_pinned(call, lane, found, access)
            self.world.touch(lane, time, operation, ranges, write=write)

    def copy_2d(self, call: Call) -> None:
        words = struct.unpack("<16Q", call.fetched[0])
        width, height = words[14:]
        sides = []
        for x, y, kind, host, device, array, pitch in (words[:7], words[7:14]):
            where = (x, y, 0), kind & 0xFFFFFFFF, (host, device, array), (pitch, 0)
            sides.append(self._side(*where, (width, height, 1)))
        self._shaped(call, sides)

    def copy_3d(self, call: Call) -> None:
        self._shaped(call, self._sides_of_3d(call.fetched[0]))

    def _sides_of_3d(self, data: bytes) -> list[_Side]:
        words = struct.unpack_from("<25Q", data)  # a node of any type has more
        sides = []
        for at in (0, 11):
            x, y, z, _, kind, host, device, array, _, pitch, rows = words[at : at + 11]
            where = (x, y, z), kind & 0xFFFFFFFF, (host, device, array), (pitch, rows)
            sides.append(self._side(*where, words[22:]))
        return sides

    def sides_of_3d(self, data: bytes) -> list[tuple[list[Range], bool, bool]]:
        """Return the bytes that a CUDA_MEMCPY3D reads, and those that it writes.

        Each with whether it writes them, and whether they are memory of the host.
        """
        sides = zip(self._sides_of_3d(data), (False, True), strict=True)
        return [(side.ranges, write, side.kind == _HOST) for side, write in sides]

    def copy_3d_with_attributes(self, call: Call) -> None:
        self._shaped_each(call, call.fetched[0], 1)

    def copy_3d_batch(self, call: Call) -> None:
        self._shaped_each(call, call.fetched[0], call.words[0])

    def _shaped_each(self, call: Call, data: bytes, count: int) -> None:
        """Apply an array of CUDA_MEMCPY3D_BATCH_OP."""
        if len(data) < _BATCH_3D * count:
            self.world.not_seen("operands of a batch of so many copies")
            count = len(data) // _BATCH_3D
        for at in range(0, _BATCH_3D * count, _BATCH_3D):
            *words, _ = struct.unpack_from("<14Q", data, at)
            extent = words[10:13]
            sides = []
            for kind, one, other, last, rest in (words[:5], words[5:10]):
                if kind & 0xFFFFFFFF == _BATCH_ARRAY:
                    where = (other, last, rest), _ARRAY, (0, 0, one), (0, 0)
                else:  # the length of a row and the height of a layer; 0: packed
                    where = (0, 0, 0), _ADDRESS, (one, one, 0), (other or extent[0], last)
                sides.append(self._side(*where, extent))
            self._shaped(call, sides)

    def copy_array(self, call: Call) -> None:
        """Apply a copy from or to the bytes of an array from an offset on."""
        roles, words = call.function.roles, call.words
        size = words[call.function.size or 0]
        ends = []
        for operand, offset in zip(
            call.function.operands, ("to_offset", "from_offset"), strict=True
        ):
            begin = words[operand]  # type: ignore[index]
            if offset in roles:
                begin = self.world.arrays.base(begin) + words[roles[offset]]
            ends.append([(begin, begin + size)])
        lane = self.world.lane(call)
        if call.function.stream is None:
            self._copy_now(call, lane, *ends)
        else:
            self._do_copy(call, lane, *ends)

    def discard(self, call: Call) -> None:
        """Apply a batch of discards, after which the contents of the memory are undefined."""
        lane = self.world.lane(call)
        operation, time = self.world.begin(call, lane)
        addresses, sizes = (
            [each for (each,) in struct.iter_unpack("<Q", part)] for part in call.fetched[:2]
        )
        ranges = [(begin, begin + size) for begin, size in zip(addresses, sizes, strict=True)]
        self.world.touch(lane, time, operation, ranges, write=True)

    def decompress(self, call: Call) -> None:
        """Apply a batch of CUmemDecompressParams."""
        lane = self.world.lane(call)
        operation, time = self.world.begin(call, lane)
        data = call.fetched[0]
        for at in range(0, len(data), 64):
            read, written, _, source, to = struct.unpack_from("<5Q", data, at)
            self.world.touch(lane, time, operation, [(source, source + read)], write=False)
            self.world.touch(lane, time, operation, [(to, to + written)], write=True)

    def _side(
        self,
        origin: Sequence[int],
        kind: int,
        places: Sequence[int],
        layout: Sequence[int],
        extent: Sequence[int],
    ) -> _Side:
        """Return the bytes that a shaped copy reads or writes: origin, place, layout, extent.

        The layout is the length of a row in bytes, and how many rows a layer has; 0 if packed.
        """
        (x, y, z), (width, height, depth) = origin, extent
        host, device, array = places
        if kind == _ARRAY:
            base, pitch, rows = self.world.arrays.layout(array)
            if not pitch:  # its shape is unknown
                return _Side(kind, [(base, base + self.world.arrays.SIZE)], is_loose=True)
        else:
            base = host if kind == _HOST else device
            pitch, rows = layout[0] or x + width, layout[1] or y + height
        layer = pitch * rows
        begin = base + z * layer + y * pitch + x
        ranges: list[Range] = []
        for each in range(min(depth, _MOST_ROWS + 1)):
            ranges += self.rows(begin + each * layer, width, height, pitch)
        last = begin + (depth - 1) * layer + (height - 1) * pitch + width
        if depth > 1 and pitch == width and rows == height:
            ranges = [(begin, last)]
        is_loose = False
        if depth > _MOST_ROWS or len(ranges) > _MOST_ROWS:
            ranges, is_loose = [(begin, last)], True
        elif len(ranges) == depth and height > 1 and pitch != width:
            is_loose = True  # too many rows in each layer
        return _Side(kind, ranges, is_loose=is_loose)

    @staticmethod
    def rows(begin: int, width: int, height: int, pitch: int) -> list[Range]:
        """Return the ranges of rows, or one range around rows that are too many."""
        return _rows(begin, width, height, pitch)

    def fill(self, call: Call) -> Work:
        words, roles = call.words, call.function.roles
        begin, width = words[0], words[call.function.size or 0] * roles["width"]
        ranges = [(begin, begin + width)]
        loose = False
        if "pitch" in roles:
            height, pitch = words[roles["height"]], words[roles["pitch"]]
            ranges = _rows(begin, width, height, pitch)
            loose = height > len(ranges) and pitch != width
        touches = tuple([(start, end, True, EXACT) for start, end in ranges])
        lane = self.world.lane(call)
        work = Work(lane, call.name, touches, [None] * len(touches), loose=loose)
        self.world.perform(call, work)
        if call.function.stream is None and self._kind_at(begin) != DEVICE:
            self.world.clocks.host_knows(lane.clock)
        return work

    def _do_copy(
        self,
        call: Call,
        lane: Lane,
        to: list[Range],
        source: list[Range],
        *,
        loose: tuple[bool, bool] = (False, False),
    ) -> tuple[bool, bool]:
        """Record the accesses of a copy; return which sides are pageable host memory.

        `loose` says whether only some bytes of the source are used, and of the destination.
        """
        operation, time = self.world.begin(call, lane)
        if not to or not source or to[0][0] == to[0][1]:
            return False, False
        name, find = call.name, self.world.memory.find
        at_source, at_to = find(source[0][0]), find(to[0][0])  # None: pageable memory of the host
        from_host = at_source is None and "DtoH" not in name and "DtoD" not in name
        to_host = at_to is None and "HtoD" not in name and "DtoD" not in name
        if not from_host:
            self.world.touch(lane, time, operation, source, write=False, loose=loose[0])
            if self.world.news:
                self.world.pass_on(source)
        if not to_host:
            self.world.touch(lane, time, operation, to, write=True, loose=loose[1])
        # From the device to pageable memory it returns "only once the copy has completed", and
        # between two places of the host it is "fully synchronous with respect to the host".
        returns_when_done = to_host or (_is_of_host(at_to) and _is_of_host(at_source))
        if lane.capture is None and returns_when_done:
            call.waits = True
            self.world.clocks.host_knows(lane.clock)
        if not (from_host or to_host):
            for found, ranges, write in ((at_source, source, False), (at_to, to, True)):
                if found is not None and found.kind == PINNED:
                    start, end = ranges[0]
                    access = Access(start, min(end, found.end), lane, time, operation, write)
                    self._remember_pinned(call, lane, found, access)
        return from_host, to_host

    def _remember_pinned(self, call: Call, lane: Lane, found: Allocation, access: Access) -> None:
        """Remember page-locked memory of a copy, which the host may use too early."""
        if lane.capture is None:
            self._pinned.remember(call.number, access, found)
            if access.write and not self.world.is_own(call.stack):
                self.world.not_seen("reads of the host from what copies to pinned memory fill")
        elif not access.write:
            self.world.not_seen("writes of the host to the source of a copy in a graph")

    def _shaped(self, call: Call, sides: list[_Side]) -> None:
        lane = self.world.lane(call)
        source, to = sides
        loose = source.is_loose, to.is_loose
        is_async = call.function.stream is not None
        if source.ranges and is_async and self._kind_at(source.ranges[0][0]) == PINNED:
            self.world.not_seen("writes of the host to the source of a 2-D or 3-D copy")
        copy = self._do_copy if is_async else self._copy_now
        copy(call, lane, to.ranges, source.ranges, loose=loose)

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
