"""Every driver call, failed once at every place: the right error, and nothing left behind."""

from __future__ import annotations

import ast
import functools
import gc
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver

import userstream as us
from device_copies import copy_on, to_host
from helpers import (
    CAI,
    Delegating,
    checked,
    current_context,
    device_current,
    device_memory,
    eventually,
    on,
    run_python,
)
from internals import nothing_is_being_freed
from userstream import _driver, testing
from userstream._copies import pinned as _pinned
from userstream._copies import staging
from userstream._driver import contexts, core
from userstream._driver.status import NOT_READY
from userstream._engine import lanes
from userstream.testing import _simulated

pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("no_garbage")]

ROOM = Path(_driver.__file__).parent
UNKNOWN_CODE = 123456
CODES = [
    driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY,
    driver.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,
    UNKNOWN_CODE,
]


def functions() -> list[str]:
    """Return what the one room that calls the driver calls, and what cuda.core does for it."""
    found = {
        node.attr
        for module in ROOM.glob("*.py")
        for node in ast.walk(ast.parse(module.read_text()))
        if isinstance(node, ast.Attribute)
        and ast.unparse(node.value) == "driver"
        and node.attr.startswith("cu")
        and node.attr[2].isupper()  # the others are types
    }
    return sorted(
        found
        | set(core.FUNCTIONS)
        | {
            "cuStreamCreateWithPriority",
            "cuPointerGetAttribute",
            "cuPointerGetAttributes",
            "cuLaunchHostFunc",
        }
    )


# Asked once a process, in `test_first_calls`.
FIRST = {"cuInit", "cuDriverGetVersion", "cuDeviceGetCount", "cuDevicePrimaryCtxRetain"}
# Where one of these fails, the scenario cannot free what it allocated.
NEEDED_TO_FREE = {
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuMemFreeHost",
    "cuThreadExchangeStreamCaptureMode",
}
# Only with a driver before CUDA 12.5; only if two threads meet a new device, open a pool or split a
# device at once; only to look up `cuPointerGetAttributes`; only for events of other contexts; only
# in a thread that nobody asks (see test_bells_internal.py); only for the message of an error.
ELSEWHERE = {
    "cuCtxSynchronize",
    "cuDevicePrimaryCtxRelease",
    "cuEventDestroy",
    "cuEventSynchronize",
    "cuGetErrorString",
    "cuGetProcAddress",
    "cuGreenCtxDestroy",
    "cuMemPoolDestroy",
    "cuStreamDestroy",
}
# Failed one by one in test_pinned: without a pool memory comes from elsewhere, and what cannot be
# freed counts.
POOLS = {
    "cuMemAllocFromPoolAsync",
    "cuMemFreeAsync",
    "cuMemPoolCreate",
    "cuMemPoolSetAccess",
    "cuStreamCreate",
    "cuStreamSynchronize",
}


@pytest.fixture(autouse=True)
def _always_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every wait record an event, although the streams are idle by then."""
    query = core.query
    busy = core.FUNCTIONS.index("cuStreamQuery") << 32 | int(NOT_READY)
    monkeypatch.setattr(core, "query", lambda handle: query(handle) or busy)


def test_every_function_is_covered() -> None:
    """A new driver call cannot be forgotten: the scenario has to come by it."""
    with device_memory(0) as address:
        testing.reset()
        scenario(address)
        copies(address)
    reached = {name for name in functions() if testing.calls(name)}
    assert set(functions()) - reached <= FIRST | ELSEWHERE | POOLS


def test_every_function_is_documented() -> None:
    page = Path(__file__).parents[2] / "docs/reference/driver-functions.md"
    ours, _of_cuda_core = page.read_text(encoding="utf-8").split("Through `cuda.core`")
    described = {name.removesuffix("_v2") for name in re.findall(r"`(cu[A-Z]\w+)`", ours)}
    assert described == set(functions()) - {"cuStreamCreateWithPriority"}  # of cuda.core


def scenario(address: int) -> None:
    """Come by every driver call."""
    stream = us.get_stream(0)
    us.get_stream(CAI(address))
    us.describe(CAI(address))
    _driver.library.device_report(0)
    context = _driver.contexts.primary_context(0)
    _driver.copies.free_pinned(context, _driver.copies.allocate_pinned(context, 64))
    lanes._splits.clear()  # so that a device is split again
    us.Stream.create(0, sms=16).close()
    with us.Stream.create(0, priority=-1) as other:
        stream.wait(other)
        other.record()
        theirs = us.Stream.from_handle(int(other.handle), owner=other)  # not known as ours
        theirs.flags, theirs.stream_id, theirs.is_done  # noqa: B018
        use_memory(other, address)
        other.sync(timeout=30)  # before others write to the words that it waits for
        with other.capture("relaxed"):
            other.capture_info  # noqa: B018
    us.Stream.legacy_default().sync(timeout=30)
    _order(address)
    us.wait(timeout=30)
    us.wait(on(0), timeout=30)
    us.completion(0).result(timeout=30)
    us.wait_for_device(0, timeout=30)
    contexts._primary.pop(3, None)  # so that the driver is asked whether it is active
    us.wait_for_device(3, timeout=30)
    us.wait_all(timeout=30)
    us.close(timeout=30)


def _order(address: int) -> None:
    """Come by what orders streams, and hold something, in a capture and outside."""
    with us.Stream.create(0) as producer, us.Stream.create(0) as mine:
        buffer = CAI(address, stream=int(producer._live()))
        with us.borrow(buffer, stream=mine):
            pass
        us.hold(buffer, stream=mine)
        us.copyto(Delegating(address, producer), buffer, stream=mine)
        place = us.pinned_empty(4, "f4")
        us.copyto(buffer, place, stream=mine, wait=False)
        us.asnumpy_async(buffer, out=place, stream=mine).result(timeout=30)
        with producer.capture("relaxed"), us.borrow(buffer, stream=mine, keep=False):
            us.acquire(buffer, stream=mine)
        with us.borrow(driver.CUdeviceptr(address), stream=mine):  # by the device
            pass


@functools.cache
def places() -> tuple[int, int]:
    """Return the addresses of a pinned word and of managed memory, made once."""
    with device_current(0):
        pinned = checked(driver.cuMemHostAlloc(64, 0))
        return int(pinned), int(checked(driver.cuMemAllocManaged(64, 1)))


def use_memory(stream: us.Stream, address: int) -> None:
    pinned, managed = places()
    stream.write_value_32(pinned, 0)
    stream.write_value_64(address, 1)
    stream.batch_mem_op([us.WriteValue(address, 1), us.WaitValue(address, 1)])
    stream.wait_value_32(address, 1)
    stream.wait_value_64(address, 1)
    stream.memcpy_dtod(address, address + 64, 8)
    stream.attach_mem_async(managed)
    stream.set_attribute("sync_policy", "spin")
    stream.get_attribute("sync_policy")
    us.get_stream(0).copy_attributes_from(stream)
    stream.wait_event(stream.record())
    stream.launch_host_func(int, blocking=False)


def array(address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    return CAI(address, shape, typestr="|u1", strides=strides)


def copies(address: int) -> None:
    """Copy in every way, with the cache and past its bound."""
    with device_memory(1) as elsewhere:
        try:
            copy_everywhere(address, elsewhere)
        finally:
            us.close(timeout=30)
            free_pinned()


def copy_everywhere(address: int, elsewhere: int) -> None:
    stream = us.get_stream(0)
    ones = np.ones(64, "u1")
    whole, tail = array(address, (64,), (1,)), array(address + 128, (64,), (1,))
    rows, other = array(address, (4, 16), (32, 1)), array(elsewhere, (4, 16), (32, 1))
    for limit in (1 << 20, 0):
        _pinned.set_limit(limit)
        copy_on(stream, whole, ones)
        copy_on(stream, rows, ones.reshape(4, 16))
        copy_on(stream, tail, whole)
        copy_on(stream, other, rows)
        copy_on(stream, array(elsewhere, (64,), (1,)), whole)
        assert to_host(tail, stream, timeout=30).all()
        assert to_host(rows, stream).all()
        assert to_host(whole, stream, np.zeros(64, "u1")).all()
    _pinned.set_limit(1 << 26)
    page_locked = to_host(whole, stream)  # through a view of other code, the driver is asked
    assert to_host(tail, stream, np.frombuffer(page_locked.data, "u1")).all()


def free_pinned() -> None:
    staging.trim()
    assert eventually(nothing_is_being_freed)


# What copies alone call, and what they are made of.
COPIES = {
    "cuMemcpy3DAsync",
    "cuMemcpy3DPeerAsync",
    "cuMemcpyAsync",
    "cuMemcpyPeerAsync",
    "cuMemGetAddressRange",
}
COPYING = COPIES | {
    "cuEventQuery",
    "cuEventRecord",
    "cuPointerGetAttributes",
}  # and cuStreamIsCapturing, which is called again after a failure


@pytest.fixture(autouse=True)
def _caches() -> Iterator[None]:
    """Begin with no pinned memory, and with as many events as can be pending at a time."""
    limit = _pinned.limit()
    gc.collect()
    free_pinned()
    stream = us.get_stream(0)
    points = [stream._resolve().completion() for _ in range(8)]
    stream.sync(timeout=30)
    assert all(_driver.streams.relaxed(point.is_done) for point in points)
    yield
    _pinned.set_limit(limit)
    gc.collect()
    free_pinned()
    _pinned._moving.clear()  # blocks that an injected failure kept from being freed
    _pinned._count()


@pytest.fixture
def address() -> Iterator[int]:
    with device_memory(0) as address:
        yield address


@pytest.mark.no_races(False)  # what fails puts nothing in order
@pytest.mark.parametrize(
    ("function", "scenario"),
    [
        *((name, scenario) for name in sorted({*functions()} - FIRST - ELSEWHERE - COPIES - POOLS)),
        *((name, copies) for name in sorted(COPYING)),
    ],
)
def test_one_failure_leaves_nothing_behind(
    function: str, scenario: Callable[[int], None], address: int
) -> None:
    for _ in range(3):  # a part of what is made once is made later
        scenario(address)
    free_pinned()
    before = _simulated.stats()
    testing.reset()
    scenario(address)
    places = testing.calls(function)
    assert places
    failures = 0
    for place in range(places):
        code = CODES[place % len(CODES)]
        testing.reset()
        # How often a wait asks varies.
        with testing.inject(function, code, skip=place, strict=False):
            try:
                scenario(address)
            except (us.UserStreamError, us.WaitErrors) as error:
                failures += 1
                _check(error, function, code)
        testing.reset()
        assert current_context() == 0, "also where what failed was to restore it"
        assert capture_mode() == driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
        us.close(timeout=30)
        scenario(address)  # the next call works
        gc.collect()  # also the frames of the error, which hold pinned memory
        free_pinned()
        after = _simulated.stats()
        # The threads of the library may use some at once that they used in turn before. What is
        # lost at each failure adds up.
        assert after.streams <= before.streams + _handed_out() + 1
        assert after.events <= before.events + 6
        if function not in NEEDED_TO_FREE:
            assert after.allocations == before.allocations
    assert failures, "nobody noticed"


def _check(error: BaseException, function: str, code: int) -> None:
    errors = error.exceptions if isinstance(error, us.WaitErrors) else (error,)
    for each in errors:
        if isinstance(each, us.DriverError) and each.function == function and each.code:
            assert each.code == int(code)
            assert str(int(code)) in str(each)


def _handed_out() -> int:
    from userstream._stream.stream import _given_away

    return len(_given_away)


def capture_mode() -> driver.CUstreamCaptureMode:
    exchange = driver.cuThreadExchangeStreamCaptureMode
    mode = checked(exchange(driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
    checked(exchange(mode))
    return mode


@pytest.mark.parametrize("code", [2, 999, UNKNOWN_CODE])
@pytest.mark.parametrize("function", sorted(FIRST))
def test_first_calls(function: str, code: int) -> None:
    """Calls that a process makes once: a failure is not cached."""
    done = run_python(
        f"""
        import userstream as us
        from cuda.bindings import driver
        from userstream import testing

        with testing.inject("{function}", {code}):
            try:
                us.get_stream(0)
            except (us.DriverError, us.DriverNotFoundError) as error:
                assert "{code}" in str(error), error
            else:
                raise AssertionError
        context = driver.cuCtxGetCurrent()[1]  # None before cuInit
        assert context is None or int(context) == 0
        us.get_stream(0).sync(timeout=30)
        """
    )
    assert done.returncode == 0, done.stderr
