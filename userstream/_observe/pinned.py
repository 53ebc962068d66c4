"""Pinned memory: changes by the host while copies are in flight."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from userstream._observe.memory import PINNED
from userstream._observe.races import Done, Place, Side

if TYPE_CHECKING:
    from userstream._observe.memory import Access
    from userstream._observe.records import Call
    from userstream._observe.world import World

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
        host = Done("a write of the host", call.stack, call.thread, None)
        told = self.world.clocks.maybe.get(access.lane.id, 0) >= access.time
        self.world.finds.race(
            "host overwrote the source of a copy",
            Place(access.start, access.end, found.kind, self.world.allocated_at(found)),
            Side(access.operation, "read"),
            Side(host, "write"),
            possible=told or source.unseen_write,
        )

    def finish(self) -> None:
        """Report results of copies whose end the host never learned."""
        for access in self._results.values():
            if not self.world.host_knew(access):
                host = Side(Done("a read of the host", -1, access.operation.thread, None), "read")
                self.world.finds.race(
                    "host read before the copy",
                    Place(access.start, access.end, PINNED),
                    Side(access.operation, "write"),
                    host,
                    possible=True,
                )
        self._results.clear()
