"""Contexts that come and go, and the loading of modules."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from userstream._observe.records import Call
    from userstream._observe.world import World

_WORD = struct.Struct("<Q")


class Contexts:
    """Applies what is done with contexts."""

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
        """Only how long it took counts."""
