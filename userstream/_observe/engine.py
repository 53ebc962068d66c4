"""What calls mean: applies one record after the other to clocks, memory and graphs."""

from __future__ import annotations

import struct
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from userstream import _driver
from userstream._observe import own, records
from userstream._observe.clocks import LEGACY, Clocks, Lane, join
from userstream._observe.graphs import Capture, Graph
from userstream._observe.memory import (
    ASSUMED,
    DEVICE,
    EXACT,
    LEARNED,
    MANAGED,
    PINNED,
    UNKNOWN,
    Access,
    Allocation,
    Memory,
)
from userstream._observe.races import Done, Finds, Place, Side

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from userstream._observe.functions import Function
    from userstream._observe.records import Record
    from userstream._observe.stacks import Stacks

_WORD = struct.Struct("<Q")
_EXTERNAL = 1  # CU_EVENT_RECORD_EXTERNAL and CU_EVENT_WAIT_EXTERNAL
_MOST_ROWS = 64  # of a copy with a pitch, taken one by one
_REMEMBERED = 4096  # copies of pinned memory whose end the host does not know
_TRIM = 4096  # records between two looks for what can be forgotten

Range = tuple[int, int]


class Engine:
    """Works out what was ordered, and finds what was not."""

    def __init__(
        self, functions: Mapping[int, tuple[str, Function]], stacks: Stacks, *, stall: float
    ) -> None:
        self.clocks = Clocks()
        self.memory = Memory()
        self.devices: dict[int, int] = {}  # of contexts
        self.finds = Finds(stacks, self.describe)
        self.names: Callable[[int], str | None] = lambda _: None  # of streams, by handle
        self.counts: dict[str, int] = {}
        self.unseen: dict[str, int] = {}  # what could not be followed, and how often
        self._stacks = stacks
        self._stall = stall
        self._graphs: dict[int, Graph] = {}  # by the handle of a graph, or of an executable one
        self._captures: dict[int, Capture] = {}
        self._words: dict[int, tuple[int, dict[int, int]]] = {}
        self._freeing: dict[int, Allocation] = {}  # by thread
        self._asked: dict[int, str] = {}  # by stack
        self._sources: OrderedDict[int, Access] = OrderedDict()  # by the number of the record
        self._results: OrderedDict[int, Access] = OrderedDict()
        self._kernels: dict[int, str] = {}  # their names
        self._writes: dict[tuple[int, int], bool] = {}  # by kernel and offset of the parameter
        self._taken = 0
        self._notes = {
            records.SEEN_STREAM: self._seen_stream,
            records.SEEN_MEMORY: self._seen_memory,
            records.SEEN_KERNEL: self._seen_kernel,
            records.SOURCE_CHANGED: self._source_changed,
            records.LEARNED: self._learned,
        }
        self._table = {
            number: (name, function, getattr(self, f"_{function.means}"))
            for number, (name, function) in functions.items()
        }

    def take(self, log: Iterable[Record]) -> None:
        """Apply records in their order."""
        for record in log:
            note = self._notes.get(record.function)
            if note is not None:
                note(record)
                continue
            name, function, apply = self._table[record.function]
            if record.leaving:
                self.counts[name] = self.counts.get(name, 0) + 1
                seconds = (record.ended - record.began) * 1e-9
                if function.waits and seconds >= self._stall:
                    lane = None if function.stream is None else self._lane(record, function)
                    self.finds.stall(name, record.stack, record.thread, lane, seconds)
            apply(record, name, function)
            self._taken += 1
            if self._taken % _TRIM == 0:
                self.memory.trim(self._is_known)

    def forget_order(self) -> None:
        """Take all until here as ordered: records were lost, and an edge may be among them."""
        self.clocks.forget_all()
        self.memory.trim(lambda _: True)
        self._captures.clear()

    def finish(self) -> None:
        """Tell of what nothing was heard of until the end."""
        for access in self._results.values():
            if not self._host_knew(access):
                host = Side(Done("a read of the host", -1, access.operation.thread, None), "read")
                self.finds.race(
                    "host read before the copy",
                    Place(access.start, access.end, PINNED),
                    Side(access.operation, "write"),
                    host,
                    possible=True,
                )
        self._results.clear()

    def _device_of(self, context: int) -> int | None:
        device = self.devices.get(context)
        return _driver.device_of_primary(context) if device is None else device

    def describe(self, lane: Lane) -> tuple[str, int | None]:
        """Name a stream; tell its device."""
        device = self._device_of(lane.context)
        if lane.kind == LEGACY:
            name = "the legacy default stream"
        elif lane.kind == "per-thread":
            name = f"the default stream of thread {lane.thread}"
        else:
            known = self.names(lane.handle)
            name = f"stream {lane.handle:#x}" if known is None else f"{known} ({lane.handle:#x})"
        if device is not None:
            name += f" of device {device}"
        return name, device

    # -- what the logger met ----------------------------------------------------------------------

    def _seen_stream(self, record: Record) -> None:
        handle, flags, context, status = record.words
        lane = self.clocks.seen_stream(handle, context, blocking=not flags & 1)
        if status:  # a capture that had begun before
            capture = Capture(seen=False)
            self._enter_capture(lane, capture)

    def _seen_memory(self, record: Record) -> None:
        start, size, kind, managed, device = record.words
        kind = MANAGED if managed else kind
        found = self.memory.find(start)
        if found is not None and found.start <= start and start + size <= found.end:
            if found.freed is None:  # it was seen when it was allocated
                found.kind = kind
                return
            if found.freed.kind == "free async":  # the driver knows it until the stream gets there
                return
        self.memory.add(Allocation(start, start + size, kind, device if kind == DEVICE else None))

    def _source_changed(self, record: Record) -> None:
        access = self._sources.pop(record.words[0], None)
        if access is None or self._host_knew(access):
            return
        found = self.memory.find(access.start) or self.memory.elsewhere
        if any(
            other.write and other.start < access.end and access.start < other.end
            for other in found.accesses
            if other is not access
        ):
            return  # the GPU wrote there
        host = Done("a write of the host", record.stack, record.thread, None)
        self.finds.race(
            "host overwrote the source of a copy",
            Place(access.start, access.end, found.kind, self._allocated(found)),
            Side(access.operation, "read"),
            Side(host, "write"),
            possible=self.clocks.maybe.get(access.lane.id, 0) >= access.time,
        )

    def _host_knew(self, access: Access) -> bool:
        return access.lane.gone or self.clocks.kept.get(access.lane.id, 0) >= access.time

    # -- accesses ---------------------------------------------------------------------------------

    def _lane(self, record: Record, function: Function) -> Lane:
        if function.stream is None:
            handle = function.roles.get("default", 0)
        else:
            handle = record.words[function.stream]
        return self.clocks.lane(handle, record.context, record.thread)

    def _is_known(self, access: Access) -> bool:
        return access.lane.gone or self.clocks.host.get(access.lane.id, 0) >= access.time

    def _is_ordered(self, old: Access, new: Access) -> bool:
        return (
            old.lane is new.lane or new.lane.clock.get(old.lane.id, 0) >= old.time or old.lane.gone
        )

    def _is_ordered_pinned(self, old: Access, new: Access) -> bool:
        return self._is_ordered(old, new) or self._host_knew(old)

    def _touch(
        self,
        lane: Lane,
        time: int,
        operation: Done,
        ranges: Iterable[Range],
        *,
        write: bool,
        known: str = EXACT,
        loose: bool = False,
    ) -> list[Access]:
        made = []
        how: Any = {"write": write, "known": known, "loose": loose}
        for start, end in ranges:
            if lane.capture is not None:
                access = Access(start, end, lane, time, operation, **how)
                for old in lane.capture.touch(access):
                    self._report(self.memory.elsewhere, old, access)
                continue
            for allocation, begin, after in self.memory.parts(start, end):
                access = Access(begin, after, lane, time, operation, **how)
                made.append(access)
                if allocation.freed is not None:
                    self._report_freed(allocation, access)
                ordered = self._is_ordered_pinned if allocation.kind == PINNED else self._is_ordered
                for old in allocation.touch(access, ordered):
                    self._report(allocation, old, access)
        return made

    def _report(self, allocation: Allocation, old: Access, new: Access) -> None:
        kind = _kind(old, new)

        def last_in_order() -> Done | None:
            until = new.lane.clock.get(old.lane.id, 0)
            return next((what for time, what in reversed(old.lane.recent) if time <= until), None)

        possible = self.clocks.maybe.get(old.lane.id, 0) >= old.time
        if old.loose or new.loose or not (_surely_writes(old) or _surely_writes(new)):
            possible = True
        start, end = max(old.start, new.start), min(old.end, new.end)
        self.finds.race(
            kind,
            Place(start, end, allocation.kind, self._allocated(allocation)),
            Side(old.operation, _access(old), old.known),
            Side(new.operation, _access(new), new.known),
            until=last_in_order,
            possible=possible,
            held_by=old.held_by | new.held_by,
        )

    def _report_freed(self, allocation: Allocation, new: Access) -> None:
        self.finds.race(
            "use after free",
            Place(new.start, new.end, allocation.kind, self._allocated(allocation)),
            Side(allocation.freed, "free"),
            Side(new.operation, _access(new), new.known),
        )

    @staticmethod
    def _allocated(allocation: Allocation) -> int:
        return -1 if allocation.operation is None else allocation.operation.stack

    def _begin(self, record: Record, name: str, lane: Lane) -> tuple[Done, int]:
        operation = Done(name, record.stack, record.thread, lane)
        return operation, self.clocks.step(lane, operation)

    # -- copies and fills -------------------------------------------------------------------------

    def _copy(self, record: Record, name: str, function: Function) -> None:
        to, source = function.operands
        size = record.words[function.size or 0]
        begin = (record.words[to], record.words[source])  # type: ignore[index]
        lane = self._lane(record, function)
        self._do_copy(
            record, name, lane, [(begin[0], begin[0] + size)], [(begin[1], begin[1] + size)]
        )

    def _do_copy(
        self,
        record: Record,
        name: str,
        lane: Lane,
        to: list[Range],
        source: list[Range],
        *,
        loose: bool = False,
    ) -> tuple[bool, bool]:
        """Note what is read and written; tell which sides are pageable memory of the host."""
        operation, time = self._begin(record, name, lane)
        if not to or not source or to[0][0] == to[0][1]:
            return False, False
        from_host = "DtoH" not in name and "DtoD" not in name and self._is_pageable(source)
        to_host = "HtoD" not in name and "DtoD" not in name and self._is_pageable(to)
        read, written = [], []
        if not from_host:
            read = self._touch(lane, time, operation, source, write=False, loose=loose)
        if not to_host:
            written = self._touch(lane, time, operation, to, write=True, loose=loose)
        elif lane.capture is None:  # "will return only once the copy has completed"
            self.clocks.host_knows(lane.clock)
        if lane.capture is None and not (from_host or to_host):
            self._remember(record, read, written)
        return from_host, to_host

    def _is_pageable(self, ranges: list[Range]) -> bool:
        return self.memory.find(ranges[0][0]) is None

    def _remember(self, record: Record, read: list[Access], written: list[Access]) -> None:
        for accesses, where in ((read, self._sources), (written, self._results)):
            if not accesses:
                continue
            found = self.memory.find(accesses[0].start)
            if found is not None and found.kind == PINNED:
                where[record.number] = accesses[0]
                if len(where) > _REMEMBERED:
                    where.popitem(last=False)

    def _copy_now(self, record: Record, name: str, function: Function) -> None:
        lane = self._lane(record, function)
        to, source = function.operands
        size = record.words[function.size or 0]
        ends = [(record.words[word], record.words[word] + size) for word in (to, source)]  # type: ignore[index]
        self._do_copy(record, name, lane, ends[:1], ends[1:])
        self._after_copy_now(function, lane, ends[:1], ends[1:])

    def _after_copy_now(
        self, function: Function, lane: Lane, to: list[Range], source: list[Range]
    ) -> None:
        if function.orders_host:
            sides = [self.memory.find(side[0][0]) for side in (to, source) if side]
            # "no host-side synchronization is performed" from device to device
            if not all(side is not None and side.kind == DEVICE for side in sides):
                self.clocks.host_knows(lane.clock)

    def _copy_batch(self, record: Record, name: str, function: Function) -> None:
        lane = self._lane(record, function)
        count = len(record.fetched[2]) // 8
        if count != record.words[3]:
            self._not_seen("operands of a batch of more than 2048 copies")
        to, source, sizes = (
            struct.unpack(f"<{count}Q", each[: 8 * count]) for each in record.fetched
        )
        operation, time = self._begin(record, name, lane)
        for begins, write in ((source, False), (to, True)):
            ranges = [
                (begin, begin + size)
                for begin, size in zip(begins, sizes, strict=True)
                if self.memory.find(begin) is not None
            ]
            self._touch(lane, time, operation, ranges, write=write)

    def _copy_2d(self, record: Record, name: str, function: Function) -> None:
        words = struct.unpack("<16Q", record.fetched[0])
        width, height = words[14], words[15]
        sides = []
        for x, y, kind, host, device, _, pitch in (words[:7], words[7:14]):
            begin = (host if kind & 0xFFFFFFFF == 1 else device) + y * (pitch or width) + x
            sides.append((kind & 0xFFFFFFFF, _rows(begin, width, height, pitch or width)))
        self._shaped(record, name, function, sides)

    def _copy_3d(self, record: Record, name: str, function: Function) -> None:
        words = struct.unpack("<25Q", record.fetched[0])
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
        self._shaped(record, name, function, sides)

    def _shaped(
        self, record: Record, name: str, function: Function, sides: list[tuple[int, list[Range]]]
    ) -> None:
        lane = self._lane(record, function)
        if any(kind == 3 for kind, _ in sides):
            self._not_seen("CUDA arrays")
            sides = [(kind, [] if kind == 3 else ranges) for kind, ranges in sides]
        (_, source), (_, to) = sides
        rows = max(len(source), len(to))
        whole = rows == 1 and _extent(record.fetched[0]) > 1
        loose = whole and not _is_packed(record.fetched[0])
        self._do_copy(record, name, lane, to, source, loose=loose)
        if function.stream is None:
            self._after_copy_now(function, lane, to, source)

    def _fill(self, record: Record, name: str, function: Function) -> None:
        words, roles = record.words, function.roles
        begin, width = words[0], words[function.size or 0] * roles["width"]
        ranges = [(begin, begin + width)]
        loose = False
        if "pitch" in roles:
            height, pitch = words[roles["height"]], words[roles["pitch"]]
            ranges = _rows(begin, width, height, pitch)
            loose = height > len(ranges) and pitch != width
        lane = self._lane(record, function)
        operation, time = self._begin(record, name, lane)
        self._touch(lane, time, operation, ranges, write=True, loose=loose)
        if function.stream is None and self._kind_at(begin) != DEVICE:
            self.clocks.host_knows(lane.clock)

    def _kind_at(self, address: int) -> int:
        found = self.memory.find(address)
        return UNKNOWN if found is None else found.kind

    # -- memory -----------------------------------------------------------------------------------

    def _allocate(self, record: Record, name: str, function: Function) -> None:
        (begin,) = _WORD.unpack(record.fetched[0])
        size = record.words[function.size or 0]
        operation = Done(name, record.stack, record.thread, None)
        device = self._device_of(record.context)
        self.memory.add(Allocation(begin, begin + size, function.roles["kind"], device, operation))

    def _register(self, record: Record, name: str, function: Function) -> None:  # noqa: ARG002
        begin, size = record.words[:2]
        operation = Done(name, record.stack, record.thread, None)
        self.memory.add(Allocation(begin, begin + size, PINNED, None, operation))

    def _allocate_async(self, record: Record, name: str, function: Function) -> None:
        lane = self._lane(record, function)
        operation, time = self._begin(record, name, lane)
        operation.kind = "allocate"
        (begin,) = _WORD.unpack(record.fetched[0])
        end = begin + record.words[function.size or 0]
        allocation = Allocation(begin, end, DEVICE, self._device_of(lane.context), operation)
        if lane.capture is None:
            allocation.touch(Access(begin, end, lane, time, operation, write=True), _always)
        self.memory.add(allocation)

    def _free(self, record: Record, name: str, function: Function) -> None:  # noqa: ARG002
        if not record.leaving:
            found = self.memory.find(record.words[0])
            if found is not None and found.freed is None:
                found.freed = Done(name, record.stack, record.thread, None)
                found.freed.kind = "free"
                self._freeing[record.thread] = found
            return
        freed = self._freeing.pop(record.thread, None)
        if record.result:
            if freed is not None:
                freed.freed = None
            return
        if freed is not None:  # its addresses may be anything now, memory of the host's heap too
            self.memory.drop(freed)
        # Freeing waits for the device.
        device = self._device_of(record.context) if freed is None else freed.device
        for lane in list(self.clocks.lanes()):
            same = device is not None and self._device_of(lane.context) == device
            if same or lane.context == record.context:
                self.clocks.host_knows(lane.clock)

    def _unmap(self, record: Record, name: str, function: Function) -> None:  # noqa: ARG002
        found = self.memory.find(record.words[0])
        if found is not None:
            self.memory.drop(found)

    def _free_async(self, record: Record, name: str, function: Function) -> None:
        found = self.memory.find(record.words[0])
        if record.leaving:
            if record.result and found is not None and found.freed is not None:
                found.freed = None
            return
        lane = self._lane(record, function)
        operation, time = self._begin(record, name, lane)
        operation.kind = "free async"
        if found is None or lane.capture is not None:
            return
        if found.freed is None:
            self._touch(lane, time, operation, [(found.start, found.end)], write=True)
            found.freed = operation

    # -- order ------------------------------------------------------------------------------------

    def _record(self, record: Record, name: str, function: Function) -> None:  # noqa: ARG002
        lane = self._lane(record, function)
        event = record.words[0]
        if lane.capture is not None and self._flags(record, function) & _EXTERNAL:
            lane.capture.graph.records.append(event)
            return
        self.clocks.record(event, lane)

    @staticmethod
    def _flags(record: Record, function: Function) -> int:
        return record.words[function.roles["flags"]] if "flags" in function.roles else 0

    def _wait_event(self, record: Record, name: str, function: Function) -> None:  # noqa: ARG002
        lane = self._lane(record, function)
        event = record.words[1]
        recorded = self.clocks.recorded(event)
        if lane.capture is not None and record.words[2] & _EXTERNAL:
            lane.capture.graph.waits.append(event)
            return
        if recorded is None:
            return
        if recorded.capture is not None and lane.capture is None:
            if not recorded.capture.lanes:  # it has ended
                return
            lane = self._enter_capture(lane, recorded.capture)
        join(self.clocks.settle(lane), recorded.clock)
        lane.held_by |= recorded.held_by

    def _record_context(self, record: Record, name: str, function: Function) -> None:  # noqa: ARG002
        context, event = record.words
        self.clocks.record_clock(event, self.clocks.of_context(context or record.context))

    def _wait_context(self, record: Record, name: str, function: Function) -> None:  # noqa: ARG002
        context, event = record.words
        recorded = self.clocks.recorded(event)
        if recorded is not None:
            self.clocks.raise_floor(context or record.context, recorded.clock)

    def _drop_event(self, record: Record, name: str, function: Function) -> None:  # noqa: ARG002
        self.clocks.drop_event(record.words[0])

    def _drop_stream(self, record: Record, name: str, function: Function) -> None:  # noqa: ARG002
        self.clocks.drop_stream(record.words[0])

    def _know_event(self, record: Record, name: str, function: Function) -> None:  # noqa: ARG002
        recorded = self.clocks.recorded(record.words[0])
        if recorded is not None and recorded.capture is None:
            self._host_knows(record, recorded.clock)

    def _know_events(self, record: Record, name: str, function: Function) -> None:  # noqa: ARG002
        for event in record.words[1:3]:
            recorded = self.clocks.recorded(event)
            if recorded is not None and recorded.capture is None:
                self._host_knows(record, recorded.clock)

    def _know_stream(self, record: Record, name: str, function: Function) -> None:  # noqa: ARG002
        lane = self._lane(record, function)
        if lane.capture is None:
            self._host_knows(record, self.clocks.settle(lane))

    def _know_context(self, record: Record, name: str, function: Function) -> None:  # noqa: ARG002
        context = record.words[0] if record.words and record.words[0] else record.context
        self._host_knows(record, self.clocks.of_context(context))

    def _host_knows(self, record: Record, clock: dict[int, int]) -> None:
        who = self._asked.get(record.stack)
        if who is None:
            who = self._asked[record.stack] = own.who_asks(self._stacks[record.stack])
        if who == own.PROGRAM:
            self.clocks.host_knows(clock)
            return
        join(self.clocks.kept, clock)
        if who == own.FUTURE:
            join(self.clocks.maybe, clock)

    def _host_function(self, record: Record, name: str, function: Function) -> None:
        lane = self._lane(record, function)
        self._begin(record, name, lane)
        if lane.capture is None:
            join(self.clocks.maybe, lane.clock)

    # -- words in memory --------------------------------------------------------------------------

    def _write_value(self, record: Record, name: str, function: Function) -> None:
        lane = self._lane(record, function)
        self._begin(record, name, lane)
        self._value_written(lane, record.words[1], record.words[2])

    def _value_written(self, lane: Lane, word: int, value: int) -> None:
        if lane.capture is not None:
            self._not_seen("values that a graph writes or waits for")
            return
        self._words[word] = (value, dict(lane.clock))
        join(self.clocks.maybe, lane.clock)
        self.finds.drop_held(word)
        for other in self.clocks.lanes():
            if word in other.held_by:
                other.held_by -= {word}
                # When it gets there is not known: it counts as ordered behind all until now.
                join(other.clock, lane.clock)

    def _wait_value(self, record: Record, name: str, function: Function) -> None:
        lane = self._lane(record, function)
        self._begin(record, name, lane)
        self._value_awaited(lane, *record.words[1:4])

    def _value_awaited(self, lane: Lane, word: int, value: int, how: int) -> None:
        if lane.capture is not None:
            self._not_seen("values that a graph writes or waits for")
            return
        written = self._words.get(word)
        if written is not None and _satisfies(written[0], value, how):
            join(lane.clock, written[1])
        else:
            lane.held_by |= {word}

    def _values(self, record: Record, name: str, function: Function) -> None:
        lane = self._lane(record, function)
        self._begin(record, name, lane)
        data = record.fetched[0]
        if len(data) // 48 != record.words[1]:
            self._not_seen("a batch of memory operations that is too long")
        for at in range(0, len(data), 48):
            operation, word, value, how = struct.unpack_from("<I4xQQI", data, at)
            if operation in (1, 4):
                self._value_awaited(lane, word, value, how)
            elif operation in (2, 5):
                self._value_written(lane, word, value)

    # -- graphs -----------------------------------------------------------------------------------

    def _enter_capture(self, lane: Lane, capture: Capture) -> Lane:
        inside = self.clocks.new_lane(lane.handle, lane.context, lane.kind)
        inside.capture = capture
        inside.blocking = lane.blocking
        lane.captured = inside
        capture.lanes.append(lane)
        return inside

    def _begin_capture(self, record: Record, name: str, function: Function) -> None:
        lane = self._lane(record, function)
        if lane.capture is not None:
            return
        capture = Capture()
        self._enter_capture(lane, capture)
        if name == "cuStreamBeginCaptureToGraph":
            capture.into = record.words[1]

    def _end_capture(self, record: Record, name: str, function: Function) -> None:  # noqa: ARG002
        capture = self._lane(record, function).capture
        if capture is None:
            return
        for lane in capture.lanes:
            lane.captured = None
        capture.lanes.clear()
        if record.result:
            return
        handle = capture.into or _WORD.unpack(record.fetched[0])[0]
        graph = self._graphs.setdefault(handle, Graph()) if capture.into else Graph()
        graph.add(capture.graph)
        self._graphs[handle] = graph

    def _instantiate(self, record: Record, name: str, function: Function) -> None:  # noqa: ARG002
        self._copy_graph(_WORD.unpack(record.fetched[0])[0], record.words[1])

    def _clone_graph(self, record: Record, name: str, function: Function) -> None:  # noqa: ARG002
        self._copy_graph(_WORD.unpack(record.fetched[0])[0], record.words[1])

    def _update_graph(self, record: Record, name: str, function: Function) -> None:  # noqa: ARG002
        self._copy_graph(record.words[0], record.words[1])

    def _copy_graph(self, to: int, source: int) -> None:
        graph = self._graphs[to] = Graph()
        found = self._graphs.get(source)
        if found is None:
            graph.complete = False
        else:
            graph.add(found)

    def _unseen_node(self, record: Record, name: str, function: Function) -> None:  # noqa: ARG002
        graph = self._graphs.setdefault(record.words[1], Graph())
        graph.complete = False

    def _drop_graph(self, record: Record, name: str, function: Function) -> None:  # noqa: ARG002
        self._graphs.pop(record.words[0], None)

    def _launch_graph(self, record: Record, name: str, function: Function) -> None:
        lane = self._lane(record, function)
        graph = self._graphs.get(record.words[0])
        if graph is None or not graph.complete:
            self._not_seen("launches of graphs that were not captured while watching")
        if graph is not None:
            for event in graph.waits:
                recorded = self.clocks.recorded(event)
                if recorded is not None:
                    join(self.clocks.settle(lane), recorded.clock)
        _, time = self._begin(record, name, lane)
        if graph is None:
            return
        where = f"a graph launched at {self._line(record.stack)}"
        for touch in graph.touches.values():
            inside: Done = touch.operation
            operation = Done(inside.name, inside.stack, record.thread, lane)
            operation.launched = where
            ranges = [(touch.start, touch.end)]
            self._touch(lane, time, operation, ranges, write=touch.write, known=touch.known)
        for event in graph.records:
            self.clocks.record(event, lane)

    def _line(self, stack: int) -> str:
        from userstream._observe.stacks import line_of

        line = line_of(self._stacks[stack])
        return "no line of Python" if line is None else f"{line.filename}:{line.lineno}"

    # -- kernels ----------------------------------------------------------------------------------

    def _seen_kernel(self, record: Record) -> None:
        (kernel,) = record.words
        self._kernels[kernel] = record.fetched[0].decode(errors="replace")

    def _learned(self, record: Record) -> None:
        kernel, offset, wrote, final = record.words
        if wrote or final:
            self._writes[kernel, offset] = bool(wrote)

    def _launch(self, record: Record, name: str, function: Function) -> None:
        kernel = record.words[function.roles["kernel"]]
        if function.stream is None:
            (handle,) = _WORD.unpack_from(record.fetched[1], 32)
            lane = self.clocks.lane(handle, record.context, record.thread)
        else:
            lane = self._lane(record, function)
        operation, time = self._begin(record, self._kernels.get(kernel) or name, lane)
        pairs = struct.unpack(f"<{len(record.fetched[0]) // 8}Q", record.fetched[0])
        for offset, address in zip(pairs[::2], pairs[1::2], strict=True):
            write = self._writes.get((kernel, offset))
            self._touch(
                lane,
                time,
                operation,
                [(address, address + 1)],
                write=write is not False,
                known=ASSUMED if write is None else LEARNED,
            )

    # -- contexts ---------------------------------------------------------------------------------

    def _context(self, record: Record, name: str, function: Function) -> None:  # noqa: ARG002
        (context,) = _WORD.unpack(record.fetched[0])
        self.devices[context] = record.words[function.roles["device"]]

    def _drop_context(self, record: Record, name: str, function: Function) -> None:  # noqa: ARG002
        self._drop(self.devices.pop(record.words[0], None))

    def _drop_device(self, record: Record, name: str, function: Function) -> None:  # noqa: ARG002
        self._drop(record.words[0])

    def _drop(self, device: int | None) -> None:
        self.memory.forget(device)
        self.clocks.forget_all()

    def _load(self, record: Record, name: str, function: Function) -> None:
        """Only how long it took counts."""

    def _not_seen(self, what: str) -> None:
        self.unseen[what] = self.unseen.get(what, 0) + 1


def _always(old: Access, new: Access) -> bool:  # noqa: ARG001
    return True


def _surely_writes(access: Access) -> bool:
    return access.write and access.known != ASSUMED


def _kind(old: Access, new: Access) -> str:
    if old.operation.kind == "allocate":
        return "use before allocation"
    if new.operation.kind.startswith("free") or old.operation.kind.startswith("free"):
        return "use after free"
    if old.write:
        return "write after write" if new.write else "read after write"
    return "write after read"


def _access(access: Access) -> str:
    kind: str = access.operation.kind
    if kind:
        return kind.partition(" ")[0]
    return "write" if access.write else "read"


def _rows(begin: int, width: int, height: int, pitch: int) -> list[Range]:
    if not width or not height:
        return []
    if pitch == width or height == 1 or height > _MOST_ROWS:
        return [(begin, begin + (height - 1) * pitch + width)]
    return [(begin + row * pitch, begin + row * pitch + width) for row in range(height)]


def _extent(structure: bytes) -> int:
    """Return how many rows a CUDA_MEMCPY2D or 3D copies."""
    if len(structure) == 128:
        return _WORD.unpack_from(structure, 120)[0]  # type: ignore[no-any-return]
    return _WORD.unpack_from(structure, 184)[0] * _WORD.unpack_from(structure, 192)[0]  # type: ignore[no-any-return]


def _is_packed(structure: bytes) -> bool:
    """Tell whether no byte lies between the rows, on both sides."""
    if len(structure) == 128:
        width, pitches = 112, (48, 104)
    else:
        width, pitches = 176, (72, 160)
    (wide,) = _WORD.unpack_from(structure, width)
    return all(_WORD.unpack_from(structure, pitch)[0] in (0, wide) for pitch in pitches)


def _satisfies(written: int, value: int, how: int) -> bool:
    how &= 3
    if how == 0:
        return written >= value
    if how == 1:
        return written == value
    return bool(written & value) if how == 2 else bool(~(written | value))
