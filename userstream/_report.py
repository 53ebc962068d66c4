"""Facts, self-check and output of ``python -m userstream``."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np
from cuda.core import Buffer, Device

from userstream import DriverNotFoundError, UserStream, __version__, _driver
from userstream._buffers.framework import KNOWN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from userstream import Stream


DEVICE_NODES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")  # the last one: WSL
LIBRARY = "libcuda.so.1"

NO_GPU = "this machine has no NVIDIA device node and no driver"


def is_gpu_machine() -> bool:
    """Return whether there is an NVIDIA device node, or a driver that can be loaded."""
    if any(Path(node).exists() for node in DEVICE_NODES):
        return True
    with suppress(OSError):
        return bool(ctypes.CDLL(LIBRARY))
    return False


T = TypeVar("T")

PACKAGES = ("cuda-core", "cuda-bindings", "numpy")

# Names of distributions, most of which include the major version of CUDA.
FRAMEWORKS = re.compile("|".join(each.distributions for each in KNOWN))

VARIABLES = re.compile(
    r"CUDA_VISIBLE_DEVICES|CUDA_DEVICE_ORDER|CUDA_MODULE_LOADING|CUDA_LAUNCH_BLOCKING"
    r"|(CUDA_PYTHON|CUPY|NUMBA)_CUDA_PER_THREAD_DEFAULT_STREAM|USERSTREAM_.*"
)

KERNEL_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Problem:
    """A failure, in the form that is printed."""

    about: str
    type: str
    message: str

    @classmethod
    def of(cls, about: str, error: Exception) -> Problem:
        """Describe an exception; for a group, including the exceptions in it."""
        message = str(error)
        if isinstance(error, ExceptionGroup):
            message = "; ".join((message, *map(str, error.exceptions)))
        return cls(about, type(error).__name__, message)


@dataclass(frozen=True)
class DriverFacts:
    """The versions of the driver."""

    version: str | None  # of the kernel module
    cuda: str


@dataclass(frozen=True)
class DeviceFacts:
    """Facts about a device; a fact that could not be determined is `None`."""

    ordinal: int
    name: str | None = None
    compute_capability: str | None = None
    memory: int | None = None
    uuid: str | None = None


@dataclass
class Facts:
    """The facts of the report, and the failures while gathering the facts."""

    versions: dict[str, str | None] = field(default_factory=dict)
    platform: str | None = None
    driver: DriverFacts | None = None
    devices: list[DeviceFacts] = field(default_factory=list)
    frameworks: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def ask(self, about: str, question: Callable[[], T], otherwise: T) -> T:
        """Return the result of a function; record an exception of it and return `otherwise`."""
        try:
            return question()
        except Exception as error:  # one missing fact must not hide the others
            self.problems.append(Problem.of(about, error))
            return otherwise


def gather(*, with_driver: bool) -> Facts:
    """Gather the facts of the report, those of driver and devices only if `with_driver` is true."""
    facts = Facts()
    facts.versions = {
        "python": platform.python_version(),
        "userstream": __version__,
        **{name: facts.ask(name, partial(_version, name), None) for name in PACKAGES},
    }
    facts.platform = facts.ask("platform", platform.platform, None)
    facts.frameworks = facts.ask("frameworks", _frameworks, {})
    facts.environment = {
        name: value for name, value in sorted(os.environ.items()) if VARIABLES.fullmatch(name)
    }
    if with_driver:
        facts.driver = facts.ask("driver", _driver_facts, None)
    if facts.driver is not None:
        facts.devices = [
            facts.ask(f"device {device}", partial(_device, device), DeviceFacts(device))
            for device in range(_driver.library.device_count())
        ]
        if not facts.devices:
            error = DriverNotFoundError("the driver sees no device")
            facts.problems.append(Problem.of("devices", error))
    return facts


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _frameworks() -> dict[str, str]:
    found: dict[str, str] = {}
    for distribution in metadata.distributions():
        # The remains of a damaged installation may lack a name.
        (given, *_) = distribution.metadata.get_all("Name") or [""]
        name = re.sub(r"[-_.]+", "-", given).lower()
        if FRAMEWORKS.fullmatch(name):
            found.setdefault(name, distribution.version)  # the first on the path is imported
    return dict(sorted(found.items()))


def _driver_facts() -> DriverFacts:
    _driver.library.ensure()
    return DriverFacts(_kernel_driver_version(), _driver.library.version_text())


def _kernel_driver_version() -> str | None:
    try:
        text = KERNEL_DRIVER.read_text(encoding="ascii", errors="replace")
    except OSError:  # simulated, or WSL
        return None
    found = re.search(r"\b\d{3,}(\.\d+)+\b", text)
    return found[0] if found else None


def _device(ordinal: int) -> DeviceFacts:
    return DeviceFacts(ordinal, *_driver.library.device_report(ordinal))


SIZE = 1 << 20  # bytes copied to the device and back
TIMEOUT = 60.0  # seconds per wait, so that a GPU which hangs is reported


class SelfCheckError(Exception):
    """A call returned the wrong result."""


@dataclass(frozen=True)
class Step:
    """A step of the check, and its result."""

    name: str
    title: str
    status: Literal["ok", "failed", "not run"] = "not run"
    ms: float | None = None
    error: Problem | None = None


@dataclass
class Section:
    """The steps for one device, or the final steps for all devices (`device` is `None`)."""

    device: int | None
    steps: list[Step] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True if every step succeeded."""
        return all(step.status == "ok" for step in self.steps)


def check(devices: int) -> Iterator[Section]:
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
        skipped = done and done[-1].status != "ok"
        done.append(Step(name, title) if skipped else _run_step(name, title, action))
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


WIDTH = 80
BOLD, GREEN, RED, PLAIN = "\033[1m", "\033[32m", "\033[31m", "\033[0m"


def say(line: str = "") -> None:
    """Print a line at once, escaping what the encoding of stdout lacks."""
    encoding = sys.stdout.encoding or "utf-8"
    print(line.encode(encoding, "backslashreplace").decode(encoding), flush=True)


def print_facts(facts: Facts, *, simulated: bool) -> None:
    """Print the facts of the report."""
    versions = {name: version or "unknown" for name, version in facts.versions.items()}
    if facts.driver is not None:
        version = "simulated" if simulated else facts.driver.version or "unknown version"
        versions["driver"] = f"{version}, for CUDA {facts.driver.cuda}"
    versions["platform"] = facts.platform or "unknown"
    _block("Versions", _aligned(versions))
    _block("Devices", (line for device in facts.devices for line in _lines_of_device(device)))
    _block("Frameworks", _aligned(facts.frameworks))
    _block("Environment", _aligned(facts.environment))
    if facts.problems:
        _block("Problems", (line for each in facts.problems for line in _lines_of_problem(each)))


def print_section(checked: Section) -> None:
    """Print a section of the self-check."""
    where = "all devices" if checked.device is None else f"device {checked.device}"
    _block(
        f"Self-check, {where}", (line for each in checked.steps for line in _lines_of_step(each))
    )


def print_no_section() -> None:
    """Print a section of the self-check that says that no device was checked."""
    _block("Self-check", iter(["not run"]))


def print_verdict(*, ok: bool, simulated: bool) -> None:
    """Print the last line: the overall result."""
    text = "ok: every check passed" if ok else "failed: not every check passed"
    where = ", on the simulated driver" if simulated else ""
    say(_styled(f"{text}{where}", GREEN if ok else RED))


def _block(heading: str, lines: Iterator[str]) -> None:
    say(_styled(heading, BOLD))
    empty = True
    for line in lines:
        say(f"  {line}")
        empty = False
    if empty:
        say("  none")
    say()


def _aligned(values: Mapping[str, str]) -> Iterator[str]:
    width = max(map(len, values), default=0)
    for name, value in values.items():
        # Values of the environment must not control the terminal.
        shown = value if value and value.isprintable() else ascii(value)
        for at in range(0, len(shown), WIDTH - 4 - width):
            yield f"{'' if at else name:<{width}}  {shown[at : at + WIDTH - 4 - width]}"


def _lines_of_device(device: DeviceFacts) -> Iterator[str]:
    yield f"{device.ordinal}  {device.name or 'unknown'}"
    if device.name is not None:
        memory = (device.memory or 0) / 2**30
        yield f"   compute capability {device.compute_capability}, {memory:.1f} GiB"
        yield f"   {device.uuid}"


def _lines_of_step(step: Step) -> Iterator[str]:
    status = f"{step.status:<7}"
    if step.status != "not run":
        status = _styled(status, GREEN if step.status == "ok" else RED)
    time = "" if step.ms is None else f"{step.ms:>9.2f} ms"
    yield f"{status}  {step.title:<55}{time}".rstrip()
    if step.error is not None:
        yield from _wrapped(f"{step.error.type}: {step.error.message}", indent=9)


def _lines_of_problem(problem: Problem) -> Iterator[str]:
    yield from _wrapped(f"{problem.about}: {problem.type}: {problem.message}", indent=0)


def _wrapped(text: str, *, indent: int) -> Iterator[str]:
    for line in text.splitlines():
        for part in textwrap.wrap(
            line, WIDTH - 2 - indent, break_long_words=False, break_on_hyphens=False
        ):
            yield " " * indent + part


def _styled(text: str, style: str) -> str:
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return f"{style}{text}{PLAIN}"
