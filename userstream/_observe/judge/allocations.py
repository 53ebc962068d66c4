"""Allocation and freeing of memory: contexts, CUDA arrays and blocks of frameworks' allocators."""

from __future__ import annotations

import copy
import functools
import struct
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from .log import OWN, Frame, Stack, json_of, line_of, owner_of, text_of
from .memory import DEVICE, MANAGED, PINNED, Access, Allocation
from .races import BLOCK_FREE, RecordedOperation

if TYPE_CHECKING:
    from collections.abc import Callable

    from .clocks import Lane
    from .finding_types import Race
    from .functions import Call
    from .world import Range, World

_WORD = struct.Struct("<Q")
_LEGACY, _PER_THREAD = 1, 2  # handles of default streams


class Allocations:
    """Applies calls that allocate or free memory."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._freeing: dict[int, Allocation] = {}  # by thread
        self._mapped: dict[int, tuple[int, int]] = {}  # by address: physical memory, offset in it
        self._addresses: dict[tuple[int, int], int] = {}  # of what is mapped

    def seen_memory(self, call: Call) -> None:
        start, size, kind, managed, device = call.words
        kind = MANAGED if managed else kind
        found = self.world.memory.find(start)
        if found is not None and found.start <= start and start + size <= found.end:
            if found.freed is None:  # its allocation was seen
                found.kind = kind
                return
            if found.freed.kind == "free async":
                # Until the host knows the end of the free, an access is a use after free.
                return
        self.world.memory.add(
            Allocation(start, start + size, kind, device if kind == DEVICE else None)
        )

    def allocate(self, call: Call) -> None:
        (begin,) = _WORD.unpack(call.fetched[0])
        size = call.words[call.function.size or 0]
        operation = RecordedOperation(call.name, call.stack, call.thread, None)
        device = self.world.device_of(call.context)
        self.world.memory.add(
            Allocation(begin, begin + size, call.function.roles["kind"], device, operation)
        )

    def allocate_pitch(self, call: Call) -> None:
        (begin,), (pitch,) = (_WORD.unpack(each) for each in call.fetched)
        operation = RecordedOperation(call.name, call.stack, call.thread, None)
        size, device = pitch * call.words[3], self.world.device_of(call.context)
        self.world.memory.add(Allocation(begin, begin + size, DEVICE, device, operation))

    def register(self, call: Call) -> None:
        begin, size = call.words[:2]
        operation = RecordedOperation(call.name, call.stack, call.thread, None)
        self.world.memory.add(Allocation(begin, begin + size, PINNED, None, operation))

    def allocate_async(self, call: Call) -> None:
        lane = self.world.lane(call)
        operation, time = self.world.begin(call, lane)
        operation.kind = "allocate"
        (begin,) = _WORD.unpack(call.fetched[0])
        end = begin + call.words[call.function.size or 0]
        pool = call.words[call.function.roles["pool"]] if "pool" in call.function.roles else 0
        if lane.capture is not None:
            node = lane.capture.node
            node.allocates[begin] = (end - begin, operation)
            node.frees.pop(begin, None)  # of the previous allocation at this address
        self.made(lane, time, operation, (begin, end), pool)

    def made(
        self, lane: Lane, time: int, operation: RecordedOperation, where: Range, pool: int = 0
    ) -> None:
        """Add memory that a stream-ordered operation allocates."""
        begin, end = where
        allocation = Allocation(begin, end, DEVICE, self.world.device_of(lane.context), operation)
        allocation.pool = pool
        if lane.capture is None:
            allocation.touch(Access(begin, end, lane, time, operation, write=True))
        self.world.memory.add(allocation)

    def free(self, call: Call) -> None:
        if not call.leaving:
            found = self.world.memory.find(call.words[0])
            if found is not None and found.freed is None:
                found.freed = RecordedOperation(call.name, call.stack, call.thread, None)
                found.freed.kind = "free"
                self._freeing[call.thread] = found
            return
        freed = self._freeing.pop(call.thread, None)
        if call.result:
            if freed is not None:
                freed.freed = None
            return
        if freed is not None:  # the addresses may belong to the heap of the host next
            self.world.memory.drop(freed)
        # cuMemFree waits for the device.
        device = self.world.device_of(call.context) if freed is None else freed.device
        for lane in list(self.world.clocks.lanes()):
            same = device is not None and self.world.device_of(lane.context) == device
            if same or lane.context == call.context:
                self.world.clocks.host_knows(lane.clock)

    def unmap(self, call: Call) -> None:
        start = call.words[0]
        end = start + (1 if call.function.size is None else call.words[call.function.size])
        for each in self.world.memory.within(start, end):
            self.world.memory.drop(each)
        mapped = self._mapped.pop(start, None)
        if mapped is not None and self._addresses.get(mapped) == start:
            del self._addresses[mapped]

    def map(self, call: Call) -> None:
        self.unmap(call)
        start, _, offset, physical, _ = call.words
        self._mapped[start] = physical, offset
        if self._addresses.setdefault((physical, offset), start) != start:
            self.world.not_seen("races at the second address of memory that is mapped twice")

    def drop_pool(self, call: Call) -> None:
        """Forget the freed memory of a pool, whose addresses may belong to anything now."""
        for each in list(self.world.memory):
            freed = each.freed is not None and each.freed.kind == "free async"
            if freed and each.pool in (call.words[0], 0):
                self.world.memory.drop(each)

    def free_async(self, call: Call) -> None:
        found = self.world.memory.find(call.words[0])
        if call.leaving:
            if call.result and found is not None and found.freed is not None:
                found.freed = None
            return
        lane = self.world.lane(call)
        operation, time = self.world.begin(call, lane)
        operation.kind = "free async"
        if lane.capture is not None:
            lane.capture.node.frees[call.words[0]] = operation
        elif found is not None:
            self.freed(lane, time, operation, found)

    def freed(self, lane: Lane, time: int, operation: RecordedOperation, found: Allocation) -> None:
        """Mark memory as freed by a stream-ordered operation."""
        if found.freed is None:
            self.world.touch(lane, time, operation, [(found.start, found.end)], write=True)
            found.freed = operation
            self.world.memory.freeing.setdefault(lane, deque()).append((time, found))


class Contexts:
    """Applies calls that create or destroy contexts, and calls that load modules."""

    def __init__(self, world: World) -> None:
        self.world = world

    def context(self, call: Call) -> None:
        (context,) = _WORD.unpack(call.fetched[0])
        self.world.devices[context] = call.words[call.function.roles["device"]]

    def drop_context(self, call: Call) -> None:
        self._drop(self.world.devices.pop(call.words[0], None))

    def drop_device(self, call: Call) -> None:
        self._drop(call.words[0])

    def _drop(self, device: int | None) -> None:
        self.world.memory.forget(device)
        self.world.clocks.forget_all()

    def load(self, call: Call) -> None:
        """Do nothing: only the duration of the call counts."""


_BITS = {1: 1, 2: 2, 3: 4, 8: 1, 9: 2, 10: 4, 16: 2, 32: 4}  # bytes of a CUarray_format


class ArrayCalls:
    """Applies calls that make and drop CUDA arrays."""

    def __init__(self, world: World) -> None:
        self.world = world

    def create_array(self, call: Call) -> None:
        (array,), data = _WORD.unpack(call.fetched[0]), call.fetched[1]
        if len(data) == 24:
            width, height, form, channels = struct.unpack("<QQII", data)
        else:
            width, height, _, form, channels, _ = struct.unpack_from("<QQQIII", data)
        size = _BITS.get(form, 0) * channels
        self.world.arrays.made(array, width * size, max(height, 1))

    def drop_array(self, call: Call) -> None:
        self.world.arrays.dropped(call.words[0])

    def texture(self, _: Call) -> None:
        self.world.not_seen("what kernels use through textures and surfaces")


# -- Blocks of the caching allocators of frameworks ------------------------------------------------

_MOST = 20_000  # blocks of one framework that are kept: the newest
_MOST_FREES = 256  # of blocks that are in use


class Block(NamedTuple):
    """Memory that a caching allocator gave to a tensor or an array."""

    start: int
    end: int
    time: int  # on the clock of the log; 0 for blocks from before the history
    stack: Callable[[], Stack]  # of the allocating line
    framework: str


class Blocks:
    """All known blocks of caching allocators, past and present."""

    def __init__(self, world: World) -> None:
        self._stacks = world.stacks
        self._allocated: deque[Block] = deque(maxlen=_MOST)  # as they were allocated
        self._listed: list[Block] = []  # of frameworks that give a list of all, the last one
        self._parts: list[bytes] = []  # of a list of which more is to come
        self._frees = _Frees(world)

    def block(self, call: Call) -> None:
        """Add the block that a framework has just allocated."""
        start, end, *handle = call.words
        if start < end:
            stack = functools.partial(self._stack, call.stack)
            framework = text_of(call.fetched[0])
            self._allocated.append(Block(start, end, call.began, stack, framework))
        for stream in handle:
            self._frees.allocated(call, start, stream)

    def freed(self, call: Call) -> None:
        """Remember which streams still use a block that a framework has just freed."""
        start, end = call.words
        self._frees.freed(call, start, max(end, start + 1), text_of(call.fetched[0]))

    def _stack(self, number: int) -> Stack:
        """Return a stack without the frames of userstream's hook."""
        stack = self._stacks[number]
        while stack and owner_of(stack[-1]) == OWN:
            stack = stack[:-1]
        return stack

    def blocks(self, call: Call) -> None:
        """Set the list of all blocks from its parts."""
        self._parts += call.fetched
        (is_more,) = call.words
        if is_more:
            return
        told = json_of([b"".join(self._parts)])
        self._parts = []
        frames = [
            Frame(filename, line, name, self._stacks.whose(filename))
            for filename, line, name in told["frames"]
        ]
        stacks = told["stacks"]

        def stack(number: int) -> Callable[[], Stack]:
            return lambda: tuple(frames[which] for which in stacks[number])

        self._listed = [
            Block(start, end, time, stack(number), framework)
            for start, end, time, framework, number in told["blocks"]
        ]

    def at(self, address: int, time: int) -> Block | None:
        """Return the block that contained an address at a time; 0 is the end of the observation."""
        found: Block | None = None
        for block in (*self._listed, *self._allocated):
            if block.start <= address < block.end and (not time or block.time <= time):
                found = block if found is None or block.time >= found.time else found
        return found

    def are_one(self, race: Race) -> bool | None:
        """Return whether a race is of one buffer; `None` if no allocator tells."""
        answers = [self._is_one(*pair) for pair in race._apart]
        if not answers or True in answers:
            return True
        return None if None in answers else False

    def _is_one(self, address: int, other: int, time: int, other_time: int) -> bool | None:
        one = self.at(address, time)
        if one is None:
            return None
        return self.at(other, other_time) is one

    def name(self, race: Race) -> Race:
        """Return a race with the framework and the line of its block, if the block is known.

        Whether it is one is settled: the stream that a block was allocated on may be given it again
        before others have done with it, and may not touch it then.
        """
        first, second = (self.at(race.address, time) for time in race._times)
        block = first or second
        if block is None:
            return race
        stack = () if first is None else first.stack()
        named = replace(race, allocated=stack, framework=block.framework)
        if second is None or first is second:
            return named
        line = line_of(second.stack())
        where = "" if line is None else f" at {line.filename}:{line.lineno}"
        how = " (torch: tensor.record_stream)" if block.framework == "torch" else ""
        return replace(
            named,
            advice=f"it was freed in between, and allocated again{where}: keep it until "
            f"{race.first.stream} has done with it{how}, or let {race.second.stream} wait for "
            f"{race.first.stream}",
        )


class _Free(NamedTuple):
    """A freed block that other streams may still use."""

    allocation: Allocation  # that the block is part of
    stream: int  # the handle of the one that the block was allocated on
    freed: Access
    uses: list[Access]  # of other streams, which nothing ordered before it


class _Frees:
    """Frees of blocks that other streams still use.

    A caching allocator gives such memory to whoever asks next on the stream that the block was
    allocated on. Until then, the program may still order that stream after the uses.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self._given: dict[int, tuple[int, int]] = {}  # blocks in use: their streams, since when
        self._frees: deque[_Free] = deque(maxlen=_MOST_FREES)

    def allocated(self, call: Call, start: int, stream: int) -> None:
        """Report the uses of blocks of which the allocator may have given out the memory again."""
        self._given[start] = stream, call.began
        if not self._frees:
            return
        allocation = self.world.memory.find(start)
        for each in list(self._frees):
            if each.allocation is allocation and each.stream == stream:
                self._frees.remove(each)
                for use in each.uses:
                    if self._is_in_use(use, each.freed):
                        self.world.report(each.allocation, use, each.freed)

    def freed(self, call: Call, start: int, end: int, framework: str) -> None:
        """Keep the uses of a block that is freed by now, if nothing orders it after them."""
        stream, since = self._given.pop(start, (0, call.began))
        allocation = self.world.memory.find(start)
        if allocation is None:
            return
        uses = [use for use in allocation.overlapping(start, end) if since <= use.operation.began]
        lane = self._lane(stream, call.thread, allocation.device) if uses else None
        if lane is None:
            return
        name = f"the allocator of {framework}"
        operation = RecordedOperation(name, call.stack, call.thread, lane, call.began, call.ended)
        operation.kind = BLOCK_FREE
        freed = Access(start, end, lane, lane.time, operation, write=True)
        # Copies: a later access that repeats one of them changes it.
        kept = [copy.copy(use) for use in uses if self._is_in_use(use, freed)]
        if kept:
            self._frees.append(_Free(allocation, stream, freed, kept))

    def _lane(self, stream: int, thread: int, device: int | None) -> Lane | None:
        """Return the stream of a block; `None` if it is captured, or nobody has used it."""
        for lane in self.world.clocks.lanes():
            is_it = max(lane.handle, _LEGACY) == max(stream, _LEGACY)  # as is 0
            is_it &= stream != _PER_THREAD or lane.thread == thread
            if is_it and self.world.device_of(lane.context) == device:
                return None if lane.captured is not None else lane
        return None

    def _is_in_use(self, use: Access, freed: Access) -> bool:
        """Return whether nothing orders the stream of a freed block after a use."""
        lane, clocks = use.lane, self.world.clocks
        return (
            lane is not freed.lane
            and not self.world.host_knew(use)
            and clocks.settle(freed.lane).get(lane.id, 0) < use.time
            and not any(
                each.clock.get(lane.id, 0) >= use.time and self._is_within(each.stack, freed)
                for each in clocks.recorded_on(lane)
            )
        )

    def _is_within(self, stack: int, freed: Access) -> bool:
        """Return whether the framework made a call as it freed a block.

        It records an event on each stream that it was told of (torch: `record_stream`), and keeps
        the memory until these have passed.
        """
        event, free = (self.world.stacks[each] for each in (stack, freed.operation.stack))
        return event == free[: len(event)]
