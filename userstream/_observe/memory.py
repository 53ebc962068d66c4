"""Who touched which bytes last: the allocations, and the accesses to each that still count."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from userstream._observe.clocks import Lane

PINNED = 1
DEVICE = 2
MANAGED = 3
UNKNOWN = 0

KINDS = {PINNED: "pinned", DEVICE: "device", MANAGED: "managed", UNKNOWN: "unknown"}


EXACT = "exact"
DECLARED = "declared"
LEARNED = "learned"
ASSUMED = "assumed"

_PAGE = 12  # bits: accesses within a page are found by it, wider ones are looked through


class Access:
    """Bytes that an operation reads or writes, or may."""

    __slots__ = ("end", "held_by", "known", "lane", "loose", "operation", "start", "time", "write")

    def __init__(
        self,
        start: int,
        end: int,
        lane: Lane,
        time: int,
        operation: Any,
        *,
        write: bool,
        known: str = EXACT,
        loose: bool = False,
    ) -> None:
        self.start = start
        self.end = end
        self.lane = lane
        self.time = time
        self.operation = operation
        self.write = write  # so too if it is only assumed
        self.known = known
        self.loose = loose  # not all of these bytes are touched
        self.held_by = lane.held_by


class Allocation:
    """Memory that was allocated at once: one generation of its addresses."""

    __slots__ = ("_narrow", "_wide", "device", "end", "freed", "kind", "operation", "pool", "start")

    def __init__(
        self, start: int, end: int, kind: int, device: int | None = None, operation: Any = None
    ) -> None:
        self.start = start
        self.end = end
        self.kind = kind
        self.device = device
        self.operation = operation  # that allocated it, if that was seen
        self.freed: Any = None  # the operation that freed it
        self.pool = 0  # if it was asked for memory of one
        self._narrow: dict[int, list[Access]] = {}  # by their page
        self._wide: list[Access] = []

    def touch(self, new: Access, is_ordered: Callable[[Access, Access], bool]) -> list[Access]:
        """Note an access; return the earlier ones that it is in conflict with, and not ordered.

        An access is forgotten once a later one, which is ordered behind it, stands for it: whatever
        is ordered behind the later one is ordered behind both.
        """
        conflicts: list[Access] = []
        page = new.start >> _PAGE
        if self._wide:
            self._wide = _passed(self._wide, new, is_ordered, conflicts)
        if page == (new.end - 1) >> _PAGE:
            near = self._narrow.get(page)
            kept = _passed(near, new, is_ordered, conflicts) if near else []
            kept.append(new)
            self._narrow[page] = kept
            return conflicts
        for each in self._pages(page, (new.end - 1) >> _PAGE):
            self._narrow[each] = _passed(self._narrow[each], new, is_ordered, conflicts)
            if not self._narrow[each]:
                del self._narrow[each]
        self._wide.append(new)
        return conflicts

    def _pages(self, first: int, last: int) -> list[int]:
        if last - first < len(self._narrow):
            return [page for page in range(first, last + 1) if page in self._narrow]
        return [page for page in self._narrow if first <= page <= last]

    @property
    def accesses(self) -> list[Access]:
        """All that still count."""
        return [*self._wide, *(each for near in self._narrow.values() for each in near)]

    def trim(self, is_known: Callable[[Access], bool]) -> None:
        """Forget the accesses that all that comes is ordered behind."""
        self._wide = [each for each in self._wide if not is_known(each)]
        for page, near in list(self._narrow.items()):
            kept = [each for each in near if not is_known(each)]
            if kept:
                self._narrow[page] = kept
            else:
                del self._narrow[page]

    def clear(self) -> None:
        """Forget all accesses."""
        self._wide.clear()
        self._narrow.clear()


def _passed(
    accesses: list[Access],
    new: Access,
    is_ordered: Callable[[Access, Access], bool],
    conflicts: list[Access],
) -> list[Access]:
    """Note those that a new one is in conflict with; return those that still count behind it."""
    kept: list[Access] = []
    sure = new.write and new.known != ASSUMED and not new.loose
    for old in accesses:
        if old.end <= new.start or new.end <= old.start:
            if not old.lane.gone:
                kept.append(old)
            continue
        if not is_ordered(old, new):
            if old.write or new.write:
                conflicts.append(old)
            kept.append(old)
        else:
            covered = new.start <= old.start and old.end <= new.end
            stands_for_it = sure or not old.write or (new.write and old.known == ASSUMED)
            if not (covered and stands_for_it):
                kept.append(old)
    return kept


class Memory:
    """All allocations that were seen, by address."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._allocations: list[Allocation] = []
        self.elsewhere = Allocation(0, 1 << 64, UNKNOWN)  # what nobody told of

    def find(self, address: int) -> Allocation | None:
        """Return the allocation that an address lies in."""
        place = bisect_right(self._starts, address) - 1
        if place >= 0 and address < self._allocations[place].end:
            return self._allocations[place]
        return None

    def parts(self, start: int, end: int) -> Iterator[tuple[Allocation, int, int]]:
        """Cut a range into what lies in one allocation each."""
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
        """Put an allocation in the place of what was at its addresses."""
        first = bisect_right(self._starts, allocation.start) - 1
        if first < 0 or self._allocations[first].end <= allocation.start:
            first += 1
        last = first
        while last < len(self._starts) and self._starts[last] < allocation.end:
            last += 1
        self._starts[first:last] = [allocation.start]
        self._allocations[first:last] = [allocation]

    def drop(self, allocation: Allocation) -> None:
        """Forget what is no memory any more."""
        place = bisect_right(self._starts, allocation.start) - 1
        if place >= 0 and self._allocations[place] is allocation:
            del self._starts[place], self._allocations[place]

    def within(self, start: int, end: int) -> list[Allocation]:
        """Return the allocations of which a range has bytes."""
        first = bisect_right(self._starts, start) - 1
        if first < 0 or self._allocations[first].end <= start:
            first += 1
        return self._allocations[first : bisect_left(self._starts, end)]

    def forget(self, device: int | None) -> None:
        """Forget the memory of a device, or all."""
        kept = [each for each in self._allocations if device is not None and each.device != device]
        self._allocations = kept
        self._starts = [each.start for each in kept]
        self.elsewhere.clear()

    def __iter__(self) -> Iterator[Allocation]:
        return iter(self._allocations)

    def trim(self, is_known: Callable[[Access], bool]) -> None:
        """Forget the accesses that the host knows of: all that comes is ordered behind them."""
        for allocation in (*self._allocations, self.elsewhere):
            allocation.trim(is_known)
