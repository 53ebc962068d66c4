"""CUDA arrays: opaque memory for textures and surfaces."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .memory import DEVICE, Allocation

if TYPE_CHECKING:
    from .memory import Memory


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
