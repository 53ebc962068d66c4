"""Watch a training loop for an hour: ``python tests/soak.py``. Its memory must be flat.

It prints each minute how much memory is resident, and at the end whether that was flat; it fails if
not. `nox -s soak` runs it, on the simulated driver. ``--pause`` leaves the machine to others.
"""

from __future__ import annotations

import argparse
import gc
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from cuda.bindings import driver
from cuda.core import LaunchConfig, ObjectCode, launch

import userstream as us
from helpers import checked
from observed import SIZE, Room, a_room, captured, copy, fill, handle
from userstream.testing import Pointer, kernel, simulate

_MEBIBYTE = 1 << 20
_GROWTH = 16 * _MEBIBYTE  # after the first tenth, which fills what is bounded
_LOOKS = 100


@kernel("soak_double")
def _double(grid: Any, block: Any, to: Pointer, source: Pointer, n: np.int64) -> None:
    del grid, block
    to.array(n, np.uint8)[:] = source.array(n, np.uint8) * 2


def step(room: Room, double: Any, number: int) -> None:
    """Do what a loop with a loader does, with streams, events and memory that come and go."""
    copy(room.x, room.pinned, room.a)
    room.b.wait(room.a)
    launch(room.b, LaunchConfig(grid=1, block=1), double, room.y, room.x, np.int64(SIZE))
    temporary = int(checked(driver.cuMemAllocAsync(SIZE, handle(room.b))))
    copy(temporary, room.y, room.b)
    checked(driver.cuMemFreeAsync(temporary, handle(room.b)))
    with us.borrow(driver.CUdeviceptr(room.y), producer=room.b, stream=room.a):
        fill(room.y, room.a)
    room.a.wait(room.b)
    event = room.a.record()
    if number % 4 == 0:
        event.sync()
    if number % 16 == 0:
        room.b.sync()
        with us.Stream.create(0) as stream:
            fill(room.x, stream)
            stream.sync()
    if number % 64 == 0:
        thread = threading.Thread(target=room.a.sync)
        thread.start()
        thread.join()
        launch_a_graph(room)


def launch_a_graph(room: Room) -> None:
    """Capture one, and destroy it when it has run."""
    with ExitStack() as stack:
        own = Room.__new__(Room)
        own.__dict__.update(room.__dict__, _stack=stack)
        graph = captured(own, lambda: fill(room.x, room.a))
        checked(driver.cuGraphLaunch(graph, handle(room.a)))
        room.a.sync()


def resident() -> int:
    """Return the bytes of this process that are in memory, without what is garbage by now."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def main(seconds: float, pause: float) -> int:
    """Run it; tell how the memory went, and whether it was flat."""
    simulate()
    begin = time.monotonic()
    sizes: list[int] = []
    minutes = number = 0
    with a_room() as room, us.observe() as seen:
        double = ObjectCode.from_ptx(b"any").get_kernel("soak_double")
        while (now := time.monotonic() - begin) < seconds:
            step(room, double, number)
            number += 1
            time.sleep(pause)
            if now > len(sizes) * seconds / _LOOKS:
                assert seen.races == (), seen
                sizes.append(resident())
            if now >= 60 * minutes:
                print(f"{minutes} min: {resident() / _MEBIBYTE:.1f} MiB", flush=True)
                minutes += 1
    settled = sizes[_LOOKS // 10 :]
    growth = max(settled[len(settled) // 2 :]) - max(settled[: len(settled) // 2])
    flat = growth <= _GROWTH
    print(
        f"{number} steps in {seconds:.0f} s, {sum(seen.as_dict()['calls'].values())} calls: from "
        f"{settled[0] / _MEBIBYTE:.1f} to {settled[-1] / _MEBIBYTE:.1f} MiB, which is "
        f"{'flat' if flat else 'not flat'} ({growth / _MEBIBYTE:+.1f} MiB from the first half to "
        f"the second); not seen: {seen.not_seen}"
    )
    return not flat


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seconds", nargs="?", type=float, default=3600)
    parser.add_argument("--pause", type=float, default=0, help="seconds between two steps")
    arguments = parser.parse_args()
    sys.exit(main(arguments.seconds, arguments.pause))
