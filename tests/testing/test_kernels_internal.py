"""A kernel that is launched while its function is being registered."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from cuda.core import (
    LaunchConfig,
    ObjectCode,
    launch,
)

from userstream.testing import (
    _kernels,
    kernel,
)

pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("no_garbage")]

ONE = LaunchConfig(grid=1, block=1)

PATIENCE = 20


def get(name: str) -> Any:
    """Return the kernel of that name, out of an image that has nothing."""
    return ObjectCode.from_ptx(b"any").get_kernel(name)


def test_a_launch_of_a_function_that_is_being_registered(stream, monkeypatch):
    """The driver knows it a moment before Python has it."""
    told, go_on = threading.Event(), threading.Event()
    seen = []

    class Slow(dict[int, Any]):
        def __setitem__(self, key, value):
            told.set()
            go_on.wait(PATIENCE)
            super().__setitem__(key, value)

    def fresh(grid, block):
        seen.append(grid)

    monkeypatch.setattr(_kernels, "_by_id", Slow(_kernels._by_id))
    thread = threading.Thread(target=lambda: kernel("fresh")(fresh))
    thread.start()
    assert told.wait(PATIENCE)
    launch(stream, ONE, get("fresh"))
    time.sleep(0.05)
    go_on.set()
    thread.join()
    stream.sync(timeout=PATIENCE)
    assert seen == [(1, 1, 1)]
