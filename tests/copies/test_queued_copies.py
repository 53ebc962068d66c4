"""Copies that nobody waits for: `asnumpy_async`, and `copyto` with ``wait=False``."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import itertools
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver

import layouts
import standins
import userstream as us
from helpers import (
    array,
    content,
    device_count,
    device_current,
    device_memory,
    eventually,
    fill,
    pinned_memory,
    refused_in_a_child,
    run_python,
    running,
    write,
)
from internals import (
    copy_aside_at_most,
    forget_uses,
    lent_blocks,
    pinned_limit,
    release_held,
    run_host_functions_on,
    settled,
    sweep,
)
from interrupts import cut_short
from userstream import testing

pytestmark = pytest.mark.usefixtures("no_garbage")

SIZE = 256
NUMBERS = np.arange(6, dtype="f4").reshape(2, 3)


def as_bytes(address: int, producer: us.Stream, size: int = SIZE) -> Any:
    return array(address, producer, shape=(size,), typestr="|u1")


def as_tensor(address: int, producer: us.Stream) -> Any:
    """One of PyTorch's, whose current stream is the producer: it has a quick layout."""
    torch = sys.modules["torch"]
    torch.cuda.set_stream(torch.cuda.ExternalStream(int(producer.handle), 0))
    return torch.Tensor(torch.device("cuda", 0), address)


@pytest.fixture(autouse=True)
def _nothing_in_use() -> None:
    """Begin without what an error of the GPU left behind in another test."""
    gc.collect()
    release_held()
    forget_uses()


# -- asnumpy_async --------------------------------------------------------------------------------


def test_the_host_goes_on_and_the_copy_is_in_order(producer: us.Stream, memory: int) -> None:
    buffer = as_bytes(memory, producer)
    us.asnumpy_async(buffer).result(timeout=20)
    with testing.latch(producer) as latch:
        fill(producer, memory, 1)
        copy = us.asnumpy_async(buffer)
        fill(producer, memory, 2)  # as whoever wrote it goes on, which is after the copy
        assert not copy.done()
        with pytest.raises(TimeoutError):
            copy.result(timeout=0.01)
        latch.release()
        result = copy.result(timeout=20)
    assert isinstance(copy, concurrent.futures.Future)
    assert set(result.tolist()) == {1}
    assert result.flags.writeable
    producer.sync(timeout=20)
    assert content(memory) == {2}


@pytest.mark.no_races(False)  # which asks about pointers as well
@pytest.mark.simulated
@pytest.mark.parametrize("filled", [False, True])
def test_a_copy_on_the_fast_path_takes_few_driver_calls(
    filled: bool, torch: types.ModuleType, producer: us.Stream, memory: int
) -> None:
    out = us.pinned_empty((3, 2), "f4").T if filled else None
    tensor = as_tensor(memory, producer)
    with device_current(0):
        write(memory, NUMBERS.T)
        us.asnumpy(tensor)
        us.asnumpy_async(tensor, out=out).result(timeout=20)  # the first one of a stream
        us.wait_for_device(0, timeout=20)
        assert eventually(settled)
        alive = weakref.ref(tensor)
        testing.reset()
        copy = us.asnumpy_async(tensor, out=out)
        del tensor
        assert testing.calls("cuMemcpyAsync") == 1
        assert testing.calls("cuEventRecord") == 1  # for the copy, the edge and what is held
        assert testing.calls("cuStreamWaitEvent") == 1  # of the producer, which was idle
        assert testing.calls("cuEventCreate") == 0
        assert testing.calls("cuPointerGetAttributes") == 1  # of the tensor, none of `out`
        assert copy.result(timeout=20).tolist() == NUMBERS.tolist()
        assert out is None or copy.result() is out
        assert eventually(lambda: settled() and alive() is None)


def test_a_copy_on_the_fast_path_is_queued_in_a_host_function(
    torch: types.ModuleType, producer: us.Stream, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = as_tensor(memory, producer)
    with device_current(0):
        us.asnumpy(tensor)
        with monkeypatch.context() as patch:
            run_host_functions_on(patch, threading.get_ident())
            copy = us.asnumpy_async(tensor)
        assert copy.result(timeout=20).size == 6


@pytest.mark.parametrize("small", [0, 1 << 16], ids=["large", "small"])
@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize("is_behind", ["the producer", "the user stream"])
def test_a_copy_on_the_fast_path_that_is_late(
    is_behind: str,
    filled: bool,
    small: int,
    torch: types.ModuleType,
    producer: us.Stream,
    memory: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is in order as others are, and what it uses is kept."""
    copy_aside_at_most(monkeypatch, small)
    stream = us.get_stream(0)
    us.asnumpy(as_tensor(memory, producer))
    with device_current(0), pytest.raises(ValueError, match="in pageable memory"):
        us.asnumpy_async(as_tensor(memory, producer), out=np.empty((3, 2), "f4").T)
    for _ in range(2):
        tensor = as_tensor(memory, producer)
        alive = weakref.ref(tensor)
        with device_current(0):
            late = producer if is_behind == "the producer" else stream
            with testing.latch(late) as latch:
                fill(producer, memory, 1)
                out = us.pinned_empty((3, 2), "f4").T if filled else None
                copy = us.asnumpy_async(tensor, out=out)
                del tensor, out
                fill(producer, memory, 2)  # as whoever wrote it goes on, which is after the copy
                assert not copy.done()
                assert alive() is not None
                latch.release()
        assert set(copy.result(timeout=20).tobytes()) == {1}
        producer.sync(timeout=20)
        assert content(memory) == {2}
        assert eventually(lambda alive=alive: (sweep(), alive() is None)[1])


def test_it_gives_what_asnumpy_gives(memory: int, producer: us.Stream) -> None:
    numbers = np.arange(24, dtype="i2").reshape(2, 3, 4)
    write(memory, numbers)
    for view, offset in layouts.usual(numbers):
        buffer = array(memory + offset, shape=view.shape, typestr="<i2", strides=view.strides)
        result = us.asnumpy_async(buffer).result(timeout=20)
        np.testing.assert_array_equal(result, view, strict=True)
        assert result.flags.writeable == us.asnumpy(buffer).flags.writeable
        if not view.flags.writeable:
            continue
        for out in (us.pinned_like(view), us.pinned_empty((2, *view.shape), "i2")[1, ...]):
            out[...] = -1
            assert us.asnumpy_async(buffer, out=out).result(timeout=20) is out
            np.testing.assert_array_equal(out, view)


def test_a_batch_is_one_completion(memory: int, producer: us.Stream) -> None:
    write(memory, NUMBERS)
    one, host = array(memory, producer, shape=(2, 3)), np.ones(2)
    us.asnumpy_async(one).result(timeout=20)
    with testing.latch(producer) as latch:
        copy = us.asnumpy_async([one, (one,), {"a": one}, host])
        assert not copy.done()
        latch.release()
        results = copy.result(timeout=20)
    for each in (results[0], results[1][0], results[2]["a"]):
        np.testing.assert_array_equal(each, NUMBERS)
    assert results[3] is host
    assert us.asnumpy_async([]).result(timeout=0) == []
    assert us.asnumpy_async(host).result(timeout=0) is host


@pytest.mark.multi_device
def test_a_batch_of_several_devices(memory: int) -> None:
    with device_memory(1) as elsewhere:
        write(memory, NUMBERS)
        write(elsewhere, NUMBERS * 2, device=1)
        streams = us.get_stream(0), us.get_stream(1)
        buffers = [array(each, shape=(2, 3)) for each in (memory, elsewhere)]
        us.asnumpy_async(buffers).result(timeout=20)
        for held in streams:
            with testing.latch(held) as latch:
                copy = us.asnumpy_async(buffers)
                (other,) = {*streams} - {held}
                other.sync(timeout=20)
                assert not copy.done()
                latch.release()
                results = copy.result(timeout=20)
            np.testing.assert_array_equal(results[0], NUMBERS)
            np.testing.assert_array_equal(results[1], NUMBERS * 2)


def test_lists_of_dali(memory: int) -> None:
    write(memory, NUMBERS)
    tensor = standins.DaliTensor(0, memory, 6, typestr="=f", version=2)
    results = us.asnumpy_async(standins.DaliList([tensor, tensor])).result(timeout=20)
    assert [each.tolist() for each in results] == [list(range(6))] * 2


@pytest.mark.schedules(0)  # how often the loop goes on depends on the clock
def test_it_can_be_awaited(producer: us.Stream, memory: int) -> None:
    buffer = as_bytes(memory, producer)
    fill(producer, memory, 3)
    us.asnumpy(buffer)

    async def main() -> None:
        assert (await us.asnumpy_async(buffer)).tolist() == [3] * SIZE
        ticks = 0
        with testing.latch(producer) as latch:
            fill(producer, memory, 4)
            copy = us.asnumpy_async(buffer)
            loop = asyncio.get_running_loop()
            loop.call_later(0.02, latch.release)

            async def tick() -> None:
                nonlocal ticks
                while not copy.done():
                    ticks += 1
                    await asyncio.sleep(0.001)

            results = await asyncio.gather(tick(), *(awaited(copy) for _ in range(3)))
        assert ticks > 1, "the event loop goes on"
        assert all(each is results[1] for each in results[2:]), "any number of tasks may wait"
        assert results[1].tolist() == [4] * SIZE
        assert await copy is results[1], "also when it is done"

    async def awaited(copy: us.Completion[Any]) -> Any:
        return await copy

    asyncio.run(main())


@pytest.mark.parametrize("made", ["asnumpy_async", "completion"])
@pytest.mark.parametrize("how", ["timeout", "cancel", "wait_for"])
def test_a_task_that_gives_up_ends_its_own_wait_alone(
    how: str, made: str, producer: us.Stream, memory: int
) -> None:
    buffer = as_bytes(memory, producer)
    us.asnumpy(buffer)

    async def main() -> None:
        with testing.latch(us.get_stream(0)) as latch:
            copy: us.Completion[Any] = getattr(us, made)(buffer)

            async def awaits() -> Any:
                return await copy

            other = asyncio.create_task(awaits())
            if how == "timeout":
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.01):
                        await copy
            elif how == "wait_for":
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(awaits(), 0.01)
            else:
                task = asyncio.create_task(awaits())
                await asyncio.sleep(0.01)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            assert not copy.done()
            assert len(copy._done_callbacks) == 1, "nothing is left of the wait"
            latch.release()
            assert await other is await copy

    asyncio.run(main())


def test_a_completion_that_is_cancelled_cancels_who_awaits_it() -> None:
    async def main() -> None:
        with testing.latch(us.get_stream(0)):
            done = us.completion(0)

            async def awaits() -> None:
                await done

            task = asyncio.create_task(awaits())
            await asyncio.sleep(0)
            assert done.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            with pytest.raises(asyncio.CancelledError):
                await done

    asyncio.run(main())


def test_awaiting_takes_an_event_loop() -> None:
    with testing.latch(us.get_stream(0)):
        done = us.completion(0)
        with pytest.raises(RuntimeError, match="event loop: await it in a coroutine"):
            done.__await__().send(None)  # type: ignore[attr-defined]
        done.cancel()


def test_an_error_of_the_gpu_is_that_of_who_awaits() -> None:
    pytest.importorskip("numpy")
    if not _is_simulated():
        pytest.skip("breaks the context")
    done = run_python(
        """
        import asyncio
        import numpy as np
        import userstream as us
        from cuda.bindings import driver
        from cuda.core import Device
        from userstream import testing

        Device(0).set_current()
        stream = us.get_stream(0)
        buffer = Device(0).allocate(64, stream=stream)
        us.asnumpy(buffer, producer=stream)

        async def main():
            with testing.latch(stream) as latch:
                copy = us.asnumpy_async(buffer, producer=stream)
                latch.release()
                testing.async_error(stream, driver.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS)
                for _ in range(2):
                    try:
                        await us.asnumpy_async(buffer, producer=stream)
                    except us.DriverError as error:
                        print(error.name)

        asyncio.run(main())
        """
    )
    assert done.stdout.split() == ["CUDA_ERROR_ILLEGAL_ADDRESS"] * 2, done.stderr


def _is_simulated() -> bool:
    from conftest import SIMULATED

    return SIMULATED


# -- what is kept ---------------------------------------------------------------------------------


def queue_to_new(buffer: Any) -> tuple[Any, ...]:
    return (us.asnumpy_async(buffer),)


def queue_to_like(buffer: Any) -> tuple[Any, ...]:
    return (us.asnumpy_async(buffer, out=us.pinned_empty((3, 2), "f4").T),)


def queue_to_out(buffer: Any) -> tuple[Any, ...]:
    place = us.pinned_empty((2, SIZE), "u1")
    return us.asnumpy_async(buffer, out=place[1]), place


def copy_to_host(buffer: Any) -> tuple[Any, ...]:
    place = us.pinned_empty((2, SIZE), "u1")
    return us.copyto(place[1], buffer, wait=False), place


def copy_from_host(buffer: Any) -> tuple[Any, ...]:
    place = us.pinned_empty((2, SIZE), "u1")
    place[:] = 5
    return us.copyto(buffer, place[1], wait=False), place


QUEUES = [queue_to_new, queue_to_out, copy_to_host, copy_from_host]


@pytest.mark.parametrize("end", ["dropped", "cancelled", "stream closed"])
@pytest.mark.parametrize("queue", QUEUES)
def test_what_it_uses_is_kept(
    queue: Callable[[Any], tuple[Any, ...]], end: str, producer: us.Stream, memory: int
) -> None:
    us.asnumpy(as_bytes(memory, producer))
    stream = us.Stream.create(0)
    buffer = as_bytes(memory, producer)
    alive = weakref.ref(buffer)
    with testing.latch(producer) as latch:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(us, "asnumpy_async", _on(stream, us.asnumpy_async))
            patch.setattr(us, "copyto", _on(stream, us.copyto))
            result = queue(buffer)
        lent = lent_blocks()
        if end == "cancelled" and isinstance(result[0], us.Completion):
            assert result[0].cancel()
        del result, buffer
        if end == "stream closed":
            stream.close()
        us.get_stream(1 % device_count()).sync(timeout=20)  # a later call
        assert alive() is not None
        assert lent <= lent_blocks(), "its host memory could be used again"
        assert lent
        latch.release()
    us.wait_for_device(0, timeout=20)
    assert eventually(lambda: (sweep(), alive() is None)[1])
    assert eventually(settled)
    stream.close()


def _on(stream: us.Stream, function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments, **more: function(*arguments, stream=stream, **more)


@pytest.mark.simulated
@pytest.mark.usefixtures("torch")
@pytest.mark.parametrize(
    ("queue", "made"),
    [
        *((queue, as_bytes) for queue in QUEUES),
        (queue_to_new, as_tensor),
        (queue_to_like, as_tensor),
    ],
)
def test_a_signal_leaves_nothing_unordered_and_nothing_lost(
    queue: Callable[[Any], tuple[Any, ...]],
    made: Callable[[int, us.Stream], Any],
    producer: us.Stream,
    memory: int,
) -> None:
    stream = us.get_stream(0)
    queue(made(memory, producer))
    with device_current(0):
        _cut_short_anywhere(queue, made, stream, producer, memory)


def _cut_short_anywhere(
    queue: Callable[[Any], tuple[Any, ...]],
    made: Callable[[int, us.Stream], Any],
    stream: us.Stream,
    producer: us.Stream,
    memory: int,
) -> None:
    us.wait_for_device(0, timeout=20)
    for at in itertools.count():
        fill(producer, memory, 1)
        producer.sync(timeout=20)
        buffer = made(memory, producer)
        alive = weakref.ref(buffer)
        copies = testing.calls("cuMemcpyAsync")
        with testing.latch(stream) as latch:
            came = cut_short(lambda buffer=buffer: queue(buffer), at)
            queued = testing.calls("cuMemcpyAsync") > copies
            del buffer
            fill(producer, memory, 2)  # as whoever wrote it goes on
            us.get_stream(1).sync(timeout=20)  # a later call
            if queued:
                assert alive() is not None, f"signal {at}: it is not held"
                assert not producer.is_done, f"signal {at}: the producer does not wait"
            latch.release()
        us.wait_for_device(0, timeout=20)
        assert content(memory) == {2}, f"signal {at}: the copy came after later work"
        if alive() is not None:
            gc.collect()  # an error in whose traceback it is itself
        assert eventually(settled), f"signal {at}: something is never released"
        assert eventually(lambda alive=alive: alive() is None), f"signal {at}"
        if not came:
            break
    assert at > 20


# -- it never waits -------------------------------------------------------------------------------


def test_it_never_waits_for_the_gpu(memory: int) -> None:
    """Not even where new memory is needed, everything on the device is held, and nothing named."""
    us.asnumpy(as_bytes(memory, us.get_stream(0)))
    buffer = driver.CUdeviceptr(memory)
    with device_memory(0, 1 << 20) as large:
        source = array(large, shape=(1 << 20,), typestr="|u1")
        with testing.latch(us.get_stream(0)) as latch:
            us.release(buffer)  # what is queued on the device from now on comes after

            def queue() -> list[us.Completion[Any]]:
                return [us.asnumpy_async(source, producer="device") for _ in range(3)]

            with running(queue) as result:
                copies = result()  # which fails if it does not end
            assert not any(copy.done() for copy in copies)
            latch.release()
        for copy in copies:
            assert copy.result(timeout=20).size == 1 << 20
    us.wait_for_device(0, timeout=20)


def test_past_the_limit_it_is_refused(memory: int, producer: us.Stream) -> None:
    """Results in ordinary memory would have to be waited for."""
    buffer = as_bytes(memory, producer)
    before = pinned_limit()
    try:
        us.UserStream.set_pinned_limit(0)
        with pytest.raises(MemoryError, match="the limit is 0"):
            us.asnumpy_async(buffer)
    finally:
        us.UserStream.set_pinned_limit(before)
    assert us.asnumpy_async(buffer).result(timeout=20).size == SIZE


# -- copyto(wait=False) ---------------------------------------------------------------------------


def test_copyto_returns_before_the_copy(producer: us.Stream, memory: int) -> None:
    buffer = as_bytes(memory, producer)
    place = us.pinned_empty(SIZE, "u1")
    place[:] = 1
    with testing.latch(us.get_stream(0)) as latch:
        stream = us.copyto(buffer, place, wait=False)
        assert stream is us.get_stream(0)
        assert not us.completion(stream).done()
        latch.release()
    us.wait(stream, timeout=20)
    assert content(memory) == {1}
    fill(producer, memory, 2)
    with testing.latch(producer) as latch:
        fill(producer, memory, 3)
        stream = us.copyto(place, buffer, wait=False)
        fill(producer, memory, 4)
        latch.release()
    us.wait(stream, timeout=20)
    assert set(place.tolist()) == {3}


def test_copyto_broadcasts(producer: us.Stream, memory: int) -> None:
    buffer = array(memory, producer, shape=(2, 3))
    row = us.pinned_empty((1, 1, 3), "f4")
    row[:] = [1, 2, 3]
    us.wait(us.copyto(buffer, row, wait=False), timeout=20)
    assert us.asnumpy(buffer).tolist() == [[1, 2, 3]] * 2
    place = us.pinned_empty((4, 2, 3), "f4")
    us.wait(us.copyto(place, buffer, wait=False), timeout=20)
    assert place.tolist() == [[[1, 2, 3]] * 2] * 4


def test_memory_that_the_driver_knows_is_page_locked(producer: us.Stream, memory: int) -> None:
    """Of whatever library: this is cuMemHostAlloc's."""
    buffer = as_bytes(memory, producer)
    fill(producer, memory, 6)
    with pinned_memory(size=SIZE) as where:
        place = np.asarray(standins_array(where))
        assert us.asnumpy_async(buffer, out=place).result(timeout=20) is place
        assert set(place.tolist()) == {6}
        us.wait(us.copyto(place, buffer, wait=False), timeout=20)
        us.wait(us.copyto(buffer, place, wait=False), timeout=20)


def standins_array(where: int) -> Any:
    interface = {"version": 3, "shape": (SIZE,), "typestr": "|u1", "data": (where, False)}
    return types.SimpleNamespace(__array_interface__=interface)


@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        (
            lambda x, host: us.asnumpy_async(x, out=host),
            ValueError,
            r"out= is in pageable memory.*pinned_empty\(\) or pinned_like",
        ),
        (
            lambda x, host: us.copyto(x, host, wait=False),
            ValueError,
            r"the source is in pageable memory.*without wait=False",
        ),
        (
            lambda x, host: us.copyto(host, x, wait=False),
            ValueError,
            r"the target is in pageable memory",
        ),
        (
            lambda x, host: us.copyto(x, x, wait=False, timeout=1),
            ValueError,
            "wait=False waits for nothing",
        ),
        (lambda x, host: us.asnumpy_async(x, out=host[1:]), ValueError, "out has shape"),
        (lambda x, host: us.asnumpy_async([x], out=host), TypeError, "consists of several"),
        (lambda x, host: us.asnumpy_async(object()), us.UnsupportedBufferError, "not a buffer"),
        (lambda x, host: us.asnumpy_async(x, stream=1), TypeError, "from_handle"),
    ],
)
def test_bad_input(
    use: Callable[[Any, np.ndarray], object],
    error: type[Exception],
    message: str,
    producer: us.Stream,
    memory: int,
) -> None:
    with pytest.raises(error, match=message):
        use(as_bytes(memory, producer), np.zeros(SIZE, "u1"))
    assert eventually(settled)


def test_a_captured_stream_is_refused(producer: us.Stream, memory: int) -> None:
    buffer = as_bytes(memory, producer)
    place = us.pinned_empty(SIZE, "u1")
    with us.Stream.create(0) as captured, captured.capture("relaxed"):
        with pytest.raises(us.CaptureError):
            us.asnumpy_async(buffer, stream=captured)
        with pytest.raises(us.CaptureError):
            us.copyto(buffer, place, stream=captured, wait=False)
    assert eventually(settled)


def test_a_closed_registry_and_a_forked_child(memory: int) -> None:
    with us.UserStream() as mine:
        mine.get_stream(0)
    with pytest.raises(us.ClosedError):
        mine.asnumpy_async(np.ones(3))
    refused_in_a_child("lambda: us.asnumpy_async([]), lambda: us.copyto(0, 0, wait=False)")


def test_copies_that_are_pending_at_exit() -> None:
    done = run_python(
        """
        import userstream as us
        from cuda.core import Device
        from userstream import testing

        Device(0).set_current()
        stream = us.get_stream(0)
        buffer = Device(0).allocate(64, stream=stream)
        us.asnumpy(buffer, producer=stream)
        held = testing.latch(stream)
        held.__enter__()
        copies = [us.asnumpy_async(buffer, producer=stream) for _ in range(3)]
        print("end")
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")
