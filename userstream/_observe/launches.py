"""Kernels: what their parameters point to, and whether they write there."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from userstream._observe.kernel_names import readable
from userstream._observe.memory import ASSUMED, LEARNED

if TYPE_CHECKING:
    from userstream._observe.records import Call
    from userstream._observe.world import World

_WORD = struct.Struct("<Q")


class Launches:
    """Applies launches of kernels."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._kernels: dict[int, str] = {}  # their names
        self._writes: dict[tuple[int, int], bool] = {}  # by kernel and offset of the parameter

    def seen_kernel(self, call: Call) -> None:
        (kernel,) = call.words
        self._kernels[kernel] = readable(call.fetched[0].decode(errors="replace"))

    def learned(self, call: Call) -> None:
        kernel, offset, wrote, final = call.words
        if wrote or final:
            self._writes[kernel, offset] = bool(wrote)

    def launch(self, call: Call) -> None:
        kernel = call.words[call.function.roles["kernel"]]
        if call.function.stream is None:
            (handle,) = _WORD.unpack_from(call.fetched[1], 32)
            lane = self.world.clocks.lane(handle, call.context, call.thread)
        else:
            lane = self.world.lane(call)
        operation, time = self.world.begin(call, lane, self._kernels.get(kernel))
        pairs = struct.unpack(f"<{len(call.fetched[0]) // 8}Q", call.fetched[0])
        for offset, address in zip(pairs[::2], pairs[1::2], strict=True):
            wrote = self._writes.get((kernel, offset))
            write, known = self.world.declarations.judge(
                operation, address, wrote is not False, ASSUMED if wrote is None else LEARNED
            )
            ranges = [(address, address + 1)]
            self.world.touch(lane, time, operation, ranges, write=write, known=known)
