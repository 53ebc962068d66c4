"""The facts: versions, driver, devices, frameworks, environment."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from userstream import DriverNotFoundError, __version__, _driver

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

PACKAGES = ("cuda-core", "cuda-bindings", "numpy")

# Names of distributions, most of which include the major version of CUDA.
FRAMEWORKS = re.compile(
    r"torch|cupy(-cuda\d+x)?|jax(-cuda\d+-plugin)?|numba(-cuda)?"
    r"|nvidia-dali(-nightly|-weekly)?-cuda\d+|(rmm|pylibraft|cvcuda|nvidia-(nvimgcodec|nvcomp))(-cu\d+)?"
    r"|warp-lang|apache-tvm-ffi|drjit|holoscan(-cu\d+)?|pynvvideocodec"
)

VARIABLES = re.compile(
    r"CUDA_VISIBLE_DEVICES|CUDA_DEVICE_ORDER|CUDA_MODULE_LOADING|CUDA_LAUNCH_BLOCKING"
    r"|(CUDA_PYTHON|CUPY|NUMBA)_CUDA_PER_THREAD_DEFAULT_STREAM|USERSTREAM_.*"
)

KERNEL_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Problem:
    """A failure, as it is printed."""

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
class Driver:
    """The driver that is in use."""

    version: str | None  # of the kernel module
    cuda: str


@dataclass(frozen=True)
class DeviceFacts:
    """A device; a fact that could not be determined is `None`."""

    ordinal: int
    name: str | None = None
    compute_capability: str | None = None
    memory: int | None = None
    uuid: str | None = None


@dataclass
class Facts:
    """The report, and the failures while gathering it."""

    versions: dict[str, str | None] = field(default_factory=dict)
    platform: str | None = None
    driver: Driver | None = None
    devices: list[DeviceFacts] = field(default_factory=list)
    frameworks: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def ask(self, about: str, question: Callable[[], T], otherwise: T) -> T:
        """Return the answer; if the question fails, record that and return `otherwise`."""
        try:
            return question()
        except Exception as error:  # one missing fact must not hide the others
            self.problems.append(Problem.of(about, error))
            return otherwise


def gather(*, with_driver: bool) -> Facts:
    """Gather the facts; those of the driver and its devices only `with_driver`."""
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


def _driver_facts() -> Driver:
    _driver.library.ensure()
    return Driver(_kernel_driver_version(), _driver.library.version_text())


def _kernel_driver_version() -> str | None:
    try:
        text = KERNEL_DRIVER.read_text(encoding="ascii", errors="replace")
    except OSError:  # simulated, or WSL
        return None
    found = re.search(r"\b\d{3,}(\.\d+)+\b", text)
    return found[0] if found else None


def _device(ordinal: int) -> DeviceFacts:
    return DeviceFacts(ordinal, *_driver.library.device_report(ordinal))
