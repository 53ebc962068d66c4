"""Programs whose races are made to happen, and turns in which that is tried."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from cuda.bindings import driver
from cuda.core import LaunchConfig, ObjectCode, launch

import userstream as us
from helpers import checked
from observed import SIZE, Room, a_room, copy, handle

HOLD = 0.02  # seconds, at the most


def fill(address: int, stream: us.Stream | int, size: int = SIZE) -> None:
    checked(driver.cuMemsetD8Async(address, 7, size, handle(stream)))


@contextmanager
def a_used_room() -> Iterator[Room]:
    """Make a room whose streams are known: something is queued on them before they race."""
    with a_room() as room:
        for stream in (room.a, room.b):
            fill(room.pinned, stream, 1)
        yield room


def read_too_early(room: Room) -> None:
    fill(room.x, room.a)
    copy(room.y, room.x, room.b)


def kernel_of(name: str) -> Any:
    return ObjectCode.from_ptx(b"any").get_kernel(name)


def run(kernel: Any, address: int, stream: us.Stream) -> None:
    launch(stream, LaunchConfig(grid=1, block=1), kernel, address)


def watched(
    body: Callable[[], object], times: int = 8, confirm: bool | int = True, **options: Any
) -> us.Observation:
    """Watch turns of a program; each is judged before the next one begins."""
    with us.observe(confirm=confirm, **options) as seen:
        for _ in range(times):
            body()
            checked(driver.cuCtxSynchronize())
            _ = seen.races
    return seen
