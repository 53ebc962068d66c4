"""Waits in asyncio: one wake-up of the loop for all that is done."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from cuda.bindings import driver

import userstream as us
from helpers import (
    eventually,
    on,
)
from userstream import testing
from watching import finish_meanwhile, is_idle


@pytest.fixture(autouse=True)
def _nothing_left() -> object:
    assert eventually(is_idle), "it watches for an earlier test"
    yield
    assert eventually(is_idle), "the watcher still watches"


# -- asyncio ----------------------------------------------------------------------------------


def test_the_event_loop_goes_on() -> None:
    stream = us.get_stream(0)

    async def main(latch: testing.latch) -> int:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                if ticks == 20:
                    latch.release()
                await asyncio.sleep(0.001)

        ticking = asyncio.create_task(tick())
        await us.wait_async(on(0), timeout=10)
        ticking.cancel()
        return ticks

    with testing.latch(stream) as latch:
        assert asyncio.run(main(latch)) >= 20


def test_shield_and_gather_take_completions() -> None:
    stream = us.get_stream(0)

    async def main() -> None:
        with testing.latch(stream) as latch:
            completion = us.completion(stream)
            shielded = asyncio.shield(completion)
            asyncio.get_running_loop().call_later(0.02, latch.release)
            await asyncio.gather(shielded, completion, asyncio.wait_for(completion, 10))
            assert completion.done()
            done, _ = await asyncio.wait([asyncio.ensure_future(completion)], timeout=10)
            assert len(done) == 1
            with testing.latch(stream):
                inner = us.completion(stream)
                outer = asyncio.shield(inner)
                outer.cancel()
                await asyncio.sleep(0)
                assert not inner.cancelled()

    asyncio.run(asyncio.wait_for(main(), 20))


@pytest.mark.parametrize("is_done", [False, True])
def test_asyncio_wait_of_a_completion_is_refused(is_done: bool) -> None:
    """Its callback has to run on the thread of the loop, or the wait never ends."""
    stream = us.get_stream(0)

    async def main() -> None:
        with testing.latch(stream) as latch:
            completion = us.completion(stream)
            if is_done:
                latch.release()
                await completion
            with pytest.raises(TypeError, match=r"pass asyncio\.ensure_future\(completion\)"):
                await asyncio.wait([completion], timeout=5)  # type: ignore[type-var]

    asyncio.run(asyncio.wait_for(main(), 20))


@pytest.mark.parametrize(
    "wait", [lambda: us.wait_async(0, timeout=0.02), lambda: us.wait_all_async(timeout=0.02)]
)
def test_timeouts(wait: Callable[[], object]) -> None:
    stream = us.get_stream(0)

    async def main() -> None:
        with pytest.raises(us.WaitTimeout) as caught:
            await wait()  # type: ignore[misc]
        assert caught.value.streams == (repr(stream),)
        assert caught.value.seconds == 0.02
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await us.wait_async(0)

    with testing.latch(stream):
        asyncio.run(main())
        assert eventually(is_idle), "nothing is left of what is late"
    asyncio.run(us.wait_async(0, timeout=10))


def test_a_wait_that_is_done_when_its_time_is_over_is_not_late() -> None:
    stream = us.get_stream(0)

    async def main(latch: testing.latch) -> None:
        task = asyncio.create_task(us.wait_async(0, timeout=0.02))
        await asyncio.sleep(0)
        finish_meanwhile(latch)
        time.sleep(0.03)
        await task

    with testing.latch(stream) as latch:
        asyncio.run(main(latch))


@pytest.mark.simulated
def test_a_wait_that_failed_when_its_time_is_over_has_failed() -> None:
    stream = us.get_stream(0)

    async def main(latch: testing.latch) -> None:
        testing.async_error(stream, driver.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS)
        task = asyncio.create_task(us.wait_async(0, timeout=0.02))
        await asyncio.sleep(0)
        finish_meanwhile(latch)
        time.sleep(0.03)
        with pytest.raises(us.DriverError):
            await task

    try:
        with testing.latch(stream) as latch:
            asyncio.run(main(latch))
    finally:
        testing.reset()
    us.close()


@pytest.mark.schedules(0)  # how often depends on the clock
def test_a_loop_is_woken_up_once_for_all_that_is_done() -> None:
    stream = us.get_stream(0)
    wakes = 0

    class Loop(asyncio.SelectorEventLoop):
        def call_soon_threadsafe(self, *args: Any, **kwargs: Any) -> asyncio.Handle:
            nonlocal wakes
            wakes += threading.current_thread().name == "userstream-watcher"
            return super().call_soon_threadsafe(*args, **kwargs)

    async def main(latch: testing.latch) -> None:
        tasks = [asyncio.create_task(us.wait_async(0)) for _ in range(300)]
        await asyncio.sleep(0)
        finish_meanwhile(latch)
        await asyncio.gather(*tasks)
        assert wakes == 2, "the second is for a signal that hits the first"

    with testing.latch(stream) as latch, asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(main(latch))


def test_a_task_that_is_cancelled_when_it_is_to_be_woken_up() -> None:
    stream = us.get_stream(0)

    async def main(latch: testing.latch) -> None:
        tasks = [asyncio.create_task(us.wait_async(0)) for _ in range(3)]
        await asyncio.sleep(0)
        finish_meanwhile(latch)
        tasks[0].cancel()
        async with asyncio.timeout(10):
            await asyncio.gather(*tasks[1:])
        assert tasks[0].cancelled()

    with testing.latch(stream) as latch:
        asyncio.run(main(latch))


def test_a_loop_that_is_closed_meanwhile(caplog: pytest.LogCaptureFixture) -> None:
    stream = us.get_stream(0)
    with testing.latch(stream) as latch:
        loops = [asyncio.new_event_loop(), asyncio.new_event_loop()]
        tasks = [loop.create_task(us.wait_async(0)) for loop in loops]
        for loop in loops:
            loop.run_until_complete(asyncio.sleep(0))
        loops[0].close()
        latch.release()
        loops[1].run_until_complete(asyncio.wait_for(tasks[1], 10))
        loops[1].close()
        tasks[0]._log_destroy_pending = False  # type: ignore[attr-defined]
        tasks[0].get_coro().close()  # type: ignore[union-attr]
    assert not caplog.records


def test_a_ctrl_c_in_the_delivery_leaves_the_others_to_the_next_run() -> None:
    stream = us.get_stream(0)
    hits = 1

    class Future(asyncio.Future[None]):
        def set_result(self, result: None) -> None:
            nonlocal hits
            if hits:
                hits -= 1
                raise KeyboardInterrupt
            super().set_result(result)

    class Loop(asyncio.SelectorEventLoop):
        def create_future(self) -> Future:
            return Future(loop=self)

    with testing.latch(stream) as latch, contextlib.closing(Loop()) as loop:
        tasks = [loop.create_task(us.wait_async(0)) for _ in range(5)]
        loop.call_soon(loop.stop)
        loop.run_forever()
        finish_meanwhile(latch)
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(tasks[0])
        loop.run_until_complete(asyncio.wait_for(asyncio.gather(*tasks), 10))


def test_no_loop_is_kept_alive() -> None:
    us.get_stream(0)
    loops: list[weakref.ref[asyncio.AbstractEventLoop]] = []

    async def main() -> None:
        loops.append(weakref.ref(asyncio.get_running_loop()))
        await us.wait_async(0)

    asyncio.run(main())
    gc.collect()
    assert loops[0]() is None


def test_a_task_group_on_loops_of_several_threads() -> None:
    streams = [us.get_stream(0, name=str(number)) for number in range(4)]

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for stream in streams:
                group.create_task(us.wait_async(stream, timeout=20))
            group.create_task(us.wait_all_async(timeout=20))

    latches = [testing.latch(stream) for stream in streams]
    for latch in latches:
        latch.__enter__()
    threads = [threading.Thread(target=lambda: asyncio.run(main())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for latch in latches:
        time.sleep(0.005)
        latch.release()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


def test_a_future_that_is_done_is_no_garbage() -> None:
    """It goes with its last reference: thousands of them would be a load for the collector."""
    stream = us.Stream.create(0)
    gc.collect()
    gc.disable()
    try:
        with testing.latch(stream._live()) as latch:
            future, dropped = us.completion(stream), us.completion(stream)
            gone = [weakref.ref(future), weakref.ref(dropped), weakref.ref(stream)]
            dropped.cancel()
            latch.release()
            future.result(timeout=10)
        del future, dropped, stream
        assert eventually(lambda: [each() for each in gone] == [None, None, None])
    finally:
        gc.enable()


def test_without_an_event_loop() -> None:
    us.get_stream(0)
    coroutine = us.wait_async(0)
    with pytest.raises(RuntimeError, match=r"event loop: await it in a coroutine.*trio"):
        coroutine.send(None)
