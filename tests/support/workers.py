"""Functions that other processes of the tests import and run."""

from __future__ import annotations

import os

import userstream as us
from helpers import device_uuid
from userstream import testing
from userstream._engine import watcher

_latches: list[testing.latch] = []


def prepare(simulated: bool) -> None:
    """Use the driver that the tests use."""
    if simulated:
        testing.simulate()


def process() -> int:
    return os.getpid()


def uuid() -> str | None:
    us.get_stream(0)
    return device_uuid(0)


def hold() -> str:
    """Hold the user stream; return its representation."""
    stream = us.get_stream(0)
    latch = testing.latch(stream)
    latch.__enter__()
    _latches.append(latch)
    return repr(stream)


def let_go() -> None:
    while _latches:
        _latches.pop().release()


def fail() -> None:
    """Make the GPU fail like a faulty kernel."""
    from cuda.bindings.driver import CUresult

    testing.async_error(us.get_stream(0), CUresult.CUDA_ERROR_ILLEGAL_ADDRESS)


def wait(seconds: float) -> None:
    us.wait(us.get_stream(0), timeout=seconds)


async def wait_async(seconds: float) -> None:
    await us.wait_async(us.get_stream(0), timeout=seconds)


def wait_while_stuck(seconds: float) -> None:
    """Wait in vain."""
    hold()
    try:
        us.wait_all(timeout=seconds)
    finally:
        let_go()


def is_awaited() -> bool:
    """Return whether a task of this process awaits a stream."""
    return bool(watcher._watcher._queues)


def describe_own_buffer() -> us.BufferInfo:
    """Describe a buffer of this process."""
    from cuda.core import Device

    Device(0).set_current()
    return us.describe(Device(0).allocate(1024, stream=us.get_stream(0)))
