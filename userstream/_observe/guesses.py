"""Whether kernels write what their parameters point to, as far as that is learned by now."""

from __future__ import annotations

import struct
from typing import NamedTuple

READS, WRITES = "reads", "writes"
TOGETHER = "together"  # something was written where other parameters pointed as well

Learned = dict[int, str]  # of a kernel: what it does there, by the offset of the parameter

PAIR = struct.Struct("<QQ")  # of a parameter: its offset, and where it points to


class Guess(NamedTuple):
    """Parameters through which an operation may write some bytes, and what is learned of them."""

    learned: Learned
    offsets: tuple[int, ...]

    @property
    def writes(self) -> bool | None:
        """Whether it does; None while that is not known."""
        found = {self.learned.get(offset) for offset in self.offsets}
        if WRITES in found or (TOGETHER in found and len(self.offsets) > 1):
            return True
        return False if found == {READS} else None


class Guesses(NamedTuple):
    """What is guessed of a launch, as long as what was learned of its kernel is no other one's."""

    learned: Learned
    pointers: bytes  # of the launch: the offset and the address of each

    def at(self, address: int) -> Guess:
        """Return the parameters that point to an address."""
        pairs = PAIR.iter_unpack(self.pointers)
        return Guess(self.learned, tuple(offset for offset, where in pairs if where == address))
