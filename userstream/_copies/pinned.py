"""A bounded cache of page-locked host memory, on which arrays are handed out.

Allocating such memory takes long, so it is used again: a block is free as soon as the last array
on it is gone, in whatever thread, also in the middle of a garbage collection. Hence that takes no
lock and runs no Python code, see `_driver.pure.lend`.

Blocks are given back by `trim`, or to make room for a larger one; in a thread of its own, so that
nothing waits for it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections import deque
from typing import TYPE_CHECKING

from userstream import _driver, _locks, _process
from userstream._engine import holding

if TYPE_CHECKING:
    from userstream._driver.host_pools import HostMemory
    from userstream._driver.pure import Lease

LIMIT_VARIABLE = "USERSTREAM_PINNED_LIMIT"
_DEFAULT_LIMIT = 4 << 30
_DEFAULT_SHARE = 8  # of the memory of the machine
_PAGE = 4096
_FAR_TOO_LARGE = 4  # times the size that is needed

# Free blocks by size and address. The values say nothing.
_free: dict[int, dict[int, object]] = {}
_blocks: dict[int, HostMemory] = {}  # all that there are, by address
_total = 0  # bytes, free or not
_accounts = _locks.Lock()  # of the total; nothing else is done under it
_limit: int | None = None


def limit() -> int:
    """Return how many bytes may be page-locked, those under the arrays of users included."""
    return _initial_limit() if _limit is None else _limit


def set_limit(nbytes: int) -> None:
    """Bound the cache from now on; with 0 nothing is handed out."""
    global _limit  # noqa: PLW0603 -- one cache for the process
    if nbytes < 0:
        raise ValueError(f"the limit of pinned memory must be at least 0 bytes, not {nbytes}")
    _limit = nbytes
    if _total > nbytes:
        trim()


def _initial_limit() -> int:
    """Return what the environment says, or an eighth of the memory, at most 4 GiB."""
    given = os.environ.get(LIMIT_VARIABLE, "")
    if not given:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        set_limit(min(_DEFAULT_LIMIT, memory // _DEFAULT_SHARE))
    elif given.isdecimal():
        set_limit(int(given))
    else:
        raise ValueError(f"{LIMIT_VARIABLE} must be a number of bytes, not {given!r}")
    return limit()


def take(nbytes: int, device: int) -> Lease | None:
    """Return page-locked memory of at least so many bytes, or `None` if the bound forbids it.

    All devices may use it. A new block is on the host's node nearest to `device`.
    """
    return take_block(rounded(nbytes), device)


def take_block(size: int, device: int) -> Lease | None:
    """As `take`, for a size that is `rounded`."""
    may_free = holding.queues or holding.orphans or holding.left
    if _limit is not None and _total <= _limit and not may_free:
        blocks = _free.get(size)
        lease = _driver.fused.lend(blocks, size) if blocks else None
        if lease is not None:  # nearly always
            return lease
    lease = _take_within_bound(size, device)
    if lease is None:
        _make_room(size)  # for the next time
    return lease


def take_or_raise(nbytes: int, device: int) -> Lease:
    """As `take`, but raise `MemoryError` where the bound forbids it."""
    size = rounded(nbytes)
    lease = _take_within_bound(size, device)
    if lease is None and _make_room(size):  # which counts until it is freed
        lease = _take(size, device, None, reuse=False)
    if lease is None:
        raise MemoryError(
            f"{nbytes} bytes of page-locked memory are more than there is left: arrays use "
            f"{_total - _free_bytes()} bytes of it, and the limit is {limit()}; release some of "
            f"these, or raise the limit with UserStream.set_pinned_limit or {LIMIT_VARIABLE}"
        )
    return lease


def _take_within_bound(size: int, device: int) -> Lease | None:
    if holding.queues or holding.orphans or holding.left:
        holding.sweep()  # some may be free by now
    most = limit() if _limit is None else _limit
    # The limit may be new.
    lease = _take(size, device, most, reuse=_total <= most)
    if lease is not None:
        return lease
    for larger in sorted(_free):
        if size < larger <= size * _FAR_TOO_LARGE:
            lease = _take(larger, device, 0)
            if lease is not None:
                return lease
    return None


def take_always(nbytes: int, device: int) -> Lease:
    """Return page-locked memory, past the bound too: for what is few and small."""
    lease = _take(rounded(nbytes), device, None)
    assert lease is not None
    return lease


def _take(size: int, device: int, most: int | None, *, reuse: bool = True) -> Lease | None:
    """Lend a free block of exactly that size, the one used last, or a new one up to a total."""
    lease = _reused(size) if reuse else None
    while lease is None:  # another thread may take what is made here
        claim = _Claim(size)
        try:
            if not claim.reserve(most):
                return None
            claim.allocate(device)
            claim.put()
        except BaseException:  # else what it has reserved would count towards the limit for good
            claim.give_up()
            raise
        lease = _reused(size)
    return lease


def _reused(size: int) -> Lease | None:
    """Lend the free block of exactly that size which was used last, if there is one."""
    blocks = _free.get(size)
    return _driver.fused.lend(blocks, size) if blocks else None


class _Claim:
    """A new block that is on its way from the driver to the free ones.

    What it has got, it has got in one call of C: whatever signal comes, `give_up` puts it back.
    """

    __slots__ = ("_made", "_memory", "_reserved", "_size")

    def __init__(self, size: int) -> None:
        self._size = size
        self._made: dict[int, object] = {}  # its address
        self._reserved = False
        self._memory: HostMemory | None = None

    def reserve(self, most: int | None) -> bool:
        global _total  # noqa: PLW0603
        with _accounts:
            if most is not None and _total + self._size > most:
                return False
            _total += self._size
            self._reserved = True
        return True

    def allocate(self, device: int) -> None:
        self._memory = _driver.host_pools.HostMemory(device)
        self._memory.allocate(self._size)
        self._settle()

    def put(self) -> None:
        """Add the block to the free ones, but once: somebody else may have taken it by then."""
        _blocks_of(self._size).update(map(dict.popitem, [self._made] * len(self._made)))

    def give_up(self) -> None:
        self._settle()
        if self._reserved:
            _unreserve(self._size)
        self.put()

    def _settle(self) -> None:
        """Take up what was allocated, if it was."""
        memory = self._memory
        address = None if memory is None else memory.address
        if memory is not None and address is not None:
            _blocks[address] = memory
            self._made[address] = None
            self._memory, self._reserved = None, False


def _blocks_of(size: int) -> dict[int, object]:
    """Return the free blocks of a size."""
    blocks = _free.get(size)
    return _free.setdefault(size, {}) if blocks is None else blocks


@functools.lru_cache(maxsize=256)
def rounded(nbytes: int) -> int:
    """Round up to a size that blocks have: eight from a power of two to the next."""
    step = max(_PAGE, 1 << max(0, (nbytes - 1).bit_length() - 4))
    return -(-nbytes // step) * step


def _unreserve(size: int) -> None:
    global _total  # noqa: PLW0603
    with _accounts:
        _total -= size


def _make_room(size: int) -> bool:
    """Free blocks, the smallest first, if that can make room for one of that size.

    Tells whether some are on their way.
    """
    missing = size + _total - limit()
    return _free_bytes() >= missing and _give_back(missing) is not None


def _free_bytes() -> int:
    return sum(each * len(blocks) for each, blocks in list(_free.items()))


def trim() -> threading.Thread | None:
    """Free all the blocks that are free; return the thread that does it, if there are any."""
    holding.sweep()
    return _give_back(None)


def _give_back(missing: int | None) -> threading.Thread | None:
    """Free blocks of at least so many bytes, or all, the smallest first, in a thread.

    It takes long: where the driver has no pools of host memory, until the devices have no work.
    """
    found: deque[tuple[int, tuple[int, object]]] = deque()  # size, and address
    thread = threading.Thread(target=_release, args=(found,), name="userstream-trim", daemon=True)
    try:
        for size, blocks in sorted(_free.items(), key=lambda each: each[0]):
            with contextlib.suppress(KeyError):  # there are none left
                while missing is None or missing > 0:
                    found.extend(zip((size,), map(dict.popitem, (blocks,)), strict=False))
                    missing = None if missing is None else missing - size
        if not found:
            return None
        thread.start()
    except BaseException as error:  # too many threads, Python is exiting, or a signal
        # Each goes back or is freed, also if the thread is on its way.
        with contextlib.suppress(IndexError):
            while True:
                size, (address, _) = found.popleft()
                _blocks_of(size)[address] = None
        if not isinstance(error, RuntimeError):
            raise
        return None
    return thread


def _release(blocks: deque[tuple[int, tuple[int, object]]]) -> None:
    while blocks:
        # What fails may have been freed or not: it is not used again, and counts.
        with contextlib.suppress(Exception):
            size, (address, _) = blocks.popleft()
            _blocks.pop(address).free()
            _unreserve(size)


def _forget() -> None:
    global _accounts, _total  # noqa: PLW0603
    # In a forked child nothing is freed, and a thread that is not here may have held it.
    _accounts = _locks.Lock()
    _total = 0
    _free.clear()
    _blocks.clear()


_process.after_fork(_forget)
