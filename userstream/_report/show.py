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
GREEN, RED, PLAIN = "\033[32m", "\033[31m", "\033[0m"


def say(line: str = "") -> None:
    """Print a line now, whatever the terminal's encoding."""
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
    """Say that there was nothing to run the self-check on."""
    _block("Self-check", iter(["not run"]))


def verdict(*, ok: bool) -> None:
    """Print the last line."""
    say(_coloured("ok: all of it held" if ok else "failed: not all of it held", ok=ok))


def _block(heading: str, lines: Iterator[str]) -> None:
    say(heading)
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
        # What the environment holds must not steer the terminal.
        yield f"{name:<{width}}  {value if value and value.isprintable() else ascii(value)}"


def _device(device: DeviceFacts) -> Iterator[str]:
    yield f"{device.ordinal}  {device.name or 'unknown'}"
    if device.name is not None:
        memory = (device.memory or 0) / 2**30
        yield f"   compute capability {device.compute_capability}, {memory:.1f} GiB"
        yield f"   {device.uuid}"


def _step(step: Step) -> Iterator[str]:
    status = f"{step.status:<7}"
    if step.status != "not run":
        status = _coloured(status, ok=step.status == "ok")
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


def _coloured(text: str, *, ok: bool) -> str:
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return f"{GREEN if ok else RED}{text}{PLAIN}"
