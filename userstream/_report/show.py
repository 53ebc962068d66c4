"""The report as plain text for a terminal of 80 columns."""

from __future__ import annotations

import os
import sys
import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from userstream._report.facts import DeviceFacts, Facts, Problem
    from userstream._report.selfcheck import Section, Step

WIDTH = 80
BOLD, GREEN, RED, PLAIN = "\033[1m", "\033[32m", "\033[31m", "\033[0m"


def say(line: str = "") -> None:
    """Print a line at once, escaping what the encoding of stdout lacks."""
    encoding = sys.stdout.encoding or "utf-8"
    print(line.encode(encoding, "backslashreplace").decode(encoding), flush=True)


def report(facts: Facts, *, simulated: bool) -> None:
    """Print the facts."""
    versions = {name: version or "unknown" for name, version in facts.versions.items()}
    if facts.driver is not None:
        version = "simulated" if simulated else facts.driver.version or "unknown version"
        versions["driver"] = f"{version}, for CUDA {facts.driver.cuda}"
    versions["platform"] = facts.platform or "unknown"
    _block("Versions", _aligned(versions))
    _block("Devices", (line for device in facts.devices for line in _device(device)))
    _block("Frameworks", _aligned(facts.frameworks))
    _block("Environment", _aligned(facts.environment))
    if facts.problems:
        _block("Problems", (line for problem in facts.problems for line in _problem(problem)))


def section(checked: Section) -> None:
    """Print a section of the self-check."""
    where = "all devices" if checked.device is None else f"device {checked.device}"
    _block(f"Self-check, {where}", (line for step in checked.steps for line in _step(step)))


def no_section() -> None:
    """Print that there was no device to check."""
    _block("Self-check", iter(["not run"]))


def verdict(*, ok: bool, simulated: bool) -> None:
    """Print the last line, which is all that some people read."""
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


def _device(device: DeviceFacts) -> Iterator[str]:
    yield f"{device.ordinal}  {device.name or 'unknown'}"
    if device.name is not None:
        memory = (device.memory or 0) / 2**30
        yield f"   compute capability {device.compute_capability}, {memory:.1f} GiB"
        yield f"   {device.uuid}"


def _step(step: Step) -> Iterator[str]:
    status = f"{step.status:<7}"
    if step.status != "not run":
        status = _styled(status, GREEN if step.status == "ok" else RED)
    time = "" if step.ms is None else f"{step.ms:>9.2f} ms"
    yield f"{status}  {step.title:<55}{time}".rstrip()
    if step.error is not None:
        yield from _wrapped(f"{step.error.type}: {step.error.message}", indent=9)


def _problem(problem: Problem) -> Iterator[str]:
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
