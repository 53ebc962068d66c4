"""The values inside userstream that tests of its public behavior set or read, in one place."""

from __future__ import annotations

from typing import Any

import pytest

from helpers import eventually
from userstream import _buffers
from userstream._buffers import framework
from userstream._copies import copy_lane, pinned
from userstream._engine import held_objects, lanes
from userstream._ordering import settings
from userstream._stream import capture, memory_operations
from userstream.testing import _simulated


def alive_in_driver() -> Any:
    """Return the numbers of streams, events, allocations and captures of the simulated driver."""
    return _simulated.stats()


def forget_frameworks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget, for one test, which classes the library has learned."""
    monkeypatch.setattr(_buffers, "learned", {})
    monkeypatch.setattr(_buffers, "_strangers", set())


def add_framework(monkeypatch: pytest.MonkeyPatch, package: str, module: str) -> None:
    row = framework.Known(module, (package,), package)
    monkeypatch.setattr(framework, "KNOWN", (*framework.KNOWN, row))
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
    """Let a copy be waited for where it was queued, however slow the machine is."""
    monkeypatch.setattr(copy_lane, "_SPIN", 10**10)


def sweep() -> None:
    held_objects.sweep()


def wait_in_every_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set, for one test, what ``USERSTREAM_SYNC=1`` sets at the import."""
    monkeypatch.setattr(settings, "SYNC", True)
