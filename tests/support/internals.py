"""The values inside userstream that tests of its public behavior set or read, in one place."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from helpers import address, eventually
from userstream import _buffers, _driver, _hooks
from userstream._buffers import framework
from userstream._copies import copies, fast_path, operands, pinned, staging
from userstream._engine import held_objects, host_wait, lanes
from userstream._ordering import settings
from userstream._stream import capture, memory_operations
from userstream._stream import stream as stream_module
from userstream.testing import _simulated

CHUNK = staging.SIZE  # bytes of each of the two chunks of a device
PART = fast_path.PART  # bytes of a part of a copy to pageable memory


def alive_in_driver() -> Any:
    """Return the numbers of streams, events, allocations and captures of the simulated driver."""
    return _simulated.stats()


def forget_frameworks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty the caches of the types of buffers for one test."""
    monkeypatch.setattr(_buffers, "view_classes", {})
    monkeypatch.setattr(_buffers, "_unsupported_types", set())


def add_framework(monkeypatch: pytest.MonkeyPatch, package: str, module: str) -> None:
    row = framework.Known(module, (package,), package)
    monkeypatch.setattr(framework, "KNOWN", (*framework.KNOWN, row))
    monkeypatch.setattr(_buffers, "_FILES", (*_buffers._FILES, (package, module)))
    forget_frameworks(monkeypatch)


def forget_splits() -> None:
    """Split devices again at the next stream with some of the multiprocessors."""
    lanes._splits.clear()


def hide_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "_splits", {})


def is_split() -> bool:
    return bool(lanes._splits)


def is_capture_begun() -> bool:
    """Return whether the library takes a capture of its own for begun and not ended."""
    return bool(capture._begun)


def name_dtypes_of_torch(monkeypatch: pytest.MonkeyPatch, dtype: np.dtype | str) -> None:
    """Give every tensor the same type for one test."""
    from userstream._buffers import torch  # loaded with the first tensor

    monkeypatch.setattr(torch, "_dtype", lambda _: dtype)


def nothing_is_held() -> bool:
    return not held_objects.queues


def nothing_is_in_use() -> bool:
    return not held_objects.queues and not held_objects.in_use


def order_by_device(monkeypatch: pytest.MonkeyPatch, enabled: bool = True) -> None:
    """Set, for one test, what ``USERSTREAM_ORDER=device`` sets at the import."""
    monkeypatch.setattr(settings, "BY_DEVICE", enabled)


def pin_word(device: int = 0) -> None:
    """Pin the page that blocking host functions use, so that no later call pins memory."""
    word = memory_operations.Gate(device)
    word.take()
    word.release()


def pinned_limit() -> int:
    return int(pinned.limit())


def release_held() -> None:
    """Release the objects that completed work held, and wait until none is left."""
    assert eventually(lambda: (sweep(), nothing_is_held())[1])


def spin_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a copy poll until it is done, even on a slow machine."""
    monkeypatch.setattr(staging, "SPIN", 10**10)


def sweep() -> None:
    held_objects.sweep()


def wait_in_every_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set, for one test, what ``USERSTREAM_SYNC=1`` sets at the import."""
    monkeypatch.setattr(settings, "SYNC", True)


# -- copies ----------------------------------------------------------------------------------------


def settled() -> bool:
    """Sweep; return whether no copy uses anything any more."""
    held_objects.sweep()
    return nothing_is_in_use() and not held_objects.orphans


def forget_uses() -> None:
    """Forget the uses that an error of the GPU left behind, which the library keeps forever."""
    held_objects.in_use.clear()


def is_anything_in_use() -> bool:
    return bool(held_objects.in_use)


def place_of(at: int) -> Any:
    """Return the driver's information about an address; `None` if CUDA does not know it."""
    return _driver.pointers.place_of(at)


def report_pieces(monkeypatch: pytest.MonkeyPatch, start: int, size: int, piece: int) -> None:
    """Make the driver report an allocation as pieces for one test."""
    whole = place_of(start)
    assert whole is not None

    def piece_of(at: int) -> Any:
        if not start <= at < start + size:
            return None
        return whole._replace(start=start + (at - start) // piece * piece, size=piece)

    monkeypatch.setattr(_driver.pointers, "place_of", piece_of)


def let_all_be_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take all memory for mapped memory, for one test."""
    monkeypatch.setattr(_driver.pointers.Place, "_may_be_mapped", lambda _: True)


def forget_uuids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask the driver for the UUID of a device again, for one test."""
    monkeypatch.setattr(_driver.library, "_uuids", {})


def shown_uuid(device: int, name: str) -> str:
    """Return the UUID of a device of that name as the library shows it."""
    return str(_driver.library._uuid(device, name))


def address_of(array: np.ndarray) -> int:
    """Return the address that copies take for the first element of a host array."""
    return operands.address_of(array)


def is_pinned(array: np.ndarray) -> bool:
    """Return whether copies of a host array go directly to its memory."""
    return operands.pinned_address(array) == address(array)


def free_pinned() -> None:
    """Free the unused page-locked memory, and wait for that."""
    thread = staging.trim()
    if thread is not None:
        thread.join(30)


def nothing_is_being_freed() -> bool:
    """Return whether no thread frees page-locked memory, or is about to start."""
    return all(thread.name != "userstream-trim" for thread in threading.enumerate())


def forget_given_streams() -> None:
    """Let go of streams whose handles a test has read, which userstream would keep until exit."""
    stream_module._given_away.clear()


def pinned_total() -> int:
    """Return the bytes of all page-locked memory of the cache, lent or free."""
    return pinned._total


def lent_blocks() -> set[int]:
    """Return the addresses of the blocks of the cache that are in use."""
    return set(pinned._blocks).difference(*pinned._free.values())


def forget_lost_blocks(held: set[int]) -> None:
    """Forget the blocks that are in use, save those `held`.

    After an exception of a signal handler a block may count as used for ever.
    """

    def all_are_back() -> bool:
        gc.collect()
        free_pinned()
        return lent_blocks() <= held

    eventually(all_are_back, 2)  # the watcher may return those of a copy later
    assert eventually(nothing_is_being_freed)  # blocks on the way to be freed are not lost
    for block in lent_blocks() - held:
        del pinned._blocks[block]
    pinned._count()


def small_chunks_in(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Change the size of chunks for one test."""
    monkeypatch.setattr(staging, "SIZE", size)
    monkeypatch.setattr(staging, "_spare", {})


def never_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the chunks while the stream is still held up, for one test."""
    monkeypatch.setattr(staging.CopyLane, "reach", lambda lane: None)


def stage_at_most(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    """Wait for copies of larger host arrays, for one test."""
    monkeypatch.setattr(copies, "_STAGED", nbytes)


def copy_aside_at_most(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    """Limit the size of copies that use staging memory for one test."""
    monkeypatch.setattr(fast_path, "ASIDE", nbytes)


def refuse_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if a copy goes through page-locked memory of the library, for one test."""

    def refuse(*_: object) -> None:
        raise AssertionError("the copy goes through other memory")

    monkeypatch.setattr(pinned, "take", refuse)
    monkeypatch.setattr(staging, "fetch", refuse)
    monkeypatch.setattr(staging, "send", refuse)
    spin_for_ever(monkeypatch)


def watch_fetches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return a list to which each copy of the fast path adds its parts and their nanoseconds."""
    fetch, seen = _driver.core.fetch, []

    def watched(*given: Any) -> Any:
        *_, limit, parts, _out = given
        seen.append((parts, limit))
        return fetch(*given)

    monkeypatch.setattr(_driver.core, "fetch", watched)
    return seen


def run_host_functions_on(monkeypatch: pytest.MonkeyPatch, thread: int) -> None:
    """Take a thread for the one that runs host functions, for one test."""
    monkeypatch.setattr(host_wait, "host_functions_thread", thread)


# -- observe: loaded by the tests that use it -----------------------------------------------------


def listeners_of_borrows() -> list[list[Any]]:
    """Return the lists of listeners that each borrow and each acquired buffer asks."""
    from userstream import _hooks

    borrows = _hooks.borrow_entered, _hooks.borrow_left
    return [*borrows, _hooks.buffers_acquired, _hooks.buffers_released]


def followed_functions() -> set[str]:
    """Return the driver functions that the recorder tells of."""
    from userstream._observe.judge.functions import FUNCTIONS

    return set(FUNCTIONS)


def keep_few_allocations(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Limit PyTorch's history of allocations for one test."""
    from userstream._observe import notes

    monkeypatch.setattr(notes, "_MOST_ENTRIES", most)


def lose_calls(seen: Any, count: int) -> None:
    """Record that calls are missing from the log."""
    from userstream._observe.judge import log

    seen._recorder.note(log.LOST, [count])


def call_once_userstream_waits(function: Callable[[], object]) -> None:
    """Call a function 10 ms after userstream begins to wait for the GPU, in an observation."""

    def begins(_: bool) -> None:
        _hooks.host_waits.remove(begins)
        threading.Timer(0.01, function).start()

    _hooks.host_waits.append(begins)


def looks_of_hang_after(seen: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what the process of a judge calls for ``--hang-after 0``, in one test."""
    from userstream._observe.judge import workers

    monkeypatch.setattr(workers, "_PROGRESS", 0)
    return workers._Progress(seen._judging.judge, 0).look


def allocate_unseen(memory: Any, address: int, size: int, operation: object = None) -> None:
    """Tell the judge's memory of an allocation that no driver call made."""
    from userstream._observe.judge.memory import DEVICE, Allocation

    memory.add(Allocation(address, address + size, DEVICE, operation=operation))


def page_of(document: dict[str, Any]) -> str:
    """Return the page in HTML of findings, which are as JSON has them."""
    from userstream._observe.judge import reports

    return reports.page(document)


def scripts_of_page() -> tuple[str, ...]:
    """Return the names of the scripts of the page, in their order."""
    from userstream._observe.judge import reports

    return tuple(reports._SCRIPTS)
