"""A bounded cache of page-locked host memory, for staging and for the arrays of users.

Allocating such memory takes long, so blocks are reused: a block is free when the last array on the
block is gone, in any thread, even during a garbage collection. So this takes no lock and runs no
Python code; see `_driver/native/leases.c`.

`trim`, and a request that needs room for a larger block, free blocks in a separate thread, because
a free may wait for the GPU. An exception of a signal handler loses at most the block that is being
allocated or moved.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from userstream import _buffers, _driver, _process
from userstream._arguments import integer
from userstream._buffers.view import contiguous_strides, used_strides
from userstream._copies import layout
from userstream._copies.operands import as_array, operand, require_numpys
from userstream._engine import held_objects

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from userstream._copies.layout import Shape
    from userstream._copies.operands import DeviceArray
    from userstream._driver.core import Lease
    from userstream._driver.host_pools import HostMemory

LIMIT_VARIABLE = "USERSTREAM_PINNED_LIMIT"
_DEFAULT_LIMIT = 4 << 30
_DEFAULT_SHARE = 8  # of the memory of the machine
_PAGE = 4096
_FAR_TOO_LARGE = 4  # times the size that is needed

_blocks: dict[int, HostMemory] = {}  # all blocks by address, except those in `_moving`
_free: dict[int, dict[int, object]] = {}  # the free ones by size and address; the values are unused
_leaving: deque[tuple[int, int]] = deque()  # size and address of blocks that a thread is to free
_moving: set[HostMemory] = set()  # blocks that are being allocated or freed

_total = 0  # bytes of all blocks at the last count
_counting = _process.RLock()  # the garbage collector may run any destructor while it is held
_limit: int | None = None


def limit() -> int:
    """Return the limit of page-locked bytes, including the memory of users' arrays."""
    return _initial_limit() if _limit is None else _limit


def set_limit(nbytes: int) -> None:
    """Set the limit of page-locked bytes; with 0 no block is lent."""
    global _limit  # noqa: PLW0603 -- one cache for the process
    if nbytes < 0:
        raise ValueError(f"the limit of pinned memory must be at least 0 bytes, not {nbytes}")
    _limit = nbytes
    if _count() > nbytes:
        trim()


def _initial_limit() -> int:
    """Set the limit from the environment, or to an eighth of the memory up to 4 GiB."""
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
    """Lend a block of at least `nbytes` bytes; `None` if the limit forbids a new block.

    All devices can use the block. A new block is on the host's NUMA node nearest to `device`.
    """
    return take_block(rounded(nbytes), device)


def take_block(size: int, device: int) -> Lease | None:
    """Lend a block like `take`, for a size that is already `rounded`."""
    may_free = held_objects.queues or held_objects.orphans
    if _limit is not None and _total <= _limit and not may_free:
        blocks = _free.get(size)
        lease = _driver.core.lend(blocks, size) if blocks else None
        if lease is not None:  # the common case
            return lease
    lease = _take_within_limit(size, device)
    if lease is None:
        _make_room(size)  # for the next request
    return lease


def take_or_raise(nbytes: int, device: int) -> Lease:
    """Lend a block like `take`; raise `MemoryError` if the limit forbids a new block."""
    size = rounded(nbytes)
    lease = _take_within_limit(size, device)
    if lease is None and _make_room(size):  # the blocks count until they are freed
        lease = _take(size, device, None, reuse=False)
    if lease is None:
        raise MemoryError(
            f"{nbytes} bytes of page-locked memory are more than there is left: arrays use "
            f"{_total - _free_bytes()} bytes of it, and the limit is {limit()}; release some of "
            f"these, or raise the limit with UserStream.set_pinned_limit or {LIMIT_VARIABLE}"
        )
    return lease


def _take_within_limit(size: int, device: int) -> Lease | None:
    if held_objects.queues or held_objects.orphans:
        held_objects.sweep()  # may free blocks
    most = limit() if _limit is None else _limit
    lease = _take(size, device, most, reuse=_total <= most)  # the limit may be new
    if lease is not None:
        return lease
    for larger in sorted(_free):
        if size < larger <= size * _FAR_TOO_LARGE:
            lease = _take(larger, device, 0)
            if lease is not None:
                return lease
    return None


def take_always(nbytes: int, device: int) -> Lease:
    """Lend a block regardless of the limit, for few and small blocks."""
    lease = _take(rounded(nbytes), device, None)
    assert lease is not None
    return lease


def _take(size: int, device: int, most: int | None, *, reuse: bool = True) -> Lease | None:
    """Lend a free block of exactly this size, or a new block up to `most` bytes in total."""
    lease = _reused(size) if reuse else None
    while lease is None:  # another thread may take the new block
        if not _add_block(size, device, most):
            return None
        lease = _reused(size)
    return lease


def _reused(size: int) -> Lease | None:
    """Lend the free block of exactly this size that was used last; `None` without a free block."""
    blocks = _free.get(size)
    return _driver.core.lend(blocks, size) if blocks else None


def _add_block(size: int, device: int, most: int | None) -> bool:
    """Allocate a free block; return `False` if the total would exceed `most` bytes."""
    memory = _driver.host_pools.HostMemory(size, device)
    try:
        with _counting:
            if most is not None and _count() + size > most:
                return False
            _moving.add(memory)
            _count()
        memory.allocate()
    finally:
        _moving.discard(memory)  # first: a signal may come in the functions below
        if memory.address is not None:
            _blocks[memory.address] = memory
            _free_blocks(size)[memory.address] = None
        _count()
    return True


def _count() -> int:
    """Count and return the bytes of all blocks."""
    global _total  # noqa: PLW0603 -- one cache for the process
    with _counting:
        _total = sum(memory.size for memory in (*list(_blocks.values()), *list(_moving)))
        return _total


def _free_blocks(size: int) -> dict[int, object]:
    """Return the dictionary of the free blocks of a size, creating it if it does not exist."""
    found = _free.get(size)
    return _free.setdefault(size, {}) if found is None else found


def _free_bytes() -> int:
    return sum(size * len(blocks) for size, blocks in _free.copy().items())


@functools.lru_cache(maxsize=256)
def rounded(nbytes: int) -> int:
    """Round up to a size that blocks have: eight from a power of two to the next."""
    step = max(_PAGE, 1 << max(0, (nbytes - 1).bit_length() - 4))
    return -(-nbytes // step) * step


def _make_room(size: int) -> bool:
    """Free blocks, the smallest first, if that makes room for a block of this size.

    Returns whether blocks are being freed.
    """
    missing = size + _count() - limit() - sum(each for each, _ in list(_leaving))
    return _free_bytes() >= missing and _give_back(missing) is not None


def trim() -> threading.Thread | None:
    """Free all unused blocks; return the thread that frees blocks, or `None`."""
    held_objects.sweep()
    return _give_back(None)


def _give_back(missing: int | None) -> threading.Thread | None:
    """Free blocks of at least `missing` bytes, or all, the smallest first, in a thread.

    Without pools of host memory, a free waits until the devices have no work. After an exception of
    a signal handler the next call frees the blocks.
    """
    for size in sorted(_free):
        blocks = _free[size]
        with contextlib.suppress(KeyError):  # no block of this size is left
            while missing is None or missing > 0:
                _leaving.append((size, blocks.popitem()[0]))
                missing = None if missing is None else missing - size
    if not _leaving:
        return None
    thread = threading.Thread(target=_release, name="userstream-trim", daemon=True)
    try:
        _driver.account.on(_driver.account.HOUSEKEEPING, _process.start_thread, thread)
    except RuntimeError:  # too many threads, or Python is exiting
        with contextlib.suppress(IndexError):
            while True:
                size, address = _leaving.pop()
                _free_blocks(size)[address] = None
        return None
    return thread


def _release() -> None:
    with contextlib.suppress(IndexError):  # no block is left
        while True:
            _, address = _leaving.popleft()
            memory = _blocks[address]
            _moving.add(memory)
            # Before the free, after which the driver may give the address to another block.
            del _blocks[address]
            # After a failure the block may or may not exist: it is not reused, and counts.
            with contextlib.suppress(Exception):
                memory.free()
                _moving.discard(memory)
    _count()


def _forget() -> None:
    """Drop all blocks in a forked child, without freeing any."""
    global _counting, _total  # noqa: PLW0603
    _counting = _process.RLock()  # a thread of the parent may hold it
    _total = 0
    for blocks in (_blocks, _free, _leaving, _moving):
        blocks.clear()


_process.after_fork(_forget)


# -- new arrays in page-locked memory --------------------------------------------------------------


def empty(shape: Any, dtype: DTypeLike) -> np.ndarray:
    """Return a new array in C order with undefined contents."""
    kind = np.dtype(dtype)
    counts, kind = _shape_of(shape) + kind.shape, kind.base
    return _array(counts, kind, contiguous_strides(counts, kind.itemsize))


def empty_like(prototype: Any, dtype: DTypeLike | None) -> np.ndarray:
    """Return a new array with the shape, the dtype and the memory order of another array."""
    view = _buffers.view_or_none(prototype)
    found = None if view is None else operand(view)
    like: DeviceArray | np.ndarray
    if found is not None:
        like = found.array
    else:
        like = as_array(prototype if view is not None else require_numpys(prototype))
    return empty_as(like.shape, like.strides, like.dtype if dtype is None else np.dtype(dtype))


def empty_as(shape: Shape, strides: Shape, dtype: np.dtype) -> np.ndarray:
    """Return a new array without gaps, whose axes have the memory order of these strides."""
    if 0 in shape or 0 in used_strides(shape, strides):  # a broadcast axis has no order
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
