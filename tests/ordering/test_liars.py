"""Producers that do not tell the truth about their order, or nothing: each is ordered all the same.

Stand-ins for real objects, which lie in the same ways: tvm_ffi's, Holoscan's and pylibraft's.
Their framework works on a stream that nothing tells.
"""

from __future__ import annotations

import ctypes
import logging
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import pytest
from cuda.bindings import driver
from cuda.core import Buffer

import userstream as us
from helpers import (
    CAI,
    another_context,
    checked,
    content,
    copy,
    device_current,
    device_memory,
    fill,
    is_blocked,
    is_held,
    run_python,
    running,
)
from internals import order_by_device
from userstream import testing

SIZE = 256


class _Array:
    """Bytes of a framework, which works on a stream of its own."""

    def __init__(self, address: int, stream: us.Stream) -> None:
        self.address, self.stream = address, stream

    def export(self, how: dict[str, Any]) -> Any:
        return Buffer.from_handle(self.address, SIZE, owner=self).__dlpack__(**how)


class Ignoring(_Array):
    """DLPack that ignores ``stream=``, as tvm_ffi's, nanobind's and ONNX Runtime's."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)

    def __dlpack__(self, *, stream: int | None = None, **how: Any) -> Any:
        return self.export(how)


class Legacy(Ignoring):
    """DLPack that orders after the legacy default stream, whichever wrote."""

    def __dlpack__(self, *, stream: int | None = None, **how: Any) -> Any:
        if stream not in (None, -1):
            with device_current(0):
                us.Stream.from_handle(stream).wait(us.Stream.legacy_default())
        return self.export(how)


class Silent(_Array):
    """An interface of version 3 without a stream, as pylibraft's and PyCUDA's."""

    more: ClassVar[dict[str, Any]] = {"version": 3, "stream": None}

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (SIZE,), "typestr": "|u1", "data": (self.address, False), **self.more}


class Old(Silent):
    """An interface before version 3, as RMM's and Numba's of old."""

    more: ClassVar[dict[str, Any]] = {"version": 2}


class AlwaysLegacy(Silent):
    """An interface that says the legacy default stream, whichever wrote."""

    more: ClassVar[dict[str, Any]] = {"version": 3, "stream": 1}


class AlwaysLegacyBothWays(Legacy, AlwaysLegacy):
    """The same with DLPack, as Holoscan's, nvImageCodec's and nvCOMP's."""


class AlwaysPerThread(Silent):
    """An interface that says the per-thread default stream, as of PyNvVideoCodec's planes."""

    more: ClassVar[dict[str, Any]] = {"version": 3, "stream": 2}


class OfPyNvVideoCodec(Silent):
    """A plane of a frame of a decoder that was given no stream: 0, which the interface forbids."""

    more: ClassVar[dict[str, Any]] = {"version": 3, "stream": 0}
    __module__ = "_PyNvVideoCodec"


OfPyNvVideoCodec.__name__ = "CAIMemoryView"


class Delegating(_Array):
    """A class of the user's own, with the two methods of the `cuda.core.Buffer` that it has."""

    def __init__(self, address: int, stream: us.Stream) -> None:
        super().__init__(address, stream)
        self.buffer = Buffer.from_handle(address, SIZE, owner=self)

    def __dlpack_device__(self) -> Any:
        return self.buffer.__dlpack_device__()

    def __dlpack__(self, **how: Any) -> Any:
        return self.buffer.__dlpack__(**how)


def core_buffer(address: int, stream: us.Stream) -> Buffer:
    return Buffer.from_handle(address, SIZE, owner=object())


LIARS: list[Callable[[int, us.Stream], Any]] = [
    Ignoring,
    Legacy,
    Silent,
    Old,
    AlwaysLegacy,
    AlwaysLegacyBothWays,
    AlwaysPerThread,
    OfPyNvVideoCodec,
    Delegating,
    core_buffer,
]


@pytest.fixture(params=LIARS, ids=lambda kind: kind.__name__)
def liar(request: pytest.FixtureRequest, memory: int, producer: us.Stream) -> Any:
    us.get_stream(0)
    fill(producer, memory, 1)
    us.asnumpy(CAI(memory, stream=int(producer.handle)))  # page-locked memory is there
    made = request.param(memory, producer)
    us.get_stream(made)  # its type is known from here on, for which there are shorter ways
    return made


@contextmanager
def pending(producer: us.Stream, address: int, value: int) -> Iterator[testing.latch]:
    """Queue a write of the framework behind held work."""
    with testing.latch(producer) as latch:
        fill(producer, address, value)
        yield latch


def dtype_of(liar: Any) -> np.dtype:
    """Return what a copy takes it for: a buffer without a type is bytes."""
    dtype = us.describe(liar).dtype
    return dtype if isinstance(dtype, np.dtype) else np.dtype("u1")


# -- in -------------------------------------------------------------------------------------------


def test_asnumpy(liar: Any, producer: us.Stream, memory: int) -> None:
    with pending(producer, memory, 2) as latch:
        with running(lambda: us.asnumpy(liar, timeout=10)) as result:
            assert is_blocked(result)
            latch.release()
            assert set(result().tolist()) == {2}


def test_borrow_comes_after(liar: Any, producer: us.Stream, memory: int, other: int) -> None:
    with pending(producer, memory, 2) as latch:
        with us.borrow(liar) as stream:
            copy(stream, other, memory)
        assert is_held(stream)
        latch.release()
        stream.sync(timeout=10)
    assert content(other) == {2}


def test_copyto_from(liar: Any, producer: us.Stream, memory: int, other: int) -> None:
    target = CAI(other, (SIZE,), typestr=dtype_of(liar).str)
    with pending(producer, memory, 2) as latch:
        stream = us.copyto(target, liar)
        assert is_held(stream)
        latch.release()
        stream.sync(timeout=10)
    assert content(other) == {2}


# -- out ------------------------------------------------------------------------------------------


def overtaken(liar: Any, use: Callable[[], us.Stream], memory: int) -> bool:
    """Return whether the framework's next work on the memory overtakes the test's held work."""
    stream, producer = us.get_stream(0), liar_stream(liar)
    with testing.latch(stream) as latch:
        assert use() is stream
        fill(producer, memory, 9, 8)
        overtook = not is_held(producer)
        latch.release()
        producer.sync(timeout=10)
        stream.sync(timeout=10)
    return overtook


_streams: dict[int, us.Stream] = {}


def liar_stream(liar: Any) -> us.Stream:
    return _streams[0] if isinstance(liar, Buffer) else liar.stream


@pytest.fixture(autouse=True)
def _their_stream(producer: us.Stream) -> Iterator[None]:
    _streams[0] = producer
    yield
    _streams.clear()


def test_borrow_comes_before(liar: Any, memory: int) -> None:
    def use() -> us.Stream:
        with us.borrow(liar) as stream:
            fill(stream, memory, 3)
        return stream

    assert not overtaken(liar, use, memory)
    assert content(memory, 8) == {9}
    assert content(memory + 8, SIZE - 8) == {3}


def test_copyto_to(liar: Any, memory: int) -> None:
    values = np.full(SIZE, 3, dtype_of(liar))
    assert not overtaken(liar, lambda: us.copyto(liar, values), memory)
    assert content(memory, 8) == {9}
    assert content(memory + 8, SIZE - 8) == {3}


def test_release(liar: Any, memory: int) -> None:
    def use() -> us.Stream:
        us.release(liar)
        return us.get_stream(0)

    assert not overtaken(liar, use, memory)


# -- on somebody's word ---------------------------------------------------------------------------


@pytest.mark.no_races(False)  # the race is what it shows
@pytest.mark.schedules(0)  # a lazy one overtakes nothing
def test_a_liar_of_whom_one_says_that_nothing_is_pending(
    producer: us.Stream, memory: int, other: int
) -> None:
    """The control of the tests above: they can fail."""
    us.get_stream(0)
    fill(producer, memory, 1)
    producer.sync(timeout=10)
    liar = Ignoring(memory, producer)
    with pending(producer, memory, 2):
        with us.borrow(liar, producer=None) as stream:
            copy(stream, other, memory)
        stream.sync(timeout=10)
        assert content_of_idle(stream, other) == {1}, "stale"

    def use() -> us.Stream:
        with us.borrow(liar, producer=None) as stream:
            fill(stream, memory, 3)
        return stream

    assert overtaken(liar, use, memory)


def content_of_idle(stream: us.Stream, address: int) -> set[int]:
    """Return the bytes of memory that is not being written, without waiting for the device."""
    return set(us.asnumpy(CAI(address, (SIZE,), typestr="|u1"), stream=stream).tolist())


def test_everybody_is_meant(producer: us.Stream, memory: int) -> None:
    """By ``producer="device"``, whatever the buffer says itself."""
    with us.Stream.create(0) as writer, testing.latch(writer) as latch:
        for use in (
            lambda: us.acquire(CAI(memory, stream=int(producer.handle)), producer="device"),
            lambda: us.acquire(CAI(memory), producer="device"),
        ):
            assert is_held(use())
        latch.release()
        us.wait(0, timeout=10)


@pytest.mark.parametrize(
    "kind", [core_buffer, AlwaysLegacy, Old, lambda at, _: driver.CUdeviceptr(at)]
)
@pytest.mark.parametrize("how", ["auto", "device"])
def test_memory_of_another_context(how: Any, kind: Any, producer: us.Stream) -> None:
    """No edge with the device reaches the work there."""
    us.get_stream(0)
    with another_context():
        pointer = checked(driver.cuMemAlloc(SIZE))
        for use in (us.acquire, us.release, lambda *b, **how: us.borrow(*b, **how).__enter__()):
            with pytest.raises(us.UnsupportedBufferError, match="not the primary one"):
                use(kind(int(pointer), producer), producer=how)
        checked(driver.cuMemFree(pointer))


@pytest.mark.multi_device
def test_an_edge_for_each_device(memory: int) -> None:
    with device_memory(1) as elsewhere, us.Stream.create(1) as writer, us.Stream.create(0) as mine:
        both = [CAI(memory), CAI(elsewhere)]
        with testing.latch(writer) as latch:
            us.acquire(both, stream=mine, producer="device")
            assert is_held(mine)
            latch.release()
            mine.sync(timeout=10)
        with testing.latch(mine) as latch:
            us.release(both, stream=mine, producer="device")
            fill(writer, elsewhere, 1)
            assert is_held(writer)
            latch.release()
            writer.sync(timeout=10)


# -- JAX ------------------------------------------------------------------------------------------


@pytest.fixture
def array(jax: types.ModuleType, memory: int, producer: us.Stream) -> Any:
    """An array of JAX, which works on the producer's stream."""

    def export(array: Any, *, stream: int) -> object:
        us.Stream.from_handle(stream).wait(producer)
        return object()

    jax.Array.__dlpack__ = export
    jax.Array.unsafe_buffer_pointer = lambda _: memory
    array = jax.Array(jax.Device(0))
    array.stream = producer
    us.get_stream(0)
    return array


def test_jax_comes_after_a_block(array: Any, memory: int) -> None:
    def use() -> us.Stream:
        with us.borrow(array) as stream:
            fill(stream, memory, 3)
        return stream

    assert not overtaken(array, use, memory)


def test_jax_comes_before(array: Any, producer: us.Stream) -> None:
    with testing.latch(producer) as latch:
        with us.borrow(array) as stream:
            pass
        assert is_held(stream)
        latch.release()
        stream.sync(timeout=10)


@pytest.mark.no_races(False)  # it writes what nobody writes
@pytest.mark.schedules(0)  # a lazy one overtakes nothing
def test_jax_need_not_wait_for_what_only_reads(array: Any, memory: int, other: int) -> None:
    """Nobody writes an array of JAX that is held."""
    array.is_fully_addressable = True
    target = CAI(other, (2, 4), typestr="<f4")
    assert overtaken(array, lambda: us.copyto(target, array), memory)


def test_jax_where_unknown_producers_are_refused(array: Any, memory: int) -> None:
    mine = us.UserStream(unknown="raise")
    with mine:
        with mine.borrow(array):
            pass
        with testing.latch(mine.get_stream(0)):
            with mine.borrow(array):
                pass
            array.stream.sync(timeout=10)  # not made to wait


def test_an_export_that_fails(array: Any, jax: types.ModuleType, producer: us.Stream) -> None:
    def export(array: Any, *, stream: int) -> object:
        raise BufferError("no such type in DLPack")

    jax.Array.__dlpack__ = export
    with testing.latch(producer) as latch:
        stream = us.acquire(array)
        assert is_held(stream)
        latch.release()
        stream.sync(timeout=10)
    with pytest.raises(us.UnknownProducerError, match="no such type"):
        us.UserStream(unknown="raise").acquire(array)


# -- captures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_a_capture_that_is_seen_goes_on(mode: Any, memory: int, producer: us.Stream) -> None:
    us.get_stream(0)
    uses: list[Callable[[], object]] = [
        lambda: us.acquire(Silent(memory, producer)),
        lambda: us.release(Silent(memory, producer)),
        lambda: us.borrow(Silent(memory, producer)).__enter__(),
        lambda: us.acquire(CAI(memory), producer="device"),
    ]
    with us.Stream.create(0) as captured:
        with captured.capture(mode) as graph:
            for use in uses:
                with pytest.raises(us.CaptureError, match=r"producer=.*before or after"):
                    use()
            fill(captured, memory, 1)
        assert graph is not None
    with us.borrow(Silent(memory, producer)):
        pass


@pytest.mark.parametrize("framework", ["torch", "cupy"])
def test_a_capture_of_a_framework_is_seen(
    framework: str, request: pytest.FixtureRequest, memory: int
) -> None:
    """On its current stream, which other code has created."""
    cuda = request.getfixturevalue(framework).cuda
    us.get_stream(0)
    with device_current(0):
        handle = checked(driver.cuStreamCreateWithPriority(1, 0))
        if framework == "torch":
            cuda.set_stream(cuda.ExternalStream(int(handle), 0))
        else:
            cuda.stream._BaseStream(int(handle), 0).use()
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    checked(driver.cuStreamBeginCapture(handle, mode))
    with pytest.raises(us.CaptureError, match="producer="):
        us.acquire(driver.CUdeviceptr(memory))
    checked(driver.cuStreamEndCapture(handle))
    checked(driver.cuStreamDestroy(handle))


def test_a_capture_that_cannot_be_seen(memory: int, producer: us.Stream) -> None:
    """It is invalidated, which CUDA makes nobody able to avoid; the error says how we could."""
    us.get_stream(0)
    with device_current(0):
        handle = checked(driver.cuStreamCreateWithPriority(1, 0))  # somebody else's
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    for use in (us.acquire, us.release):
        checked(driver.cuStreamBeginCapture(handle, mode))
        with pytest.raises(us.CaptureError) as caught:
            use(Silent(memory, producer))
        assert "pass producer=, or set UserStream.unknown" in caught.value.__notes__[0]
        with pytest.raises(us.UnknownProducerError):
            us.UserStream(unknown="raise").acquire(Silent(memory, producer))
        driver.cuStreamEndCapture(handle)
    us.acquire(Silent(memory, producer))
    checked(driver.cuStreamDestroy(handle))


def test_a_stream_that_is_captured_depends_on_nobody_else(memory: int) -> None:
    with us.Stream.create(0) as mine, mine.capture("relaxed"):
        with pytest.raises(us.CaptureError, match="cannot depend on all other work"):
            us.acquire(driver.CUdeviceptr(memory), stream=mine)


def test_a_capture_that_begins_inside(memory: int) -> None:
    """The end of the block is refused, what it used is held, and the capture goes on."""
    with us.Stream.create(0) as captured:
        borrow = us.borrow(driver.CUdeviceptr(memory))
        borrow.__enter__()
        with captured.capture("relaxed"):
            with pytest.raises(us.CaptureError, match="producer="):
                borrow.__exit__(None, None, None)
            fill(captured, memory, 1)


# -- what may be asked for ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "use", [us.UserStream.acquire, us.UserStream.release, us.UserStream.borrow]
)
def test_unknown_producers_can_be_refused(use: Any, liar: Any) -> None:
    mine = us.UserStream(unknown="raise")
    assert mine.unknown == "raise"

    def enter() -> None:
        used = use(mine, liar)
        if used is not None:
            used.__enter__()

    with pytest.raises(us.UnknownProducerError, match="producer="):
        enter()
    mine.unknown = "device"
    with mine:
        mine.acquire(liar)


@pytest.mark.parametrize(
    ("kind", "doubted"), [(AlwaysLegacy, True), (AlwaysLegacyBothWays, True), (Silent, False)]
)
def test_a_message_says_that_a_default_stream_is_not_believed(
    kind: type[_Array], doubted: bool, memory: int, producer: us.Stream
) -> None:
    with pytest.raises(us.UnknownProducerError, match="producer=") as caught:
        us.UserStream(unknown="raise").acquire(kind(memory, producer))
    assert ("its interface names a default stream" in str(caught.value)) == doubted


@pytest.mark.parametrize("wrong", ["exact", "", None, 1])
def test_other_words_are_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r'"device".*"raise"'):
        us.UserStream.get().unknown = wrong
    if wrong is not None:
        with pytest.raises(ValueError, match=r'"device".*"raise"'):
            us.UserStream(unknown=wrong)


def test_the_environment_can_refuse_them() -> None:
    code = """
        import userstream as us
        assert us.UserStream.get().unknown == us.UserStream().unknown == "raise"
        assert us.UserStream(unknown="device").unknown == "device"
    """
    done = run_python(code, USERSTREAM_UNKNOWN="raise")
    assert done.returncode == 0, done.stderr
    for name in ("USERSTREAM_UNKNOWN", "USERSTREAM_ORDER"):
        done = run_python("import userstream", simulate=None, **{name: "Device!"})
        assert f"ValueError: {name} must be" in done.stderr


def test_every_order_can_be_that_of_the_device(
    torch: types.ModuleType, producer: us.Stream, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It tells whether a stream was guessed wrongly: the one that wrote is not the current one."""
    tensor = torch.Tensor(torch.device("cuda", 0), memory)
    us.acquire(tensor)
    us.wait(0, timeout=10)
    uses: list[Callable[[], us.Stream]] = [
        lambda: us.acquire(tensor),
        lambda: us.acquire(tensor, producer=None),
        lambda: us.acquire(CAI(memory)),
    ]
    for use in uses:
        with testing.latch(producer):
            use().sync(timeout=10)  # guessed wrongly
    order_by_device(monkeypatch)
    for use in uses:
        with testing.latch(producer) as latch:
            assert is_held(use())
            latch.release()
            us.wait(0, timeout=10)
    with testing.latch(us.get_stream(0)) as latch:
        with us.borrow(tensor):
            pass
        fill(producer, memory, 1)
        assert is_held(producer)
        latch.release()
        producer.sync(timeout=10)


@pytest.mark.parametrize("unknown", ["device", "raise"])
def test_the_environment_can_ask_for_that(unknown: str) -> None:
    """Then no producer has to be known, so none is refused."""
    code = """
        from cuda.bindings import driver
        from cuda.core import Device
        import userstream as us
        from userstream import testing

        Device(0).set_current()
        stream = us.get_stream(0)
        buffer = Device(0).allocate(8, stream=stream)
        address = driver.CUdeviceptr(int(buffer.handle))

        class Settled:
            __cuda_array_interface__ = {
                "shape": (8,), "typestr": "|u1", "data": (int(address), False),
                "version": 3, "stream": -1,
            }

        def is_held(stream):
            try:
                stream.sync(timeout=0.03)
            except us.WaitTimeout:
                return True
            return False

        def use(*given, **how):
            with us.borrow(*given, **how):
                pass

        with us.Stream.create(0) as writer:
            for given in (Settled(), address, [address, Settled()]):
                for how in ({}, {"producer": None}):
                    with testing.latch(writer) as latch:
                        use(given, **how)
                        assert is_held(stream), (given, how)
                        latch.release()
                        us.wait(0, timeout=10)
                        writer.sync(timeout=10)
                    with testing.latch(stream) as latch:
                        use(given, **how)
                        writer.launch_host_func(int)
                        assert is_held(writer), (given, how)
                        latch.release()
                        us.wait(0, timeout=10)
                        writer.sync(timeout=10)
            assert us.asnumpy(Settled(), timeout=10).shape == (8,)
    """
    done = run_python(code, USERSTREAM_ORDER="device", USERSTREAM_UNKNOWN=unknown)
    assert done.returncode == 0, done.stderr


def test_a_capture_where_every_order_is_that_of_the_device(
    memory: int, producer: us.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error does not advise `producer=`, which would change nothing."""
    order_by_device(monkeypatch)
    us.get_stream(0)
    with us.Stream.create(0) as captured, captured.capture("relaxed"):
        with pytest.raises(us.CaptureError, match="unset USERSTREAM_ORDER"):
            us.acquire(CAI(memory), producer=producer)
        fill(captured, memory, 1)


def test_it_is_logged_once_for_a_type(
    memory: int, producer: us.Stream, caplog: pytest.LogCaptureFixture
) -> None:
    class Fresh(Silent):
        pass

    class AnotherType(Silent):
        pass

    us.acquire(Fresh(memory, producer))
    with caplog.at_level(logging.DEBUG, "userstream"):
        for kind in (Fresh, Fresh, AnotherType):
            us.acquire(kind(memory, producer))
        us.acquire(CAI(memory))
    said = [record.message for record in caplog.records]
    assert len(said) == 2
    assert "Fresh is ordered with everything on device 0" in said[0]
    assert "producer=" in said[0]


def test_many_threads(memory: int, producer: us.Stream) -> None:
    """Each has an event of its own while it needs one."""
    us.get_stream(0)

    def use() -> None:
        for number in range(50):
            with us.borrow(Silent(memory, producer)) as stream:
                fill(stream, memory, number)

    with running(use) as one, running(use) as two, running(use) as three:
        for result in (one, two, three):
            result()
    us.wait(0, timeout=20)
    assert content(memory) == {49}


# -- what is told ---------------------------------------------------------------------------------


def test_what_describe_says(liar: Any) -> None:
    info = us.describe(liar)
    assert (info.ordering, info.producer) == ("device", None)


def test_a_stream_beside_dlpack_is_taken(memory: int, producer: us.Stream, other: int) -> None:
    """CV-CUDA is such a type: exact in both directions, without a call of `__dlpack__`."""

    class Both(Silent):
        def __dlpack_device__(self) -> tuple[int, int]:
            return (2, 0)

        def __dlpack__(self, **_: Any) -> Any:
            raise AssertionError("not asked")

    us.get_stream(0)
    both = Both(memory, producer)
    both.more = {"version": 3, "stream": int(producer.handle)}  # type: ignore[misc]
    assert us.describe(both).ordering == "exact"
    with testing.latch(producer) as latch:
        stream = us.acquire(both)
        assert is_held(stream)
        latch.release()
        stream.sync(timeout=10)

    def use() -> us.Stream:
        with us.borrow(both) as stream:
            fill(stream, memory, 3)
        return stream

    assert not overtaken(both, use, memory)
    assert set(us.asnumpy(both).tolist()) <= {3, 9}
    us.copyto(both, us.asnumpy(both))
    both.more = {"version": 3, "stream": -1}  # type: ignore[misc]
    assert us.describe(both).ordering == "none"
    with testing.latch(producer):
        us.acquire(both).sync(timeout=10)


class _Table(ctypes.Structure):
    """``DLPackExchangeAPI`` of dlpack.h 1.3."""

    _fields_ = (
        ("version", ctypes.c_uint32 * 2),
        ("older", ctypes.c_void_p),
        ("functions", ctypes.c_void_p * 4),
        ("current_work_stream", ctypes.c_void_p),
    )


_Current = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_int, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p)
)
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


@pytest.mark.parametrize("told", ["stream", "nothing", "an error", "another version", "no table"])
def test_the_exchange_table(told: str, memory: int, producer: us.Stream) -> None:
    """Of DLPack 1.3: the current stream of any framework that has one."""
    asked = []

    def current(kind: int, device: int, out: Any) -> int:
        asked.append((kind, device))
        out[0] = int(producer.handle) if told == "stream" else None
        return -1 if told == "an error" else 0

    function = _Current(current)
    table = _Table((2 if told == "another version" else 1, 3))
    table.current_work_stream = ctypes.cast(function, ctypes.c_void_p)
    name = b"another" if told == "no table" else b"dlpack_exchange_api"

    class Tabled(Ignoring):
        __dlpack_c_exchange_api__ = _new_capsule(ctypes.addressof(table), name, None)

    info = us.describe(Tabled(memory, producer))
    if told == "stream":
        assert (info.ordering, info.producer) == ("current", int(producer.handle))
        assert asked == [(2, 0)]
    else:
        assert (info.ordering, info.producer) == ("device", None)
    us.acquire(Tabled(memory, producer))
