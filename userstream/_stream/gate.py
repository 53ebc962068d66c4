"""Gates: words of pinned memory that hold a stream until they are written.

The pages are never freed, because freeing waits for the device: a stream that is held then never
continues, and the process hangs. They belong to primary contexts, which are not destroyed.
"""

from __future__ import annotations

import ctypes
import itertools
from collections import deque
from typing import Any

from userstream import _driver, _process

_PAGE = 4096
_WIDTH = 4
_WORDS = _PAGE // _WIDTH


class _Pool:
    """The words of a device, by number. Nothing here needs a lock."""

    __slots__ = ("free", "made", "unused")

    def __init__(self) -> None:
        self.free: deque[int] = deque()  # again
        self.unused = itertools.count()  # the numbers of words that were never used
        self.made: list[tuple[Any, ...]] = []  # by the driver: pages

    def address(self, number: int, device: int) -> int:
        """Return the address of a word; allocate its page if need be."""
        page, word = divmod(number, _WORDS)
        while True:
            pages = [made for _, made in self.made if made is not None]
            if page < len(pages):  # of whatever content: a gate counts on from there
                return int(pages[page]) + word * _WIDTH
            context = _driver.contexts.primary_context(device)
            _driver.copies.allocate_pinned(context, _PAGE, self.made)


_pools: dict[int, _Pool] = {}  # by device


class Gate:
    """A word that a stream waits for: at `address`, until it is `value` or later.

    It has a word once `take` is called. Whatever signal comes in there, `release` gives that back.
    """

    __slots__ = ("_device", "_taken", "address", "value")

    def __init__(self, device: int) -> None:
        self._device = device
        self._taken: list[int] = []  # the number of the word
        self.address = 0
        self.value = 0

    def take(self) -> None:
        """Take a word."""
        device = self._device
        pool = _pools.get(device) or _pools.setdefault(device, _Pool())
        # One call of C: no signal comes between the word's leaving the pool and its being here.
        try:
            self._taken.extend(itertools.islice(iter(pool.free.pop, None), 1))
        except IndexError:
            self._taken.extend(itertools.islice(pool.unused, 1))
        address = pool.address(self._taken[0], device)
        # One more than the use before, whose waits a later value satisfies as well. A smaller one
        # might hold those forever, so the address comes last.
        self.value = (ctypes.c_uint32.from_address(address).value + 1) & 0xFFFFFFFF
        self.address = address

    def release(self) -> None:
        """Let the stream continue; the word can be used again at once."""
        if self._taken:
            if self.address:
                _process.fence()  # the stream reads what was written until now
                ctypes.c_uint32.from_address(self.address).value = self.value
            _pools[self._device].free.append(self._taken.pop())
