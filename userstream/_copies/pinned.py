"""A bounded cache of page-locked host memory, on which arrays are handed out.

Allocating such memory takes long, so it is used again: a block is free as soon as the last array
on it is gone, in whatever thread, also in the middle of a garbage collection. Hence that takes no
lock and runs no Python code, see `_driver/native/leases.c`.

Blocks are given back by `trim`, or to make room for a larger one; in a thread of its own, so that
nothing waits for it.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from userstream import _buffers, _driver, _process
from userstream._arguments import integer
from userstream._buffers.view import contiguous_strides
from userstream._copies import layout
from userstream._copies.operands import as_array, device_array, is_on_host, require_numpys
from userstream._engine import held_objects
from userstream.errors import UserStreamError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sized

    from numpy.typing import DTypeLike

    from userstream._copies.layout import Shape
    from userstream._copies.operands import DeviceArray
    from userstream._driver.core import Lease
    from userstream._driver.host_pools import HostMemory

V = TypeVar("V")

LIMIT_VARIABLE = "USERSTREAM_PINNED_LIMIT"
_DEFAULT_LIMIT = 4 << 30
_DEFAULT_SHARE = 8  # of the memory of the machine
_PAGE = 4096
_FAR_TOO_LARGE = 4  # times the size that is needed

# Blocks by size and address: all that there are, the free ones among them, and those among them
# that a thread is to free. Of the latter two the values say nothing. A block changes its place in
# one call of C: whatever signals come, it is in one or in the other.
_blocks: dict[int, dict[int, HostMemory]] = {}
_free: dict[int, dict[int, object]] = {}
_leaving: dict[int, dict[int, object]] = {}

# New blocks on their way from the driver, by who has asked for them; and what is being freed.
_coming: dict[weakref.ref[_Claim], HostMemory] = {}
_going: dict[object, HostMemory] = {}

_total = 0  # bytes of all of them, as counted last
_accounts = _process.RLock()  # of the total; the garbage collector may run any destructor in it
_limit: int | None = None


def limit() -> int:
    """Return the limit of page-locked bytes, including the memory of users' arrays."""
    return _initial_limit() if _limit is None else _limit


def set_limit(nbytes: int) -> None:
    """Bound the cache from now on; with 0 nothing is handed out."""
    global _limit  # noqa: PLW0603 -- one cache for the process
    if nbytes < 0:
        raise ValueError(f"the limit of pinned memory must be at least 0 bytes, not {nbytes}")
    _limit = nbytes
    if _count() > nbytes:
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
    """Return a block like `take`, for a size that is already `rounded`."""
    may_free = held_objects.queues or held_objects.orphans
    if _limit is not None and _total <= _limit and not may_free:
        blocks = _free.get(size)
        lease = _driver.core.lend(blocks, size) if blocks else None
        if lease is not None:  # nearly always
            return lease
    lease = _take_within_bound(size, device)
    if lease is None:
        _make_room(size)  # for the next time
    return lease


def take_or_raise(nbytes: int, device: int) -> Lease:
    """Return a block like `take`, but raise `MemoryError` where the limit forbids it."""
    size = rounded(nbytes)
    lease = _take_within_bound(size, device)
    if lease is None and _make_room(size):  # which counts until it is freed
        lease = _take(size, device, None, reuse=False)
    if lease is None:
        raise MemoryError(
            f"{nbytes} bytes of page-locked memory are more than there is left: arrays use "
            f"{_total - _bytes(_free)} bytes of it, and the limit is {limit()}; release some of "
            f"these, or raise the limit with UserStream.set_pinned_limit or {LIMIT_VARIABLE}"
        )
    return lease


def _take_within_bound(size: int, device: int) -> Lease | None:
    if held_objects.queues or held_objects.orphans:
        held_objects.sweep()  # some may be free by now
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
    """Return page-locked memory regardless of the limit, for few and small blocks."""
    lease = _take(rounded(nbytes), device, None)
    assert lease is not None
    return lease


def _take(size: int, device: int, most: int | None, *, reuse: bool = True) -> Lease | None:
    """Lend a free block of exactly that size, the one used last, or a new one up to a total."""
    lease = _reused(size) if reuse else None
    while lease is None:  # another thread may take what is made here
        claim = _Claim()
        memory = _driver.host_pools.HostMemory(size, device)
        if not _reserve(claim, memory, most):
            return None
        try:
            memory.allocate()
        finally:  # after an error or a signal as well, unless another one comes: see `_Claim`
            _settle(weakref.ref(claim))
        lease = _reused(size)
    return lease


def _reused(size: int) -> Lease | None:
    """Lend the free block of exactly that size which was used last, if there is one."""
    blocks = _free.get(size)
    return _driver.core.lend(blocks, size) if blocks else None


class _Claim:
    """Identity of a request for a new block.

    It goes with the frame that it is in, however many exceptions of signal handlers come there. A
    block whose claim has gone is nobody's, and the next count looks after it.
    """

    __slots__ = ("__weakref__",)


def _reserve(claim: _Claim, memory: HostMemory, most: int | None) -> bool:
    """Count a new block from now on; return `False` if that would exceed `most` bytes."""
    global _total  # noqa: PLW0603 -- one cache for the process
    if _coming:
        _count()  # some may be nobody's
    with _accounts:
        if most is not None and _sum() + memory.size > most:
            return False
        _coming[weakref.ref(claim)] = memory
        _total += memory.size
    return True


def _settle(claim: weakref.ref[_Claim]) -> None:
    """Add a new block to the free ones, once; forget the block if the driver gave no memory."""
    memory = _coming.get(claim)
    if memory is None:
        return
    address, size = memory.address, memory.size
    if address is None:
        with contextlib.suppress(UserStreamError):
            memory.discard()
        _coming.pop(claim, None)
        with _accounts:
            _sum()
        return
    # `_blocks[size][address] = _coming.pop(claim)` and `_free[size][address] = None`, in one call.
    counted = map(
        _blocks_of_size(_blocks, size).__setitem__, (address,), map(_coming.pop, (claim,))
    )
    with contextlib.suppress(KeyError):  # another thread was faster
        _blocks_of_size(_free, size).update(zip((address,), counted, strict=True))


def _count() -> int:
    """Settle the blocks of requests that have gone, and return the bytes of all blocks."""
    for claim in list(_coming):
        if claim() is None:
            _settle(claim)
    with _accounts:
        return _sum()


def _sum() -> int:
    global _total  # noqa: PLW0603 -- one cache for the process
    moving = (*list(_coming.values()), *list(_going.values()))
    _total = _bytes(_blocks) + sum(memory.size for memory in moving)
    return _total


def _blocks_of_size(blocks: dict[int, dict[int, V]], size: int) -> dict[int, V]:
    """Return the dictionary of blocks of a size, creating it if it does not exist."""
    found = blocks.get(size)
    return blocks.setdefault(size, {}) if found is None else found


def _bytes(blocks: Mapping[int, Sized]) -> int:
    return sum(size * len(each) for size, each in list(blocks.items()))


@functools.lru_cache(maxsize=256)
def rounded(nbytes: int) -> int:
    """Round up to a size that blocks have: eight from a power of two to the next."""
    step = max(_PAGE, 1 << max(0, (nbytes - 1).bit_length() - 4))
    return -(-nbytes // step) * step


def _make_room(size: int) -> bool:
    """Free blocks, the smallest first, if that can make room for one of that size.

    Returns whether blocks are being freed.
    """
    missing = size + _count() - limit() - _bytes(_leaving)
    return _bytes(_free) >= missing and _give_back(missing) is not None


def trim() -> threading.Thread | None:
    """Free all unused blocks; return the thread that frees blocks, or `None`."""
    held_objects.sweep()
    return _give_back(None)


def _give_back(missing: int | None) -> threading.Thread | None:
    """Free blocks of at least so many bytes, or all, the smallest first, in a thread.

    It takes long: where the driver has no pools of host memory, until the devices have no work.
    After a signal the next call frees them.
    """
    for size, blocks in sorted(_free.items(), key=lambda each: each[0]):
        with contextlib.suppress(KeyError):  # there are none left
            while missing is None or missing > 0:
                _blocks_of_size(_leaving, size).update(map(dict.popitem, (blocks,)))
                missing = None if missing is None else missing - size
    if not any(_leaving.values()):
        return None
    thread = threading.Thread(target=_release, name="userstream-trim", daemon=True)
    try:
        _process.start_thread(thread)
    except RuntimeError:  # too many threads, or Python is exiting
        # Each is free again or is freed, also if the thread is on its way.
        for size, blocks in list(_leaving.items()):
            with contextlib.suppress(KeyError):
                _blocks_of_size(_free, size).update(map(dict.popitem, [blocks] * len(blocks)))
        return None
    return thread


def _release() -> None:
    for size, blocks in list(_leaving.items()):
        with contextlib.suppress(KeyError):  # there are none left
            while True:
                address, _ = blocks.popitem()
                # What fails may have been freed or not: it is not used again, and counts.
                with contextlib.suppress(Exception):
                    _free_block(size, address)
    _count()


def _free_block(size: int, address: int) -> None:
    key = object()  # not the address: once the block is freed, another one may come there
    _going.update(zip((key,), map(_blocks[size].pop, (address,)), strict=True))
    _going[key].free()
    del _going[key]


def _forget() -> None:
    global _accounts, _total  # noqa: PLW0603
    # In a forked child nothing is freed, and a thread that is not here may have held it.
    _accounts = _process.RLock()
    _total = 0
    everything: tuple[dict[Any, Any], ...] = (_blocks, _free, _leaving, _coming, _going)
    for blocks in everything:
        blocks.clear()


_process.after_fork(_forget)


# -- new arrays in page-locked memory --------------------------------------------------------------


def empty(shape: Any, dtype: DTypeLike) -> np.ndarray:
    """Return a new array in C order, its contents undefined."""
    kind = np.dtype(dtype)
    counts, kind = _shape_of(shape) + kind.shape, kind.base
    return _array(counts, kind, contiguous_strides(counts, kind.itemsize))


def empty_like(prototype: Any, dtype: DTypeLike | None) -> np.ndarray:
    """Return a new array of the shape, the dtype and the order in memory that another one has."""
    view = _buffers.view_or_none(prototype)
    like: DeviceArray | np.ndarray
    if view is not None and not is_on_host(view):
        like = device_array(view)
    else:
        like = as_array(prototype if view is not None else require_numpys(prototype))
    return empty_as(like.shape, like.strides, like.dtype if dtype is None else np.dtype(dtype))


def empty_as(shape: Shape, strides: Shape, dtype: np.dtype) -> np.ndarray:
    """Return a new array without gaps, its axes in the order that these strides have."""
    steps = [abs(step) for count, step in zip(shape, strides, strict=True) if count > 1]
    if 0 in shape or 0 in steps:  # a broadcast axis has no place in the order
        return _array(shape, dtype, contiguous_strides(shape, dtype.itemsize))
    order = tuple(map(abs, strides))
    return _array(shape, dtype, layout.packed(shape, order, dtype.itemsize).strides)


def _array(shape: Shape, dtype: np.dtype, strides: Shape) -> np.ndarray:
    if dtype.hasobject:
        raise TypeError(f"page-locked memory cannot hold Python objects ({dtype}): no GPU has them")
    nbytes = math.prod(shape) * dtype.itemsize
    if not nbytes:
        return np.empty(shape, dtype)
    _driver.library.ensure()
    memory: Any = take_or_raise(nbytes, _driver.contexts.current_device())
    return np.ndarray(shape, dtype, memory, 0, strides)


def _shape_of(shape: Any) -> Shape:
    lengths = [shape] if hasattr(shape, "__index__") else shape
    counts = tuple([integer(count, "each length in shape") for count in lengths])
    if min(counts, default=0) < 0:
        raise ValueError(f"shape has a negative length: {shape!r}")
    return counts
