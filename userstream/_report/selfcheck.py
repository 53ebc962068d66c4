"""The self-check: the main job on every device, with real bytes."""

from __future__ import annotations

import ctypes
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
from cuda.core import Buffer, Device

from userstream import UserStream, _driver
from userstream._report.facts import Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from userstream import Stream

SIZE = 1 << 20  # bytes that make the round trip
TIMEOUT = 60.0  # seconds for each wait: a GPU that hangs is reported


class SelfCheckError(Exception):
    """A call returned, but not what it should have."""


@dataclass(frozen=True)
class Step:
    """A step and what came of it."""

    name: str
    title: str
    status: Literal["ok", "failed", "not run"] = "not run"
    ms: float | None = None
    error: Problem | None = None


@dataclass
class Section:
    """The steps on a device, or those after all devices (`device` is `None`)."""

    device: int | None
    steps: list[Step] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every step was."""
        return all(step.status == "ok" for step in self.steps)


def run(devices: int) -> Iterator[Section]:
    """Check every device, one after the other; yield each section when it is done."""
    registry = UserStream()  # streams of others stay out of it
    before = _current()
    for device in range(devices):
        yield _DeviceCheck(registry, device, devices).run()
    yield _end(registry, before)


def _end(registry: UserStream, before: int) -> Section:
    def close() -> None:
        registry.close(timeout=TIMEOUT)
        _expect(not registry.streams(), "close() left streams in the registry")

    steps = [
        ("wait_all", "wait_all() returns", lambda: registry.wait_all(timeout=TIMEOUT)),
        ("close", "close() empties the registry", close),
        ("unchanged", "the current device is as before", lambda: _unchanged(before)),
    ]
    return Section(None, _run_steps(steps))


class _DeviceCheck:
    """The steps on one device, which hand on what they made."""

    stream: Stream
    first: Buffer
    second: Buffer

    def __init__(self, registry: UserStream, device: int, devices: int) -> None:
        self.registry = registry
        self.device = device
        self.other = (device + 1) % devices if devices > 1 else None
        self.sent = os.urandom(SIZE)
        self.pinned: list[int] = []
        self.before = 0

    def run(self) -> Section:
        elsewhere = "" if self.other is None else f", while device {self.other} is current"
        title = f"get_stream({self.device}){elsewhere}"
        steps = [
            ("one_stream", "it is the device's only one, in every thread", self.one_stream),
            ("allocate", "cuda.core allocates buffers on it", self.allocate),
            ("resolve", "a buffer leads to its device and the stream", self.resolve),
            ("copy", "copies host > device > device > host are queued", self.copy),
            ("wait", "wait(buffer) returns", self.wait),
            ("bytes", f"all {SIZE:,} random bytes came back", self.compare),
            ("wait_for_device", "wait_for_device(buffer) returns", self.wait_for_device),
            ("free", "the buffers are freed", self.free),
            ("unchanged", "the current device is as before", lambda: _unchanged(self.before)),
        ]
        current = ExitStack()
        first = ("get_stream", title, lambda: self.get_stream(current))
        done = _run_steps([first, *steps])
        # Whatever failed. On a broken context this may fail as well.
        leave = _run_step("leave", "the device of before is current again", current.close)
        return Section(self.device, done if leave.status == "ok" else [*done, leave])

    def get_stream(self, current: ExitStack) -> None:
        if self.other is not None:
            current.enter_context(_driver.entered(_driver.primary_context(self.other)))
        self.before = _current()
        self.stream = self.registry.get_stream(self.device)
        found = self.stream.device.device_id
        _expect(found == self.device, f"the stream is on device {found}, not {self.device}")
        _expect(self.stream.is_nonblocking, "the stream is not non-blocking")
        _expect(self.stream.priority == 0, f"the stream has priority {self.stream.priority}, not 0")

    def one_stream(self) -> None:
        with ThreadPoolExecutor(1) as pool:
            elsewhere = pool.submit(self.registry.get_stream, self.device).result()
        for again in (self.registry.get_stream(Device(self.device)), elsewhere):
            _expect(again is self.stream, f"another call returned {again!r}, not {self.stream!r}")
        there = self.registry.streams().get((self.device, None))
        _expect(there is self.stream, f"the registry lists {there!r}, not {self.stream!r}")

    def allocate(self) -> None:
        context = _driver.primary_context(self.device)
        with _driver.entered(context):
            device = Device(self.device)
            device.set_current()
            self.first = device.allocate(SIZE, stream=self.stream)
            self.second = device.allocate(SIZE, stream=self.stream)
        # Pinned, because with pageable memory the driver waits for the copy itself.
        for _ in range(2):
            self.pinned.append(_driver.allocate_pinned(context, SIZE))

    def resolve(self) -> None:
        stream = self.registry.get_stream(self.first)
        _expect(stream is self.stream, f"get_stream(buffer) is {stream!r}, not {self.stream!r}")
        found = self.registry.device_of(self.first).device_id
        _expect(found == self.device, f"device_of(buffer) is {found}, not {self.device}")
        info = self.registry.describe(self.first)
        facts = (info.device_id, info.address, info.nbytes, info.memory)
        wanted = (self.device, int(self.first.handle), SIZE, "device")
        _expect(facts == wanted, f"describe(buffer) tells {facts}, not {wanted}")

    def copy(self) -> None:
        source, target = self.pinned
        ctypes.memmove(source, self.sent, SIZE)
        ctypes.memset(target, 0, SIZE)
        with _driver.entered(_driver.primary_context(self.device)):
            self.first.copy_from(Buffer.from_handle(source, SIZE), stream=self.stream)
            self.second.copy_from(self.first, stream=self.stream)
            self.second.copy_to(Buffer.from_handle(target, SIZE), stream=self.stream)

    def wait(self) -> None:
        self.registry.wait(self.second, timeout=TIMEOUT)

    def compare(self) -> None:
        received = np.frombuffer(ctypes.string_at(self.pinned[1], SIZE), np.uint8)
        wrong = int(np.count_nonzero(received != np.frombuffer(self.sent, np.uint8)))
        _expect(not wrong, f"{wrong:,} of {SIZE:,} bytes differ from what was sent")

    def wait_for_device(self) -> None:
        self.registry.wait_for_device(self.first, timeout=TIMEOUT)

    def free(self) -> None:
        # Pinned memory only here, after the waits: freeing it waits for the device without end,
        # so if a step fails it is left to the end of the process.
        self.first.close(self.stream)
        self.second.close(self.stream)
        while self.pinned:
            _driver.free_pinned(_driver.primary_context(self.device), self.pinned.pop())


def _run_steps(steps: Iterable[tuple[str, str, Callable[[], None]]]) -> list[Step]:
    """Run steps until one fails; those after it are not run."""
    done: list[Step] = []
    for name, title, action in steps:
        if done and done[-1].status != "ok":
            done.append(Step(name, title))
        else:
            done.append(_run_step(name, title, action))
    return done


def _run_step(name: str, title: str, action: Callable[[], None]) -> Step:
    start = time.perf_counter()
    error = None
    try:
        action()
    except Exception as caught:  # whatever it is, it is what the step found out
        error = Problem.of(name, caught)
    ms = round((time.perf_counter() - start) * 1e3, 3)
    return Step(name, title, "failed" if error else "ok", ms, error)


def _current() -> int:
    return int(_driver.current_context() or 0)


def _unchanged(before: int) -> None:
    after = _current()
    _expect(after == before, f"context {after:#x} is current, and {before:#x} was before")


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise SelfCheckError(otherwise)
