"""Pinned memory: what the host does with it while copies are under way."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from userstream._observe.memory import PINNED
from userstream._observe.races import Done, Place, Side

if TYPE_CHECKING:
    from userstream._observe.memory import Access
    from userstream._observe.records import Call
    from userstream._observe.world import World

_REMEMBERED = 4096  # copies whose end the host does not know


class Pinned:
    """Remembers copies from and to pinned memory until the host knows that they are over."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._sources: OrderedDict[int, Access] = OrderedDict()  # by the number of the record
        self._results: OrderedDict[int, Access] = OrderedDict()

    def remember(self, number: int, access: Access) -> None:
        where = self._results if access.write else self._sources
        where[number] = access
        if len(where) > _REMEMBERED:
            where.popitem(last=False)

    def source_changed(self, call: Call) -> None:
        access = self._sources.pop(call.words[0], None)
        if access is None or self.world.host_knew(access):
            return
        found = self.world.memory.find(access.start) or self.world.memory.elsewhere
        if any(
            other.write and other.start < access.end and access.start < other.end
            for other in found.accesses
        ):
            return  # the GPU wrote there
        host = Done("a write of the host", call.stack, call.thread, None)
        self.world.finds.race(
            "host overwrote the source of a copy",
            Place(access.start, access.end, found.kind, self.world.allocated_at(found)),
            Side(access.operation, "read"),
            Side(host, "write"),
            possible=self.world.clocks.maybe.get(access.lane.id, 0) >= access.time,
        )

    def finish(self) -> None:
        """Tell of what nothing was heard of until the end."""
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
