"""Allocation and freeing of memory, and the contexts that memory belongs to."""

from __future__ import annotations

import struct
from collections import deque
from typing import TYPE_CHECKING

from .memory import DEVICE, MANAGED, PINNED, Access, Allocation
from .races import RecordedOperation

if TYPE_CHECKING:
    from .clocks import Lane
    from .functions import Call
    from .world import Range, World

_WORD = struct.Struct("<Q")


class Allocations:
    """Applies calls that allocate or free memory."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._freeing: dict[int, Allocation] = {}  # by thread

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
