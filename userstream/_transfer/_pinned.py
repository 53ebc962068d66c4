"""A bounded cache of page-locked host memory, on which arrays are handed out.

Allocating such memory takes long, so it is used again: a block is free as soon as the last array
on it is gone, in whatever thread, also in the middle of a garbage collection. Hence that takes no
lock and runs no Python code, see `_lend`.

Blocks are given back by `trim`, or to make room for a larger one; in a thread of its own, so that
nobody waits for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import weakref
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from userstream import _driver, _holding, _process

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Lease: TypeAlias = "ctypes.Array[ctypes.c_char]"  # what arrays are built on

LIMIT_VARIABLE = "USERSTREAM_PINNED_LIMIT"
_DEFAULT_LIMIT = 4 << 30
_DEFAULT_SHARE = 8  # of the memory of the machine
_PAGE = 4096
_FAR_TOO_LARGE = 4  # times the size that is needed

# Free blocks by size and address. The values say nothing: a method of a dict written in C fills it.
_free: dict[int, dict[int, object]] = {}
_leases: dict[int, weakref.ref[Lease]] = {}  # by address, as a weak reference has to live to tell
_frees: dict[int, Callable[[], None]] = {}  # by address: gives the block back
_total = 0  # bytes, free or not
_accounts = threading.Lock()  # of the total; nothing else is done under it
_limit: int | None = None


def limit() -> int:
    """Return how many bytes may be page-locked, those under the arrays of users included."""
    return _initial_limit() if _limit is None else _limit


def set_limit(nbytes: int) -> None:
    """Bound the cache from now on; with 0 nothing is handed out."""
    global _limit  # noqa: PLW0603 -- one cache for the process
    if nbytes < 0:
        raise ValueError(f"the limit of pinned memory is at least 0 bytes, not {nbytes}")
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
    _holding.sweep()  # some may be free by now
    size = _rounded(nbytes)
    address = _pop(size) if _total <= limit() else None  # the limit may be new
    if address is not None:
        return _lend(address, size)
    if _reserve(size, most=limit()):
        return _lend(_allocate(size, device), size)
    for larger in sorted(_free):
        if size < larger <= size * _FAR_TOO_LARGE:
            address = _pop(larger)
            if address is not None:
                return _lend(address, larger)
    _make_room(size)  # for the next time
    return None


def take_always(nbytes: int, device: int) -> Lease:
    """Return page-locked memory, past the bound too: for what is few and small."""
    size = _rounded(nbytes)
    address = _pop(size)
    if address is None:
        _reserve(size, most=None)
        address = _allocate(size, device)
    return _lend(address, size)


def _rounded(nbytes: int) -> int:
    """Round up to a size that blocks have: eight from a power of two to the next."""
    step = max(_PAGE, 1 << max(0, (nbytes - 1).bit_length() - 4))
    return -(-nbytes // step) * step


def _pop(size: int) -> int | None:
    """Take a free block of exactly that size, the one used last."""
    try:
        return _free[size].popitem()[0]
    except KeyError:
        return None


def _lend(address: int, size: int) -> Lease:
    lease: Lease = (ctypes.c_char * size).from_address(address)
    blocks = _free.get(size)
    if blocks is None:
        blocks = _free.setdefault(size, {})
    # At the end it calls `blocks[address] = <the dead reference>`: nothing of Python in between.
    _leases[address] = weakref.ref(lease, partial(blocks.__setitem__, address))
    return lease


def _reserve(size: int, *, most: int | None) -> bool:
    global _total  # noqa: PLW0603
    with _accounts:
        if most is not None and _total + size > most:
            return False
        _total += size
    return True


def _unreserve(size: int) -> None:
    global _total  # noqa: PLW0603
    with _accounts:
        _total -= size


def _allocate(size: int, device: int) -> int:
    try:
        address, free = _driver.allocate_host(device, size)
    except BaseException:
        _unreserve(size)
        raise
    _frees[address] = free
    return address


def _make_room(size: int) -> None:
    """Free blocks, the smallest first, if that can make room for one of that size."""
    missing = size + _total - limit()
    if sum(each * len(blocks) for each, blocks in list(_free.items())) < missing:
        return
    found = []
    for each in sorted(_free):
        while missing > 0 and (address := _pop(each)) is not None:
            found.append((address, each))
            missing -= each
    _give_back(found)


def trim() -> threading.Thread | None:
    """Free all the blocks that are free; return the thread that does it, if there are any."""
    _holding.sweep()
    found = []
    for size in list(_free):
        while (address := _pop(size)) is not None:
            found.append((address, size))
    return _give_back(found)


def _give_back(blocks: list[tuple[int, int]]) -> threading.Thread | None:
    if not blocks:
        return None
    # It takes long: where the driver has no pools of host memory, until the devices have no work.
    thread = threading.Thread(target=_release, args=(blocks,), name="userstream-trim", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # there are too many, or Python is going down: they stay as they were
        for address, size in blocks:
            _free[size][address] = None
        return None
    return thread


def _release(blocks: Iterable[tuple[int, int]]) -> None:
    for address, size in blocks:
        # What fails may have been freed or not: it is not used again, and counts.
        with contextlib.suppress(Exception):
            _frees.pop(address)()
            _unreserve(size)


def _forget() -> None:
    global _accounts, _total  # noqa: PLW0603
    # In a forked child nothing is freed, and a thread that is not here may have held it.
    _accounts = threading.Lock()
    _total = 0
    _free.clear()
    _leases.clear()
    _frees.clear()


_process.after_fork(_forget)
