"""The locks of `with` blocks, which no signal leaves taken."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest

from interrupts import cut_short
from userstream import _process
from userstream._engine import futures

KINDS = [_process.Lock, _process.RLock, futures._Condition]


def is_free(lock: Any) -> bool:
    """Ask in another thread, as some are reentrant."""
    found: list[bool] = []

    def ask() -> None:
        found.append(lock.acquire(blocking=False))
        if found[0]:
            lock.release()

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_signal_at_any_place_leaves_it_free(kind: Callable[[], Any]) -> None:
    lock = kind()
    inside: list[int] = []

    def use() -> None:
        with lock:
            inside.append(at)

    for at in itertools.count():
        came = cut_short(use, at, anywhere=True)
        assert is_free(lock), f"signal {at}: it is taken"
        if not came:
            break
    assert at > 2
    assert at in inside


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_has_it_alone(kind: Callable[[], Any]) -> None:
    lock = kind()
    with lock:
        assert not is_free(lock)
    assert is_free(lock)
    with pytest.raises(ZeroDivisionError), lock:
        _ = 1 // 0
    assert is_free(lock)
    assert lock.acquire()
    assert not is_free(lock)
    lock.release()
    assert is_free(lock)


@pytest.mark.parametrize("kind", [_process.RLock, futures._Condition])
def test_a_thread_may_take_it_again(kind: Callable[[], Any]) -> None:
    lock = kind()
    with lock:
        with lock:
            pass
        assert not is_free(lock)
    assert is_free(lock)


def test_a_fence_gives_a_lock_back_before_it_takes_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the two alone lets a processor change the order of what is before and after it."""
    steps: list[str] = []

    class Lock:
        def __enter__(self) -> None:
            steps.append("taken")

        def __exit__(self, *_: object) -> None:
            steps.append("back")

    monkeypatch.setattr(_process, "Lock", Lock)
    _process.fence()
    assert "back taken" in " ".join(steps)
