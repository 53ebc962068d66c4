"""The self-check: find streams, copy real data and wait, on every device."""

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

SIZE = 1 << 20  # bytes copied to the device and back
TIMEOUT = 60.0  # seconds per wait, so that a GPU which hangs is reported


class SelfCheckError(Exception):
    """A call returned the wrong result."""


@dataclass(frozen=True)
class Step:
    """A step and its result."""

    name: str
    title: str
    status: Literal["ok", "failed", "not run"] = "not run"
    ms: float | None = None
    error: Problem | None = None


@dataclass
class Section:
    """The steps for one device, or the last ones, for all devices (`device` is `None`)."""

    device: int | None
    steps: list[Step] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every step succeeded."""
        return all(step.status == "ok" for step in self.steps)


def run(devices: int) -> Iterator[Section]:
    """Check one device after another; yield each section as it completes."""
    registry = UserStream()  # separate from the streams of the process
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
        ("unchanged", "the current device is unchanged", lambda: _unchanged(before)),
    ]
    return Section(None, _run_steps(steps))


class _DeviceCheck:
    """The steps for one device, which share the objects that they create."""

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
            ("one_stream", "every thread gets the same stream", self.one_stream),
            ("allocate", "cuda.core allocates buffers on it", self.allocate),
            ("resolve", "a buffer resolves to its device and stream", self.resolve),
            ("copy", "copies are queued: host > device > device > host", self.copy),
            ("wait", "wait(buffer) returns", self.wait),
            ("bytes", f"all {SIZE:,} random bytes came back", self.compare),
            ("wait_for_device", "wait_for_device(buffer) returns", self.wait_for_device),
            ("free", "the buffers are freed", self.free),
            ("unchanged", "the current device is unchanged", lambda: _unchanged(self.before)),
        ]
        current = ExitStack()
        first = ("get_stream", title, lambda: self.get_stream(current))
        done = _run_steps([first, *steps])
        # Whether or not a step failed. With a broken context this may fail as well.
        leave = _run_step("leave", "the previous device is current again", current.close)
        return Section(self.device, done if leave.status == "ok" else [*done, leave])

    def get_stream(self, current: ExitStack) -> None:
        if self.other is not None:
            current.enter_context(
                _driver.contexts.entered(_driver.contexts.primary_context(self.other))
            )
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
        context = _driver.contexts.primary_context(self.device)
        with _driver.contexts.entered(context):
            device = Device(self.device)
            device.set_current()
            self.first = device.allocate(SIZE, stream=self.stream)
            self.second = device.allocate(SIZE, stream=self.stream)
        # Pinned, because copies of pageable memory block inside the driver.
        for _ in range(2):
            self.pinned.append(_driver.copies.allocate_pinned(context, SIZE))

    def resolve(self) -> None:
        stream = self.registry.get_stream(self.first)
        _expect(stream is self.stream, f"get_stream(buffer) is {stream!r}, not {self.stream!r}")
        found = self.registry.device_of(self.first).device_id
        _expect(found == self.device, f"device_of(buffer) is {found}, not {self.device}")
        info = self.registry.describe(self.first)
        facts = (info.device_id, info.address, info.nbytes, info.memory)
        wanted = (self.device, int(self.first.handle), SIZE, "device")
        _expect(facts == wanted, f"describe(buffer) returned {facts}, not {wanted}")

    def copy(self) -> None:
        source, target = self.pinned
        ctypes.memmove(source, self.sent, SIZE)
        ctypes.memset(target, 0, SIZE)
        with _driver.contexts.entered(_driver.contexts.primary_context(self.device)):
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
        # Pinned memory is freed only after the waits succeeded: freeing it waits for the device,
        # with no timeout. If a step failed, the memory is left to the end of the process.
        self.first.close(self.stream)
        self.second.close(self.stream)
        while self.pinned:
            _driver.copies.free_pinned(
                _driver.contexts.primary_context(self.device), self.pinned.pop()
            )


def _run_steps(steps: Iterable[tuple[str, str, Callable[[], None]]]) -> list[Step]:
    """Run steps until one fails; skip the rest."""
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
    except Exception as caught:  # any exception is a result of the step
        error = Problem.of(name, caught)
    ms = round((time.perf_counter() - start) * 1e3, 3)
    return Step(name, title, "failed" if error else "ok", ms, error)


def _current() -> int:
    return int(_driver.contexts.current_context() or 0)


def _unchanged(before: int) -> None:
    after = _current()
    _expect(after == before, f"context {after:#x} is current, but it was {before:#x} before")


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise SelfCheckError(otherwise)
