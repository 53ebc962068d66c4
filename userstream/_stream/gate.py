"""Gates: words of pinned memory that hold a stream until they are written.

The pages are never freed, because freeing waits for the device: a stream that is held then never
goes on, and the process hangs. They belong to primary contexts, which are not destroyed.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict, deque
from typing import Any

from userstream import _driver

_PAGE = 4096
_WIDTH = 4

# By device. Deques, because their ends are safe to use without a lock.
_free: defaultdict[int, deque[int]] = defaultdict(deque)


class Gate:
    """A word that a stream waits for: at `address`, until it is `value` or later."""

    __slots__ = ("_device", "_released", "address", "value")

    def __init__(self, device: int) -> None:
        self._device = device
        self._released = False
        self.address = _take(device)
        # One more than the use before, whose waits a later value satisfies as well.
        self.value = (ctypes.c_uint32.from_address(self.address).value + 1) & 0xFFFFFFFF

    def release(self) -> None:
        """Let the stream continue; the gate can be reused at once."""
        if not self._released:
            ctypes.c_uint32.from_address(self.address).value = self.value
            self._released = True
            _free[self._device].append(self.address)


def _take(device: int) -> int:
    free = _free[device]
    try:
        return free.pop()
    except IndexError:
        made: list[tuple[Any, ...]] = []  # of whatever content: a gate counts on from there
        try:
            _driver.memory.allocate_pinned(_driver.contexts.primary_context(device), _PAGE, made)
        finally:  # a signal may have come
            for _, page in made:
                free.extend(range(int(page), int(page) + _PAGE, _WIDTH))
        return free.pop()
