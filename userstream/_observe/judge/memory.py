"""Allocations, and the accesses to each that later accesses can race with."""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Iterator

    from .clocks import Clock, Lane

PINNED = 1
DEVICE = 2
MANAGED = 3
UNKNOWN = 0

KINDS = {PINNED: "pinned", DEVICE: "device", MANAGED: "managed", UNKNOWN: "unknown"}


EXACT = "exact"
DECLARED = "declared"
TYPED = "typed"  # by the type of a kernel's parameter
LEARNED = "learned"
ASSUMED = "assumed"

_NONE: list[Access] = []

Span = tuple[int, int, bool, str]  # start, end, whether it writes there, and how that is known

_SEGMENT = 1 << 21  # bytes, of which caching allocators allocate multiples
_PAGE = 12  # bits: accesses are indexed by the page that contains them
_STEP = 6  # bits: pages for wider accesses are so much larger, and so on


class Access:
    """A range of bytes that an operation reads or writes, or may read or write."""

    __slots__ = (
        "end",
        "held_by",
        "known",
        "lane",
        "loose",
        "operation",
        "over",
        "reach",
        "start",
        "time",
        "write",
    )

    def __init__(  # noqa: PLR0917 -- made for each access: keywords would take longer
        self,
        start: int,
        end: int,
        lane: Lane,
        time: int,
        operation: Any,
        write: bool,
        known: str = EXACT,
        loose: bool = False,
    ) -> None:
        self.start = start
        self.end = end
        self.lane = lane
        self.time = time
        self.operation = operation
        self.write = write  # also if the write is only assumed
        self.known = known
        self.loose = loose  # only some of these bytes are accessed
        self.reach = end  # up to where bytes may be accessed as well: of a kernel's pointer
        self.held_by = lane.held_by
        # A sure write of the stream to the same bytes: once repeated, it stands for this access.
        self.over: Access | None = None

    @property
    def is_sure(self) -> bool:
        """Return whether the access surely writes all of its bytes."""
        return self.write and self.known != ASSUMED and not self.loose

    @property
    def is_stale(self) -> bool:
        """Return whether another access, which was repeated, stands for this one."""
        return self.over is not None and self.over.time > self.time


_Level = dict[int, list[Access]]  # by their page

# What an access repeats: an allocation, a page, the accesses there, and the one that is repeated.
Place = tuple["Allocation", int, list[Access], Access]


class Allocation:
    """One allocation: one generation of its addresses."""

    __slots__ = (
        "_lanes",
        "_narrow",
        "_time",
        "_wide",
        "device",
        "end",
        "freed",
        "is_open",
        "kind",
        "last",
        "operation",
        "pool",
        "start",
    )

    def __init__(
        self, start: int, end: int, kind: int, device: int | None = None, operation: Any = None
    ) -> None:
        self.start = start
        self.end = end
        self.kind = kind
        self.device = device
        self.operation = operation  # the allocating operation, if it was seen
        self.freed: Any = None  # the operation that freed it
        self.pool = 0  # the handle of the pool, if the call names one
        self._narrow: _Level = {}
        self._wide: dict[int, _Level] = {}  # by the bits of their pages
        self.is_open = False  # a kernel may have used more than is known
        # The last use: by a stream that is ordered after all others, else by each of them.
        self.last: Lane | None = None
        self._time = 0
        self._lanes: dict[Lane, int] = {}

    @property
    def is_cut_up(self) -> bool:
        """Return whether a caching allocator may have put several buffers into the allocation.

        PyTorch allocates multiples of 2 MiB, as do JAX and whoever maps memory. What is allocated
        in stream order is one buffer.
        """
        if self.operation is not None and self.operation.kind:
            return False
        return (self.end - self.start) % _SEGMENT == 0

    def is_shared(self, lane: Lane) -> bool:
        """Return whether a stream is not ordered after the last use by another stream."""
        last = self.last
        if last is lane or (last is not None and lane.clock.get(last.id, 0) >= self._time):
            return False
        if last is not None:
            self._lanes[last] = self._time
            self.last = None
        clock = lane.clock
        for other, time in list(self._lanes.items()):
            if other is lane or clock.get(other.id, 0) >= time or other.is_finished:
                del self._lanes[other]  # the next use by the stream stands for it
        return bool(self._lanes)

    def _used(self, lane: Lane, time: int) -> None:
        if self._lanes:
            self._lanes[lane] = time
        else:
            self.last = lane
            self._time = time

    def touch(self, new: Access, kept: Clock | None = None) -> list[Access]:
        """Record an access; return the earlier accesses that race with it.

        Ordered is what its stream knows to be over, and what `kept` says.

        An access is forgotten once a later one, which is ordered behind it, stands for it: whatever
        is ordered behind the later one is ordered behind both.
        """
        conflicts: list[Access] = []
        kept = {} if kept is None else kept
        self._used(new.lane, new.time)
        self.is_open |= new.reach > new.end
        page, last = new.start >> _PAGE, (new.end - 1) >> _PAGE
        for bits, level in self._wide.items():
            _pass(level, new.start >> bits, (new.end - 1) >> bits, new, kept, conflicts)
        if page != last:
            if self._narrow:
                _pass(self._narrow, page, last, new, kept, conflicts)
            self._add(new)
            return conflicts
        near = self._narrow.get(page)
        still = _passed(near, new, kept, conflicts) if near else []
        still.append(new)
        self._narrow[page] = still
        return conflicts

    def _add(self, new: Access) -> None:
        page = new.start >> _PAGE
        different = (page ^ ((new.end - 1) >> _PAGE)).bit_length()
        level = self._narrow
        if different:
            bits = _PAGE + -(-different // _STEP) * _STEP
            page = new.start >> bits
            level = self._wide.setdefault(bits, {})
        level.setdefault(page, []).append(new)

    def touch_again(  # noqa: PLR0917 -- as `Access`
        self,
        start: int,
        end: int,
        lane: Lane,
        time: int,
        operation: Any,
        write: bool,
        known: str,
        loose: bool = False,
    ) -> Place | None:
        """Record an access that repeats one of its stream; return `None` for any other access.

        The new access takes the place of the earlier one, and is ordered behind all accesses to
        these bytes. Most accesses of most programs are of this kind.
        """
        page = start >> _PAGE
        if self.freed is not None or page != (end - 1) >> _PAGE:
            return None
        if self._wide:
            for bits, level in self._wide.items():
                for old in level.get(start >> bits, _NONE):
                    if old.lane is not lane and old.start < end and start < old.end:
                        return None
        near = self._narrow.get(page, _NONE)
        sure = write and known != ASSUMED and not loose
        like: Access | None = None
        for old in near:
            if old.end <= start or end <= old.start:
                continue
            if old.lane is not lane or old.start != start or old.end != end:
                return None
            if old.write is write and old.known == known and old.loose is loose:
                like = old
            # What the new access stands for has to become stale, or is removed by `touch`.
            elif old.time == time if sure else not old.write or (write and not old.is_sure):
                return None
        if like is None:
            return None
        like.time = time
        like.operation = operation
        like.held_by = lane.held_by
        self._used(lane, time)
        return self, page, near, like

    @staticmethod
    def touch_places(
        places: list[Place | None], lane: Lane, time: int, operation: Any
    ) -> list[int]:
        """Record the accesses that repeat those at `places`; return the indices of all others.

        An access does not repeat one if its memory or its page was used in another way since.
        """
        others = []
        for index, place in enumerate(places):
            if place is not None:
                allocation, page, near, access = place
                if (
                    access.lane is lane
                    and allocation.last is lane
                    and allocation._narrow.get(page) is near
                    and allocation.freed is None
                ):
                    access.time = allocation._time = time
                    access.operation = operation
                    access.held_by = lane.held_by
                    continue
            others.append(index)
        return others

    def reached(self, new: Access, kept: Clock | None = None) -> list[Access]:
        """Return accesses that may race with a new access beyond the known bytes of both.

        One of the two is that of a kernel, which may use more than what its pointer points to.
        """
        kept = {} if kept is None else kept
        clock, lane, reach = new.lane.clock, new.lane, new.reach
        is_open = reach > new.end
        if not (is_open or self.is_open):
            return []
        if self.is_cut_up and is_open:
            # Two kernels of a framework are given two tensors: that says nothing.
            pages = (page for level in self._wide.values() for page in level.values())
            old_ones = [each for page in pages for each in page if each.reach == each.end]
        else:
            old_ones = self.accesses
        return [
            old
            for old in old_ones
            if old.lane is not lane
            and (new.write or old.write)
            and old.start < reach
            and new.start < old.reach
            and not (old.start < new.end and new.start < old.end)
            and clock.get(old.lane.id, 0) < old.time
            and not old.lane.is_finished
            and kept.get(old.lane.id, 0) < old.time
        ]

    def _levels(self) -> list[tuple[int, _Level]]:
        return [*self._wide.items(), (_PAGE, self._narrow)]

    def overlapping(self, start: int, end: int) -> list[Access]:
        """Return the accesses to a range that still count."""
        return [
            each
            for bits, level in self._levels()
            for page in _pages(level, start >> bits, (end - 1) >> bits)
            for each in level[page]
            if each.start < end and start < each.end and not each.is_stale
        ]

    @property
    def is_used(self) -> bool:
        """Return whether accesses are remembered."""
        return bool(self._narrow or self._wide)

    def adopt(self, elsewhere: Allocation) -> None:
        """Take over earlier accesses to the bytes of a new allocation, such as those of a graph."""
        for each in elsewhere.overlapping(self.start, self.end):
            if self.start <= each.start and each.end <= self.end:
                self.is_open |= each.reach > each.end
                self._lanes[each.lane] = max(each.time, self._lanes.get(each.lane, 0))
                self._add(each)

    @property
    def accesses(self) -> list[Access]:
        """The accesses that later accesses can race with."""
        return [
            each
            for _, level in self._levels()
            for page in level.values()
            for each in page
            if not each.is_stale
        ]

    def trim(self, is_known: Callable[[Access], bool]) -> int:
        """Forget accesses whose completion the host knows; return how many are left."""
        count = 0
        for _, level in self._levels():
            for page, near in list(level.items()):
                kept = [each for each in near if not is_known(each)]
                if not kept:
                    del level[page]
                elif len(kept) < len(near):  # else later accesses may repeat these
                    level[page] = kept
                count += len(kept)
        return count

    def clear(self) -> None:
        """Forget all accesses."""
        for _, level in self._levels():
            level.clear()


def _pages(level: _Level, first: int, last: int) -> list[int]:
    """Return those of the pages from `first` to `last` that have accesses."""
    if first == last:
        return [first] if first in level else []
    if last - first < len(level):
        return [page for page in range(first, last + 1) if page in level]
    return [page for page in level if first <= page <= last]


def _pass(  # noqa: PLR0917 -- called for each level
    level: _Level, first: int, last: int, new: Access, kept: Clock, conflicts: list[Access]
) -> None:
    """Call `_passed` for the pages of a level from `first` to `last`."""
    for page in _pages(level, first, last):
        still = _passed(level[page], new, kept, conflicts)
        if still:
            level[page] = still
        else:
            del level[page]


def _passed(
    accesses: list[Access],
    new: Access,
    kept: Clock,
    conflicts: list[Access],
) -> list[Access]:
    """Append accesses that race with `new` to `conflicts`; return those it does not supersede."""
    still: list[Access] = []
    start, end, write, mine, clock = new.start, new.end, new.write, new.lane, new.lane.clock
    loose = new.loose
    sure = write and new.known != ASSUMED and not loose
    # Hot loop of the analysis: it calls no function for each access.
    for old in accesses:
        lane = old.lane
        if old.end <= start or end <= old.start:
            if not lane.is_finished:
                still.append(old)
        elif old.over is not None and old.over.time > old.time:
            continue  # stale
        elif (
            lane is mine
            or clock.get(lane.id, 0) >= old.time
            or lane.is_finished
            or kept.get(lane.id, 0) >= old.time
        ):
            covered = start <= old.start and old.end <= end
            # The new access must be at least as certain as the old one.
            stands_for_it = (
                sure or not old.write or (write and (old.loose or old.known == ASSUMED))
            ) and (old.loose or not loose)
            if not (covered and stands_for_it):
                still.append(old)
                if lane is mine and old.start == start and old.end == end and old.is_sure:
                    new.over = old
        else:
            if write or old.write:
                conflicts.append(old)
            still.append(old)
    return still


class Memory:
    """The allocations that were seen, by address."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._allocations: list[Allocation] = []
        self.elsewhere = Allocation(0, 1 << 64, UNKNOWN)  # memory of unknown allocations
        # Freed by a stream, oldest first, with the number of the operation there.
        self.freeing: dict[Lane, deque[tuple[int, Allocation]]] = {}

    def find(self, address: int) -> Allocation | None:
        """Return the allocation that contains an address."""
        place = bisect_right(self._starts, address) - 1
        if place >= 0 and address < self._allocations[place].end:
            return self._allocations[place]
        return None

    def parts(self, start: int, end: int) -> Iterator[tuple[Allocation, int, int]]:
        """Split a range at the boundaries of allocations."""
        while start < end:
            place = bisect_right(self._starts, start) - 1
            found = self._allocations[place] if place >= 0 else None
            if found is None or found.end <= start:
                found = self.elsewhere
                after = self._starts[place + 1] if place + 1 < len(self._starts) else end
            else:
                after = found.end
            yield found, start, min(end, after)
            start = after

    def add(self, allocation: Allocation) -> None:
        """Add an allocation, which replaces any other at its addresses."""
        first = bisect_right(self._starts, allocation.start) - 1
        if first < 0 or self._allocations[first].end <= allocation.start:
            first += 1
        last = first
        while last < len(self._starts) and self._starts[last] < allocation.end:
            last += 1
        for each in self._allocations[first:last]:
            each.clear()
        self._starts[first:last] = [allocation.start]
        self._allocations[first:last] = [allocation]
        if first == last and self.elsewhere.is_used:
            allocation.adopt(self.elsewhere)

    def drop(self, allocation: Allocation) -> None:
        """Remove an allocation."""
        place = bisect_right(self._starts, allocation.start) - 1
        if place >= 0 and self._allocations[place] is allocation:
            del self._starts[place], self._allocations[place]
            allocation.clear()  # no launch repeats accesses to it

    def drop_freed(self, kept: Clock) -> None:
        """Forget memory once the host knows the end of the operation that freed it.

        The addresses may belong to anything from then on, for example to an array of NumPy.
        """
        for lane, freed in list(self.freeing.items()):
            while freed and (lane.is_finished or freed[0][0] <= kept.get(lane.id, 0)):
                _, allocation = freed.popleft()
                if allocation.freed is not None:  # else the call has failed
                    self.drop(allocation)
            if not freed:
                del self.freeing[lane]

    def within(self, start: int, end: int) -> list[Allocation]:
        """Return the allocations that overlap a range."""
        first = bisect_right(self._starts, start) - 1
        if first < 0 or self._allocations[first].end <= start:
            first += 1
        return self._allocations[first : bisect_left(self._starts, end)]

    def forget(self, device: int | None) -> None:
        """Forget the memory of a device, or all."""
        kept = []
        for each in self._allocations:
            if device is None or each.device == device:
                each.clear()
            else:
                kept.append(each)
        self._allocations = kept
        self._starts = [each.start for each in kept]
        self.elsewhere.clear()

    def __iter__(self) -> Iterator[Allocation]:
        return iter(self._allocations)

    def trim(self, is_known: Callable[[Access], bool]) -> int:
        """Forget accesses whose completion the host knows; return how many are left."""
        return sum(each.trim(is_known) for each in (*self._allocations, self.elsewhere))


# -- what kernels do ----------------------------------------------------------------------------

READS, WRITES = "reads", "writes"

TOGETHER = "together"  # bytes changed to which other parameters point as well

Learned = dict[int, str]  # what a kernel does, by the offset of the parameter

PAIR = struct.Struct("<QQ")  # the offset of a parameter, and the address that it points to


class Guess(NamedTuple):
    """The kernel parameters that point to an address, with the learned accesses of each."""

    learned: Learned
    offsets: tuple[int, ...]

    def only_reads(self, constant: frozenset[int]) -> bool:
        """Return whether the types of all parameters say that the kernel only reads there."""
        return constant.issuperset(self.offsets)

    @property
    def writes(self) -> bool | None:
        """`True` if the kernel writes there, `False` if not, `None` while unknown."""
        found = {self.learned.get(offset) for offset in self.offsets}
        if WRITES in found or (TOGETHER in found and len(self.offsets) > 1):
            return True
        return False if found == {READS} else None


class Guesses(NamedTuple):
    """The pointers of a launch, with the learned accesses of its kernel's parameters."""

    learned: Learned
    pointers: bytes  # pairs of offset and address

    def at(self, address: int) -> Guess:
        """Return the parameters that point to an address."""
        pairs = PAIR.iter_unpack(self.pointers)
        return Guess(self.learned, tuple(offset for offset, where in pairs if where == address))


# -- CUDA arrays: opaque memory for textures and surfaces ------------------------------------------


class Arrays:
    """CUDA arrays, which have no addresses: each gets a place behind all addresses."""

    SIZE = 1 << 40

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._bases: dict[int, int] = {}
        self._layouts: dict[int, tuple[int, int]] = {}  # bytes of a row, rows of a layer
        self._next = 1 << 62

    def made(self, array: int, row: int, rows: int) -> None:
        """Add an array of a known shape."""
        self.dropped(array)
        self._layouts[array] = (row, rows)

    def dropped(self, array: int) -> None:
        """Forget an array."""
        self._layouts.pop(array, None)
        base = self._bases.pop(array, None)
        found = None if base is None else self._memory.find(base)
        if found is not None:
            self._memory.drop(found)

    def base(self, array: int) -> int:
        """Return the place of an array."""
        found = self._bases.get(array)
        if found is None:
            found = self._bases[array] = self._next
            self._next += self.SIZE
            self._memory.add(Allocation(found, found + self.SIZE, DEVICE))
        return found

    def layout(self, array: int) -> tuple[int, int, int]:
        """Return the place of an array, the bytes of its rows, and the rows of its layers."""
        row, rows = self._layouts.get(array, (0, 0))
        return self.base(array), row, rows
