"""Copies cut short by an exception where a signal can bring one: what they use stays, in order."""

from __future__ import annotations

import contextlib
import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import userstream as us
from helpers import array, content, device_memory, eventually, fill, in_thread
from internals import nothing_is_in_use, small_chunks_in
from interrupts import cut_short
from userstream import testing

pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("no_garbage")]

SIZE = 256


def settled() -> bool:
    for stream in us.streams().values():
        stream.sync()
    return nothing_is_in_use()


def as_bytes(address: int, producer: us.Stream) -> Any:
    return array(address, producer, shape=(SIZE,), typestr="|u1")


class Scene:
    """Two buffers of a producer, and a copy that the GPU is kept from."""

    def __init__(self, producer: us.Stream, source: int, target: int) -> None:
        self.producer, self.stream = producer, us.get_stream(0)
        self.source, self.target = source, target

    def cut(self, use: Callable[[Any, Any], object], at: int) -> bool:
        """Cut a use of both short. If it has queued a copy, they stay, and their producer waits."""
        fill(self.producer, self.source, 1)
        fill(self.producer, self.target, 0)
        self.producer.sync()
        target, source = (as_bytes(each, self.producer) for each in (self.target, self.source))
        target_alive, source_alive = weakref.ref(target), weakref.ref(source)
        used = {
            between: (target_alive, source_alive),
            written: (target_alive,),
            read: (source_alive,),
        }[use]
        copies = testing.calls("cuMemcpyAsync")
        with testing.latch(self.stream) as latch:
            came = cut_short(partial(use, target, source), at)
            queued = testing.calls("cuMemcpyAsync") > copies
            del source, target
            fill(self.producer, self.source, 2)  # as whoever wrote it goes on
            us.get_stream(1).sync()  # a later call
            if queued:
                assert all(each() for each in used), f"signal {at}: it is not held"
                assert not self.producer.is_done, f"signal {at}: the producer does not wait"
            latch.release()
        us.wait_for_device(0)
        if use is not read:
            assert content(self.target) == ({1} if queued else {0}), f"signal {at}: later bytes"
        if target_alive() or source_alive():
            gc.collect()  # an error in whose traceback it is itself
        assert eventually(settled), f"signal {at}: something is never released"
        assert eventually(lambda: target_alive() is source_alive() is None), f"signal {at}"
        return came


def between(target: Any, source: Any) -> None:
    us.copyto(target, source)


def written(target: Any, _source: Any) -> None:
    us.copyto(target, np.ones(SIZE, "u1"))


def read(_target: Any, source: Any) -> None:
    """Late, as the GPU is kept from it."""
    with contextlib.suppress(us.WaitTimeout):
        us.asnumpy(source, timeout=0)


@pytest.fixture
def scene(producer: us.Stream) -> Iterator[Scene]:
    us.get_stream(1)
    with device_memory(0) as source, device_memory(0) as target:
        yield Scene(producer, source, target)


@pytest.mark.parametrize("use", [between, written, read])
def test_what_a_copy_uses_stays_and_its_producer_waits(
    use: Callable[[Any, Any], object], scene: Scene
) -> None:
    scene.cut(use, 1 << 30)  # what is made at the first use is there
    assert any(not scene.cut(use, at) for at in itertools.count())


@pytest.mark.parametrize("use", [between, read])
def test_a_copy_whose_end_cannot_be_marked(
    use: Callable[[Any, Any], object], scene: Scene, memory: int
) -> None:
    """It is held nevertheless, and let go of once an event can be recorded again."""
    source, target = as_bytes(scene.source, scene.producer), as_bytes(memory, scene.producer)
    alive = weakref.ref(source)
    use(target, source)
    us.wait_for_device(0)
    with testing.latch(scene.stream) as latch:
        skip = 1 if use is between else 2  # of the acquire, and of what is waited for
        with testing.inject("cuEventRecord", 2, count=9, skip=skip):
            with contextlib.suppress(us.DriverError):
                use(target, source)
            del source
            gc.collect()
            assert alive() is not None
            us.get_stream(1).sync()
            assert alive() is not None
        us.get_stream(1).sync()  # a later call, which marks it
        assert alive() is not None
        latch.release()
    assert eventually(settled)
    assert eventually(lambda: alive() is None)


def test_a_copy_that_is_not_late(scene: Scene) -> None:
    """On the fast path: whatever signal comes, nothing is kept for good."""
    source = as_bytes(scene.source, scene.producer)
    us.asnumpy(source)
    for at in itertools.count():
        came = cut_short(lambda: us.asnumpy(source), at)
        assert eventually(settled), f"signal {at}: something is never released"
        if not came:
            break
    assert set(us.asnumpy(source)) == {content(scene.source).pop()}


def test_the_chunks_of_a_large_copy_are_left_to_other_threads(
    producer: us.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever signal comes, and also where the error is kept, as an interactive Python does."""
    small_chunks_in(monkeypatch, 1 << 15)
    large = 5 << 14  # more than both chunks, and than is copied aside
    with device_memory(0, large) as memory:
        source = array(memory, producer, shape=(large,), typestr="|u1")
        out = np.zeros(large, "u1")
        errors: list[BaseException] = []

        def copy() -> None:
            try:
                us.asnumpy(source, out=out)
            except BaseException as error:
                errors[:] = [error]
                raise

        copy()
        for at in itertools.count():
            came = cut_short(copy, at)
            in_thread(lambda: us.asnumpy(source, out=out, timeout=20))
            if not came:
                break
        errors.clear()
        assert eventually(settled)
