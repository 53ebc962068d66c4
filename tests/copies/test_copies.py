"""Copies to the host, from it and between devices, of every layout."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver
from cuda.core import Device
from numpy.lib.stride_tricks import sliding_window_view

import userstream as us
from device_copies import DeviceArray, copy_on, memory_of, on_device, read, to_host
from helpers import (
    address,
    checked,
    current_context,
    device_current,
    eventually,
    in_thread,
    is_blocked,
    primary_context,
    reclaim,
    running,
    untraced,
)
from internals import (
    CHUNK,
    alive_in_driver,
    forget_uses,
    free_pinned,
    is_anything_in_use,
    is_pinned,
    never_reach,
    pinned_limit,
    pinned_total,
    settled,
    small_chunks_in,
    stage_at_most,
)
from layouts import random_target, same, views
from userstream import testing

MIB = 1 << 20
multi_device = pytest.mark.multi_device


@pytest.fixture(autouse=True)
def _nothing_in_use() -> Iterator[None]:
    """Forget what an error of the GPU left behind, which is kept forever; bound the cache."""
    gc.collect()
    forget_uses()
    before = pinned_limit()
    us.UserStream.set_pinned_limit(1 << 28)
    yield
    us.UserStream.set_pinned_limit(before)


@pytest.fixture
def stream() -> us.Stream:
    return us.get_stream(0)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch, no_cache: None) -> None:
    small_chunks_in(monkeypatch, 4096)


@pytest.fixture
def held_in_between(monkeypatch: pytest.MonkeyPatch, small_chunks: None) -> None:
    """Hold a stream after the chunks were lent for it."""
    never_reach(monkeypatch)


RANDOM = np.random.default_rng(1)
LARGE = RANDOM.random((24, 40, 300), "f4")
LAYOUTS = {
    "contiguous": LARGE,
    "transposed": LARGE.T,
    "flipped": LARGE[::-1, :, ::-1],
    "long rows": LARGE[:, :, :200],
    "two gaps": LARGE[:, :30, :200],
    "slices at halves of rows": LARGE[:, 1:40:3, :200],
    "every second": LARGE[..., ::2],
    "one of fifty": LARGE[..., ::50],
    "one of fifty, twice": LARGE[:, ::39, ::50],
    "column": LARGE[:, 7, 7],
    "broadcast": np.broadcast_to(LARGE[:, :1], (24, 7, 300)),
    "windows": sliding_window_view(LARGE[0, 0], 100),
    "windows of rows": sliding_window_view(LARGE, 5, axis=1),
    "0-d": LARGE[3, 4, 5, ...],
    "empty": LARGE[:, :0],
    "one": LARGE[:1, :1, :1],
}
layouts = pytest.mark.parametrize("view", LAYOUTS.values(), ids=LAYOUTS.keys())


# ---- to the host --------------------------------------------------------------------------------


@layouts
def test_to_host(view: np.ndarray, stream: us.Stream) -> None:
    with on_device(view) as memory:
        assert same(to_host(memory, stream), view)


@layouts
def test_to_host_past_the_bound(view: np.ndarray, stream: us.Stream, small_chunks: None) -> None:
    with on_device(view) as memory:
        assert same(to_host(memory, stream), view)


@pytest.mark.parametrize("seed", range(3))
def test_to_host_of_any_layout(seed: int, stream: us.Stream) -> None:
    for view in views(seed, 60):
        with on_device(view) as memory:
            assert same(to_host(memory, stream), view)


def test_chunks_that_do_not_divide(stream: us.Stream, no_cache: None) -> None:
    view = RANDOM.integers(0, 255, 2 * CHUNK + 12345).astype("u1")
    with on_device(view) as memory:
        result = to_host(memory, stream)
        assert same(result, view)
        assert not is_pinned(result)


def test_results_are_page_locked_and_writable(stream: us.Stream) -> None:
    with on_device(LARGE) as memory:
        result = to_host(memory, stream)
    assert is_pinned(result)
    result += 1
    assert same(result, LARGE + 1)


@pytest.mark.parametrize("name", ["broadcast", "windows"])
@pytest.mark.parametrize("cached", [True, False])
def test_results_that_alias_are_read_only(
    name: str, cached: bool, stream: us.Stream, request: pytest.FixtureRequest
) -> None:
    if not cached:
        request.getfixturevalue("no_cache")
    with on_device(LAYOUTS[name]) as memory:
        result = to_host(memory, stream)
    assert not result.flags.writeable


def test_a_huge_broadcast_takes_no_memory(stream: us.Stream) -> None:
    view = np.broadcast_to(np.float32(3), (1 << 20, 1 << 20))
    with on_device(view) as memory:
        assert to_host(memory, stream)[1, 2] == 3
        windows = sliding_window_view(np.zeros(1 << 20, "f4"), 1 << 19)
    with on_device(windows) as memory:
        assert to_host(memory, stream).shape == windows.shape


@layouts
def test_into_an_array(view: np.ndarray, stream: us.Stream) -> None:
    with on_device(view) as memory:
        out = np.zeros(view.shape, view.dtype)
        assert to_host(memory, stream, out) is out
        assert same(out, view)


@layouts
def test_into_an_array_past_the_bound(
    view: np.ndarray, stream: us.Stream, small_chunks: None
) -> None:
    with on_device(view) as memory:
        out = np.zeros(view.shape[::-1], view.dtype).T
        to_host(memory, stream, out)
        assert same(out, view)


@pytest.mark.parametrize("seed", range(2))
def test_into_strided_arrays(seed: int, stream: us.Stream) -> None:
    random = np.random.default_rng(seed)
    for view in views(seed, 50):
        _, out = random_target(random, view)
        with on_device(view) as memory:
            to_host(memory, stream, out)
        assert same(out, view)


@pytest.mark.parametrize("name", ["contiguous", "long rows", "every second", "broadcast"])
def test_into_page_locked_memory(name: str, stream: us.Stream) -> None:
    view = LAYOUTS[name]
    with on_device(LARGE[::-1, ::-1]) as memory:
        pinned = to_host(memory, stream)
    out = pinned.reshape(-1)[: view.size].reshape(view.shape)
    with on_device(view) as memory:
        to_host(memory, stream, out)
    assert same(out, view)


def test_page_locked_memory_is_written_directly(stream: us.Stream) -> None:
    with on_device(LARGE) as memory:
        out = us.pinned_empty(LARGE.shape, LARGE.dtype)
        assert eventually(lambda: (free_pinned(), pinned_total() < 2 * out.nbytes)[1])
        before = pinned_total()
        to_host(memory, stream, out)
        assert same(out, LARGE)
        assert pinned_total() == before, "the copy went through other memory"
        out.flags.writeable = False
        with pytest.raises(ValueError, match="out is read-only"):
            to_host(memory, stream, out)


@pytest.mark.parametrize(
    ("out", "error"),
    [
        (np.zeros((2, 3), "f4"), ValueError),
        (np.zeros((1, 3, 2), "f4"), ValueError),
        (np.zeros((3, 2), "f8"), TypeError),
        (np.zeros((3, 2), ">f4"), TypeError),
        (np.broadcast_to(np.float32(0), (3, 2)), ValueError),
    ],
    ids=["shape", "dimensions", "dtype", "byte order", "read-only"],
)
def test_what_out_must_be(out: np.ndarray, error: type[Exception], stream: us.Stream) -> None:
    with on_device(LARGE[0, :3, :2]) as memory, pytest.raises(error):
        to_host(memory, stream, out)


def test_broadcasting_into_the_host(stream: us.Stream) -> None:
    with on_device(LARGE[0, 0]) as memory:
        out = np.zeros((3, 2, 300), "f4")
        copy_on(stream, out, memory)
        assert same(out, np.broadcast_to(LARGE[0, 0], out.shape).copy())
        with pytest.raises(ValueError, match="broadcast"):
            copy_on(stream, np.zeros((300, 2), "f4"), memory)
        with pytest.raises(ValueError, match="broadcast"):
            copy_on(stream, np.zeros((), "f4"), memory)


def test_a_buffer_without_a_shape(stream: us.Stream) -> None:
    with on_device(np.arange(100, dtype="u1")) as memory:
        with pytest.raises(us.UnsupportedBufferError, match="__cuda_array_interface__"):
            to_host(driver.CUdeviceptr(memory.address), stream)


# ---- from the host ------------------------------------------------------------------------------


def check_from_host(view: np.ndarray, target: np.ndarray, stream: us.Stream) -> None:
    """Copy a view into a view of device memory, and compare with NumPy, gaps included."""
    with on_device(target) as memory:
        copy_on(stream, memory, view)
        stream.sync(timeout=20)
        target[...] = view
        assert (read(memory, target) == memory_of(target)).all()


@pytest.mark.parametrize(
    "name", ["contiguous", "flipped", "two gaps", "every second", "0-d", "one"]
)
@pytest.mark.parametrize("past", [False, True])
def test_from_host(
    name: str, past: bool, stream: us.Stream, request: pytest.FixtureRequest
) -> None:
    if past:
        request.getfixturevalue("small_chunks")
    target = LAYOUTS[name]
    memory = LARGE.copy()
    target = np.lib.stride_tricks.as_strided(
        memory.reshape(-1)[(address(target) - address(LARGE)) // 4 :], target.shape, target.strides
    )
    check_from_host(RANDOM.random(target.shape, "f4"), target, stream)


def test_what_is_staged_stays_until_the_gpu_has_read_it(stream: us.Stream) -> None:
    values = [np.full(1000, number, "f4") for number in range(4)]
    with ExitStack() as stack:
        buffers = [stack.enter_context(on_device(np.zeros(1000, "f4"))) for _ in values]
        # Where the driver has no pools, none could be allocated beside a held stream.
        blocks = [us.pinned_empty(values[0].nbytes, "u1") for _ in values]
        del blocks
        with testing.latch(stream):
            for value, buffer in zip(values, buffers, strict=True):
                copy_on(stream, buffer, value)
                value[:] = -1
        for number, buffer in enumerate(buffers):
            assert (to_host(buffer, stream, timeout=20) == number).all()


@pytest.mark.parametrize("seed", range(2))
def test_from_host_of_any_layout(seed: int, stream: us.Stream) -> None:
    random = np.random.default_rng(seed)
    for view in views(seed, 50):
        check_from_host(view, random_target(random, view)[1], stream)


def test_from_host_broadcasts(stream: us.Stream) -> None:
    check_from_host(np.arange(3.0), np.zeros((4, 2, 3)), stream)
    with on_device(np.zeros((4, 3))) as memory:
        with pytest.raises(ValueError, match="broadcast"):
            copy_on(stream, memory, np.zeros((3, 4)))
        with pytest.raises(TypeError, match="float32"):
            copy_on(stream, memory, np.zeros((4, 3), "f4"))
    with on_device(np.zeros((0, 3))) as memory:
        copy_on(stream, memory, np.zeros(3))


def test_targets_that_alias_are_refused(stream: us.Stream) -> None:
    with on_device(LAYOUTS["windows"]) as memory, pytest.raises(ValueError, match="share memory"):
        copy_on(stream, memory, np.zeros((), "f4"))


@pytest.mark.parametrize("pinned", [False, True])
def test_the_source_may_be_reused_at_once(pinned: bool, stream: us.Stream) -> None:
    with on_device(LARGE) as memory:
        source = to_host(memory, stream) if pinned else LARGE.copy()
        with testing.latch(stream):
            copy_on(stream, memory, source)  # waits for nothing
            source[...] = 0
        stream.sync(timeout=20)
        assert same(to_host(memory, stream), LARGE)


@pytest.mark.parametrize("pinned", [False, True])
def test_a_large_source_is_waited_for(
    pinned: bool, stream: us.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage_at_most(monkeypatch, 4096)
    with on_device(LARGE) as memory:
        source = to_host(memory, stream)[::-1] if pinned else LARGE[::-1].copy()
        source = source[::-1] if pinned else source
        with testing.latch(stream) as latch:
            with running(lambda: copy_on(stream, memory, source)) as result:
                assert is_blocked(result)
                latch.release()
                result()
        source[...] = 0
        expected = LARGE if pinned else LARGE[::-1]
        assert same(to_host(memory, stream), np.ascontiguousarray(expected))


# ---- between devices ----------------------------------------------------------------------------


def check_between(view: np.ndarray, target: np.ndarray, devices: tuple[int, int]) -> None:
    stream = us.get_stream(devices[0])
    with on_device(view, devices[1]) as source, on_device(target, devices[0]) as to:
        copy_on(stream, to, source)
        stream.sync(timeout=20)
        target[...] = view
        assert not view.size or (read(to, target) == memory_of(target)).all()


BOTH = [(0, 0), pytest.param((0, 1), marks=multi_device), pytest.param((1, 0), marks=multi_device)]


@pytest.mark.parametrize("devices", BOTH)
@pytest.mark.parametrize("seed", range(2))
def test_between_any_layouts(devices: tuple[int, int], seed: int) -> None:
    random = np.random.default_rng(seed)
    for view in views(seed, 40):
        check_between(view, random_target(random, view)[1], devices)


@pytest.mark.parametrize("devices", BOTH)
@pytest.mark.parametrize("name", ["contiguous", "two gaps", "one of fifty", "broadcast", "empty"])
def test_between(devices: tuple[int, int], name: str) -> None:
    view = LAYOUTS[name]
    check_between(view, np.zeros(view.shape, "f4"), devices)


def test_between_broadcasts() -> None:
    check_between(np.arange(3.0), np.zeros((4, 2, 3)), (0, 0))


def test_between_waits_for_nothing(stream: us.Stream) -> None:
    with on_device(LARGE) as source, on_device(np.zeros_like(LARGE)) as to:
        with testing.latch(stream):
            copy_on(stream, to, source)
        assert same(to_host(to, stream), LARGE)


def test_between_what_overlaps(stream: us.Stream) -> None:
    with on_device(LARGE[0]) as memory:
        copy_on(stream, memory, memory)  # nothing to do
        row = DeviceArray(LARGE[0, :1], memory.address)
        copy_on(stream, row, row)
        first = DeviceArray(LARGE[0, :20], memory.address)
        other = DeviceArray(LARGE[0, :20], memory.address + 4)
        with pytest.raises(ValueError, match="overlap"):
            copy_on(stream, first, other)
        copy_on(stream, first, first.at(memory.address + LARGE[0, :20].nbytes))
        assert same(to_host(first, stream), LARGE[0, 20:])
        with pytest.raises(TypeError, match="convert"):
            copy_on(stream, first, DeviceArray(LARGE[0, :20].view("i4"), memory.address))


# ---- buffers without a type ---------------------------------------------------------------------


@pytest.fixture
def untyped() -> Any:
    """A buffer of 96 bytes, which says nothing of their type."""
    with device_current(0):
        buffer = Device(0).allocate(96, stream=us.get_stream(0))
    us.get_stream(0).sync(10)
    return buffer


SIX_BY_FOUR = np.arange(24, dtype="f4").reshape(6, 4)


@pytest.mark.parametrize(
    "array", [SIX_BY_FOUR, SIX_BY_FOUR.T, SIX_BY_FOUR[:, ::-1], np.arange(12, dtype="c8")]
)
@pytest.mark.parametrize("wait", [True, False])
def test_a_buffer_without_a_type_takes_as_many_bytes(
    untyped: Any, array: np.ndarray, wait: bool
) -> None:
    source, target = us.pinned_empty(array.shape, array.dtype), us.pinned_like(array)
    source[:] = array
    us.copyto(untyped, source if not wait else array, producer=None, wait=wait)
    us.wait(0, timeout=10)
    assert us.asnumpy(untyped, producer=None).tobytes() == array.tobytes()  # in C order
    us.copyto(target, untyped, producer=None, wait=wait)
    us.wait(0, timeout=10)
    assert same(target, array)


def test_a_buffer_without_a_type_and_an_array_on_the_device(
    untyped: Any, stream: us.Stream
) -> None:
    with on_device(SIX_BY_FOUR.T) as memory:  # which has strides
        us.copyto(untyped, memory, stream=stream, producer=stream)
        us.copyto(memory, np.zeros((4, 6), "f4"), stream=stream, producer=stream)
        us.copyto(memory, untyped, stream=stream, producer=stream)
        assert same(to_host(memory, stream), SIX_BY_FOUR.T)


@pytest.mark.parametrize(
    ("array", "match"),
    [
        (np.zeros(23, "f4"), "has 96 bytes and no type, .* shape \\(23,\\) has 92"),
        (np.zeros(95, "u1"), "could not broadcast"),
        (np.zeros(12, object), "does not convert|could not broadcast"),  # 96 bytes of references
    ],
)
def test_a_buffer_without_a_type_takes_nothing_else(
    untyped: Any, array: np.ndarray, match: str
) -> None:
    for to, source in ((untyped, array), (array, untyped)):
        with pytest.raises((TypeError, ValueError), match=match):
            us.copyto(to, source, producer=None)


# ---- streams, contexts, captures ----------------------------------------------------------------


def everything(stream: us.Stream, device: int = 0) -> None:
    """Copy in every way."""
    fresh = [LARGE, LARGE[:, :30, :200], LARGE[..., ::2], LARGE[..., ::50]]
    with ExitStack() as stack:
        for view in fresh:
            memory = stack.enter_context(on_device(np.zeros_like(LARGE), device))
            memory = DeviceArray(view, memory.address, device)
            other = stack.enter_context(on_device(np.zeros(view.shape, "f4"), device))
            copy_on(stream, memory, view)
            copy_on(stream, other, memory)
            assert same(to_host(memory, stream, timeout=20), view)
            assert same(to_host(other, stream, np.zeros(view.shape, "f4")), view)
        before = pinned_limit()
        us.UserStream.set_pinned_limit(0)
        try:
            memory = DeviceArray(LARGE, memory.address, device)
            copy_on(stream, memory, LARGE)
            assert same(to_host(memory, stream), LARGE)
        finally:
            us.UserStream.set_pinned_limit(before)


def test_in_a_thread_without_a_context() -> None:
    in_thread(lambda: everything(us.get_stream(0)))


@multi_device
@pytest.mark.parametrize(
    "make",
    [
        lambda: us.get_stream(1),
        us.Stream.legacy_default,
        us.Stream.per_thread_default,
        lambda: us.Stream.from_handle(us.get_stream(1)),
    ],
    ids=["user", "legacy", "per-thread", "foreign"],
)
def test_on_another_device_than_the_current_one(make: Callable[[], us.Stream]) -> None:
    with device_current(0):
        everything(make(), 1)
        assert current_context() == int(primary_context(0))


@multi_device
@pytest.mark.parametrize("default", [us.Stream.legacy_default, us.Stream.per_thread_default])
def test_a_default_stream_is_that_of_the_buffers_device(default: Callable[[], us.Stream]) -> None:
    with (
        on_device(LARGE, 1) as memory,
        device_current(1),
    ):
        with (
            testing.latch(default()),
            device_current(0),
        ):
            with pytest.raises(us.WaitTimeout):
                to_host(memory, default(), timeout=0.02)
    assert eventually(settled)


@contextmanager
def capturing(stream: us.Stream) -> Iterator[None]:
    handle = stream._live()
    checked(driver.cuStreamBeginCapture(handle, driver.CUstreamCaptureMode(0)))
    try:
        yield
        active = driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
        assert checked(driver.cuStreamIsCapturing(handle)) == active
    finally:
        checked(driver.cuGraphDestroy(checked(driver.cuStreamEndCapture(handle))))


@pytest.mark.parametrize("cached", [False, True])
def test_a_capturing_stream_is_refused(cached: bool, stream: us.Stream) -> None:
    with (
        on_device(LARGE) as memory,
        on_device(LARGE) as other,
        us.Stream.create(0) as captured,
    ):
        if cached:
            to_host(memory, stream)
        else:
            free_pinned()
        total = pinned_total()
        with capturing(captured):
            for use in (
                lambda: to_host(memory, captured),
                lambda: to_host(memory, captured, np.zeros_like(LARGE)),
                lambda: copy_on(captured, memory, LARGE),
                lambda: copy_on(captured, memory, other),
            ):
                with pytest.raises(us.CaptureError):
                    use()
        assert not cached or pinned_total() <= total
        assert same(to_host(memory, stream), LARGE)


def is_trimming() -> bool:
    """Return whether page-locked memory is about to be freed."""
    return "userstream-trim" in [thread.name for thread in threading.enumerate()]


def test_a_capture_elsewhere_survives(stream: us.Stream) -> None:
    """In the global mode, which most calls of the driver break."""
    # What allocates device memory may not run beside it.
    with on_device(LARGE) as memory, on_device(LARGE) as other, us.Stream.create(0) as captured:
        free_pinned()
        every = DeviceArray(LARGE[..., ::2], memory.address)

        def use() -> None:
            assert same(to_host(memory, stream), LARGE)
            assert same(to_host(every, stream), LARGE[..., ::2])
            copy_on(stream, every, LARGE[..., ::2])
            copy_on(stream, other, memory)
            before = pinned_limit()
            us.UserStream.set_pinned_limit(0)
            try:
                assert same(to_host(memory, stream, np.zeros_like(LARGE)), LARGE)
                # A free waits for a stream that is held, and keeps all others from recording.
                assert eventually(lambda: not is_trimming())
                with testing.latch(stream), pytest.raises(us.WaitTimeout):
                    to_host(memory, stream, timeout=0.01)
            finally:
                us.UserStream.set_pinned_limit(before)

        with capturing(captured):
            use()
            in_thread(use)


# ---- timeouts, Ctrl-C, failures -----------------------------------------------------------------


def test_a_timeout(stream: us.Stream) -> None:
    with on_device(LARGE) as memory:
        where = address(to_host(memory, stream))
        out = to_host(memory, stream)
        with testing.latch(stream):
            for late in (
                lambda: to_host(memory, stream, timeout=0.02),
                lambda: to_host(memory, stream, np.zeros_like(LARGE), timeout=0.02),
                lambda: to_host(memory, stream, out, timeout=0.02),
            ):
                with pytest.raises(us.WaitTimeout) as error:
                    late()
                assert error.value.seconds == 0.02
                assert error.value.streams == (repr(stream),)
            held = us.pinned_empty(LARGE.nbytes, "u1")
            assert address(held) != where, "the GPU is still to write there"
        assert eventually(settled)
        assert same(to_host(memory, stream), LARGE)


def test_a_timeout_past_the_bound(stream: us.Stream, small_chunks: None) -> None:
    with on_device(LARGE) as memory:
        assert same(to_host(memory, stream), LARGE)
        with testing.latch(stream):
            for late in (
                lambda: to_host(memory, stream, timeout=0.02),
                lambda: copy_on(stream, memory, LARGE, timeout=0.02),
            ):
                with pytest.raises(us.WaitTimeout) as error:
                    late()
                assert error.value.seconds == 0.02
        assert eventually(settled)
        assert same(to_host(memory, stream), LARGE)


@pytest.mark.simulated
def test_timeouts_lose_no_events(stream: us.Stream, small_chunks: None) -> None:
    counts = []
    with on_device(LARGE) as memory:
        for _ in range(4):
            with testing.latch(stream):
                for _ in range(4):
                    with pytest.raises(us.WaitTimeout):
                        to_host(memory, stream, timeout=0)
            assert eventually(settled)
            to_host(memory, stream)
            counts.append(alive_in_driver().events)
    assert counts[3] <= counts[1] + 2, counts


def test_a_held_stream_keeps_the_chunks_from_nobody(stream: us.Stream, small_chunks: None) -> None:
    with on_device(LARGE) as memory, on_device(LARGE) as more, us.Stream.create(0) as other:
        for copy in (
            lambda: to_host(memory, stream),
            lambda: copy_on(stream, memory, LARGE, timeout=20),
        ):
            with testing.latch(stream) as latch, running(copy) as result:
                assert is_blocked(result)
                assert same(to_host(more, other, timeout=20), LARGE)
                copy_on(other, more, LARGE, timeout=20)
                latch.release()
                result()


def test_waiting_for_the_chunks_times_out(stream: us.Stream, held_in_between: None) -> None:
    with on_device(LARGE) as memory, us.Stream.create(0) as other, testing.latch(stream) as latch:
        with running(lambda: to_host(memory, stream)) as result:
            assert eventually(is_anything_in_use)
            with pytest.raises(us.WaitTimeout):
                to_host(memory, other, timeout=0.02)
            latch.release()
            assert same(result(), LARGE)
        assert same(to_host(memory, other), LARGE)


def test_at_most_two_chunks(stream: us.Stream, no_cache: None) -> None:
    free_pinned()
    before = pinned_total()
    view = np.zeros(5 * CHUNK, "u1")
    with on_device(view) as memory, ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(running(lambda: to_host(memory, us.get_stream(0))))
        copy_on(stream, memory, view)
    assert pinned_total() <= before + 2 * CHUNK


def test_a_closed_stream_is_refused(stream: us.Stream) -> None:
    with on_device(LARGE) as memory:
        stream = us.Stream.create(0)
        stream.close()
        with pytest.raises(us.ClosedError):
            to_host(memory, stream)


@pytest.mark.parametrize("past", [False, True])
def test_ctrl_c(
    past: bool, stream: us.Stream, no_garbage: None, request: pytest.FixtureRequest
) -> None:
    """No destructor may run meanwhile: what a signal handler raises in one is lost."""
    if past:
        request.getfixturevalue("held_in_between")
    with on_device(LARGE) as memory:
        with testing.latch(stream) as latch:

            def interrupt() -> None:
                assert eventually(is_anything_in_use)
                threading.Event().wait(0.02)
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

            with untraced(), running(interrupt), pytest.raises(KeyboardInterrupt):
                to_host(memory, stream)
            assert not settled()
            latch.release()
            assert eventually(settled)
        assert same(to_host(memory, stream), LARGE)


@pytest.mark.simulated
@pytest.mark.parametrize("function", ["cuMemcpyAsync", "cuEventRecord", "cuEventQuery"])
@pytest.mark.parametrize("past", [False, True])
def test_a_failure_in_the_middle(
    function: str, past: bool, stream: us.Stream, request: pytest.FixtureRequest
) -> None:
    if past:
        request.getfixturevalue("small_chunks")
    with on_device(LARGE) as memory:
        uses: list[Callable[[], object]] = [lambda: to_host(memory, stream)]
        if past or function != "cuEventQuery":  # else it waits for nothing
            uses.append(lambda: copy_on(stream, memory, LARGE))
        for use in uses:
            use()
            stream.sync(timeout=20)
            assert eventually(settled)
            # All further queries: one that looks for a spare event ignores its failure.
            count = 1 << 20 if function == "cuEventQuery" else 1
            for skip in range(3 if past else 1):
                reclaim(stream)
                with testing.inject(function, 719, count, skip, this_thread=True):
                    with pytest.raises(us.DriverError) as error:
                        use()
                assert error.value.function == function
                testing.reset()
                assert eventually(settled)
        assert same(to_host(memory, stream), LARGE)


@pytest.mark.simulated
def test_an_error_of_the_gpu_surfaces_as_itself() -> None:
    with us.Stream.create(3) as stream, on_device(LARGE, 3) as memory:
        testing.async_error(stream, 700)
        with pytest.raises(us.DriverError) as error:
            to_host(memory, stream, timeout=20)
        assert error.value.code == 700
        testing.reset()


# ---- types --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype",
    [
        "?",
        "i1",
        "u8",
        "f2",
        ">f4",
        "c8",
        "c16",
        "S3",
        "U2",
        "M8[ns]",
        [("a", "u1"), ("b", "f8", 3)],
    ],
    ids=str,
)
def test_types_of_numpy(dtype: Any, stream: us.Stream) -> None:
    size = np.dtype(dtype).itemsize
    raw = RANDOM.integers(0, 2 if dtype == "?" else 100, 6 * size).astype("u1")
    view = raw.view(dtype).reshape(2, 3)[:, ::2]
    with on_device(view) as memory:
        assert same(to_host(memory, stream), view)
