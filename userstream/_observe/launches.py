"""Kernels: what their parameters point to, and whether they write there."""

from __future__ import annotations

import struct
from collections import defaultdict
from typing import TYPE_CHECKING

from userstream._observe.kernel_names import readable
from userstream._observe.memory import ASSUMED, LEARNED

if TYPE_CHECKING:
    from userstream._observe.records import Call
    from userstream._observe.world import World

_WORD = struct.Struct("<Q")
_PAIR = struct.Struct("<QQ")


class Launches:
    """Applies launches of kernels."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._kernels: dict[int, str] = {}  # their names
        # By kernel, and by offset of the parameter.
        self._writes: defaultdict[int, dict[int, bool]] = defaultdict(dict)

    def seen_kernel(self, call: Call) -> None:
        (kernel,) = call.words
        self._kernels[kernel] = readable(call.fetched[0].decode(errors="replace"))

    def learned(self, call: Call) -> None:
        kernel, offset, wrote, final = call.words
        if wrote or final:
            self._writes[kernel][offset] = bool(wrote)

    def launch(self, call: Call) -> None:
        kernel = call.words[call.function.roles["kernel"]]
        if call.function.stream is None:
            (handle,) = _WORD.unpack_from(call.fetched[1], 32)
            lane = self.world.clocks.lane(handle, call.context, call.thread)
        else:
            lane = self.world.lane(call)
        operation, time = self.world.begin(call, lane, self._kernels.get(kernel))
        writes, declarations = self._writes[kernel], self.world.declarations
        touches = []
        for offset, address in _PAIR.iter_unpack(call.fetched[0]):
            wrote = writes.get(offset)
            write, known = wrote is not False, ASSUMED if wrote is None else LEARNED
            if declarations.count:
                write, known = declarations.judge(operation, address, write, known)
            touches.append((address, address + 1, write, known))
        self.world.touch_each(lane, time, operation, touches)
