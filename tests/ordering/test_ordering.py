"""Order with the producers of buffers, in both directions and with no host wait."""

from __future__ import annotations

import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import pytest
from cuda.bindings import driver
from cuda.core import Device

import standins
import userstream as us
from conftest import SIMULATED
from helpers import (
    CAI,
    Exporting,
    array,
    checked,
    content,
    copy,
    device_current,
    device_memory,
    entered,
    eventually,
    fill,
    held_while,
    in_thread,
    is_blocked,
    on,
    pooled_events,
    primary_context,
    run_python,
    running,
    waits_for,
)
from internals import forget_frameworks, nothing_is_held, wait_in_every_block
from userstream import testing

pytestmark = pytest.mark.usefixtures("no_garbage")


# -- what an edge does --------------------------------------------------------------------------


def test_acquire_waits_for_the_producer_and_the_host_does_not(
    producer: us.Stream, memory: int, other: int
) -> None:
    fill(producer, memory, 1)
    producer.sync(timeout=10)
    with testing.latch(producer) as latch:
        fill(producer, memory, 2)
        stream = us.acquire(array(memory, producer))
        assert stream is us.get_stream(0)
        copy(stream, other, memory)
        assert not stream.is_done
        latch.release()
    assert content(other) == {2}


def test_release_makes_the_producer_wait(producer: us.Stream, memory: int, other: int) -> None:
    stream = us.get_stream(0)
    fill(producer, memory, 1)
    us.acquire(array(memory, producer))
    with testing.latch(stream) as latch:
        copy(stream, other, memory)
        us.release(array(memory, producer))
        fill(producer, memory, 2)
        assert not producer.is_done
        latch.release()
    assert content(other) == {1}
    assert content(memory) == {2}


def test_borrow_does_both(producer: us.Stream, memory: int, other: int) -> None:
    with testing.latch(producer) as latch:
        fill(producer, memory, 1)
        with us.borrow(array(memory, producer)) as stream:
            copy(stream, other, memory)
        fill(producer, memory, 2)
        assert not producer.is_done
        assert not stream.is_done
        latch.release()
    assert content(other) == {1}
    assert content(memory) == {2}


def test_nothing_but_the_edge_is_waited_for(producer: us.Stream, memory: int) -> None:
    """Work that the producer queues afterwards holds nobody up."""
    stream = us.acquire(array(memory, producer))
    with testing.latch(producer):
        stream.sync(timeout=10)


def test_a_stream_of_ones_own(producer: us.Stream, memory: int) -> None:
    with us.Stream.create(0) as mine, testing.latch(producer) as latch:
        for given in (mine, mine._live()):
            with us.borrow(array(memory, producer), stream=given) as stream:
                assert stream == mine
        assert not us.streams()
        assert not mine.is_done
        latch.release()
        mine.sync(timeout=10)


def test_a_registry_of_ones_own(producer: us.Stream, memory: int) -> None:
    with us.UserStream() as registry:
        assert registry.acquire(array(memory, producer)) is registry.get_stream(0)
        assert not us.streams()


# -- who produces -------------------------------------------------------------------------------


def edges(use: Callable[[], object], function: str = "cuStreamWaitEvent") -> int:
    """Return how many edges something makes, or calls of another function of the driver."""
    before = testing.calls(function)
    use()
    return testing.calls(function) - before


def test_the_current_stream_of_torch(
    torch: types.ModuleType, producer: us.Stream, memory: int
) -> None:
    tensor = torch.Tensor(torch.device("cuda", 0), memory)
    legacy = us.Stream.legacy_default()
    us.get_stream(0)  # none can be made while the legacy default stream is held
    with device_current(0):
        assert waits_for(legacy, lambda: us.acquire(tensor))
    assert not waits_for(producer, lambda: us.acquire(tensor))
    torch.cuda.set_stream(torch.cuda.ExternalStream(int(producer.handle), 0))
    assert waits_for(producer, lambda: us.acquire(tensor))
    assert waits_for(producer, lambda: us.acquire([tensor], {"a": tensor}))
    torch._C = None  # the function is private: there may be none
    assert waits_for(producer, lambda: us.acquire(tensor))


def test_the_current_stream_of_cupy(
    cupy: types.ModuleType, producer: us.Stream, memory: int
) -> None:
    current = cupy.cuda.stream._BaseStream(int(producer.handle), 0).use()
    kept = weakref.ref(current)
    assert waits_for(producer, lambda: us.acquire(cupy.ndarray(0, memory)))
    with us.borrow(cupy.ndarray(0, memory)):
        cupy.cuda.stream._BaseStream(0, 0).use()
        del current
        assert kept() is not None, "CuPy destroys a stream with its object"


@pytest.mark.multi_device
@pytest.mark.parametrize("current", [0, 1])
def test_a_default_stream_is_that_of_the_device_of_the_buffer(
    torch: types.ModuleType, current: int
) -> None:
    """Whichever device is current, a token means the buffer's."""
    with (
        device_memory(1) as address,
        device_current(current),
    ):
        tensor = torch.Tensor(torch.device("cuda", 1), address)
        us.get_stream(1)  # none can be made while the legacy default stream is held
        for use in (
            lambda: us.acquire(tensor),
            lambda: us.acquire(tensor, producer=us.Stream.legacy_default()),
            lambda: us.acquire(standins.NumbaArray(1, address, stream=1)),
            lambda: us.acquire(tensor, stream=us.Stream.per_thread_default()),
        ):
            latch = testing.latch(us.Stream.legacy_default())
            with device_current(1):
                latch.__enter__()
            user = use()
            assert not user.is_done
            latch.release()
            user.sync(timeout=10)


def test_the_stream_that_numba_names(producer: us.Stream, memory: int) -> None:
    bound = standins.NumbaArray(0, memory, stream=int(producer.handle))
    assert waits_for(producer, lambda: us.acquire(bound))
    unbound = standins.NumbaArray(0, memory, stream=None)
    us.get_stream(0)
    with device_current(0):
        assert waits_for(us.Stream.legacy_default(), lambda: us.acquire(unbound))


def test_the_stream_that_dali_names(producer: us.Stream, memory: int) -> None:
    tensor = standins.DaliTensor(0, memory)
    tensor.stream = int(producer.handle)
    batch = standins.DaliList([tensor], tensor.stream)
    dynamic = standins.DaliDynamic(0, memory)
    dynamic.stream = tensor.stream
    for output in (tensor, batch, dynamic, standins.DaliBatch([dynamic])):
        assert waits_for(producer, lambda output=output: us.acquire(output)), output
    dynamic.stream = None
    for output in (dynamic, standins.DaliBatch([dynamic])):
        assert waits_for(producer, lambda output=output: us.acquire(output)), "and for all others"
        with pytest.raises(us.UnknownProducerError):
            us.UserStream(unknown="raise").acquire(output)


def test_the_interface(producer: us.Stream, memory: int) -> None:
    assert waits_for(producer, lambda: us.acquire(array(memory, producer)))
    assert not waits_for(producer, lambda: us.acquire(array(memory, None)))


def test_an_array_that_orders_its_consumer(producer: us.Stream) -> None:
    exporting = Exporting(producer)
    assert waits_for(producer, lambda: us.acquire(exporting))
    assert exporting.asked == [int(us.get_stream(0)._live())]
    assert exporting.capsule is not None
    assert exporting.capsule() is None, "acquire keeps nothing alive"


@pytest.mark.multi_device
def test_an_array_that_orders_a_default_stream_of_its_device() -> None:
    legacy = us.Stream.legacy_default()
    with (
        us.Stream.create(1) as writer,
        device_current(0),
    ):
        with testing.latch(writer) as latch:
            us.acquire(Exporting(writer, 1), stream=legacy)
            assert legacy.is_done, "that of device 0"
            with device_current(1):
                assert not legacy.is_done
                latch.release()
                legacy.sync(timeout=10)


def test_jax_is_ordered_part_by_part(jax: types.ModuleType, producer: us.Stream) -> None:
    asked = []

    def export(self: Any, *, stream: int) -> object:
        asked.append((self.device.local_hardware_id, stream))
        return object()

    jax.Array.__dlpack__ = export
    sharded = jax.Array(jax.Device(0), jax.Device(1))
    with pytest.raises(us.DeviceMismatchError):
        us.acquire(sharded)
    assert us.acquire(sharded, stream=producer) is producer
    assert asked == [(0, int(producer.handle)), (1, int(producer.handle))]
    with us.borrow(jax.Array(jax.Device(0))) as stream:
        assert asked[-1] == (0, int(stream.handle))
    with us.borrow(sharded, stream=producer, producer=None):
        pass
    assert len(asked) == 3


@pytest.mark.multi_device
def test_the_stream_that_an_array_names_may_be_of_another_device() -> None:
    with device_current(0):
        handle = checked(driver.cuStreamCreate(1))
    with us.Stream.create(1) as mine, device_memory(1) as there:
        found = array(there, us.Stream.from_handle(handle))
        assert waits_for(us.Stream.from_handle(handle), lambda: us.acquire(found, stream=mine))
    checked(driver.cuStreamDestroy(handle))


@pytest.mark.multi_device
@pytest.mark.parametrize(("first", "other"), [(0, 1), (1, 0)])
def test_a_default_stream_is_that_of_the_first_part_and_of_no_other_device(
    jax: types.ModuleType, first: int, other: int
) -> None:
    jax.Array.__dlpack__ = lambda *_, **how: object()
    sharded = jax.Array(jax.Device(first), jax.Device(other))
    with pytest.raises(us.DeviceMismatchError, match=f"means a stream of device {other};"):
        us.acquire(sharded, stream=us.Stream.legacy_default())


def test_an_export_that_fails(producer: us.Stream) -> None:
    class Failing(Exporting):
        def __dlpack__(self, *, stream: int) -> object:
            raise BufferError("it is sparse")

    assert waits_for(producer, lambda: us.acquire(Failing(producer))), "by the device"
    with pytest.raises(us.UnknownProducerError, match="producer="):
        us.UserStream(unknown="raise").acquire(Failing(producer))
    assert us.acquire(Failing(producer), producer=producer) is us.get_stream(0)


def test_a_producer_that_is_given(producer: us.Stream, memory: int) -> None:
    core = Device(0)
    with device_current(0):
        core.set_current()
        theirs = core.create_stream()
    for given in (producer, producer._live(), theirs):
        source = us.Stream.from_handle(given)
        for buffer in (array(memory, None), driver.CUdeviceptr(memory), on(0)):
            assert waits_for(
                source, lambda buffer=buffer, given=given: us.acquire(buffer, producer=given)
            )
    theirs.close()


def test_nothing_is_pending(producer: us.Stream, memory: int) -> None:
    with testing.latch(producer):
        with us.borrow(array(memory, producer), producer=None) as stream:
            stream.sync(timeout=10)
        us.release(array(memory, producer), producer=None)


@pytest.mark.parametrize("use", [us.acquire, us.release, lambda b: us.borrow(b).__enter__()])
def test_an_unknown_producer_is_refused_on_request(
    use: Callable[[Any], object], memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(us.UserStream.get(), "unknown", "raise")
    for buffer in (
        CAI(memory, version=2),
        driver.CUdeviceptr(memory),
        standins.RmmBuffer(0, memory, version=0),
    ):
        with pytest.raises(us.UnknownProducerError, match="producer=") as caught:
            use(buffer)
        assert caught.value.device == 0


@pytest.mark.schedules(0)  # who was held by an earlier run adds edges
@pytest.mark.simulated
@pytest.mark.no_races(False)  # who watches adds to what is counted
def test_one_edge_for_each_producer(
    torch: types.ModuleType, producer: us.Stream, memory: int
) -> None:
    stream = us.get_stream(0)
    one, two = array(memory, producer), standins.NumbaArray(0, memory, stream=1)
    with device_current(0):
        assert edges(lambda: us.acquire(one, one, [one, one])) == 1
        assert edges(lambda: us.acquire(one, two, one)) == 2
        assert edges(lambda: us.release(one, two, one)) == 2
        assert edges(lambda: us.acquire(array(memory, stream))) == 0
        assert edges(lambda: us.acquire(one, producer=stream)) == 0
        theirs = Device(0).create_stream()
        foreign = CAI(memory, stream=int(theirs.handle))
        asked = edges(lambda: us.acquire(foreign), "cuStreamGetCtx")  # to wrap the stream
        assert asked
        assert edges(lambda: us.acquire(*[foreign] * 8), "cuStreamGetCtx") == asked
        assert edges(lambda: us.acquire(two, stream=us.Stream.legacy_default())) == 0
        tensor = torch.Tensor(torch.device("cuda", 0), memory)
        assert edges(lambda: us.acquire(*[tensor] * 8)) == 1
        torch.cuda.set_stream(torch.cuda.ExternalStream(int(stream.handle), 0))
        assert edges(lambda: us.acquire(tensor)) == 0
        assert edges(lambda: us.borrow(tensor).__enter__()) == 0


# -- several devices, threads -------------------------------------------------------------------


@pytest.mark.multi_device
@pytest.mark.parametrize("current", [None, 0, 1])
def test_a_buffer_of_one_device_on_a_stream_of_another(current: int | None) -> None:
    context = driver.CUcontext(0) if current is None else primary_context(current)
    with (
        device_memory(1) as address,
        us.Stream.create(1) as producer,
        us.Stream.create(0) as mine,
        entered(context),
    ):
        buffer = array(address, producer)
        with testing.latch(producer) as latch:
            with us.borrow(buffer, stream=mine):
                pass
            assert not mine.is_done
            latch.release()
        with testing.latch(mine) as latch:
            with us.borrow(buffer, stream=mine):
                pass
            assert not producer.is_done
            latch.release()
            producer.sync(timeout=10)


@pytest.mark.multi_device
def test_buffers_of_several_devices() -> None:
    with device_memory(0) as here, device_memory(1) as there:
        one, two = (
            standins.NumbaArray(device, address, stream=1)
            for device, address in enumerate((here, there))
        )
        for use in (us.acquire, us.release, lambda *b: us.borrow(*b).__enter__()):
            with pytest.raises(us.DeviceMismatchError, match="stream=") as caught:
                use(one, two)
            assert caught.value.devices == (0, 1)
        with us.Stream.create(1) as mine, us.borrow(one, two, stream=mine) as stream:
            assert stream is mine


def test_nested_and_in_many_threads(producer: us.Stream, memory: int) -> None:
    def work() -> int:
        for _ in range(50):
            with us.borrow(array(memory, producer)) as outer:
                with us.borrow(array(memory, producer)) as inner:
                    assert outer is inner
                us.acquire(array(memory, producer))
                us.release(array(memory, producer))
        return 1

    results: list[int] = []
    threads = [threading.Thread(target=lambda: results.append(work())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [1] * 8
    producer.sync(timeout=10)
    us.wait_all(timeout=10)
    events = pooled_events()
    assert len(events) == len(set(map(id, events)))


def test_edges_leave_no_more_events_than_there_are_callers(
    producer: us.Stream, memory: int
) -> None:
    buffer = array(memory, producer)
    assert eventually(nothing_is_held)
    us.acquire(buffer)
    before = len(pooled_events())
    for _ in range(500):
        us.acquire(buffer)
        with us.borrow(buffer, keep=False):
            pass
    assert len(pooled_events()) == before


def test_held_events_are_used_again(memory: int) -> None:
    stream, buffer = us.get_stream(0), array(memory, None)

    def use() -> int:
        with testing.latch(stream):  # so that each time 50 are needed at once
            for _ in range(50):
                us.release(buffer)
        us.wait(stream, timeout=10)
        # Another thread returns the events.
        assert eventually(lambda: nothing_is_held() and len(pooled_events()) >= 50)
        return len(pooled_events())

    most = max(use() for _ in range(3))
    assert use() <= most + 1
    events = testing.calls("cuEventCreate") if SIMULATED else 0
    use()
    assert not SIMULATED or testing.calls("cuEventCreate") <= events + 1


def test_only_a_block_on_a_per_thread_stream_must_end_in_its_thread(
    producer: us.Stream, memory: int
) -> None:
    per_thread = us.Stream.per_thread_default()
    with device_current(0):
        for more in ({"stream": per_thread}, {"producer": per_thread}):
            borrow = us.borrow(array(memory, producer), **more)
            borrow.__enter__()
            with pytest.raises(RuntimeError, match="in the thread where it began"):
                in_thread(lambda borrow=borrow: borrow.__exit__(None, None, None))
            borrow.__exit__(None, None, None)
    for more in ({}, {"stream": us.Stream.legacy_default()}):
        with device_current(0):
            elsewhere = us.borrow(array(memory, producer), **more)
            elsewhere.__enter__()
        in_thread(lambda borrow=elsewhere: borrow.__exit__(None, None, None))


# -- a block ------------------------------------------------------------------------------------


def test_an_exception_releases_as_well(producer: us.Stream, memory: int) -> None:
    stream = us.get_stream(0)
    with testing.latch(stream) as latch:
        with pytest.raises(KeyError), us.borrow(array(memory, producer)):
            raise KeyError
        assert not producer.is_done
        latch.release()


@pytest.mark.simulated
def test_an_error_at_the_end_never_hides_ones_own(producer: us.Stream, memory: int) -> None:
    def use(error: Exception | None) -> None:
        with us.borrow(array(memory, producer)):
            testing.inject("cuStreamWaitEvent", 999, this_thread=True)
            if error is not None:
                raise error

    with pytest.raises(KeyError) as caught:
        use(KeyError())
    assert "CUDA_ERROR_UNKNOWN" in caught.value.__notes__[0]
    with pytest.raises(us.DriverError, match="CUDA_ERROR_UNKNOWN"):
        use(None)


@pytest.mark.simulated
def test_buffers_are_held_though_a_producer_cannot_wait(producer: us.Stream, memory: int) -> None:
    stream = us.get_stream(0)

    def use(buffer: Any) -> None:
        with (
            testing.inject("cuStreamWaitEvent", 999, this_thread=True),
            pytest.raises(us.DriverError),
        ):
            us.release(buffer, producer=producer)

    assert held_while(stream, use, memory) == [True, False]

    def borrow(buffer: Any) -> None:
        with (
            pytest.raises(us.DriverError),
            testing.inject("cuStreamWaitEvent", 999, skip=1, this_thread=True),
            us.borrow(buffer, producer=producer),
        ):
            pass

    assert held_while(stream, borrow, memory) == [True, False]


@pytest.mark.simulated
def test_one_producer_that_cannot_wait_does_not_stop_the_others(
    producer: us.Stream, memory: int
) -> None:
    with us.Stream.create(0) as second:
        borrow = us.borrow(array(memory, producer), array(memory, second))
        stream = borrow.__enter__()
        with testing.latch(stream) as latch:
            with (
                testing.inject("cuStreamWaitEvent", 999, this_thread=True),
                pytest.raises(us.DriverError),
            ):
                borrow.__exit__(None, None, None)
            producer.sync(timeout=10)
            assert not second.is_done
            latch.release()


def test_a_borrow_begins_once_at_a_time(producer: us.Stream, memory: int) -> None:
    borrow = us.borrow(array(memory, producer))
    with pytest.raises(RuntimeError, match="not entered"):
        borrow.__exit__(None, None, None)
    with borrow:
        with pytest.raises(RuntimeError, match="has not ended"):
            borrow.__enter__()
    with borrow:
        pass


def test_the_producer_is_the_one_at_the_begin(
    torch: types.ModuleType, producer: us.Stream, memory: int
) -> None:
    tensor = torch.Tensor(torch.device("cuda", 0), memory)
    torch.cuda.set_stream(torch.cuda.ExternalStream(int(producer.handle), 0))
    with us.borrow(tensor) as stream:
        torch.cuda.set_stream(torch.cuda.default_stream(0))
        with testing.latch(stream) as latch:
            us.release(tensor)  # which is another producer by now
            producer.sync(timeout=10)
            latch.release()
        latch = testing.latch(stream)
        latch.__enter__()
    assert not producer.is_done
    latch.release()


# -- bad input ----------------------------------------------------------------------------------


def test_bad_input(memory: int) -> None:
    buffer = CAI(memory, stream=None)
    for use in (us.acquire, us.release, lambda *b, **k: us.borrow(*b, **k).__enter__()):
        with pytest.raises(ValueError, match="no buffer"):
            use()
        with pytest.raises(ValueError, match="no buffer"):
            use([], {})
        with pytest.raises(us.UnsupportedBufferError, match=r"buffers\[1\]"):
            use(buffer, 3)
        with pytest.raises(us.HostBufferError):
            use(standins.DaliHostTensor())
        for wrong in ("auto", object(), 1.5, True):
            with pytest.raises(TypeError, match="stream="):
                use(buffer, stream=wrong)
        for wrong in ("current", object(), 1.5, True):
            with pytest.raises(TypeError, match=r'producer=.* \(or "auto", "device", or None\)'):
                use(buffer, producer=wrong)
        with pytest.raises(ValueError, match="not the handle"):
            use(buffer, stream=driver.CUstream(0))
        with us.Stream.create(0) as closed:
            pass
        with pytest.raises(us.ClosedError):
            use(buffer, stream=closed)
        with pytest.raises(us.ClosedError):
            use(buffer, producer=closed)
    with pytest.raises(us.NoUserStreamError):
        us.hold(buffer)
    assert not us.streams()
    with us.UserStream() as registry:
        pass
    with pytest.raises(us.ClosedError):
        registry.acquire(buffer)


@pytest.mark.schedules(0)  # waits for other processes
def test_sync_waits_on_the_host() -> None:
    code = """
        import sys
        import userstream as us
        from helpers import CAI, device_memory, is_blocked, running
        from userstream import testing

        with device_memory(0) as address, us.Stream.create(0) as producer:
            buffer = CAI(address, stream=int(producer.handle))
            for stream, use in ((producer, us.acquire), (us.get_stream(0), us.release)):
                with testing.latch(stream) as latch, running(lambda: use(buffer)) as result:
                    print(is_blocked(result, float(sys.argv[1])))
                    latch.release()
                    result()
        """
    for value, blocked in (("1", True), ("0", False), ("", False)):
        patience = "0.05" if blocked else "20"
        done = run_python(
            code, patience, USERSTREAM_SYNC=value, PYTHONPATH=":".join(__import__("sys").path)
        )
        assert done.stdout == f"{blocked}\n" * 2, done.stderr


def test_a_stream_that_a_framework_destroyed_is_asked_nothing(
    torch: types.ModuleType, memory: int
) -> None:
    """A handle is known as long as it is current, and no longer: to ask one may be a crash."""
    with device_current(0):
        handle = checked(driver.cuStreamCreateWithPriority(1, 0))
        torch.cuda.set_stream(torch.cuda.ExternalStream(int(handle), 0))
        us.acquire(torch.Tensor(torch.device("cuda", 0), memory))
        us.wait(0, timeout=10)
        checked(driver.cuStreamDestroy(handle))
    us.wait_for_device(0, timeout=10)
    us.wait_all(timeout=10)


def test_modules_that_are_mocks(monkeypatch: pytest.MonkeyPatch, memory: int) -> None:
    for name in ("torch", "cupy", "jax", "cupy.cuda", "jax.core"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    forget_frameworks(monkeypatch)
    assert us.acquire(array(memory, None)) is us.get_stream(0)


@pytest.mark.multi_device
def test_a_release_to_a_default_stream_of_another_device(torch: types.ModuleType) -> None:
    with device_memory(1) as address, device_current(0):
        tensor = torch.Tensor(torch.device("cuda", 1), address)
        stream = us.get_stream(1)
        legacy = us.Stream.legacy_default()
        legacy.sync(timeout=10)
        with testing.latch(stream) as latch:
            us.release(tensor)
            legacy.sync(timeout=10)  # of device 0
            with device_current(1):
                assert not legacy.is_done
            latch.release()


def test_the_per_thread_stream_of_a_framework(torch: types.ModuleType, memory: int) -> None:
    tensor = torch.Tensor(torch.device("cuda", 0), memory)
    us.acquire(tensor)
    torch.cuda.set_stream(torch.cuda.ExternalStream(2, 0))
    borrow = us.borrow(tensor)
    borrow.__enter__()
    with pytest.raises(RuntimeError, match="in the thread where it began"):
        in_thread(lambda: borrow.__exit__(None, None, None))
    borrow.__exit__(None, None, None)


def test_sync_of_the_usual_buffers(
    torch: types.ModuleType, producer: us.Stream, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = torch.Tensor(torch.device("cuda", 0), memory)
    torch.cuda.set_stream(torch.cuda.ExternalStream(int(producer.handle), 0))
    us.acquire(tensor)
    wait_in_every_block(monkeypatch)
    with testing.latch(producer) as latch, running(lambda: us.acquire(tensor)) as result:
        assert is_blocked(result)
        latch.release()
        result()


@pytest.mark.simulated
def test_results_are_handed_over_with_one_edge(
    torch: types.ModuleType, producer: us.Stream, memory: int
) -> None:
    tensor = torch.Tensor(torch.device("cuda", 0), memory)
    torch.cuda.set_stream(torch.cuda.ExternalStream(int(producer.handle), 0))
    us.get_stream(0)
    assert edges(lambda: us.hand_over(*[tensor] * 8)) == 1
    assert len(tensor.recorded) == 8
