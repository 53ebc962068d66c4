"""A storm of signals: every public function, cut short wherever a handler's exception can come.

``USERSTREAM_INTERRUPTS`` is how often each function is cut short; the places are drawn from a seed.
After each cut the thread's context and capture mode are as before, and the next call works. In the
end there is no stream, capture or hold more than before, and nothing is in use.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver

import userstream as us
from conftest import SIMULATED
from helpers import array, checked, current_context, device_count, device_memory, eventually
from internals import (
    alive_in_driver,
    forget_lost_blocks,
    forget_splits,
    lent_blocks,
    nothing_is_in_use,
)
from interrupts import cut_short
from userstream import testing

pytestmark = [
    pytest.mark.usefixtures("no_garbage"),
    # Python drops what a signal handler raises in a destructor, and says so.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

COUNT = int(os.environ.get("USERSTREAM_INTERRUPTS", "40"))
SIZE = 256
RELAXED = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED


class Scene:
    """Arguments of the functions: a producer's buffers, a stream and a busy stream."""

    def __init__(self, producer: us.Stream, busy: us.Stream, source: int, target: int) -> None:
        self.stream = us.get_stream(0)
        self.producer, self.busy = producer, busy
        self.address = target
        self.source, self.target = (
            array(each, producer, shape=(SIZE,), typestr="|u1") for each in (source, target)
        )
        self.host = np.ones(SIZE, "u1")
        self.pinned = us.pinned_empty(SIZE, "u1")
        self.event = producer.record()


@pytest.fixture
def scene(producer: us.Stream, name: str) -> Iterator[Scene]:
    held = lent_blocks()
    with (
        us.Stream.create(0) as busy,
        device_memory(0) as source,
        device_memory(0) as target,
        contextlib.nullcontext() if is_idle(name) else testing.latch(busy),
    ):
        scene = Scene(producer, busy, source, target)
        yield scene
        del scene.pinned
    forget_lost_blocks(held)  # a free may wait for the held stream


def _borrow(scene: Scene, **more: Any) -> None:
    with us.borrow(scene.source, scene.target, **more) as stream:
        stream.memcpy_dtod(scene.address, scene.address + 64, 8)


def _late(wait: Callable[[], object]) -> None:
    with contextlib.suppress(us.WaitTimeout, TimeoutError):
        wait()


def _cancelled(scene: Scene) -> None:
    assert us.completion(scene.busy).cancel()


async def _awaited(scene: Scene) -> None:
    await us.completion(scene.stream)
    await us.asnumpy_async(scene.source)


def _made(**more: Any) -> None:
    with us.Stream.create(0, **more):
        pass


def _part(_: Scene) -> None:
    # Each split makes a green context that the process keeps, of which a GPU has few.
    if SIMULATED:
        forget_splits()
    _made(sms=16)


def _captured(scene: Scene) -> None:
    with us.Stream.create(0) as stream, stream.capture("relaxed"):
        stream.memcpy_dtod(scene.address, scene.address + 64, 8)
        stream.capture_info  # noqa: B018


def _values(scene: Scene) -> None:
    scene.stream.write_value_32(scene.address, 1)
    scene.stream.wait_value_32(scene.address, 1)
    scene.stream.batch_mem_op([us.WriteValue(scene.address, 2)])


def _registry(_: Scene) -> None:
    with us.UserStream() as mine:
        mine.get_stream(0, name="mine", priority=-1)
        mine.wait_all(timeout=10)


def _attributes(scene: Scene) -> None:
    scene.stream.set_attribute("sync_policy", "spin")
    scene.stream.get_attribute("sync_policy")


FUNCTIONS: dict[str, Callable[[Scene], object]] = {
    "get_stream": lambda scene: us.get_stream(scene.source),
    "get_stream of no target": lambda _: us.get_stream(),
    "a registry": _registry,
    "streams": lambda _: us.streams(),
    "wait": lambda scene: us.wait(scene.source, timeout=10),
    "wait, late": lambda scene: _late(lambda: us.wait(scene.busy, timeout=0.001)),
    "wait_all": lambda _: us.wait_all(timeout=10),
    "wait_for_device": lambda _: us.wait_for_device(1 % device_count(), timeout=10),
    "wait_for_device, late": lambda scene: _late(
        lambda: us.wait_for_device(scene.busy, timeout=0.001)
    ),
    "wait_async": lambda _: asyncio.run(us.wait_async(0, timeout=10)),
    "completion": lambda scene: us.completion(scene.source).result(timeout=10),
    "completion, late": lambda scene: _late(
        lambda: us.completion(scene.busy).result(timeout=0.001)
    ),
    "completion, cancelled": _cancelled,
    "acquire and release": lambda scene: (us.acquire(scene.source), us.release(scene.source)),
    "borrow": _borrow,
    "borrow on a stream": lambda scene: _borrow(scene, stream=scene.producer),
    "borrow, keep=False": lambda scene: _borrow(scene, keep=False),
    "hold": lambda scene: us.hold(scene.host, stream=scene.stream),
    "asnumpy": lambda scene: us.asnumpy(scene.source, timeout=10),
    "asnumpy into": lambda scene: us.asnumpy(scene.source, out=scene.host, timeout=10),
    "copyto": lambda scene: us.copyto(scene.target, scene.source),
    "copyto from the host": lambda scene: us.copyto(scene.target, scene.host),
    "copyto to the host": lambda scene: us.copyto(scene.host, scene.source, timeout=10),
    "asnumpy_async": lambda scene: us.asnumpy_async(scene.source).result(timeout=10),
    "asnumpy_async into": lambda scene: us.asnumpy_async(scene.source, out=scene.pinned),
    "copyto, not waited for": lambda scene: us.copyto(scene.target, scene.pinned, wait=False),
    "awaiting": lambda scene: asyncio.run(_awaited(scene)),
    "pinned_empty": lambda _: us.pinned_empty(SIZE, "u1"),
    "pinned_like": lambda scene: us.pinned_like(scene.source),
    "describe": lambda scene: (us.describe(scene.source), us.device_of(scene.source)),
    "Stream.create": lambda _: _made(priority=-1),
    "Stream.create of a part": _part,
    "Stream.from_handle": lambda scene: us.Stream.from_handle(int(scene.producer.handle)).sync(),
    "default streams": lambda _: us.Stream.legacy_default().is_done,
    "Stream.sync, late": lambda scene: _late(lambda: scene.busy.sync(timeout=0.001)),
    "Stream.wait": lambda scene: scene.stream.wait(scene.producer),
    "Stream.wait of an event": lambda scene: scene.stream.wait_event(scene.event),
    "Stream.record": lambda scene: scene.stream.record(),
    "Stream.capture": _captured,
    "Stream.launch_host_func": lambda scene: scene.producer.launch_host_func(int),
    "Stream.add_callback": lambda scene: scene.producer.add_callback(lambda *_: None),
    "values of streams": _values,
    "attributes of streams": _attributes,
    "facts of a stream": lambda scene: (
        scene.stream.is_done,
        scene.stream.priority,
        scene.stream.flags,
        scene.producer.stream_id,
        repr(scene.stream),
    ),
}


def state() -> tuple[int, driver.CUstreamCaptureMode]:
    exchange = driver.cuThreadExchangeStreamCaptureMode
    mode = checked(exchange(RELAXED))
    checked(exchange(mode))
    return current_context(), mode


def alive() -> tuple[int, ...]:
    """Count the streams and captures that the simulated driver has, and the streams it holds."""
    if not SIMULATED:
        return ()
    statistics = alive_in_driver()
    return statistics.streams, statistics.captures, statistics.holds


def is_quiet() -> bool:
    """Return whether all queued work has completed and no object is held for that work."""
    us.wait_all(timeout=20)
    return nothing_is_in_use()


def drawn(count: int, places: int) -> list[int]:
    """Return places to cut at: all of them in turn, or as many as are wanted."""
    numbers = random.Random(places)
    rounds, rest = divmod(count, places)
    return [*range(places)] * rounds + sorted(numbers.sample(range(places), rest))


def is_idle(name: str) -> bool:
    """Return whether nothing may be held up on the device meanwhile."""
    if name == "wait_for_device":  # of another device, if there is one
        return device_count() == 1
    return name == "Stream.create of a part"  # the first one waits for all work of the device


@contextlib.contextmanager
def in_mode(mode: driver.CUstreamCaptureMode) -> Iterator[None]:
    before = checked(driver.cuThreadExchangeStreamCaptureMode(mode))
    try:
        yield
    finally:
        checked(driver.cuThreadExchangeStreamCaptureMode(before))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_storm_of_signals(name: str, scene: Scene) -> None:
    function = FUNCTIONS[name]

    def call() -> object:
        return function(scene)

    for _ in range(2):  # what is made at the first use is there
        call()
    places: list[str] = []
    cut_short(call, 1 << 60, places)
    assert eventually(is_quiet)
    busy = 0 if is_idle(name) else 1
    assert eventually(lambda: not SIMULATED or alive()[2] == busy)
    gc.collect()
    before, modes = alive(), itertools.cycle(list(driver.CUstreamCaptureMode))
    for at, mode in zip(drawn(COUNT, len(places)), modes, strict=False):
        with in_mode(mode):
            expected, cut = state(), []
            cut_short(call, at, cut)
            assert state() == expected, f"{at}: {cut[-1]}"
            call()
    gc.collect()
    assert eventually(is_quiet), "something stays in use"
    # The first late wait in a context makes the stream on which such waits are chained, once.
    chains = device_count() if SIMULATED else 0
    possible = [(before[0] + more, *before[1:]) if before else () for more in range(chains + 1)]
    assert eventually(lambda: alive() in possible), f"{before} became {alive()}"


@pytest.mark.schedules(1)
@pytest.mark.parametrize("name", ["awaiting"])
def test_a_storm_of_signals_in_chosen_orders(name: str, scene: Scene) -> None:
    """In one of the orders the GPU is done at once: the watcher reports while a cut is underway."""
    test_a_storm_of_signals(name, scene)
