"""Copies to the host, from it and between devices, of every layout."""

from __future__ import annotations

import ctypes
import gc
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver
from numpy.lib.stride_tricks import sliding_window_view

import userstream as us
from helpers import (
    address,
    checked,
    current_context,
    device_current,
    device_memory,
    eventually,
    in_thread,
    is_blocked,
    reclaim,
    run_python,
    running,
    untraced,
    upload,
)
from layouts import random_target, same, views
from userstream import _driver, testing
from userstream._buffers import view_of
from userstream._buffers.view import Layout, View
from userstream._copies import layout as _layout
from userstream._copies import pinned as _pinned
from userstream._copies import staging
from userstream._copies.arrays import DeviceArray, device_array, numpy_dtype, pinned_address
from userstream._copies.copies import between, from_host, into_host, to_host
from userstream._copies.copy_lane import CopyLane
from userstream._engine import held_objects
from userstream._engine.host_wait import Deadline
from userstream.testing import _simulated

MIB = 1 << 20
multi_device = pytest.mark.multi_device


def span(view: np.ndarray) -> tuple[int, int]:
    """Return where the memory of a view begins, before its first element, and how much it is."""
    side = _layout.spread(view.shape, view.strides, view.itemsize)
    return side.offset, side.nbytes


class Told(View):
    """A look at nothing: what it tells is given."""

    source = "test"

    def __init__(self, layout: Layout, device: int = 0) -> None:
        super().__init__(None)
        self.layout, self.device = layout, device


def array(view: np.ndarray, where: int, device: int = 0, **more: Any) -> DeviceArray:
    layout = Layout(where, view.shape, view.strides, view.dtype, view.nbytes)
    return device_array(Told(layout._replace(**more), device))


@contextmanager
def on_device(view: np.ndarray, device: int = 0, **more: Any) -> Iterator[DeviceArray]:
    """Put a view of host memory on a device, with what lies between its elements."""
    offset, size = span(view)
    size = size if view.size else 1
    with (
        device_memory(device, size) as where,
        device_current(device),
    ):
        if view.size:
            upload(where, address(view) - offset, size)
        yield array(view, where + offset, device, **more)


def read(memory: DeviceArray, view: np.ndarray) -> np.ndarray:
    """Read the memory of a view, as bytes."""
    offset, size = span(view)
    found = np.empty(size, "u1")
    with device_current(memory.device):
        checked(driver.cuMemcpyDtoH(address(found), memory.address - offset, size))
    return found


def memory_of(view: np.ndarray) -> np.ndarray:
    """Return the memory of a view, as bytes."""
    offset, size = span(view)
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address(view) - offset))


@pytest.fixture(autouse=True)
def _nothing_in_use() -> Iterator[None]:
    """Forget what an error of the GPU left behind, which is kept forever; bound the cache."""
    gc.collect()
    held_objects.in_use.clear()
    before = _pinned.limit()
    _pinned.set_limit(1 << 28)
    yield
    _pinned.set_limit(before)


@pytest.fixture
def stream() -> us.Stream:
    return us.get_stream(0)


@pytest.fixture
def no_cache() -> Iterator[None]:
    """Let every result be pageable."""
    before = _pinned.limit()
    _pinned.set_limit(0)
    yield
    _pinned.set_limit(before)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch, no_cache: None) -> None:
    monkeypatch.setattr(staging, "SIZE", 4096)
    monkeypatch.setattr(staging, "_spare", {})


@pytest.fixture
def held_in_between(monkeypatch: pytest.MonkeyPatch, small_chunks: None) -> None:
    """Let a stream be held that was free when the chunks were lent."""
    monkeypatch.setattr(CopyLane, "reach", lambda lane: None)


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
    view = RANDOM.integers(0, 255, 2 * staging.SIZE + 12345).astype("u1")
    with on_device(view) as memory:
        result = to_host(memory, stream)
        assert same(result, view)
        assert pinned_address(result) is None


def test_results_are_page_locked_and_writable(stream: us.Stream) -> None:
    with on_device(LARGE) as memory:
        result = to_host(memory, stream)
    assert pinned_address(result) == address(result)
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


def test_too_many_copies_are_refused(stream: us.Stream) -> None:
    plan = _layout.moves((70000, 2), 1, (2, 1), (1 << 31, 1))
    with pytest.raises(us.UnsupportedBufferError, match="contiguous first"):
        CopyLane(stream, 0).copy(0, 0, plan)


def test_scattered_arrays_are_for_their_framework() -> None:
    def somewhere(name: str) -> DeviceArray:
        view = LAYOUTS[name]
        return DeviceArray(512, view.shape, view.strides, view.dtype, 0)

    assert somewhere("every second").is_scattered
    assert somewhere("column").is_scattered
    for name in ("contiguous", "transposed", "long rows", "windows", "broadcast", "0-d", "empty"):
        assert not somewhere(name).is_scattered, name


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


def test_page_locked_memory_is_written_directly(
    stream: us.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets = []
    copy = _driver.copies.copy
    with on_device(LARGE) as memory:
        out = to_host(memory, stream)
        monkeypatch.setattr(
            _driver.copies,
            "copy",
            lambda to, *more, **peers: (targets.append(to), copy(to, *more, **peers)),
        )
        to_host(memory, stream, out)
        assert targets == [address(out)]
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
        into_host(out, memory, stream)
        assert same(out, np.broadcast_to(LARGE[0, 0], out.shape).copy())
        with pytest.raises(ValueError, match="broadcast"):
            into_host(np.zeros((300, 2), "f4"), memory, stream)
        with pytest.raises(ValueError, match="broadcast"):
            into_host(np.zeros((), "f4"), memory, stream)


def test_a_buffer_without_a_shape(stream: us.Stream) -> None:
    with on_device(np.arange(100, dtype="u1")) as memory:
        bytes_ = device_array(Told(Layout(memory.address, nbytes=100)))
        assert same(to_host(bytes_, stream), np.arange(100, dtype="u1"))
        with pytest.raises(us.UnsupportedBufferError, match="__cuda_array_interface__"):
            device_array(view_of(driver.CUdeviceptr(memory.address)))


# ---- from the host ------------------------------------------------------------------------------


def check_from_host(view: np.ndarray, target: np.ndarray, stream: us.Stream) -> None:
    """Copy a view into a view of device memory, and compare with NumPy, gaps included."""
    with on_device(target) as memory:
        from_host(view, memory, stream)
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
        blocks = [_pinned.take(values[0].nbytes, 0) for _ in values]
        del blocks
        with testing.latch(stream):
            for value, buffer in zip(values, buffers, strict=True):
                from_host(value, buffer, stream)
                value[:] = -1
        for number, buffer in enumerate(buffers):
            assert (to_host(buffer, stream, deadline=Deadline(20)) == number).all()


@pytest.mark.parametrize("seed", range(2))
def test_from_host_of_any_layout(seed: int, stream: us.Stream) -> None:
    random = np.random.default_rng(seed)
    for view in views(seed, 50):
        check_from_host(view, random_target(random, view)[1], stream)


def test_from_host_broadcasts(stream: us.Stream) -> None:
    check_from_host(np.arange(3.0), np.zeros((4, 2, 3)), stream)
    with on_device(np.zeros((4, 3))) as memory:
        with pytest.raises(ValueError, match="broadcast"):
            from_host(np.zeros((3, 4)), memory, stream)
        with pytest.raises(TypeError, match="float32"):
            from_host(np.zeros((4, 3), "f4"), memory, stream)
    with on_device(np.zeros((0, 3))) as memory:
        from_host(np.zeros(3), memory, stream)


def test_targets_that_alias_are_refused(stream: us.Stream) -> None:
    with on_device(LAYOUTS["windows"]) as memory, pytest.raises(ValueError, match="share memory"):
        from_host(np.zeros((), "f4"), memory, stream)


@pytest.mark.parametrize("pinned", [False, True])
def test_the_source_may_be_reused_at_once(pinned: bool, stream: us.Stream) -> None:
    with on_device(LARGE) as memory:
        source = to_host(memory, stream) if pinned else LARGE.copy()
        with testing.latch(stream):
            from_host(source, memory, stream)  # waits for nothing
            source[...] = 0
        stream.sync(timeout=20)
        assert same(to_host(memory, stream), LARGE)


@pytest.mark.parametrize("pinned", [False, True])
def test_a_large_source_is_waited_for(
    pinned: bool, stream: us.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    from userstream._copies import copies as _host

    monkeypatch.setattr(_host, "_STAGED", 4096)
    with on_device(LARGE) as memory:
        source = to_host(memory, stream)[::-1] if pinned else LARGE[::-1].copy()
        source = source[::-1] if pinned else source
        with testing.latch(stream) as latch:
            with running(lambda: from_host(source, memory, stream)) as result:
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
        between(to, source, stream)
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
            between(to, source, stream)
        assert same(to_host(to, stream), LARGE)


def test_between_what_overlaps(stream: us.Stream) -> None:
    with on_device(LARGE[0]) as memory:
        between(memory, memory, stream)  # nothing to do
        row = array(LARGE[:1], memory.address)
        between(row, row, stream)
        first = array(LARGE[0, :20], memory.address)
        other = array(LARGE[0, :20], memory.address + 4)
        with pytest.raises(ValueError, match="overlap"):
            between(first, other, stream)
        between(first, array(LARGE[0, :20], memory.address + LARGE[0, :20].nbytes), stream)
        assert same(to_host(first, stream), LARGE[0, 20:])
        with pytest.raises(TypeError, match="convert"):
            between(first, array(LARGE[0, :20].view("i4"), memory.address), stream)


# ---- streams, contexts, captures ----------------------------------------------------------------


def everything(stream: us.Stream, device: int = 0) -> None:
    """Copy in every way."""
    fresh = [LARGE, LARGE[:, :30, :200], LARGE[..., ::2], LARGE[..., ::50]]
    with ExitStack() as stack:
        for view in fresh:
            memory = stack.enter_context(on_device(np.zeros_like(LARGE), device))
            memory = array(view, memory.address, device)
            other = stack.enter_context(on_device(np.zeros(view.shape, "f4"), device))
            from_host(view, memory, stream)
            between(other, memory, stream)
            assert same(to_host(memory, stream, deadline=Deadline(20)), view)
            assert same(to_host(other, stream, np.zeros(view.shape, "f4")), view)
        before = _pinned.limit()
        _pinned.set_limit(0)
        try:
            from_host(LARGE, memory := array(LARGE, memory.address, device), stream)
            assert same(to_host(memory, stream), LARGE)
        finally:
            _pinned.set_limit(before)


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
        assert current_context() == int(_driver.contexts.primary_context(0))


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
                to_host(memory, default(), deadline=Deadline(0.02))
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
    with on_device(LARGE) as memory, us.Stream.create(0) as captured:
        if cached:
            to_host(memory, stream)
        else:
            staging.trim()
        total = _pinned._total
        with capturing(captured):
            for use in (
                lambda: to_host(memory, captured),
                lambda: to_host(memory, captured, np.zeros_like(LARGE)),
                lambda: from_host(LARGE, memory, captured),
                lambda: between(memory, memory._replace(address=memory.address + 4), captured),
            ):
                with pytest.raises(us.CaptureError):
                    use()
        assert _pinned._total <= total
        assert same(to_host(memory, stream), LARGE)


def test_a_capture_elsewhere_survives(stream: us.Stream) -> None:
    """In the global mode, which most calls of the driver break."""
    # What allocates device memory may not run beside it.
    with on_device(LARGE) as memory, on_device(LARGE) as other, us.Stream.create(0) as captured:
        thread = staging.trim()
        if thread is not None:
            thread.join(20)
        every = array(LARGE[..., ::2], memory.address)

        def use() -> None:
            assert same(to_host(memory, stream), LARGE)
            assert same(to_host(every, stream), LARGE[..., ::2])
            from_host(LARGE[..., ::2], every, stream)
            between(other, memory, stream)
            before = _pinned.limit()
            _pinned.set_limit(0)
            try:
                assert same(to_host(memory, stream, np.zeros_like(LARGE)), LARGE)
                with testing.latch(stream), pytest.raises(us.WaitTimeout):
                    to_host(memory, stream, deadline=Deadline(0.01))
            finally:
                _pinned.set_limit(before)

        with capturing(captured):
            use()
            in_thread(use)


# ---- timeouts, Ctrl-C, failures -----------------------------------------------------------------


def settled() -> bool:
    held_objects.sweep()
    return not held_objects.queues and not held_objects.in_use


def test_a_timeout(stream: us.Stream) -> None:
    with on_device(LARGE) as memory:
        where = address(to_host(memory, stream))
        out = to_host(memory, stream)
        with testing.latch(stream):
            for late in (
                lambda: to_host(memory, stream, deadline=Deadline(0.02)),
                lambda: to_host(memory, stream, np.zeros_like(LARGE), deadline=Deadline(0.02)),
                lambda: to_host(memory, stream, out, deadline=Deadline(0.02)),
            ):
                with pytest.raises(us.WaitTimeout) as error:
                    late()
                assert error.value.seconds == 0.02
                assert error.value.streams == (repr(stream),)
            held = _pinned.take(LARGE.nbytes, 0)
            assert held is not None  # and none that the GPU is still to write
            assert address(np.ndarray(1, "u1", held)) != where
        assert eventually(settled)
        assert same(to_host(memory, stream), LARGE)


def test_a_timeout_past_the_bound(stream: us.Stream, small_chunks: None) -> None:
    with on_device(LARGE) as memory:
        assert same(to_host(memory, stream), LARGE)
        with testing.latch(stream):
            for late in (
                lambda: to_host(memory, stream, deadline=Deadline(0.02)),
                lambda: from_host(LARGE, memory, stream, deadline=Deadline(0.02)),
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
                        to_host(memory, stream, deadline=Deadline(0))
            assert eventually(settled)
            to_host(memory, stream)
            counts.append(_simulated.stats().events)
    assert counts[3] <= counts[1] + 2, counts


def test_a_held_stream_keeps_the_chunks_from_nobody(stream: us.Stream, small_chunks: None) -> None:
    with on_device(LARGE) as memory, on_device(LARGE) as more, us.Stream.create(0) as other:
        for copy in (
            lambda: to_host(memory, stream),
            lambda: from_host(LARGE, memory, stream, deadline=Deadline(20)),
        ):
            with testing.latch(stream) as latch, running(copy) as result:
                assert is_blocked(result)
                assert same(to_host(more, other, deadline=Deadline(20)), LARGE)
                from_host(LARGE, more, other, deadline=Deadline(20))
                latch.release()
                result()


def test_waiting_for_the_chunks_times_out(stream: us.Stream, held_in_between: None) -> None:
    with on_device(LARGE) as memory, us.Stream.create(0) as other, testing.latch(stream) as latch:
        with running(lambda: to_host(memory, stream)) as result:
            assert eventually(lambda: bool(held_objects.in_use))
            with pytest.raises(us.WaitTimeout):
                to_host(memory, other, deadline=Deadline(0.02))
            latch.release()
            assert same(result(), LARGE)
        assert same(to_host(memory, other), LARGE)


def test_at_most_two_chunks(stream: us.Stream, no_cache: None) -> None:
    thread = staging.trim()
    if thread is not None:
        thread.join(20)
    before = _pinned._total
    view = np.zeros(5 * staging.SIZE, "u1")
    with on_device(view) as memory, ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(running(lambda: to_host(memory, us.get_stream(0))))
        from_host(view, memory, stream)
    assert _pinned._total <= before + 2 * staging.SIZE


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
                assert eventually(lambda: bool(held_objects.in_use))
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
            uses.append(lambda: from_host(LARGE, memory, stream))
        for use in uses:
            use()
            stream.sync(timeout=20)
            assert eventually(settled)
            for skip in range(3 if past else 1):
                reclaim(stream)
                with testing.inject(function, 719, skip=skip, this_thread=True):
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
            to_host(memory, stream, deadline=Deadline(20))
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


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_types_of_ml_dtypes(name: str, stream: us.Stream) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    view = np.arange(12).astype(getattr(ml_dtypes, name)).reshape(3, 4)
    for dtype in (name, view.dtype):
        with on_device(view, dtype=dtype) as memory:
            result = to_host(memory, stream)
        assert result.dtype == view.dtype
        assert same(result, view)


def test_without_ml_dtypes() -> None:
    done = run_python(
        """
        import sys
        sys.modules["ml_dtypes"] = None
        import userstream as us
        from userstream._copies.arrays import numpy_dtype
        for name in "bfloat16", "float8_e4m3fn":
            try:
                numpy_dtype(name, "torch.Tensor")
            except us.UnsupportedBufferError as error:
                assert name in str(error)
                assert "ml_dtypes" in str(error)
            else:
                raise AssertionError(name)
        """,
        simulate=None,  # cuda.core would import it
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("dtype", ["qint8", "qint32", "float4_e2m1fn_x2", np.dtype("O"), None])
def test_types_that_numpy_has_not(dtype: Any) -> None:
    with pytest.raises(us.UnsupportedBufferError, match="framework x"):
        numpy_dtype(dtype, "framework x")


def test_types_below_a_byte_are_refused() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    with pytest.raises(us.UnsupportedBufferError, match="int4"):
        numpy_dtype(np.dtype(ml_dtypes.int4), "jax.Array")
