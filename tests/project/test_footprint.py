"""Files and calls of userstream that a public call enters, a measure of reading and of cost."""

from __future__ import annotations

import sys
import time
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import standins
import userstream as us
from helpers import CAI, device_current, device_memory, on
from internals import release_held, spin_for_ever
from userstream import testing

pytestmark = [
    pytest.mark.simulated,
    pytest.mark.no_races(False),  # who watches adds to what is counted
]


class Footprint(NamedTuple):
    modules: set[str]
    calls: list[str]


class Counted(CAI):
    """An array that counts how often its interface is read."""

    read = 0

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        self.read += 1
        return self.interface


def footprint(call: Callable[[], object], *, but: str | None = None) -> Footprint:
    """Call a function once more, and tell which functions of userstream are called.

    What the function named `but` calls is not counted, nor that itself.
    """
    call()
    calls: list[tuple[str, str]] = []
    inside = 0

    def profile(frame: types.FrameType, event: str, _: object) -> None:
        nonlocal inside
        module = frame.f_globals.get("__name__", "")
        if frame.f_code.co_name == but and event in ("call", "return"):
            inside += 1 if event == "call" else -1
        elif inside:
            return
        elif event == "call" and module.startswith("userstream."):
            calls.append((module, frame.f_code.co_name))

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(before)
    return Footprint({module for module, _ in calls}, [name for _, name in calls])


def settle() -> None:
    """Wait until nothing is held for earlier copies, because the next copy would release it."""
    release_held()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a copy poll until it is done, even on a slow machine."""
    spin_for_ever(monkeypatch)


def test_a_wait_for_an_idle_stream(torch: types.ModuleType) -> None:
    tensor = torch.Tensor(torch.device("cuda", 0))
    us.get_stream(tensor)
    passed = footprint(lambda: us.wait(tensor))
    assert len(passed.modules) <= 5, passed.modules
    assert len(passed.calls) <= 6, passed.calls


@pytest.mark.usefixtures("patient")
def test_a_copy_of_an_array_to_the_host(memory: int, producer: us.Stream) -> None:
    """Up to the copy and the wait, which asks as often as the GPU takes; its device is current.

    The interface is read once, and the driver asked once about the pointer.
    """
    array = Counted(memory, stream=int(producer.handle))
    for _ in range(2):  # the first leaves one event behind, and takes two
        us.asnumpy(array)
    asked = testing.calls("cuPointerGetAttributes")
    settle()
    with device_current(0):
        passed = footprint(lambda: us.asnumpy(array), but="fetch")
    assert len(passed.modules) <= 12, passed.modules
    assert len(passed.calls) <= 37, passed.calls
    assert (array.read, testing.calls("cuPointerGetAttributes") - asked) == (4, 2)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize("is_default", [False, True])
def test_a_copy_of_a_tensor_to_the_host(
    is_default: bool, filled: bool, torch: types.ModuleType, memory: int, producer: us.Stream
) -> None:
    """By the short way as well where PyTorch is on its default stream, as it mostly is."""
    if not is_default:
        torch.cuda.set_stream(torch.cuda.ExternalStream(int(producer.handle), 0))
    tensor = torch.Tensor(torch.device("cuda", 0), memory)
    out = np.empty((2, 3), "f4") if filled else None
    for _ in range(2):  # as above
        us.asnumpy(tensor, out=out)
    asked = testing.calls("cuPointerGetAttributes")
    settle()
    with device_current(0):
        passed = footprint(lambda: us.asnumpy(tensor, out=out), but="fetch")
    assert len(passed.calls) <= 17, passed.calls
    assert testing.calls("cuPointerGetAttributes") - asked == 2  # and it was called twice


@pytest.mark.usefixtures("patient")
def test_a_copy_to_a_host_array_that_is_there(torch: types.ModuleType, memory: int) -> None:
    """It costs hardly more than `asnumpy` with `out=`."""
    tensor = torch.Tensor(torch.device("cuda", 0), memory)
    out = np.empty((2, 3), "f4")
    us.get_stream(0)
    for _ in range(2):  # as above
        us.copyto(out, tensor)
    settle()
    with device_current(0):
        passed = footprint(lambda: us.copyto(out, tensor), but="fetch")
    assert len(passed.calls) <= 22, passed.calls


@pytest.mark.parametrize("timeout", [None, 20])
def test_a_copy_looks_once(timeout: float | None, memory: int, producer: us.Stream) -> None:
    us.get_stream(0)
    handle = int(producer.handle)
    # In another context `out` is asked for as well, to see whether it is page-locked.
    with device_memory(0) as other, device_current(0):
        for use, count in (
            (lambda one, _: us.asnumpy(one, timeout=timeout), 1),
            (lambda one, _: us.asnumpy(one, out=np.empty(4, "f4"), timeout=timeout), 1),
            (lambda one, _: us.asnumpy([one], timeout=timeout), 1),
            (lambda one, _: us.copyto(np.empty(4, "f4"), one, timeout=timeout), 1),
            (lambda one, _: us.copyto(one, np.empty(4, "f4"), timeout=timeout), 1),
            (lambda one, two: us.copyto(one, two, timeout=timeout), 2),
        ):
            one, two = (Counted(each, stream=handle) for each in (memory, other))
            asked = testing.calls("cuPointerGetAttributes")
            use(one, two)
            assert one.read + two.read == count
            assert testing.calls("cuPointerGetAttributes") - asked == count


def test_a_stream_that_exists(torch: types.ModuleType) -> None:
    tensor = torch.Tensor(torch.device("cuda", 0))
    assert len(footprint(lambda: us.get_stream(tensor)).calls) <= 3


def test_a_stream_of_other_buffers(memory: int) -> None:
    """No view is made, and numba's interface, which it makes anew each time, is not read."""

    class Numba(standins.NumbaArray):  # type: ignore[misc]
        @property
        def __cuda_array_interface__(self) -> dict[str, Any]:
            raise AssertionError("not asked")

    for buffer, most in ((Numba(0, memory), 5), (on(0), 4), (CAI(memory), 5)):
        us.get_stream(buffer)
        calls = footprint(lambda buffer=buffer: us.get_stream(buffer)).calls
        assert len(calls) <= most, calls
    with pytest.raises(AssertionError, match="not asked"):
        us.describe(Numba(0, memory))


def test_an_acquire(torch: types.ModuleType, memory: int, producer: us.Stream) -> None:
    """One edge, which is one call of C."""
    torch.cuda.set_stream(torch.cuda.ExternalStream(int(producer.handle), 0))
    tensor = torch.Tensor(torch.device("cuda", 0), memory)
    for _ in range(2):  # the first leaves an event behind
        us.acquire(tensor)
    passed = footprint(lambda: us.acquire(tensor))
    assert len(passed.modules) <= 4, passed.modules
    assert len(passed.calls) <= 7, passed.calls


def test_an_acquire_of_an_array_that_names_its_stream(memory: int, producer: us.Stream) -> None:
    """Its interface is read once, and the driver asked once about the pointer."""
    us.get_stream(0)
    array = Counted(memory, stream=int(producer.handle))
    for _ in range(2):  # as above
        us.acquire(array)
    asked = testing.calls("cuPointerGetAttributes")
    passed = footprint(lambda: us.acquire(array))
    assert len(passed.modules) <= 6, passed.modules
    assert len(passed.calls) <= 10, passed.calls
    assert (array.read, testing.calls("cuPointerGetAttributes") - asked) == (4, 2)


@pytest.mark.parametrize("given", [False, True])
def test_a_borrow(given: bool, torch: types.ModuleType, memory: int, producer: us.Stream) -> None:
    """Of a tensor, with edges both ways: to the current stream, or to one that is given."""
    tensor = torch.Tensor(torch.device("cuda", 0), memory)
    if not given:
        torch.cuda.set_stream(torch.cuda.ExternalStream(int(producer.handle), 0))
    who: Any = producer if given else "auto"

    def borrow() -> None:
        with us.borrow(tensor, producer=who):
            pass

    stream = us.get_stream(tensor)
    pool = stream._lane.pool
    for event in [pool.take() for _ in range(4)]:
        pool.give_back(event)  # events for those that follow
    us.wait(tensor)
    with testing.latch(stream):  # what is held stays so, and the watcher at its post
        borrow()
        stream._lane.swept = time.monotonic() + 60.0  # when it sweeps is a matter of time
        passed = footprint(borrow)
    assert len(passed.modules) <= 6, passed.modules
    assert len(passed.calls) <= 20, passed.calls
