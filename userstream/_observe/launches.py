"""Kernels: what their parameters point to, and whether they write there."""

from __future__ import annotations

import struct
from collections import defaultdict
from typing import TYPE_CHECKING

from userstream._observe.guesses import PAIR, READS, TOGETHER, WRITES, Guesses, Learned
from userstream._observe.kernel_names import readable
from userstream._observe.memory import ASSUMED, LEARNED

if TYPE_CHECKING:
    from userstream._observe.memory import Span
    from userstream._observe.records import Call
    from userstream._observe.world import World

    _Touched = tuple[tuple[Span, ...], Guesses | None]

_WORD = struct.Struct("<Q")
_REMEMBERED = 1024  # sets of parameters of a kernel


class Launches:
    """Applies launches of kernels."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._kernels: dict[int, str] = {}  # their names
        self._writes: defaultdict[int, Learned] = defaultdict(dict)  # by kernel
        # By kernel, and by its parameters: programs launch the same again and again.
        self._touches: defaultdict[int, dict[bytes, _Touched]] = defaultdict(dict)

    def seen_kernel(self, call: Call) -> None:
        (kernel,) = call.words
        name = readable(call.fetched[0].decode(errors="replace"))
        if self._kernels.get(kernel, name) != name:  # the handle is another one's by now
            self._writes.pop(kernel, None)
            self._touches.pop(kernel, None)
        self._kernels[kernel] = name

    def learned(self, call: Call) -> None:
        kernel, offset, wrote, final = call.words
        learned = self._writes[kernel]
        before = learned.get(offset)
        if wrote == 1:
            learned[offset] = WRITES
        elif wrote and before != WRITES:
            learned[offset] = TOGETHER
        elif final and not wrote:
            learned[offset] = READS
        if learned.get(offset) != before:
            self._touches[kernel].clear()

    def launch(self, call: Call) -> None:
        kernel = call.words[call.function.roles["kernel"]]
        if call.function.stream is None:
            (handle,) = _WORD.unpack_from(call.fetched[1], 32)
            lane = self.world.clocks.lane(handle, call.context, call.thread)
        else:
            lane = self.world.lane(call)
        operation, time = self.world.begin(call, lane, self._kernels.get(kernel))
        pointers = call.fetched[0]
        touched = self._touches[kernel].get(pointers)
        if touched is None:
            touched = self._touched(kernel, pointers)
        touches, operation.guesses = touched
        declarations = self.world.declarations
        if declarations.count:
            touches = tuple(
                (start, end, *declarations.judge(operation, start, write, known))
                for start, end, write, known in touches
            )
        self.world.touch_each(lane, time, operation, touches)

    def _touched(self, kernel: int, pointers: bytes) -> _Touched:
        guesses, known = Guesses(self._writes[kernel], pointers), self._touches[kernel]
        touches = []
        for address in dict.fromkeys(address for _, address in PAIR.iter_unpack(pointers)):
            writes = guesses.at(address).writes
            how = ASSUMED if writes is None else LEARNED
            touches.append((address, address + 1, writes is not False, how))
        if len(known) == _REMEMBERED:
            known.clear()
        is_guessed = any(how == ASSUMED for *_, how in touches)
        found = tuple(touches), guesses if is_guessed else None
        known[pointers] = found
        return found
